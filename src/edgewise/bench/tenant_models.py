"""Opens what a workload calls a model: a file, or a network of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgewise.bench.staged_tenants import is_staged
from edgewise.errors import ConfigError, ProfileError
from edgewise.frontends.checkpoint import load_model
from edgewise.frontends.partition import PartitionedModel, read_partitioned
from edgewise.frontends.zoo import backbone_names
from edgewise.frontends.zoo_int8 import int8_file, models_folder
from edgewise.placement.workload import MODEL_SUFFIXES
from edgewise.profiles.partition import PartitionProfile
from edgewise.profiling.staged_partition import partitioned


def model_file(name_or_path: str | Path, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """Find a model's file; that of a network of the zoo is made once, in the user's cache.

    Args:
        name_or_path: A file, or a name of the zoo.
        say: Told what takes so long.

    Raises:
        BackendUnavailable: A package that makes the network's file is not installed.
        ModelError: The network cannot be quantised.
    """
    name = _network(name_or_path)
    return Path(name_or_path) if name is None else int8_file(name, models_folder(), say=say)[0]


def open_model(
    name_or_path: str | Path,
    profile: PartitionProfile,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> PartitionedModel:
    """Read a model, cut where its profile was measured.

    A file must be the very one that was measured. Two builds of a network of the zoo differ in the
    last bit of what its quantiser saw, so there places and sizes must agree.

    Args:
        name_or_path: A file, or a name of the zoo.
        profile: Says where to cut.
        say: Told what takes so long.

    Raises:
        ConfigError: It is neither a model's file nor such a name.
        ProfileError: The profile is of another model.
        ModelError: The model cannot be read.
        BackendUnavailable: As `model_file`.
    """
    name = _network(name_or_path)
    if is_staged(name_or_path):
        model = read_model(name_or_path)
        if not _same(profile, model):
            raise _foreign(name_or_path)
        return model
    path = model_file(name_or_path, say=say)
    if name is None and path.suffix.lower() not in MODEL_SUFFIXES:
        raise ConfigError(
            f"there is no model {str(name_or_path)!r} to run, only a profile",
            help=f"name an .onnx or .tflite file, or a network: {', '.join(backbone_names())}",
        )
    try:
        model = read_partitioned(path, places=profile.cuts[1:-1])
    except ConfigError as error:  # no such tensor
        raise _foreign(name_or_path) from error
    if name is None:
        same = profile.model_version in {"", model.version}
    else:
        same = np.array_equal(profile.prefix_bytes, [p.prefix_bytes for p in model.places])
    if not same or tuple(p.tensor for p in model.places) != tuple(profile.cuts):
        raise _foreign(name_or_path)
    return model


def read_model(
    name_or_path: str | Path,
    *,
    places: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> PartitionedModel:
    """Read a model with all its places.

    Args:
        name_or_path: A file, a name of the zoo, a shipped model or the folder of a checkpoint.
        places: How many inner places a file gets at most; one with exits has its stages' ends.
        say: Told what takes so long.

    Raises:
        ConfigError: There is no such model.
        ModelError: It cannot be read or cut.
        BackendUnavailable: As `model_file`.
    """
    if is_staged(name_or_path):
        return partitioned(load_model(name_or_path))
    return read_partitioned(model_file(name_or_path, say=say), places=places)


def _same(profile: PartitionProfile, model: PartitionedModel) -> bool:
    """Whether a profile is of that very model."""
    known = profile.model_version in {"", model.version}
    return known and tuple(p.tensor for p in model.places) == tuple(profile.cuts)


def _network(name_or_path: str | Path) -> str | None:
    """A name of the zoo, or ``None``."""
    name = str(name_or_path).lower().replace("_", "-")
    return next((n for n in backbone_names() if n.replace("_", "-") == name), None)


def _foreign(name_or_path: str | Path) -> ProfileError:
    beside = f"{Path(name_or_path).with_suffix('')}.partition.json"
    where = "" if isinstance(name_or_path, Path) else " beside the workload"
    return ProfileError(
        f"its profile is of another model than {name_or_path}",
        help=f"edgewise profile {name_or_path} --segments --export {beside}{where}",
    )

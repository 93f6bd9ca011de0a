"""Samples of costs in many states, in one file: what ``edgewise fit --samples`` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgewise.errors import ProfileError
from edgewise.predict.state_samples import StateSamples
from edgewise.predict.stored import read_stored, write_stored

FORMAT = "edgewise-state-samples"
FORMAT_VERSION = 1


def save_samples(samples: StateSamples, path: Path) -> None:
    """Write samples, whole or not at all.

    Raises:
        ProfileError: There are none, or the file cannot be written.
    """
    if not samples.seconds.size or not samples.states.size:
        raise ProfileError("there are no samples to write")
    arrays = {"states": samples.states, "seconds": samples.seconds}
    if samples.joules is not None:
        arrays["joules"] = samples.joules
    header = {
        "features": list(samples.features),
        "units": list(samples.units),
        "provenance": samples.provenance,
        "elapsed_s": samples.elapsed_s,
    }
    write_stored(path, arrays, header, format_name=FORMAT, version=FORMAT_VERSION)


def load_samples(path: Path) -> StateSamples:
    """Read samples that `save_samples` wrote.

    Raises:
        ProfileError: The file is missing, damaged, of another kind or of a newer version.
    """
    arrays, header = read_stored(path, format_name=FORMAT, version=FORMAT_VERSION)
    try:
        elapsed_s = header["elapsed_s"]
        return StateSamples(
            features=tuple(str(name) for name in header["features"]),
            states=arrays["states"].astype(np.float64),
            units=tuple(str(name) for name in header["units"]),
            seconds=arrays["seconds"].astype(np.float64),
            provenance=str(header["provenance"]),
            joules=arrays["joules"].astype(np.float64) if "joules" in arrays else None,
            elapsed_s=None if elapsed_s is None else float(elapsed_s),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{path} is damaged: {type(error).__name__}: {error}", help="write the file again"
        ) from error

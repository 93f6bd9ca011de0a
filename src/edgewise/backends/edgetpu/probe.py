"""Whether runtime, library and device work together, tried out in a child that may crash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgewise.backends.accelerator import AcceleratorLost
from edgewise.backends.edgetpu.child import WORKER, Child, ChildDied
from edgewise.backends.edgetpu.diagnose import diagnose
from edgewise.errors import BackendUnavailable

WHAT = "the Edge TPU"
LIBRARY = "libedgetpu.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What a device was reached through.

    Attributes:
        runtime: Name of the Python package.
        runtime_version: Its version.
        library: The delegate's library.
        library_version: What it says about itself; ``None`` where it says nothing.
    """

    runtime: str
    runtime_version: str
    library: str
    library_version: str | None

    def __str__(self) -> str:
        return (
            f"{self.runtime} {self.runtime_version} and {self.library}"
            f" {self.library_version or '(version unknown)'}"
        )


def probe(  # noqa: PLR0913 - each is one circumstance of the trial
    *,
    library: str = LIBRARY,
    options: Mapping[str, str] | None = None,
    model: bytes | None = None,
    timeout_s: float = 60.0,
    root: Path = Path("/"),
    command: Sequence[str] = WORKER,
) -> Versions:
    """Open the device in a throw-away child process, which is gone on return.

    Args:
        library: The delegate's library.
        options: The delegate's own, for example ``{"device": "usb:0"}``.
        model: A compiled model to allocate; ``None`` tries the delegate alone. A model that the
            runtime refuses is no fault of the device and is not told here.
        timeout_s: For each step, seconds.
        root: Where the file tree starts, for the diagnosis.
        command: Starts the child.

    Raises:
        BackendUnavailable: It cannot be used, and why.
    """
    child = None
    versions: Versions | None = None
    try:
        child = Child(command, settings=worker_settings(library, options), what=WHAT)
        versions = hear_versions(child, timeout_s=timeout_s)
        await_ready(child, library=library, root=root, timeout_s=timeout_s)
        if model is not None:
            load = {"op": "load", "key": "probe", "format": "tflite", "threads": 1}
            child.call(load, model, timeout_s=timeout_s)
    except ChildDied as error:
        said = f": {error.said}" if error.said else ""
        raise BackendUnavailable(
            f"{versions or 'the runtime'} do not work together here: a trial process ended with"
            f" {error.cause}{said}",
            help="install a pair that was built together: a libedgetpu for your runtime's"
            " TensorFlow version (community builds exist), or the runtime that your libedgetpu was"
            " built with",
        ) from error
    except AcceleratorLost as error:
        raise BackendUnavailable(
            f"{WHAT} cannot be used through {versions or 'its runtime'}: {error.message}",
            help="unplug it, plug it in again, and check its power",
        ) from error
    finally:
        if child is not None:
            child.close()
    return versions


def worker_settings(library: str | None, options: Mapping[str, str] | None) -> str:
    """Write what the child must know."""
    return json.dumps({"library": library, "options": dict(options or {})})


def hear_versions(child: Child, *, timeout_s: float) -> Versions:
    """Take what a fresh child says about itself, before it touches the device.

    Raises:
        BackendUnavailable: No runtime is installed.
        AcceleratorLost: The child died or hung.
    """
    hello, _ = child.receive(timeout_s=timeout_s)
    if "error" in hello:
        raise BackendUnavailable(hello["error"], help=hello["help"])
    return Versions(**hello)


def await_ready(child: Child, *, library: str | None, root: Path, timeout_s: float) -> None:
    """Wait until a child has opened the device.

    Raises:
        BackendUnavailable: No library, no device, or it is not to be had.
        AcceleratorLost: The child died or hung.
    """
    ready, _ = child.receive(timeout_s=timeout_s)
    if "error" in ready:
        found = diagnose(
            ready["error"], library=library or LIBRARY, root=root, ignore_pids=[child.pid]
        )
        raise BackendUnavailable(found.problem, help=found.help)

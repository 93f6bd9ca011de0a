"""What a model costs when it is cut in two: a prefix on an accelerator, the rest on CPU cores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError
from edgewise.profiles.exchange import write_whole

FORMAT = "edgewise-partition-profile"
FORMAT_VERSION = 1

Float64 = npt.NDArray[np.float64]
Provenance = Literal["measured", "simulated", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProfile:
    """Costs of one model at its P + 1 places to cut: 0 is all on the CPU, P none.

    Attributes:
        model_id: The model's name.
        model_version: Hash of its weights and structure, or ``""`` where unknown.
        cuts: Names of the places, [P + 1]: of the tensor that crosses; the first is the input.
        depth_ratio: Work before each place as a share of the whole, [P + 1], 0 to 1.
        prefix_bytes: Parameters before each place, [P + 1], bytes, never falling.
        boundary_bytes: What crosses at each place, [P + 1], bytes: the input at 0, the answer at P.
        accelerator_s: Computing of the prefix alone, [P + 1], seconds: no fixed cost, no
            transfers, no streaming of parameters; 0 at place 0.
        threads: Numbers of CPU threads that were measured, ascending, 1 first. [T].
        cpu_s: The rest on the CPU after each place, [P + 1, T], seconds; 0 at place P.
        cpu_cv2: Squared coefficient of variation of those times, [P + 1]; 0 for constant ones.
        sram_bytes: Memory that a compiler gave each prefix, [P + 1]; ``None`` where the device's
            own figure holds.
        accelerator: Name of the device that ``accelerator_s`` is of.
        cpu: Device that ``cpu_s`` is of: a fingerprint or words.
        accelerator_provenance: How ``accelerator_s`` came about.
        cpu_provenance: How ``cpu_s`` came about.
        notes: How it was made: facts for people.

    Raises:
        ProfileError: Shapes do not fit each other, or a value cannot be.
    """

    model_id: str
    model_version: str = ""
    cuts: tuple[str, ...]
    depth_ratio: Float64
    prefix_bytes: Float64
    boundary_bytes: Float64
    accelerator_s: Float64
    threads: tuple[int, ...] = (1,)
    cpu_s: Float64
    cpu_cv2: Float64 | None = None
    sram_bytes: Float64 | None = None
    accelerator: str = ""
    cpu: str = ""
    accelerator_provenance: Provenance = "estimated"
    cpu_provenance: Provenance = "measured"
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = len(self.cuts)
        if places < 2:
            raise self._wrong(f"expected at least the places 0 and P, found {places}")
        for name in ("depth_ratio", "prefix_bytes", "boundary_bytes", "accelerator_s"):
            self._keep(name, (places,))
        self._keep("cpu_s", (places, len(self.threads)))
        for name in ("cpu_cv2", "sram_bytes"):
            if getattr(self, name) is not None:
                self._keep(name, (places,))
        if self.cpu_cv2 is None:
            object.__setattr__(self, "cpu_cv2", np.zeros(places))
        self._check_order()

    def _keep(self, name: str, shape: tuple[int, ...]) -> None:
        """Make an array of a field that nobody can change."""
        array = np.array(getattr(self, name), dtype=np.float64)
        if array.shape != shape:
            raise self._wrong(
                f"expected {name} of shape {shape}, found {array.shape}",
                help="measure it again: a place to cut is missing",
            )
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise self._wrong(f"{name} has a value that is negative or not finite")
        array.flags.writeable = False
        object.__setattr__(self, name, array)

    def _check_order(self) -> None:
        for name in ("depth_ratio", "prefix_bytes"):
            if (np.diff(getattr(self, name)) < 0).any():
                raise self._wrong(f"{name} falls from a place to a deeper one: cuts out of order")
        if tuple(sorted(set(self.threads))) != tuple(self.threads) or self.threads[0] != 1:
            raise self._wrong(f"expected threads that rise from 1, found {self.threads}")
        if self.accelerator_s[0] != 0 or (self.cpu_s[-1] != 0).any():
            raise self._wrong("place 0 has nothing on the accelerator, place P nothing on the CPU")
        for name in ("accelerator_provenance", "cpu_provenance"):
            if getattr(self, name) not in get_args(Provenance):
                raise self._wrong(f"unknown {name} {getattr(self, name)!r}")

    @property
    def last(self) -> int:
        """P, the place with nothing on the CPU."""
        return len(self.cuts) - 1

    @property
    def weight_bytes(self) -> float:
        """Parameters of the whole model, bytes."""
        return float(self.prefix_bytes[-1])

    def _wrong(self, message: str, *, help: str | None = None) -> ProfileError:  # noqa: A002
        return ProfileError(f"partition profile of {self.model_id!r}: {message}", help=help)


def partition_profile_text(profile: PartitionProfile) -> str:
    """Write a profile as JSON."""
    plain = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in asdict(profile).items()
    }
    return json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **plain}, indent=1) + "\n"


def write_partition_profile(profile: PartitionProfile, path: Path) -> None:
    """Write a profile to a file, whole or not at all.

    Raises:
        ProfileError: It cannot be written; what was there before stays.
    """
    text = partition_profile_text(profile)
    write_whole(path, text.encode(), what="the partition profile")


def read_partition_profile(path: str | Path) -> PartitionProfile:
    """Read a file that `write_partition_profile` wrote.

    Raises:
        ProfileError: It cannot be read, is no such profile, or says something that cannot be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"cannot read the partition profile {path}: {error}",
            help="measure one with `edgewise profile MODEL --segments`",
        ) from error
    return parse_partition_profile(text, where=str(path))


def parse_partition_profile(text: str, *, where: str) -> PartitionProfile:
    """Read a profile from JSON text.

    Raises:
        ProfileError: As `read_partition_profile`.
    """
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ProfileError(f"{where} is no partition profile of Edgewise")
    if (version := found.pop("version", None)) != FORMAT_VERSION:
        raise ProfileError(
            f"{where} has version {version!r}, this Edgewise reads {FORMAT_VERSION}",
            help="measure it again, or upgrade edgewise",
        )
    names = {f.name for f in fields(PartitionProfile)}
    needed = {"model_id", "cuts", "depth_ratio", "prefix_bytes", "boundary_bytes"}
    needed |= {"accelerator_s", "cpu_s"}
    odd = sorted((set(found) - names) | (needed - set(found)))
    if odd:
        raise ProfileError(f"{where}: missing or unknown members: {', '.join(odd)}")
    try:
        return PartitionProfile(
            **{**found, "cuts": tuple(found["cuts"]), "threads": tuple(found.get("threads", (1,)))}
        )
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{where}: {error}") from error


def thread_column(profile: PartitionProfile, threads: int) -> int:
    """Which column of ``cpu_s`` is for at most so many threads.

    Example:
        A profile measured with 1 and 2 threads gives column 1 for 2, 3 and more threads.
    """
    return max(k for k, t in enumerate(profile.threads) if t <= max(threads, 1))

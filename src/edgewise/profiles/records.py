"""What a profile is: costs of a model's units on one device, and how they were measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError, nearest_names
from edgewise.profiles import statistics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UnitKind = Literal["stage", "segment", "head", "full", "controller"]
Provenance = Literal["measured", "simulated", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPolicy:
    """How many threads a backend may use, and where. Costs under two policies never mix.

    Attributes:
        threads: Worker threads of one call.
        spinning: Idle workers spin instead of sleeping.
        affinity: CPU numbers the threads are bound to; ``None`` where the kernel chooses.
    """

    threads: int
    spinning: bool = False
    affinity: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"a thread policy needs at least one thread, found {self.threads!r}")
        if self.affinity is not None:
            object.__setattr__(self, "affinity", tuple(sorted(set(self.affinity))))
            if not self.affinity:
                raise ValueError("an affinity names at least one CPU; None leaves it to the kernel")

    @property
    def key(self) -> str:
        """The policy in words; two policies are equal exactly when their keys are.

        Example:
            >>> ThreadPolicy(threads=1).key
            '1 thread, no spin'
            >>> ThreadPolicy(threads=2, spinning=True, affinity=(2, 3)).key
            '2 threads, spin, CPUs 2 3'
        """
        words = [
            f"{self.threads} thread" + ("s" if self.threads > 1 else ""),
            "spin" if self.spinning else "no spin",
        ]
        if self.affinity is not None:
            words.append("CPUs " + " ".join(map(str, self.affinity)))
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How samples were taken; samples of two methods never mix.

    Attributes:
        warmup_rounds: Rounds run and thrown away before the first sample.
        clock: Name of the clock, e.g. ``"perf_counter_ns"``.
        synchronised: The device had finished on both sides of each sample.
        interleaved: Units took turns within a round instead of running one after the other.
        stop_rule: When sampling ended, in words.
        version: Raised when the way of measuring changes without a change in the rest.
    """

    warmup_rounds: int
    clock: str
    synchronised: bool
    interleaved: bool
    stop_rule: str
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class UnitKey:
    """Something with a cost, on one backend, at one batch size.

    Attributes:
        name: ``"stage:3"``, ``"segment:0-4"``, ``"head:2"``, ``"full"``.
        kind: What sort of unit.
        backend: Runtime on device, e.g. ``"onnxruntime:CPU"``.
        batch: Inputs of one call.
    """

    name: str
    kind: UnitKind
    backend: str
    batch: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(UnitKind):
            raise ValueError(
                f"unknown kind of unit {self.kind!r}; "
                f"{nearest_names(self.kind, get_args(UnitKind))}"
            )
        if not self.name or not self.backend or self.batch < 1:
            raise ValueError(f"a unit needs a name, a backend and a batch of at least 1: {self}")

    def __str__(self) -> str:
        return f"{self.name} on {self.backend}, batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost:
    """Samples of one unit.

    Attributes:
        unit: What was run, and where.
        samples_s: [R] wall time of one call by round, seconds, synchronised; NaN where the
            round has no sample. Read-only.
        energy_j: Energy of one call above idle, joules; ``None`` where it is not known.
        energy_note: Why ``energy_j`` is ``None``, or how it was measured.
    """

    unit: UnitKey
    samples_s: npt.NDArray[np.float64]
    energy_j: float | None = None
    energy_note: str = "no energy meter was read"

    def __post_init__(self) -> None:
        samples_s = np.array(self.samples_s, dtype=np.float64)
        if samples_s.ndim != 1:
            raise ProfileError(
                f"samples of {self.unit} have shape {samples_s.shape}; expected [rounds]"
            )
        present = samples_s[~np.isnan(samples_s)]
        if not present.size:
            raise ProfileError(f"{self.unit} has no sample")
        if not (np.isfinite(present) & (present >= 0)).all():
            raise ProfileError(f"{self.unit} has a sample that is negative or infinite")
        if self.energy_j is not None:
            object.__setattr__(self, "energy_j", float(self.energy_j))
        samples_s.flags.writeable = False
        object.__setattr__(self, "samples_s", samples_s)

    @property
    def present_s(self) -> npt.NDArray[np.float64]:
        """The samples that were taken, in order. [count]."""
        return self.samples_s[~np.isnan(self.samples_s)]

    @property
    def count(self) -> int:
        """How many samples there are."""
        return int(np.count_nonzero(~np.isnan(self.samples_s)))

    @property
    def median_s(self) -> float:
        """Median wall time of one call, seconds."""
        return statistics.median(self.samples_s)

    def quantile_s(self, q: float) -> float:
        """Wall time that a share ``q`` of calls stays under, as :func:`statistics.quantile`."""
        return statistics.quantile(self.samples_s, q)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """All costs of one model on one device under one thread policy.

    Attributes:
        model_id: The model's name.
        model_version: Hash of its weights and structure.
        device_id: Fingerprint of the device.
        device: What the fingerprint stands for, JSON.
        thread_policy: Threads the backends had.
        method: How it was measured.
        provenance: Measured, simulated or estimated; printed with every number.
        created_unix_s: When the campaign began, seconds since 1970, by that machine's clock.
        state: Load of others, frequencies and the like at that time, JSON.
        units: Cost of each unit; all sample arrays have the same rounds.
    """

    model_id: str
    model_version: str
    device_id: str
    device: Mapping[str, object]
    thread_policy: ThreadPolicy
    method: Method
    provenance: Provenance
    created_unix_s: float
    units: Mapping[UnitKey, Cost]
    state: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.provenance not in get_args(Provenance):
            raise ValueError(
                f"provenance must be one of {get_args(Provenance)}, found {self.provenance!r}"
            )
        # An int and an equal float would give two digests.
        object.__setattr__(self, "created_unix_s", float(self.created_unix_s))
        if not self.units:
            raise ProfileError(f"the profile of model {self.model_id!r} has no unit")
        if len({cost.samples_s.size for cost in self.units.values()}) != 1:
            raise ProfileError(
                f"units of the profile of model {self.model_id!r} differ in their number of rounds"
            )
        if len({(key.name, key.backend, key.batch) for key in self.units}) != len(self.units):
            raise ProfileError(
                f"the profile of model {self.model_id!r} has two units of one name, "
                "backend and batch"
            )
        for key, cost in self.units.items():
            if key != cost.unit:
                raise ProfileError(f"the cost filed under {key} is that of {cost.unit}")

    @property
    def num_rounds(self) -> int:
        """R, the rounds in which at least one unit was sampled."""
        return int(next(iter(self.units.values())).samples_s.size)

    @property
    def created_text(self) -> str:
        """When it was measured, for people, in UTC."""
        return unix_time_text(self.created_unix_s)

    def backends(self) -> tuple[str, ...]:
        """Names of the backends with at least one cost, sorted."""
        return tuple(sorted({key.backend for key in self.units}))

    def names(self, backend: str, *, batch: int = 1) -> tuple[str, ...]:
        """Names of the units with a cost on that backend at that batch size, sorted."""
        return tuple(
            sorted(k.name for k in self.units if k.backend == backend and k.batch == batch)
        )

    def cost(self, name: str, backend: str, batch: int = 1) -> Cost:
        """Look up the cost of one unit.

        Raises:
            ProfileError: It was not measured; the message says which part is unknown.
        """
        for key, cost in self.units.items():
            if key.name == name and key.backend == backend and key.batch == batch:
                return cost
        raise ProfileError(
            f"the profile of model {self.model_id!r} has no cost of unit {name!r} on backend "
            f"{backend!r} at batch {batch}; {self._nearest(name, backend, batch)}",
            help=f"edgewise profile {self.model_id}",
        )

    def matrix(
        self, names: Sequence[str], backend: str, *, batch: int = 1
    ) -> npt.NDArray[np.float64]:
        """Samples of several units, aligned by round.

        A row holds what was measured within one round, so sums along it keep the correlation
        between units that sums of separate quantiles lose.

        Returns:
            [R, U] seconds, NaN where a round has no sample of a unit.

        Raises:
            ProfileError: A unit was not measured.
        """
        if not names:
            return np.empty((self.num_rounds, 0))
        columns = [self.cost(name, backend, batch).samples_s for name in names]
        return np.stack(columns, axis=1)  # [R, U]

    def sums_s(
        self, names: Sequence[str], backend: str, *, batch: int = 1
    ) -> npt.NDArray[np.float64]:
        """Total of several units in each round that has a sample of all of them.

        Returns:
            [R'] seconds with R' ≤ R; empty where no round is complete.

        Raises:
            ProfileError: A unit was not measured.
        """
        per_unit_s = self.matrix(names, backend, batch=batch)  # [R, U]
        totals_s: npt.NDArray[np.float64] = per_unit_s.sum(axis=1)  # [R], NaN spreads
        return totals_s[~np.isnan(totals_s)]

    def differences(
        self,
        *,
        model_version: str,
        device_id: str,
        thread_policy: ThreadPolicy,
        device: Mapping[str, object] | None = None,
    ) -> tuple[str, ...]:
        """Say in words what separates this profile from the present situation; empty if nothing.

        Args:
            model_version: Hash of the model that would run.
            device_id: Fingerprint of this device.
            thread_policy: Threads the backends would have.
            device: What this device's fingerprint stands for; names the fields that differ.
        """
        found = []
        if self.device_id != device_id:
            text = f"another device (profile: {self.device_id!r}, here: {device_id!r}"
            if device is not None:
                text += "".join(
                    f"; {name}: {self.device.get(name)!r}, here {device.get(name)!r}"
                    for name in sorted({*self.device, *device})
                    if self.device.get(name) != device.get(name)
                )
            found.append(text + ")")
        if self.thread_policy != thread_policy:
            found.append(
                f"another thread policy (profile: {self.thread_policy.key!r}, "
                f"here: {thread_policy.key!r})"
            )
        if self.model_version != model_version:
            found.append(
                f"another model version (profile: {self.model_version!r}, here: {model_version!r})"
            )
        return tuple(found)

    def check_usable(
        self,
        *,
        model_version: str,
        device_id: str,
        thread_policy: ThreadPolicy,
        device: Mapping[str, object] | None = None,
    ) -> None:
        """Refuse a profile that says nothing about the present situation.

        Args:
            model_version: Hash of the model that would run.
            device_id: Fingerprint of this device.
            thread_policy: Threads the backends would have.
            device: What this device's fingerprint stands for; names the fields that differ.

        Raises:
            ProfileError: The device, thread policy or model version differs; each that does is
                named with both values.
        """
        found = self.differences(
            model_version=model_version,
            device_id=device_id,
            thread_policy=thread_policy,
            device=device,
        )
        if found:
            raise ProfileError(
                f"the profile of model {self.model_id!r} from {self.created_text} is for "
                + " and for ".join(found),
                help=f"edgewise profile {self.model_id}",
            )

    def digest(self) -> str:
        """SHA-256 over everything the profile says, as hexadecimal digits.

        Sample arrays enter as little-endian doubles, the rest as JSON with sorted keys.
        """
        header = {
            "model_id": self.model_id,
            "model_version": self.model_version,
            "device_id": self.device_id,
            "device": self.device,
            "thread_policy": dataclasses.asdict(self.thread_policy),
            "method": dataclasses.asdict(self.method),
            "provenance": self.provenance,
            "created_unix_s": self.created_unix_s,
            "state": self.state,
        }
        sha = hashlib.sha256(canonical_json(header).encode())
        for key in sorted(self.units):
            cost = self.units[key]
            unit = {
                **dataclasses.asdict(key),
                "energy_j": cost.energy_j,
                "energy_note": cost.energy_note,
            }
            sha.update(canonical_json(unit).encode())
            # One bit pattern for every NaN, and for both zeros, on every machine.
            samples_s = np.where(np.isnan(cost.samples_s), math.nan, cost.samples_s + 0.0)
            sha.update(samples_s.astype("<f8").tobytes())
        return sha.hexdigest()

    def _nearest(self, name: str, backend: str, batch: int) -> str:
        if backend not in self.backends():
            return "backends: " + nearest_names(backend, self.backends())
        known = self.names(backend, batch=batch)
        if not known:
            batches = sorted({k.batch for k in self.units if k.backend == backend})
            return f"measured batch sizes: {', '.join(map(str, batches))}"
        return "units: " + nearest_names(name, known)


def canonical_json(value: object) -> str:
    """One text for one JSON value: sorted keys, no blanks, no NaN.

    Raises:
        ProfileError: The value is not JSON.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise ProfileError(f"a profile can hold JSON values only: {error}") from error


def unix_time_text(unix_s: float) -> str:
    """Write an instant for people, in UTC.

    Example:
        >>> unix_time_text(0.0)
        '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

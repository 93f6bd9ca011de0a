"""Finds an accelerator's cache policy and bandwidths by timing models alone and in turns."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from edgewise.backends.accelerator import AcceleratorDevice, Prefix
from edgewise.backends.piece import Array
from edgewise.clock import Clock
from edgewise.device.accelerator import Accelerator, CachePolicy
from edgewise.errors import ConfigError, ProfileError

Float64 = npt.NDArray[np.float64]

_BLOCK = 8  # calls of one kind in a row
_LEAST_BLOCKS = 4
_LOOK_EVERY = 4
_PAYS = 0.3  # share of a first use's loading from which a switch counts as reloading
_SURE_Z = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorProbe:
    """What was found, and how sure that is.

    Attributes:
        accelerator: The description; what could not be measured is kept from the device's own.
        pair_share: What a call pays after a switch between two models that fit together, as a
            share of what a first use pays: near 1 under ``token``, near 0 else.
        round_share: The same for all models in turn, which do not fit together; ``None`` where
            they do.
        in_error_ratio: Standard error of ``in_bytes_per_s`` as a share of it.
        out_error_ratio: The same of ``out_bytes_per_s``; ``None`` where it was not measured.
        fixed_error_s: Standard error of ``fixed_s``; ``None`` where it was not measured.
        calls: How many were timed.
        elapsed_s: How long that took.
        notes: What is uncertain, for people.
    """

    accelerator: Accelerator
    pair_share: float
    round_share: float | None
    in_error_ratio: float
    out_error_ratio: float | None
    fixed_error_s: float | None
    calls: int
    elapsed_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """y = offset + slope · x, with standard errors."""

    offset: float
    slope: float
    offset_error: float
    slope_error: float


def probe_accelerator(  # noqa: PLR0913 - each is one circumstance of the campaign
    device: AcceleratorDevice,
    prefixes: Sequence[Prefix],
    inputs: Mapping[str, Array],
    *,
    clock: Clock,
    limit_s: float = 60.0,
    precision: float = 0.004,
) -> AcceleratorProbe:
    """Time models alone (A, A, A), two in turn (A, B, A, B) and all in turn (A, B, C).

    A first use after loading pays for bringing parameters in, under every policy. Under ``token``
    each switch pays the same again, under ``lru`` only where the models do not fit together, under
    ``pinned`` never. Reload times over bytes give the bandwidth in; times of calls that do not
    load, less what is known of them, over output sizes give the bandwidth out and the fixed cost.

    Args:
        device: Its description gives the memory, which timing does not; the prefixes' own
            ``sram_bytes`` count first. The prefixes are loaded, and unloaded in the end.
        prefixes: At least three that together do not fit while two of them do. For the bandwidth
            out they need ``compute_s`` (0 where it is negligible) and outputs of different sizes.
        inputs: One per key.
        clock: For the time limit.
        limit_s: Time after which no further block is started, seconds.
        precision: Standard error of the bandwidths, as a share, at which it stops earlier.

    Raises:
        ConfigError: There are too few prefixes, no two fit together, or an input is missing.
        ProfileError: The times contradict every policy.
        BackendError: The device refused or failed.
    """
    campaign = _Campaign(device, prefixes, inputs)
    start_s = clock.now_s()
    try:
        for prefix in prefixes:
            device.load(prefix)
        policy = None
        for blocks in itertools.count(1):
            campaign.run_block(policy)
            elapsed_s = clock.now_s() - start_s
            late = elapsed_s >= limit_s
            if blocks < _LEAST_BLOCKS or not (late or blocks % _LOOK_EVERY == 0):
                continue
            found = campaign.result(elapsed_s=elapsed_s)
            policy = found.accelerator.cache_policy
            if late or max(found.in_error_ratio, found.out_error_ratio or 0.0) <= precision:
                break
    finally:
        for prefix in prefixes:
            device.unload(prefix.key)
    return found


class _Campaign:
    """The timed calls, by kind and key."""

    def __init__(
        self, device: AcceleratorDevice, prefixes: Sequence[Prefix], inputs: Mapping[str, Array]
    ) -> None:
        self._device = device
        self._prefixes = tuple(prefixes)
        self._inputs = inputs
        self._sram_bytes = device.description.sram_bytes
        self._times_s: dict[tuple[str, str], list[float]] = defaultdict(list)
        if len(prefixes) < 3:
            raise ConfigError(
                f"expected at least three prefixes to probe with, found {len(prefixes)}"
            )
        missing = [p.key for p in prefixes if p.key not in inputs]
        if missing:
            raise ConfigError(f"there is no input for prefix {missing[0]!r}")
        self._pairs = [
            (a, b)
            for a, b in itertools.combinations(self._prefixes, 2)
            if a.weight_bytes + b.weight_bytes <= self._sram_bytes
            and a.weight_bytes
            and b.weight_bytes
        ]
        if not self._pairs:
            raise ConfigError(
                f"no two of the prefixes fit into {self._sram_bytes} bytes together",
                help="probe with smaller ones",
            )
        self._fits = sum(self._cached("token").values()) <= self._sram_bytes

    def run_block(self, policy: CachePolicy | None) -> None:
        """Some calls of every kind, so that drift touches all of them.

        Args:
            policy: Once it is known, only those kinds that its bandwidth follows from.
        """
        for prefix in self._prefixes:
            for _ in range(_BLOCK if policy == "pinned" else 1):
                self._device.load(prefix)  # again: its first use loads its parameters
                self._call("first", prefix)
            for _ in range(_BLOCK):
                self._call("alone", prefix)
        if policy in {None, "token"}:
            for pair in self._pairs:
                self._in_turn("pair", pair)
        if policy in {None, "lru"} and not self._fits:
            self._in_turn("round", self._prefixes)

    def result(self, *, elapsed_s: float) -> AcceleratorProbe:
        """What the calls so far say."""
        pair_share, pair_z = self._share("pair", {p.key for pair in self._pairs for p in pair})
        round_share, round_z = None, 0.0
        if not self._fits:
            round_share, round_z = self._share("round", {p.key for p in self._prefixes})
        policy, notes = self._policy(pair_share, pair_z, round_share, round_z)
        loading = self._loading(policy)
        answering = self._answering(policy, 1.0 / loading.slope)
        known = self._device.description
        found = replace(
            known,
            cache_policy=policy,
            in_bytes_per_s=1.0 / loading.slope,
            switch_s=loading.offset,
            provenance="simulated" if self._device.provenance == "simulated" else "measured",
        )
        if answering is None:
            notes.append(
                "out_bytes_per_s and fixed_s are kept as they were: too few outputs differ in size,"
                " or compute_s is unknown"
            )
        else:
            found = replace(found, out_bytes_per_s=1.0 / answering.slope, fixed_s=answering.offset)
        calls = sum(map(len, self._times_s.values()))
        in_error = loading.slope_error / loading.slope
        source = (
            f"probe of {calls} calls: a switch pays {max(0.0, pair_share):.0%} of a first use's"
            f" loading; bandwidth in ±{in_error:.1%}"
        )
        return AcceleratorProbe(
            accelerator=replace(found, source=source),
            pair_share=pair_share,
            round_share=round_share,
            in_error_ratio=in_error,
            out_error_ratio=None if answering is None else answering.slope_error / answering.slope,
            fixed_error_s=None if answering is None else answering.offset_error,
            calls=calls,
            elapsed_s=elapsed_s,
            notes=tuple(notes),
        )

    def _call(self, kind: str, prefix: Prefix) -> None:
        answer = self._device.run(prefix.key, self._inputs[prefix.key])
        self._times_s[kind, prefix.key].append(answer.service_s)

    def _in_turn(self, kind: str, group: Sequence[Prefix]) -> None:
        for prefix in group:
            self._device.run(prefix.key, self._inputs[prefix.key])  # all have been used once
        for _ in range(_BLOCK):
            for prefix in group:
                self._call(kind, prefix)

    def _cached(self, policy: CachePolicy) -> dict[str, int]:
        """Parameters of each prefix that can stay in memory, bytes."""
        cached = {}
        left = self._sram_bytes
        for prefix in self._prefixes:
            room = self._sram_bytes if prefix.sram_bytes is None else prefix.sram_bytes
            if policy == "pinned" and prefix.sram_bytes is None:
                room = left  # given in the order of loading, where no compiler said more
            cached[prefix.key] = min(prefix.weight_bytes, room)
            left = max(0, left - cached[prefix.key])
        return cached

    def _excess(self, kind: str, key: str) -> tuple[float, float]:
        """What a call takes longer than one alone: mean and standard error, seconds."""
        mean_s, error_s = _middle(self._times_s[kind, key])
        alone_s, alone_error_s = _middle(self._times_s["alone", key])
        return mean_s - alone_s, math.hypot(error_s, alone_error_s)

    def _share(self, kind: str, keys: Iterable[str]) -> tuple[float, float]:
        """Excess as a share of a first use's, and how many standard errors it is above zero."""
        turns = [self._excess(kind, key) for key in sorted(keys)]
        firsts = [self._excess("first", key) for key in sorted(keys)]
        total_s, first_s = sum(t for t, _ in turns), sum(f for f, _ in firsts)
        error_s = math.hypot(*(e for _, e in turns))
        share = total_s / first_s if first_s > 0 else math.inf
        return share, total_s / error_s if error_s > 0 else math.copysign(math.inf, total_s)

    def _policy(
        self, pair_share: float, pair_z: float, round_share: float | None, round_z: float
    ) -> tuple[CachePolicy, list[str]]:
        notes: list[str] = []
        shares = [(pair_share, pair_z), *([] if round_share is None else [(round_share, round_z)])]
        for share, z in shares:
            if (share >= _PAYS and z < _SURE_Z) or 0.15 < share < 0.7:
                notes.append(
                    f"the cache policy is uncertain: a switch pays {share:.0%} of a first use's"
                    f" loading ({z:.1f} standard errors)"
                )
        if pair_share >= _PAYS:
            return "token", notes
        if round_share is None:
            raise ConfigError(
                "the prefixes all fit into memory together, so lru and pinned look the same",
                help="probe with one more, or with larger ones",
            )
        return ("lru" if round_share >= _PAYS else "pinned"), notes

    def _loading(self, policy: CachePolicy) -> _Line:
        """Time to bring parameters in over their bytes."""
        kind = {"token": "pair", "lru": "round", "pinned": "first"}[policy]
        points = [
            (cached, *self._excess(kind, key))
            for key, cached in self._cached(policy).items()
            if cached and (kind, key) in self._times_s
        ]
        line = _fit_line(points)
        if line is None or line.slope <= 0:
            raise ProfileError(
                f"the times under policy {policy!r} do not grow with the bytes that are loaded",
                help="probe on a quiet machine, with prefixes that differ more in size",
            )
        return line

    def _answering(self, policy: CachePolicy, in_bytes_per_s: float) -> _Line | None:
        """Time of calls that do not load, less what is known of them, over output bytes."""
        points = []
        cached = self._cached(policy)
        for prefix in self._prefixes:
            if prefix.compute_s is None or prefix.weight_bytes > cached[prefix.key]:
                continue
            mean_s, error_s = _middle(self._times_s["alone", prefix.key])
            known_s = prefix.compute_s + prefix.input.nbytes / in_bytes_per_s
            points.append((prefix.output.nbytes, mean_s - known_s, error_s))
        if len({x for x, _, _ in points}) < 3:
            return None
        line = _fit_line(points)
        return None if line is None or line.slope <= 0 else line


def _middle(times_s: Sequence[float]) -> tuple[float, float]:
    """Mean of the middle half and its standard error: a disturbed call does not count.

    Source:
        Tukey & McLaughlin (1963): the error of a trimmed mean follows from the Winsorised
        variance, s_w / ((1 - 2γ) √n).
    """
    ordered = np.sort(np.asarray(times_s))
    count = len(ordered)
    cut = count // 4
    clipped = np.clip(ordered, ordered[cut], ordered[count - 1 - cut])
    deviation = float(clipped.std(ddof=1)) if count > 1 else 0.0
    kept = (count - 2 * cut) / count
    return float(ordered[cut : count - cut].mean()), deviation / (kept * math.sqrt(count))


def _fit_line(points: Sequence[tuple[float, float, float]]) -> _Line | None:
    """Weighted least squares of y over x; an offset below two standard errors is taken as 0.

    Args:
        points: x, y and the standard error of y.

    Returns:
        ``None`` where there are not two different x.
    """
    x, y, error = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(set(x.tolist())) < 2:
        return None
    # Exact times (a simulation's) all weigh the same.
    weight = 1.0 / np.maximum(error, max(1e-9 * float(np.abs(y).max()), 1e-15))
    unit = float(x.max())
    columns = np.stack([np.ones_like(x), x / unit], axis=1) * weight[:, None]  # [N, 2]
    covariance = np.linalg.inv(columns.T @ columns)
    offset, slope = covariance @ (columns.T @ (y * weight))
    errors = np.sqrt(np.diag(covariance))
    if offset > 2 * errors[0]:
        return _Line(
            offset=float(offset),
            slope=float(slope) / unit,
            offset_error=float(errors[0]),
            slope_error=float(errors[1]) / unit,
        )
    alone = columns[:, 1]
    return _Line(
        offset=0.0,
        slope=float(alone @ (y * weight) / (alone @ alone)) / unit,
        offset_error=float(errors[0]),
        slope_error=float(1.0 / np.sqrt(alone @ alone)) / unit,
    )


def accelerator_text(accelerator: Accelerator) -> str:
    """Write a description as TOML, as `parse_accelerator` reads it."""
    lines = []
    for field in fields(accelerator):
        value = getattr(accelerator, field.name)
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):  # TOML's basic strings are JSON's but for one character
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        else:
            text = repr(value)
        lines.append(f"{field.name} = {text}\n")
    return "".join(lines)

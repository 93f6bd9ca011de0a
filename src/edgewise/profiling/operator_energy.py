"""Energy of one call above idle: equally long windows of idling and of work, one after the other.

What repeats one call is a hot loop: clocks rise and caches are warm. Energies of short operators
are therefore those of the loop, not those within a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from edgewise.clock import Clock, MonotonicClock
from edgewise.device import find_meters
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity
from edgewise.profiles.operators import Energy
from edgewise.profiles.statistics import median_bootstrap_interval

SAMPLES_PER_WINDOW = 20
_LEAST_WINDOW_S = 0.1
_NONE = "no energy meter covers this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyMeter:
    """One meter.

    Attributes:
        note: What it counts, for people.
        kind: ``"counter"`` gives joules since some instant, ``"power"`` watts now.
        period_s: How often its value moves, seconds.
        read: Its value; NaN where it cannot be read any more.
    """

    note: str
    kind: Literal["counter", "power"]
    period_s: float
    read: Callable[[], float]


FindMeter = Callable[[str], tuple[EnergyMeter | None, str]]


def find_energy_meter(
    backend: str, *, root: Path = Path("/"), clock: Clock | None = None
) -> tuple[EnergyMeter | None, str]:
    """The meter that covers a backend.

    A GPU's own counter for ``"…:cuda"``, which leaves the processor's share out; else the sum of
    the processor's packages; else the input rail of a board.

    Args:
        backend: Runtime on device.
        root: Where the file tree starts. Tests pass a recorded tree.
        clock: For the age of what was read; the machine's by default.

    Returns:
        The meter, or ``None``; and what it counts, or why there is none.
    """
    clock = clock or MonotonicClock()
    if backend.partition(":")[2].lower().startswith(("cuda", "gpu")):
        from edgewise.device.sensors import nvml

        note = "GPU 0 alone: the processor's share is not in it"
        sensor = nvml.make(root)
        for name, kind in (("energy.gpu0_j", "counter"), ("power.gpu0_w", "power")):
            found, why = _of_sensor(sensor, (name,), kind, note, clock)  # type: ignore[arg-type]
            if found is not None:
                break
        return found, why
    return _of_processor(root, clock)


def measure_energy(  # noqa: PLR0913 - each is one knob of a measurement
    call: Callable[[], object],
    *,
    meter: EnergyMeter,
    call_s: float,
    pairs: int = 8,
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
) -> Energy:
    """Measure the energy of one call above idle.

    Each pair is a window of so many calls, and a window of idling as long as that took; which
    comes first alternates. A window spans at least 20 values of the meter, and 0.1 s. The net
    energies of the pairs give a median and its bootstrap interval.

    Args:
        call: The work.
        meter: What is read.
        call_s: How long one call takes, about, seconds.
        pairs: How many, at least two.
        clock: Times and sleeps; the machine's by default.
        rng: Draws of the bootstrap.

    Returns:
        Joules of one call; ``None`` with the reason where the meter failed, or where work drew no
        more than idling.
    """
    clock = clock or MonotonicClock()
    window_s = max(SAMPLES_PER_WINDOW * meter.period_s, _LEAST_WINDOW_S)
    calls = max(1, math.ceil(window_s / max(call_s, 1e-9)))
    working_s = max(window_s, calls * call_s)
    nets = []
    for pair in range(max(2, pairs)):
        idle_first = pair % 2 == 1
        idle_w = _idle_w(meter, working_s, clock) if idle_first else math.nan
        active_w, working_s = _active_w(meter, call, calls, clock)
        if not idle_first:
            idle_w = _idle_w(meter, working_s, clock)
        nets.append((active_w - idle_w) * working_s / calls)
    if not np.isfinite(nets).all():
        return Energy(note=f"{meter.note}: it could not be read during the measurement")
    middle = float(np.median(nets))
    if middle <= 0:
        return Energy(
            note=f"{meter.note}: work drew {-middle * calls / working_s:.3g} W less than idling, so"
            " its energy is not known"
            if middle < 0
            else f"{meter.note}: work drew no more than idling, so its energy is not known"
        )
    interval = median_bootstrap_interval(nets, rng=rng or np.random.default_rng(0))
    return Energy(energy_j=middle, low_j=interval.low, high_j=interval.high, note=meter.note)


def _active_w(
    meter: EnergyMeter, call: Callable[[], object], calls: int, clock: Clock
) -> tuple[float, float]:
    """Mean power of so many calls, and how long they took."""
    start_s, first = clock.now_s(), meter.read()
    values, next_s = [first], start_s + meter.period_s
    for _ in range(calls):
        call()
        if meter.kind == "power" and clock.now_s() >= next_s:
            values.append(meter.read())
            next_s = clock.now_s() + meter.period_s
    last, duration_s = meter.read(), max(clock.now_s() - start_s, 1e-9)
    if meter.kind == "counter":
        return (last - first) / duration_s, duration_s
    # The first value may still be of what ran before.
    return float(np.mean([*values[1:], last])), duration_s


def _idle_w(meter: EnergyMeter, duration_s: float, clock: Clock) -> float:
    """Mean power while nothing is done."""
    start_s, first = clock.now_s(), meter.read()
    if meter.kind == "counter":
        clock.sleep_s(duration_s)
        last = meter.read()
        return (last - first) / max(clock.now_s() - start_s, 1e-9)
    values: list[float] = []
    while clock.now_s() < start_s + duration_s or not values:
        clock.sleep_s(meter.period_s)
        values.append(meter.read())
    return float(np.mean(values))


def _of_processor(root: Path, clock: Clock) -> tuple[EnergyMeter | None, str]:
    from edgewise.device.sensors import ina3221, rapl

    meters = find_meters(root)
    packages = [m for m in meters if m.name.startswith("rapl package") and m.name.count(" ") == 1]
    usable = [m for m in packages if m.quality == "ok"]
    reasons = [f"{m.name}: {m.reason}" for m in meters if m.reason]
    why = "; ".join(reasons) or _NONE
    if usable:
        names = tuple(f"energy.{m.name.removeprefix('rapl ')}_j" for m in usable)
        note = f"{', '.join(m.name for m in usable)}, idle taken off"
        found, why = _of_sensor(rapl.make(root), names, "counter", note, clock)
        if found is not None:
            return found, why
    rails = [m.name.removeprefix("ina3221 ") for m in meters if m.kind == "power"]
    for rail in ("VDD_IN", "POM_5V_IN"):  # what the whole board draws, by its label
        if rail in rails:
            note = f"rail {rail} of the whole board, idle taken off"
            return _of_sensor(ina3221.make(root), (f"power.{rail}_w",), "power", note, clock)
    return None, why


def _of_sensor(
    sensor: Sensor,
    names: tuple[str, ...],
    kind: Literal["counter", "power"],
    note: str,
    clock: Clock,
) -> tuple[EnergyMeter | None, str]:
    first: Mapping[str, Quantity] = sensor.read(clock.now_s())
    for name in names:
        if first.get(name) is None or first[name].value is None:
            return None, first[name].reason if name in first else _NONE
    # A counter of the kernel or the driver moves faster than a monitor cares to look.
    period_s = {"rapl": 0.005, "nvml": 0.1}.get(sensor.name, sensor.period_s)
    read = functools.partial(_sum, sensor, names, clock)
    return EnergyMeter(note=note, kind=kind, period_s=period_s, read=read), note


def _sum(sensor: Sensor, names: tuple[str, ...], clock: Clock) -> float:
    """Sum of quantities of a sensor; NaN where one is not known."""
    found = sensor.read(clock.now_s())
    values = [found[name].value for name in names]
    return math.nan if None in values else math.fsum(v for v in values if v is not None)

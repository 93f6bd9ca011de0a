"""How the clocks and the neighbours of a simulated device change: step functions of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from edgewise.errors import ConfigError

DVFS_STEP_S = 0.010
"""How long the paper's trace stays at each level (UniExit, section 7.2)."""


class Levels(NamedTuple):
    """What a cost depends on at one instant.

    Attributes:
        f_cpu_hz: Clock of the CPU.
        f_gpu_hz: Clock of the GPU.
        f_emc_hz: Clock of the memory.
        u_cpu: Share of the CPU that other programs use, 0 to 1.
        u_gpu: Share of the GPU that other programs use, 0 to 1.
    """

    f_cpu_hz: float
    f_gpu_hz: float
    f_emc_hz: float
    u_cpu: float = 0.0
    u_gpu: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLevels:
    """The frequencies a device can be set to, ascending, Hz."""

    cpu_hz: tuple[float, ...]
    gpu_hz: tuple[float, ...]
    emc_hz: tuple[float, ...]

    def __post_init__(self) -> None:
        for each in self.lists:
            if not each or list(each) != sorted(set(each)) or each[0] <= 0:
                raise ConfigError(f"expected ascending frequencies above zero, found {each}")

    @property
    def lists(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """CPU, GPU and memory, in this order."""
        return self.cpu_hz, self.gpu_hz, self.emc_hz

    def at(self, steps: Sequence[int], *, u_cpu: float = 0.0, u_gpu: float = 0.0) -> Levels:
        """The levels at three positions; a position outside a list takes its nearest end."""
        cpu, gpu, emc = (
            levels[min(max(k, 0), len(levels) - 1)]
            for levels, k in zip(self.lists, steps, strict=True)
        )
        return Levels(cpu, gpu, emc, u_cpu, u_gpu)

    @property
    def top(self) -> tuple[int, int, int]:
        """Positions of the highest levels."""
        return len(self.cpu_hz) - 1, len(self.gpu_hz) - 1, len(self.emc_hz) - 1


class Trace(Protocol):
    """Levels as a function of time, constant between changes."""

    @property
    def name(self) -> str:
        """For tables and figures."""
        ...

    def levels(self, t_s: float) -> Levels:
        """What holds at an instant."""
        ...

    def next_change_s(self, t_s: float) -> float:
        """The first instant after ``t_s`` at which the levels may differ; ``inf`` for never."""
        ...

    def temperature_celsius(self, t_s: float) -> float | None:
        """Of the chip; ``None`` where the scenario says nothing about heat."""
        ...


def step_index(t_s: float, step_s: float) -> int:
    """Which step an instant lies in; a step holds its start ``k * step_s`` and not its end.

    Example:
        >>> step_index(0.3, 0.1), step_index(3 * 0.1, 0.1)  # 0.3 < 3 * 0.1 in floating point
        (2, 3)
    """
    k = math.floor(t_s / step_s)
    if k * step_s > t_s:
        return k - 1
    return k + 1 if (k + 1) * step_s <= t_s else k


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One row of levels per step.

    Attributes:
        name: For tables and figures.
        step_s: How long each row holds, seconds.
        rows: What holds in steps 0, 1, ….
        repeats: Whether it starts again after the last row, or stays there.
        celsius: Temperature in each step, or empty.
    """

    name: str
    step_s: float
    rows: tuple[Levels, ...] = field(repr=False)
    repeats: bool = True
    celsius: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.rows or not self.step_s > 0:
            raise ConfigError(f"trace {self.name!r} needs a row and a step above zero seconds")
        if self.celsius and len(self.celsius) != len(self.rows):
            raise ConfigError(f"trace {self.name!r} needs one temperature per row")

    @property
    def period_s(self) -> float:
        """How long all rows take, seconds."""
        return len(self.rows) * self.step_s

    def levels(self, t_s: float) -> Levels:
        """What holds at an instant; before 0 as a repetition, or the first row."""
        return self.rows[self._row(t_s)]

    def next_change_s(self, t_s: float) -> float:
        """The end of this step; ``inf`` once nothing changes any more."""
        k = step_index(t_s, self.step_s)
        if len(self.rows) == 1 or (not self.repeats and k >= len(self.rows) - 1):
            return math.inf
        return ((k if self.repeats else max(k, 0)) + 1) * self.step_s

    def temperature_celsius(self, t_s: float) -> float | None:
        """Of the chip, where the scenario has one."""
        return self.celsius[self._row(t_s)] if self.celsius else None

    def _row(self, t_s: float) -> int:
        k = step_index(t_s, self.step_s)
        return k % len(self.rows) if self.repeats else min(max(k, 0), len(self.rows) - 1)


def static_max(clocks: ClockLevels) -> StepTrace:
    """All clocks at their highest: the paper's static setting."""
    return StepTrace(name="static max", step_s=1.0, rows=(clocks.at(clocks.top),))


def static_min(clocks: ClockLevels) -> StepTrace:
    """All clocks at their lowest."""
    return StepTrace(name="static min", step_s=1.0, rows=(clocks.at((0, 0, 0)),))


def down_up(clocks: ClockLevels, *, step_s: float = DVFS_STEP_S) -> StepTrace:
    """The paper's dynamic trace: all clocks fall by a level each step, then rise alike.

    A clock that has reached its end waits there until all have; then the direction changes. With
    ``n`` levels in the longest list it repeats after ``2 (n - 1)`` steps.

    Source:
        UniExit, section 7.2, "controlled dynamic DVFS".
    """
    longest = max(1, *clocks.top)
    down = [[top - k for top in clocks.top] for k in range(longest)]
    up = [[k] * 3 for k in range(longest)]
    return StepTrace(
        name="down-up DVFS",
        step_s=step_s,
        rows=tuple(clocks.at(steps) for steps in (*down, *up)),
    )


def idle_then_spike(
    clocks: ClockLevels,
    *,
    idle_s: float = 0.2,
    busy_s: float = 0.3,
    step_s: float = DVFS_STEP_S,
    levels_per_step: int = 1,
) -> StepTrace:
    """Work arrives after a pause: clocks are at their lowest and climb; repeats.

    Args:
        clocks: The levels there are.
        idle_s: How long nothing happens, all clocks at their lowest; comes first.
        busy_s: How long work goes on after that.
        step_s: How long the governor waits between two raises.
        levels_per_step: By how many levels it raises.
    """
    idle, busy = round(idle_s / step_s), round(busy_s / step_s)
    climb = [[k * levels_per_step] * 3 for k in range(busy)]
    return StepTrace(
        name="idle then spike",
        step_s=step_s,
        rows=tuple(clocks.at(steps) for steps in ([[0, 0, 0]] * idle + climb)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thermal:
    """How a chip heats: ``dT/dt = (ambient + R * W - T) / tau``, and when it is throttled.

    The constants are assumed, not measured; they put the settled temperature of full load above
    the trip point on both devices.

    Attributes:
        ambient_celsius: Temperature that the chip would have without power.
        start_celsius: Temperature at 0.
        trip_celsius: Where throttling starts.
        hysteresis_celsius: How far below that it ends.
        celsius_per_w: R, thermal resistance from chip to air.
        time_constant_s: tau, seconds.
    """

    ambient_celsius: float = 35.0
    start_celsius: float = 70.0
    trip_celsius: float = 80.0
    hysteresis_celsius: float = 2.0
    celsius_per_w: float = 3.0
    time_constant_s: float = 12.0

    def after(self, celsius: float, power_w: float, duration_s: float) -> float:
        """Temperature after constant power for a time, the equation's exact solution."""
        settled = self.ambient_celsius + self.celsius_per_w * power_w
        return settled + (celsius - settled) * math.exp(-duration_s / self.time_constant_s)


_THERMAL = Thermal()


def thermal_throttle(
    clocks: ClockLevels,
    power_w: Callable[[Levels], float],
    *,
    thermal: Thermal = _THERMAL,
    duration_s: float = 60.0,
    step_s: float = 0.1,
) -> StepTrace:
    """Full load heats the chip until CPU and GPU are capped, level by level.

    Above the trip point the caps fall by one level a step, below it less the hysteresis they rise
    by one. Memory is not capped.

    Args:
        clocks: The levels there are.
        power_w: What the device draws at some levels under full load, watts.
        thermal: How the chip heats.
        duration_s: How long is worked out; the last row holds ever after.
        step_s: How often the governor looks.
    """
    (top_cpu, top_gpu, top_emc) = clocks.top
    cap, celsius = 0, thermal.start_celsius
    rows, temperatures = [], []
    for _ in range(round(duration_s / step_s)):
        row = clocks.at((top_cpu - cap, top_gpu - cap, top_emc))
        rows.append(row)
        temperatures.append(celsius)
        celsius = thermal.after(celsius, power_w(row), step_s)
        if celsius > thermal.trip_celsius:
            cap = min(cap + 1, max(top_cpu, top_gpu))
        elif celsius < thermal.trip_celsius - thermal.hysteresis_celsius:
            cap = max(cap - 1, 0)
    return StepTrace(
        name="thermal throttle",
        step_s=step_s,
        rows=tuple(rows),
        repeats=False,
        celsius=tuple(temperatures),
    )


def random_walk(
    clocks: ClockLevels,
    *,
    seed: int,
    steps: int = 6000,
    step_s: float = DVFS_STEP_S,
    max_utilisation: float = 0.0,
) -> StepTrace:
    """Each clock stays or moves by one level per step, with equal chances; repeats.

    Args:
        clocks: The levels there are.
        seed: The same seed gives the same walk.
        steps: How many, before it repeats.
        step_s: How long each holds.
        max_utilisation: Utilisation of CPU and GPU walk too, by a tenth of this, from 0 to this.
    """
    rng = np.random.default_rng(seed)
    moves = rng.integers(-1, 2, size=(steps, 5))
    ends = np.array([*clocks.top, 10, 10])
    at = np.array([*clocks.top, 0, 0])
    rows = []
    for move in moves:
        rows.append(
            clocks.at(
                [int(k) for k in at[:3]],
                u_cpu=max_utilisation * int(at[3]) / 10,
                u_gpu=max_utilisation * int(at[4]) / 10,
            )
        )
        at = np.clip(at + move, 0, ends)
    return StepTrace(name=f"random walk (seed {seed})", step_s=step_s, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """A neighbour that works and pauses in turn, beside any other trace.

    Attributes:
        base: What the clocks do.
        u_cpu: Share of the CPU it takes while it works, added to that of ``base``.
        u_gpu: Share of the GPU.
        off_s: How long it pauses; comes first.
        on_s: How long it works.
    """

    base: Trace
    u_cpu: float = 0.4
    u_gpu: float = 0.4
    off_s: float = 0.5
    on_s: float = 0.5

    def __post_init__(self) -> None:
        if not (self.off_s > 0 and self.on_s > 0):
            raise ConfigError("a neighbour needs times above zero seconds for work and pause")
        if not (0 <= self.u_cpu <= 1 and 0 <= self.u_gpu <= 1):
            raise ConfigError("a neighbour takes shares from 0 to 1")

    @property
    def name(self) -> str:
        """For tables and figures."""
        return f"{self.base.name} with a neighbour"

    def levels(self, t_s: float) -> Levels:
        """What holds at an instant."""
        found = self.base.levels(t_s)
        if not self._works(t_s):
            return found
        return found._replace(
            u_cpu=min(1.0, found.u_cpu + self.u_cpu), u_gpu=min(1.0, found.u_gpu + self.u_gpu)
        )

    def next_change_s(self, t_s: float) -> float:
        """The earlier of the base's and the neighbour's next change."""
        whole_s = self.off_s + self.on_s
        k = step_index(t_s, whole_s)
        own_s = (k + 1) * whole_s if self._works(t_s) else k * whole_s + self.off_s
        return min(own_s, self.base.next_change_s(t_s))

    def temperature_celsius(self, t_s: float) -> float | None:
        """That of the base."""
        return self.base.temperature_celsius(t_s)

    def _works(self, t_s: float) -> bool:
        whole_s = self.off_s + self.on_s
        return t_s >= step_index(t_s, whole_s) * whole_s + self.off_s

"""A simulated device on a trace: what a unit costs from now on, and what a monitor would read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgewise.clock import Clock
from edgewise.device.simulated.jetson import DeviceModel
from edgewise.device.simulated.traces import Levels, Trace, step_index
from edgewise.device.simulated.work import UnitWork
from edgewise.device.state import FEATURES, DeviceState, Quantity
from edgewise.errors import ConfigError, nearest_names

Float64 = npt.NDArray[np.float64]

SIMULATED_FEATURES = FEATURES[:5]
"""What a simulated cost depends on; a CPU quota is not simulated."""

UTILISATIONS = tuple((cpu / 5, gpu / 5) for cpu in range(5) for gpu in range(5))
"""The 25 points at which a full campaign samples utilisation of CPU and GPU: 0 to 0.8 each."""

_BLOCK = 256  # requests whose noise is drawn at once: making a generator takes as long


class SimulatedDevice:
    """Some work on a device whose clocks and neighbours follow a trace.

    Args:
        model: The device.
        trace: What changes under it.
        work: Its units, as :func:`load_work` gives them.
        seed: Of the noise.
    """

    provenance = "simulated"

    def __init__(
        self, model: DeviceModel, trace: Trace, work: Sequence[UnitWork], *, seed: int
    ) -> None:
        self.model, self.trace, self.work, self.seed = model, trace, tuple(work), seed
        self._index = {unit.name: k for k, unit in enumerate(self.work)}
        self._max_hz = tuple(levels[-1] for levels in model.clocks.lists)
        # Traces come back to the same levels, so that most are worked out once.
        self._seconds = lru_cache(4096)(self._work_out_seconds)
        self._watts = lru_cache(4096)(self._work_out_watts)
        self._noise = lru_cache(8)(self._draw_noise)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, stages first."""
        return tuple(self._index)

    def cost_s(self, unit: str, start_s: float, *, request: int) -> float:
        """How long a unit takes that starts now.

        While the levels are constant it progresses at one over its time there; it is done when the
        progress reaches the noise factor, which depends on seed, request and unit alone: all
        policies meet the same luck.

        Args:
            unit: Its name.
            start_s: When it starts.
            request: Number of the request or token that it runs for.

        Returns:
            Seconds, exact for piecewise constant levels.

        Raises:
            ConfigError: There is no such unit.
        """
        k = self._position(unit)
        left, now_s = self._noise(request // _BLOCK)[request % _BLOCK][k], start_s
        while True:
            seconds = self._seconds(self.trace.levels(now_s))[k]
            change_s = self.trace.next_change_s(now_s)
            if now_s + left * seconds <= change_s:
                return now_s - start_s + left * seconds
            left -= (change_s - now_s) / seconds
            now_s = change_s

    def energy_j(self, unit: str, start_s: float, duration_s: float) -> float:
        """What the whole device draws while a unit runs, idle power included, joules."""
        k = self._position(unit)
        end_s, now_s, joules = start_s + duration_s, start_s, 0.0
        while now_s < end_s:
            until_s = min(end_s, self.trace.next_change_s(now_s))
            joules += self._watts(self.trace.levels(now_s))[k] * (until_s - now_s)
            now_s = until_s
        return joules

    def true_median_s(self, unit: str, levels: Levels) -> float:
        """Time of a unit without noise if the levels stay as they are, seconds."""
        return self._seconds(levels)[self._position(unit)]

    def costs_s(self, states: Float64) -> Float64:
        """Time of every unit without noise in constant states.

        Args:
            states: [N, 5], in the order of ``SIMULATED_FEATURES``.

        Returns:
            [N, U], seconds.
        """
        return self.model.costs_s(self.work, states)

    def state(self, at_s: float) -> DeviceState:
        """What a monitor that reads without delay would say; power is that of the running work."""
        levels = self.trace.levels(at_s)
        ratios = self._vector(levels)
        watts = self._watts(levels)
        celsius = self.trace.temperature_celsius(at_s)
        heat = (
            Quantity.missing("unsupported", "this simulated scenario has no temperature")
            if celsius is None
            else Quantity.ok(celsius)
        )
        return DeviceState(
            at_s=at_s,
            quantities={
                **{n: Quantity.ok(v) for n, v in zip(SIMULATED_FEATURES, ratios, strict=True)},
                "cpu.frequency_hz": Quantity.ok(levels.f_cpu_hz),
                "gpu.frequency_hz": Quantity.ok(levels.f_gpu_hz),
                "emc.frequency_hz": Quantity.ok(levels.f_emc_hz),
                "cpu.quota_ratio": Quantity.ok(1.0),
                "power.total_w": Quantity.ok(sum(watts) / len(watts)),
                "thermal.cpu-thermal_celsius": heat,
                "thermal.gpu-thermal_celsius": heat,
            },
        )

    def _position(self, unit: str) -> int:
        try:
            return self._index[unit]
        except KeyError:
            raise ConfigError(
                f"the simulated work has no unit {unit!r}", help=nearest_names(unit, self._index)
            ) from None

    def _vector(self, levels: Levels) -> list[float]:
        cpu, gpu, emc = self._max_hz
        return [
            levels.f_cpu_hz / cpu,
            levels.f_gpu_hz / gpu,
            levels.f_emc_hz / emc,
            levels.u_cpu,
            levels.u_gpu,
        ]

    def _work_out_seconds(self, levels: Levels) -> list[float]:
        found: list[float] = self.costs_s(np.array([self._vector(levels)]))[0].tolist()
        return found

    def _work_out_watts(self, levels: Levels) -> list[float]:
        states = np.array([self._vector(levels)])
        found: list[float] = self.model.watts(self.work, states)[0].tolist()
        return found

    def _draw_noise(self, block: int) -> list[list[float]]:
        rng = np.random.default_rng([self.seed, block])
        shape = (_BLOCK, len(self.work))
        factors = self.model.noise.factors(rng.standard_normal(shape), rng.random(shape))
        found: list[list[float]] = factors.tolist()
        return found


class SimulatedMonitor:
    """Reads a simulated device as the real monitor reads a real one: at its own times.

    Args:
        device: Whose state.
        clock: Tells the present instant.
        period_s: It reads at multiples of this, seconds, so its answer is up to that old; 0 reads
            at the instant it is asked.
    """

    def __init__(self, device: SimulatedDevice, clock: Clock, *, period_s: float = 0.0) -> None:
        if not (math.isfinite(period_s) and period_s >= 0):
            raise ConfigError(f"expected a period of zero seconds or more, found {period_s!r}")
        self._device, self._clock, self._period_s = device, clock, period_s

    def latest(self) -> DeviceState:
        """The newest state."""
        now_s = self._clock.now_s()
        if self._period_s:
            now_s = step_index(now_s, self._period_s) * self._period_s
        return self._device.state(now_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Campaign:
    """Records of all units in many constant states, simulated.

    Attributes:
        features: Names of the columns of ``states``.
        states: [N, 5].
        units: [U], stages first.
        seconds: [N, R, U].
        joules: [N, R, U], of the whole device.
        elapsed_s: How long taking them would have taken, seconds.
    """

    features: tuple[str, ...]
    states: Float64
    units: tuple[str, ...]
    seconds: Float64
    joules: Float64
    elapsed_s: float


def full_factorial(
    model: DeviceModel, *, utilisations: Sequence[tuple[float, float]] = UTILISATIONS
) -> Float64:
    """Every combination of clock levels and utilisation points.

    Args:
        model: The device.
        utilisations: Pairs of what others use of CPU and GPU, 0 to 1.

    Returns:
        [N, 5], in the order of ``SIMULATED_FEATURES``; 17,600 states for the Orin Nano.
    """
    cpu, gpu, emc = (np.array(each) / each[-1] for each in model.clocks.lists)
    axes = np.meshgrid(cpu, gpu, emc, np.arange(len(utilisations)), indexing="ij")
    point = axes[3].ravel()
    used = np.asarray(utilisations, dtype=np.float64).reshape(-1, 2)
    return np.column_stack([*(a.ravel() for a in axes[:3]), used[point]])


def run_campaign(
    model: DeviceModel,
    work: Sequence[UnitWork],
    *,
    seed: int,
    states: Float64 | None = None,
    repeats: int = 3,
) -> Campaign:
    """Take records of every unit in constant states, as offline profiling does.

    Args:
        model: The device.
        work: Its units.
        seed: Of the noise, which is independent of that of requests.
        states: [N, 5]; the full factorial by default.
        repeats: Records per state.
    """
    if states is None:
        states = full_factorial(model)
    rng = np.random.default_rng([seed, 0x70F11E])
    shape = (len(states), repeats, len(work))
    noise = model.noise.factors(rng.standard_normal(shape), rng.random(shape))
    seconds = model.costs_s(work, states)[:, None, :] * noise
    joules = model.watts(work, states)[:, None, :] * seconds
    return Campaign(
        features=SIMULATED_FEATURES,
        states=states,
        units=tuple(unit.name for unit in work),
        seconds=seconds,
        joules=joules,
        elapsed_s=float(model.settle_s * seconds[..., 0].size + model.passes * seconds.sum()),
    )

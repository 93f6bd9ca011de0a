"""Two simulated Jetsons: their clocks, what a unit of work costs at each, and what they draw.

The constants and how they were fitted stand in docs/background/simulated-devices.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.device.simulated.traces import ClockLevels, Levels
from edgewise.device.simulated.work import Kind, UnitWork
from edgewise.errors import ConfigError, nearest_names

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """How much longer each part of a unit takes per share that other programs use.

    Attributes:
        launch_per_cpu: Of the launches, per share of the CPU.
        compute_per_gpu: Of the arithmetic, per share of the GPU.
        traffic_per_cpu: Of the memory traffic, per share of the CPU.
        traffic_per_gpu: Of the memory traffic, per share of the GPU.
    """

    launch_per_cpu: float
    compute_per_gpu: float
    traffic_per_cpu: float
    traffic_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What repeated runs in one state differ by.

    Attributes:
        sigma: Standard deviation of the logarithm of a unit's time.
        outlier_chance: How often a unit is hit by something else, such as an interrupt.
        outlier_ratio: By how much of itself it then takes longer.
    """

    sigma: float
    outlier_chance: float
    outlier_ratio: float

    def factors(self, normal: Float64, uniform: Float64) -> Float64:
        """What a time is multiplied by, from standard normal and uniform numbers alike."""
        hit = np.where(uniform < self.outlier_chance, 1 + self.outlier_ratio, 1.0)
        return np.asarray(np.exp(self.sigma * normal) * hit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What the device draws: idle, and of each part ``peak * x * V(x)^2 * activity``.

    ``x`` is the clock as a share of its highest and ``V(x) = floor + (1 - floor) x`` the voltage
    as a share of that at the highest: the usual law of switching power.

    Attributes:
        idle_w: With nothing to do, watts.
        peak_w: CPU, GPU, memory at their highest clocks and always busy, watts.
        voltage_floor: Voltage at the clock 0 over that at the highest, of the three parts; memory
            has one voltage for all clocks.
    """

    idle_w: float
    peak_w: tuple[float, float, float]
    voltage_floor: tuple[float, float, float] = (0.6, 0.6, 1.0)

    def watts(self, ratios: Float64, activity: Float64) -> Float64:
        """Power at clocks [..., 3] with the parts busy [..., 3] of the time; [...]."""
        floor = np.array(self.voltage_floor)
        voltage = floor + (1 - floor) * ratios
        switching = np.array(self.peak_w) * ratios * voltage**2 * activity
        return np.asarray(self.idle_w + switching.sum(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A simulated device.

    The time of a unit in a constant state is the sum of three terms::

        launches * launch_s * (fixed + (1 - fixed) * f_cpu_max / f_cpu)   * (1 + k * u_cpu)
        + flops / (efficiency * flops_per_cycle * f_gpu)                  * (1 + k * u_gpu)
        + traffic_bytes / (efficiency * bytes_per_cycle * f_emc)          * (1 + k u_cpu + k u_gpu)

    Attributes:
        name: ``"jetson-orin-nano"`` or ``"jetson-xavier-nx"``.
        title: For people.
        clocks: The levels it can be set to.
        launch_s: One launch with the CPU at its highest clock, seconds, by kind of work.
        launch_fixed_ratio: Share of that which no clock changes.
        flops_per_cycle: Of the GPU's tensor cores in half precision.
        compute_efficiency: Share of them that is reached.
        bytes_per_cycle: Of the memory, per cycle of its clock.
        traffic_efficiency: Share of them that is reached.
        interference: What neighbours cost.
        noise: What repeats differ by.
        power: What it draws.
        settle_s: How long setting a state before a record of a campaign takes, seconds.
        passes: Times that every unit runs for one record; the last one counts.
    """

    name: str
    title: str
    clocks: ClockLevels = field(repr=False)
    launch_s: Mapping[Kind, float]
    launch_fixed_ratio: float
    flops_per_cycle: float
    compute_efficiency: float
    bytes_per_cycle: float
    traffic_efficiency: float
    interference: Interference
    noise: Noise
    power: Power
    settle_s: float = 0.1
    passes: int = 2

    @property
    def max_hz(self) -> Float64:
        """[3], the highest clock of CPU, GPU and memory."""
        return np.array([levels[-1] for levels in self.clocks.lists])

    def top_terms_s(self, work: Sequence[UnitWork]) -> Float64:
        """[U, 3], seconds of launches, arithmetic and traffic, all clocks highest, no neighbour."""
        _, gpu_hz, emc_hz = self.max_hz
        flops_rate = self.compute_efficiency * self.flops_per_cycle * gpu_hz
        bytes_rate = self.traffic_efficiency * self.bytes_per_cycle * emc_hz
        return np.array(
            [
                [
                    u.launches * self.launch_s[u.kind],
                    u.flops / flops_rate,
                    u.traffic_bytes / bytes_rate,
                ]
                for u in work
            ]
        )

    def slowdowns(self, states: Float64) -> Float64:
        """How much longer each term takes than with all clocks highest and no neighbour.

        Args:
            states: [N, 5]: shares of the highest clock of CPU, GPU and memory, then what others
                use of CPU and GPU; the first five of `edgewise.device.state.FEATURES`.

        Returns:
            [N, 3] for launches, arithmetic and traffic.
        """
        cpu, gpu, emc, u_cpu, u_gpu = states.T
        fixed, k = self.launch_fixed_ratio, self.interference
        return np.stack(
            [
                (fixed + (1 - fixed) / cpu) * (1 + k.launch_per_cpu * u_cpu),
                (1 + k.compute_per_gpu * u_gpu) / gpu,
                (1 + k.traffic_per_cpu * u_cpu + k.traffic_per_gpu * u_gpu) / emc,
            ],
            axis=-1,
        )

    def costs_s(self, work: Sequence[UnitWork], states: Float64) -> Float64:
        """Noise-free time of each unit in each state.

        Args:
            work: U units.
            states: [N, 5], as for :meth:`slowdowns`.

        Returns:
            [N, U], seconds.
        """
        return np.asarray(self.slowdowns(states) @ self.top_terms_s(work).T)

    def watts(self, work: Sequence[UnitWork], states: Float64) -> Float64:
        """What the device draws while a unit runs.

        The CPU is busy for the launches' share of the unit's time, the GPU for the rest, memory
        for the traffic's; what other programs use is added, up to always busy.

        Returns:
            [N, U], watts.
        """
        terms = self.slowdowns(states)[:, None, :] * self.top_terms_s(work)  # [N, U, 3]
        launch, compute, traffic = np.moveaxis(terms / terms.sum(-1, keepdims=True), -1, 0)
        u_cpu, u_gpu = states[:, 3:4], states[:, 4:5]
        busy = np.stack(
            [launch + u_cpu, compute + traffic + u_gpu, traffic + (u_cpu + u_gpu) / 2], axis=-1
        )
        return self.power.watts(states[:, None, :3], np.minimum(busy, 1.0))

    def full_load_w(self, levels: Levels) -> float:
        """What the device draws with all its parts always busy, watts."""
        return float(self.power.watts(np.array(levels[:3]) / self.max_hz, np.ones(3)))


_MHZ = 1e6

_INTERFERENCE = Interference(
    launch_per_cpu=0.6, compute_per_gpu=1.0, traffic_per_cpu=0.3, traffic_per_gpu=0.5
)

DEVICES: Mapping[str, DeviceModel] = {
    model.name: model
    for model in (
        DeviceModel(
            name="jetson-orin-nano",
            title="Jetson Orin Nano (simulated)",
            clocks=ClockLevels(
                cpu_hz=tuple(115.2 * _MHZ + 76.8 * _MHZ * k for k in range(22)),
                gpu_hz=tuple(306 * _MHZ + 102 * _MHZ * k for k in range(8)),
                emc_hz=(204 * _MHZ, 665.6 * _MHZ, 2133 * _MHZ, 3199 * _MHZ),
            ),
            launch_s={"image": 68.5e-6, "token": 66.4e-6},
            launch_fixed_ratio=0.9,
            flops_per_cycle=32 * 512,
            compute_efficiency=0.4,
            bytes_per_cycle=32,
            traffic_efficiency=0.95,
            interference=_INTERFERENCE,
            noise=Noise(sigma=0.0092, outlier_chance=0.01, outlier_ratio=0.08),
            power=Power(idle_w=5.0, peak_w=(6.0, 10.0, 4.0)),
        ),
        DeviceModel(
            name="jetson-xavier-nx",
            title="Jetson Xavier NX (simulated)",
            clocks=ClockLevels(
                cpu_hz=(*(115.2 * _MHZ + 76.8 * _MHZ * k for k in range(24)), 1907.2 * _MHZ),
                gpu_hz=tuple(
                    each * _MHZ
                    for each in (
                        114.75, 204, 306, 408, 510, 599.25, 701.25, 752.25, 803.25, 854.25, 905.25,
                        956.25, 1007.25, 1058.25, 1109.25,
                    )
                ),
                # Six levels as in the paper. Which six is not confirmed publicly: steps that
                # Tegra memory controllers have, between the lowest and the module's highest.
                emc_hz=tuple(each * _MHZ for each in (204, 665.6, 1065.6, 1331.2, 1600, 1866)),
            ),
            launch_s={"image": 59.9e-6, "token": 38.7e-6},
            launch_fixed_ratio=0.9,
            flops_per_cycle=48 * 128,
            compute_efficiency=0.65,
            bytes_per_cycle=32,
            traffic_efficiency=0.95,
            interference=_INTERFERENCE,
            noise=Noise(sigma=0.0125, outlier_chance=0.01, outlier_ratio=0.08),
            power=Power(idle_w=4.0, peak_w=(5.5, 7.5, 3.0)),
        ),
    )
}  # fmt: skip


def device_names() -> tuple[str, ...]:
    """Names that :func:`load_device` knows."""
    return tuple(DEVICES)


def load_device(name: str) -> DeviceModel:
    """A simulated device by name.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in DEVICES:
        raise ConfigError(
            f"no simulated device is called {name!r}", help=nearest_names(name, DEVICES)
        )
    return DEVICES[name]

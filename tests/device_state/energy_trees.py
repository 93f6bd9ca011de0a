"""Fake machines with energy counters: a laptop with RAPL, boards with INA3221, and NVML itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

RAPL = "sys/class/powercap"
PACKAGE = f"{RAPL}/intel-rapl:0"
CORE = f"{RAPL}/intel-rapl:0:0"
UNCORE = f"{RAPL}/intel-rapl:0:1"
PSYS = f"{RAPL}/intel-rapl:1"
MMIO = f"{RAPL}/intel-rapl-mmio:0"
RANGE_UJ = 262_143_328_850

JETSON = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"


def x86_laptop(*, mmio: bool = True, energy_uj: int = RANGE_UJ - 5_000_000) -> dict[str, str]:
    """A laptop with intel_pstate (it lists no frequencies) and RAPL; the package wraps soon."""
    cpu = "sys/devices/system/cpu"
    files = {f"{cpu}/online": "0-3\n", f"{cpu}/present": "0-3\n"}
    for policy in (f"{cpu}/cpu{number}/cpufreq" for number in range(4)):
        files |= {
            f"{policy}/scaling_driver": "intel_pstate\n",
            f"{policy}/scaling_governor": "powersave\n",
            f"{policy}/scaling_cur_freq": "1800000\n",
            f"{policy}/scaling_max_freq": "4700000\n",
            f"{policy}/cpuinfo_max_freq": "4700000\n",
        }
    files |= zone(PACKAGE, "package-0", energy_uj) | zone(CORE, "core", 1_000_000)
    files |= zone(UNCORE, "uncore", 2_000_000) | zone(PSYS, "psys", 3_000_000)
    return files | (zone(MMIO, "package-0", energy_uj) if mmio else {})


def zone(path: str, name: str, energy_uj: int, *, range_uj: int = RANGE_UJ) -> dict[str, str]:
    """One powercap zone."""
    return {
        f"{path}/name": f"{name}\n",
        f"{path}/energy_uj": f"{energy_uj}\n",
        f"{path}/max_energy_range_uj": f"{range_uj}\n",
    }


def for_root_only(root: Path) -> None:
    """Close the counters to all but root, as Linux 5.10 and newer do."""
    for path in (root / RAPL).glob("*/energy_uj"):
        path.chmod(0o400 if os.geteuid() == 0 else 0)  # an owner may always read with 0400


def rails(
    values: Mapping[str, tuple[int, int]], directory: str = JETSON, *, unconnected: bool = False
) -> dict[str, str]:
    """An INA3221 by label: millivolts and milliamperes; channel 7 is the chip's own sum."""
    files = {f"{directory}/in7_label": "sum of shunt voltages\n", f"{directory}/in7_input": "12\n"}
    for channel, (label, (voltage_mv, current_ma)) in enumerate(values.items(), start=1):
        files |= {
            f"{directory}/in{channel}_label": f"{label}\n",
            f"{directory}/in{channel}_input": f"{voltage_mv}\n",
            f"{directory}/curr{channel}_input": f"{current_ma}\n",
        }
    if unconnected:
        files |= {f"{directory}/in3_label": "NC\n", f"{directory}/in3_input": "0\n"}
    return files


class NVMLError(Exception):
    """As in pynvml: the code is its ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {1: "Uninitialized", 3: "Not Supported", 4: "Insufficient Permissions"}.get(
            self.value, f"Unknown Error {self.value}"
        )


class NvmlStub:
    """The part of the module pynvml (nvidia-ml-py 13) that is used, with its names and units.

    Attributes:
        values: What each call says, by its name; clocks by their kind.
        errors: Code that a call fails with, by its name; ``"*"`` for every call on a GPU.
        vanish_after: How many calls on a GPU succeed before every one says "GPU is lost" (15).
        running: Starts not yet undone.
        starts: Starts in all.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, gpus: int = 1, vanish_after: int | None = None) -> None:
        self.gpus = gpus
        self.vanish_after = vanish_after
        self.errors: dict[str, int] = {}
        self.running = self.starts = 0
        self.values: dict[str, int] = {
            "nvmlDeviceGetClockInfo 1": 990,
            "nvmlDeviceGetClockInfo 2": 2619,
            "nvmlDeviceGetMaxClockInfo 1": 1980,
            "nvmlDeviceGetMaxClockInfo 2": 2619,
            "nvmlDeviceGetUtilizationRates": 37,
            "nvmlDeviceGetPowerUsage": 71_500,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
            "nvmlDeviceGetTemperature 0": 41,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
        }

    def nvmlInit(self) -> None:  # noqa: N802
        self._fail("nvmlInit")
        self.running += 1
        self.starts += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._started()
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._started()
        self._fail("nvmlDeviceGetCount")
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:  # noqa: N802
        self._started()
        self._fail("nvmlDeviceGetHandleByIndex")
        return SimpleNamespace(index=index, start=self.starts)

    def nvmlDeviceGetClockInfo(self, handle: SimpleNamespace, type: int) -> int:  # noqa: A002, N802
        return self._ask(handle, "nvmlDeviceGetClockInfo", type)

    def nvmlDeviceGetMaxClockInfo(self, handle: SimpleNamespace, type: int) -> int:  # noqa: A002, N802
        return self._ask(handle, "nvmlDeviceGetMaxClockInfo", type)

    def nvmlDeviceGetUtilizationRates(self, handle: SimpleNamespace) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._ask(handle, "nvmlDeviceGetUtilizationRates"), memory=12)

    def nvmlDeviceGetPowerUsage(self, handle: SimpleNamespace) -> int:  # noqa: N802
        return self._ask(handle, "nvmlDeviceGetPowerUsage")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: SimpleNamespace) -> int:  # noqa: N802
        return self._ask(handle, "nvmlDeviceGetTotalEnergyConsumption")

    def nvmlDeviceGetTemperature(self, handle: SimpleNamespace, sensor: int) -> int:  # noqa: N802
        return self._ask(handle, "nvmlDeviceGetTemperature", sensor)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: SimpleNamespace) -> int:  # noqa: N802
        return self._ask(handle, "nvmlDeviceGetCurrentClocksEventReasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: SimpleNamespace) -> int:  # noqa: N802
        return self._ask(handle, "nvmlDeviceGetCurrentClocksThrottleReasons")

    def _ask(self, handle: SimpleNamespace, call: str, kind: int | None = None) -> int:
        self._started()
        if handle.start != self.starts:
            raise NVMLError(2)  # a handle of an earlier start
        self._fail("*")
        self._fail(call)
        if self.vanish_after is not None:
            self.vanish_after -= 1
            if self.vanish_after < 0:
                raise NVMLError(15)
        name = call if kind is None else f"{call} {kind}"
        return self.values[name]

    def _started(self) -> None:
        if self.running < 1:
            raise NVMLError(1)

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise NVMLError(self.errors[call])

"""NVIDIA graphics cards, as the driver's management library (NVML) reports them."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgewise.device.files import Quality
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_NOT_INSTALLED = "the Python package nvidia-ml-py is not installed: pip install nvidia-ml-py"
_RECORDED = "NVML knows this machine, not a recorded tree"

# By number, since what the module calls them depends on its release.
_NO_PERMISSION, _FUNCTION_NOT_FOUND = 4, 13
_AWAY = {15, 16, 28}  # lost, needs a reset, not found
# Uninitialised, no driver, no library, another version, unknown: only a new start can help.
_RESTART = {1, 9, 12, 18, 999} | _AWAY

_SM, _MEMORY = 1, 2
_CLOCKS = {"frequency": _SM, "memory_frequency": _MEMORY}
_EVENTS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# A software power cap (0x4) is how cards are run; idle (0x1) and set clocks (0x2, 0x10, 0x100) are
# no trouble either. Hardware slowdown (0x8) comes of heat or of the power brake.
_THROTTLES = {"thermal": 0x20 | 0x40, "power_brake": 0x80, "hw_slowdown": 0x8}


class Nvml(Sensor):
    """Reads clocks, utilisation, power, energy, temperature and throttling of NVIDIA GPUs.

    Of GPU ``i``: ``power.gpu<i>_w``, ``energy.gpu<i>_j`` (since the first reading),
    ``thermal.gpu<i>_celsius`` and ``throttle.gpu<i>_thermal``, ``_power_brake`` and
    ``_hw_slowdown`` (1 or 0). Of GPU 0: ``gpu.frequency_hz`` and ``gpu.frequency_ratio`` (to the
    highest) of its multiprocessors, ``gpu.memory_frequency_hz``, ``gpu.memory_frequency_ratio``
    and ``gpu.utilisation_ratio``; of the others the same under ``gpu<i>``. Utilisation is the
    share of the driver's own window, 1/6 s to 1 s, in which any kernel ran, ours among them: too
    coarse to follow single requests. Power is an average over such a window as well.

    NVML may start and then support nothing, as on Jetson boards, or stop working at any time. So
    each call is made anew each time and answers for itself, and what is said to be zero where zero
    cannot be (clock, power, counter of energy) is unknown. Where starting it is what failed, or
    could help, that is tried again every ``retry_s``.

    Args:
        nvml: The module ``pynvml``, or one that behaves so; ``None`` imports it when first needed.
        absent: Why there can be no NVML; empty where there can.
        retry_s: How often starting it is tried at most, seconds.

    Source:
        NVIDIA, NVML API Reference: clocks in MHz, utilisation in percent, power in mW, energy in
        mJ since the driver was loaded (Volta and newer), bits of the clock event reasons.
    """

    name = "nvml"
    period_s = 0.1

    def __init__(self, nvml: Any = None, *, absent: str = "", retry_s: float = 5.0) -> None:
        self._nvml = nvml
        self._absent = absent
        self._retry_s = retry_s
        self._tried_s = -math.inf
        self._failure = Quantity.missing("unsupported", absent)
        self._handles: tuple[Any, ...] = ()
        self._gpus = 1  # as many as were ever seen; one to say of why there is none
        self._must_restart = False
        self._energy_mj: dict[int, tuple[int, int]] = {}  # by GPU: last count and total

    def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: D102 - see the class above it
        # A clock that was set back must not stop the trying.
        due = not 0 <= now_s - self._tried_s < self._retry_s
        if due and not self._absent and (self._must_restart or not self._handles):
            self._tried_s = now_s
            self._shut_down()
            self._start()
        quantities: dict[str, Quantity] = {}
        for index in range(self._gpus):
            if index < len(self._handles):
                quantities |= self._read_gpu(index)
            else:
                quantities |= dict.fromkeys(_names(index), self._failure)
        return quantities

    def close(self) -> None:  # noqa: D102
        self._shut_down()
        self._tried_s = -math.inf

    def _start(self) -> None:
        call = "nvmlInit"
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            call = "nvmlDeviceGetCount"
            count = self._nvml.nvmlDeviceGetCount()
            call = "nvmlDeviceGetHandleByIndex"
            self._handles = tuple(map(self._nvml.nvmlDeviceGetHandleByIndex, range(count)))
        except ImportError:
            self._failure = Quantity.missing("unsupported", _NOT_INSTALLED)
        except Exception as error:  # noqa: BLE001 - a broken library must not end the monitor
            self._failure = _missing(call, error)
        else:
            self._failure = Quantity.missing("unsupported", f"NVML lists {count} GPUs")
            self._gpus = max(self._gpus, count)
        if not self._handles and call != "nvmlInit":
            self._stop_library()

    def _shut_down(self) -> None:
        self._must_restart = False
        if self._handles:
            self._handles = ()
            self._stop_library()

    def _stop_library(self) -> None:
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def _read_gpu(self, index: int) -> dict[str, Quantity]:
        codes: set[int | None] = set()
        found = dict(self._ask_all(index, codes))
        if not codes.isdisjoint(_RESTART) and all(each.value is None for each in found.values()):
            self._must_restart = True
        return found

    def _ask_all(self, index: int, codes: set[int | None]) -> Iterator[tuple[str, Quantity]]:
        handle, part, gpu = self._handles[index], _part(index), f"gpu{index}"

        def ask(*calls: str, of: tuple[int, ...] = ()) -> Any:
            """What the first of these calls that this driver has says, or why there is nothing."""
            for call in calls:
                try:
                    return getattr(self._nvml, call)(handle, *of)
                except Exception as error:  # noqa: BLE001 - as in _start
                    codes.add(_code(error))
                    missing = _missing(call, error)
                    if _code(error) != _FUNCTION_NOT_FOUND and not isinstance(
                        error, AttributeError
                    ):
                        break
            return missing

        for what, kind in _CLOCKS.items():
            now_hz = _positive(ask("nvmlDeviceGetClockInfo", of=(kind,)), 1e6, "clock")
            max_hz = _positive(ask("nvmlDeviceGetMaxClockInfo", of=(kind,)), 1e6, "highest clock")
            yield f"{part}.{what}_hz", now_hz
            yield f"{part}.{what}_ratio", _ratio(now_hz, max_hz)
        rates = ask("nvmlDeviceGetUtilizationRates")
        yield f"{part}.utilisation_ratio", _value(rates, _busy_ratio)
        yield f"power.{gpu}_w", _positive(ask("nvmlDeviceGetPowerUsage"), 1e-3, "power")
        count = ask("nvmlDeviceGetTotalEnergyConsumption")
        yield f"energy.{gpu}_j", self._accumulate(index, count)
        celsius = ask("nvmlDeviceGetTemperature", of=(0,))
        yield f"thermal.{gpu}_celsius", _value(celsius, float)
        events = ask(*_EVENTS)
        for why, bits in _THROTTLES.items():
            yield f"throttle.{gpu}_{why}", _flag(events, bits)

    def _accumulate(self, index: int, count_mj: Any) -> Quantity:
        counted = _positive(count_mj, 1e-3, "counter of energy")
        if counted.value is None:
            return counted
        last_mj, total_mj = self._energy_mj.get(index, (count_mj, 0))
        # A driver that was loaded again counts from zero.
        total_mj += count_mj - last_mj if count_mj >= last_mj else count_mj
        self._energy_mj[index] = count_mj, total_mj
        return Quantity.ok(total_mj * 1e-3)


def make(root: Path, nvml: Any = None) -> Nvml:
    """The sensor of this machine's NVIDIA GPUs.

    Args:
        root: Where the file tree starts. A recorded tree has no NVML unless one is passed in.
        nvml: Instead of the module ``pynvml``.
    """
    return Nvml(nvml, absent="" if nvml is not None or root == Path("/") else _RECORDED)


def _part(index: int) -> str:
    return "gpu" if index == 0 else f"gpu{index}"


def _names(index: int) -> list[str]:
    part, gpu = _part(index), f"gpu{index}"
    clocks = [f"{part}.{what}_{unit}" for what in _CLOCKS for unit in ("hz", "ratio")]
    throttles = [f"throttle.{gpu}_{why}" for why in _THROTTLES]
    meters = [f"power.{gpu}_w", f"energy.{gpu}_j", f"thermal.{gpu}_celsius"]
    return [*clocks, f"{part}.utilisation_ratio", *meters, *throttles]


def _code(error: Exception) -> int | None:
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def _missing(call: str, error: Exception) -> Quantity:
    code = _code(error)
    quality: Quality = "unsupported"
    if code == _NO_PERMISSION:
        quality = "denied"
    elif code in _AWAY:
        quality = "masked"
    said = f"error {code}, {error}" if code is not None else f"{type(error).__name__}: {error}"
    return Quantity.missing(quality, f"{call} failed: {said}")


def _value(said: Any, convert: Callable[[Any], float]) -> Quantity:
    return said if isinstance(said, Quantity) else Quantity.ok(convert(said))


def _busy_ratio(rates: Any) -> float:
    percent: float = min(100, rates.gpu)
    return percent * 1e-2


def _flag(said: Any, bits: int) -> Quantity:
    return _value(said, lambda mask: 1.0 if mask & bits else 0.0)


def _positive(said: Any, scale: float, what: str) -> Quantity:
    if not isinstance(said, Quantity) and said <= 0:
        return Quantity.missing("unsupported", f"NVML says the {what} is {said}")
    return _value(said, lambda raw: raw * scale)


def _ratio(now_hz: Quantity, max_hz: Quantity) -> Quantity:
    if now_hz.value is None or max_hz.value is None:
        return now_hz if now_hz.value is None else max_hz
    return Quantity.ok(min(1.0, now_hz.value / max_hz.value))

"""The machine as it is: cores, clocks, meters, memory and load, one sensor per file.

Every reader takes the root of the file tree, so that a test can pass a recorded machine. What is
not known is ``None`` with a reason, never zero.
"""

from __future__ import annotations

from edgewise.device.clocks import (
    ClockReading,
    TimerQuality,
    read_clocks,
    read_frequencies_hz,
    timer_quality,
)
from edgewise.device.cores import UsableCores, usable_cores
from edgewise.device.fingerprint import DeviceFingerprint, device_fingerprint
from edgewise.device.load import OtherLoad, load_between, other_load, read_cpu_counters
from edgewise.device.memory import Memory, read_memory
from edgewise.device.meters import MeterStatus, find_meters

__all__ = [
    "ClockReading",
    "DeviceFingerprint",
    "Memory",
    "MeterStatus",
    "OtherLoad",
    "TimerQuality",
    "UsableCores",
    "device_fingerprint",
    "find_meters",
    "load_between",
    "other_load",
    "read_clocks",
    "read_cpu_counters",
    "read_frequencies_hz",
    "read_memory",
    "timer_quality",
    "usable_cores",
]

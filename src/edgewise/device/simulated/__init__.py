"""Simulated devices: Jetsons that are not here, and states that are hard to bring about.

Nothing here is measured; everything made with it is labelled simulated.
"""

from __future__ import annotations

from edgewise.device.simulated.clock import SimulatedClock
from edgewise.device.simulated.device import (
    SIMULATED_FEATURES,
    UTILISATIONS,
    Campaign,
    SimulatedDevice,
    SimulatedMonitor,
    full_factorial,
    run_campaign,
)
from edgewise.device.simulated.jetson import DeviceModel, device_names, load_device
from edgewise.device.simulated.traces import (
    DVFS_STEP_S,
    ClockLevels,
    Contention,
    Levels,
    StepTrace,
    Thermal,
    Trace,
    down_up,
    idle_then_spike,
    random_walk,
    static_max,
    static_min,
    thermal_throttle,
)
from edgewise.device.simulated.work import UnitWork, full_depth, load_work, work_names

__all__ = [
    "DVFS_STEP_S",
    "SIMULATED_FEATURES",
    "UTILISATIONS",
    "Campaign",
    "ClockLevels",
    "Contention",
    "DeviceModel",
    "Levels",
    "SimulatedClock",
    "SimulatedDevice",
    "SimulatedMonitor",
    "StepTrace",
    "Thermal",
    "Trace",
    "UnitWork",
    "device_names",
    "down_up",
    "full_depth",
    "full_factorial",
    "idle_then_spike",
    "load_device",
    "load_work",
    "random_walk",
    "run_campaign",
    "static_max",
    "static_min",
    "thermal_throttle",
    "work_names",
]

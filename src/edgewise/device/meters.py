"""Finds energy and power meters and says which of them can be read; it measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgewise.device.files import Quality, matching, read_number, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterStatus:
    """One meter and whether it can be used.

    Attributes:
        name: What it measures, such as ``"rapl package-0"``.
        kind: ``"energy"`` counts joules, ``"power"`` gives watts at an instant, ``"battery"`` is a
            gauge of the whole machine.
        path: Its directory.
        quality: ``"ok"``, ``"denied"`` or ``"unsupported"``.
        reason: Why it cannot be used; empty where it can.
        help: The command that would change that; ``None`` where nothing would.
    """

    name: str
    kind: Literal["energy", "power", "battery"]
    path: str
    quality: Quality
    reason: str = ""
    help: str | None = None


def find_meters(root: Path = Path("/")) -> list[MeterStatus]:
    """List the meters of this machine, usable or not.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        RAPL zones, INA3221 rails and batteries, in this order. Empty where there is none: energy is
        then unknown.

    Source:
        Linux kernel, Documentation/power/powercap/powercap.rst (energy_uj) and
        Documentation/hwmon/ina3221.rst (in*_input in mV, curr*_input in mA).
    """
    return [*_rapl(root), *_ina3221(root), *_batteries(root)]


def _rapl(root: Path) -> list[MeterStatus]:
    meters: list[MeterStatus] = []
    seen: set[str] = set()
    # A zone per socket (intel-rapl:0) and within it (intel-rapl:0:1); all are listed side by side.
    # intel-rapl-mmio counts package-0 a second time: it comes last and is dropped as a duplicate.
    for pattern in ("intel-rapl:*", "intel-rapl-mmio:*"):
        for zone in matching(root, f"sys/class/powercap/{pattern}"):
            label = read_text(zone / "name").value or zone.name
            package = zone.name.split(":")[1]
            name = label if label.startswith(("package", "psys")) else f"package-{package} {label}"
            if name in seen:
                continue
            seen.add(name)
            counter = read_number(zone / "energy_uj")
            denied = counter.quality == "denied"
            meters.append(
                MeterStatus(
                    name=f"rapl {name}",
                    kind="energy",
                    path=str(zone),
                    quality=counter.quality,
                    reason="energy_uj is for root only (Linux 5.10 and newer)"
                    if denied
                    else counter.reason,
                    help=f"sudo chmod a+r {zone}/energy_uj" if denied else None,
                )
            )
    return meters


def _ina3221(root: Path) -> list[MeterStatus]:
    meters: list[MeterStatus] = []
    # Bus, address and hwmon number differ between boards and kernels: find rails by their label.
    for path in matching(root, "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in*_label"):
        label = read_text(path).value
        if label is None or label == "sum of shunt voltages":
            continue
        channel = path.name.removeprefix("in").removesuffix("_label")
        readings = [
            read_number(path.parent / f"in{channel}_input"),
            read_number(path.parent / f"curr{channel}_input"),
        ]
        bad = next((each for each in readings if each.value is None), None)
        meters.append(
            MeterStatus(
                name=f"ina3221 {label}",
                kind="power",
                path=str(path.parent),
                quality=bad.quality if bad else "ok",
                reason=bad.reason if bad else "",
                help=f"sudo chmod a+r {path.parent}/*_input"
                if bad and bad.quality == "denied"
                else None,
            )
        )
    return meters


def _batteries(root: Path) -> list[MeterStatus]:
    return [
        MeterStatus(
            name=f"battery {supply.name}",
            kind="battery",
            path=str(supply),
            quality="unsupported",
            reason="a battery gauge is too slow and counts the whole machine, not one inference",
        )
        for supply in matching(root, "sys/class/power_supply/*")
        if read_text(supply / "type").value == "Battery"
    ]

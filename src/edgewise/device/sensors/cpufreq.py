"""CPU clocks, as the kernel's cpufreq drivers report them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.files import (
    NumberReading,
    exists,
    matching,
    parse_cpu_list,
    read_number,
    read_text,
)
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_CPUS = "sys/devices/system/cpu"
_OFFLINE = Quantity.missing("masked", "the core is offline")
_NO_CPUFREQ = Quantity.missing(
    "unsupported", "the kernel exposes no cpufreq (usual in virtual machines and containers)"
)
_NO_CPU = Quantity.missing("unsupported", "the kernel lists no CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """Cores that share one clock, which is read through one descriptor."""

    names: tuple[str, ...]
    current: KeptFile
    max_hz: Quantity


class CpuFrequency(Sensor):
    """Reads ``cpu<N>.frequency_hz``, ``cpu.frequency_hz`` and ``cpu.frequency_ratio``.

    The last two are means over the online cores that answer. The ratio is to what the silicon can
    do, each core to its own, and not to what the present power mode allows.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        hotplug_s: How often is asked which cores are online, seconds; it is also asked at once
            where a core stops answering.
        rescan_s: How often policies and their highest clocks are looked for again, seconds; also at
            once where cores went or came.

    Source:
        Linux kernel, Documentation/admin-guide/pm/cpufreq.rst: scaling_cur_freq and
        cpuinfo_max_freq are in kHz. cpuinfo_cur_freq is left alone: it is for root, and some
        drivers busy-wait half a millisecond to answer.
    """

    name = "cpufreq"

    def __init__(self, root: Path, *, hotplug_s: float = 0.1, rescan_s: float = 1.0) -> None:
        self._root, self._cpus = root, root / _CPUS
        self._hotplug_s, self._rescan_s = hotplug_s, rescan_s
        self._online_file = KeptFile(self._cpus / "online")
        self._policies: dict[str, _Policy] = {}
        self._online: frozenset[int] = frozenset()
        self._known: set[int] = set()
        # What each core says where its policy does not speak for it.
        self._without: dict[str, Quantity] = {}
        self._silent = 0
        self._asked_s = self._scanned_s = float("-inf")
        self._nothing: Mapping[str, Quantity] | None = None

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read every policy once."""
        if not 0 <= now_s - self._asked_s < self._hotplug_s:
            self._ask_who_is_online(now_s)
        elif self._nothing is not None:
            return self._nothing
        quantities, silent = self._read_policies(now_s)
        if silent > self._silent and self._asked_s != now_s:
            self._ask_who_is_online(now_s)
            quantities, silent = self._read_policies(now_s)
        self._silent = silent
        self._nothing = None if self._policies else quantities
        return quantities

    def close(self) -> None:
        """Close all descriptors."""
        self._online_file.close()
        for policy in self._policies.values():
            policy.current.close()
        self._asked_s = self._scanned_s = float("-inf")

    def _ask_who_is_online(self, now_s: float) -> None:
        self._asked_s = now_s
        listed = parse_cpu_list(self._online_file.text(now_s).value or "")
        if listed is None:  # kernels without hotplug do not list them: all cores are online
            names = [each.name[3:] for each in matching(self._root, f"{_CPUS}/cpu[0-9]*")]
            listed = [int(each) for each in names if each.isdigit()]
        online = frozenset(listed)
        changed, self._online = online != self._online, online
        if changed or not 0 <= now_s - self._scanned_s < self._rescan_s:
            self._scanned_s = now_s
            self._find_policies()

    def _find_policies(self) -> None:
        self._known |= self._online
        self._known.update(parse_cpu_list(read_text(self._cpus / "present").value or "") or ())
        self._without = {
            f"cpu{core}.frequency_hz": _NO_CPUFREQ if core in self._online else _OFFLINE
            for core in sorted(self._known)
        }
        names_of: dict[str, list[str]] = {}
        for core in sorted(self._online):
            directory = self._cpus / f"cpu{core}/cpufreq"
            if exists(directory):
                # A link to the policy, which cores of one clock have in common.
                policy = os.path.realpath(directory)
                names_of.setdefault(policy, []).append(f"cpu{core}.frequency_hz")
        before, self._policies = self._policies, {}
        for path, names in names_of.items():
            directory, kept = Path(path), before.get(path)
            highest = directory / "cpuinfo_max_freq"
            self._policies[path] = _Policy(
                names=tuple(names),
                current=kept.current if kept else KeptFile(directory / "scaling_cur_freq"),
                max_hz=_in_hz(str(highest), read_number(highest)),
            )

    def _read_policies(self, now_s: float) -> tuple[dict[str, Quantity], int]:
        """All quantities, and how many policies do not answer."""
        quantities = dict(self._without)
        frequencies_hz, ratios, missing = list[float](), list[float](), list[Quantity]()
        no_max: Quantity | None = None
        for policy in self._policies.values():
            found = _in_hz(policy.current.path, policy.current.number(now_s))
            quantities.update(dict.fromkeys(policy.names, found))
            if found.value is None:
                missing.append(found)
                continue
            cores = len(policy.names)
            frequencies_hz += [found.value] * cores
            if policy.max_hz.value is None:
                no_max = policy.max_hz
            else:
                # A boosted core can run a little above what its driver calls the highest.
                ratios += [min(1.0, found.value / policy.max_hz.value)] * cores
        why = missing[0] if missing else _NO_CPUFREQ if self._online else _NO_CPU
        quantities["cpu.frequency_hz"] = _mean(frequencies_hz, why)
        quantities["cpu.frequency_ratio"] = _mean(ratios, no_max or why)
        return quantities, len(missing)


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of CPU clocks under ``root``."""
    return CpuFrequency(root)


def _in_hz(path: str, frequency_khz: NumberReading) -> Quantity:
    if frequency_khz.value is None:
        return Quantity.missing(frequency_khz.quality, frequency_khz.reason)
    if not frequency_khz.value:
        return Quantity.missing("unsupported", f"{path} says 0")
    return Quantity.ok(frequency_khz.value * 1e3)


def _mean(values: list[float], why: Quantity) -> Quantity:
    return Quantity.ok(sum(values) / len(values)) if values else why

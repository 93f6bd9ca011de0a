"""Clock and load of an embedded GPU, as the kernel's devfreq shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from edgewise.device.files import NumberReading, exists, matching, read_number, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_NODE_NAMES = ("gv11b", "gp10b", "ga10b", "gb10b", "gpu")
_FOLDERS = ("sys/devices", "sys/devices/platform", "sys/devices/platform/bus@0")
_LOADS = ("sys/devices/gpu.0/load", "sys/devices/platform/gpu.0/load")
_NAMES = ("gpu.frequency_hz", "gpu.frequency_ratio", "gpu.utilisation_ratio")
_NO_GPU = Quantity.missing("unsupported", "the kernel shows no GPU under devfreq")
_NO_LOAD = Quantity.missing("unsupported", "this GPU's driver has no load file (as on Jetson Thor)")
_GATED = Quantity.missing("masked", "the GPU is suspended, its clock and load are old")


class _Gpu:
    """The folder of its clock, that of the device it belongs to, and files that stay open."""

    def __init__(self, node: Path) -> None:
        self.node = node
        if exists(node / "device"):
            self.device = node / "device"
        else:
            self.device = node.parent if node.name == "devfreq_dev" else node.parent.parent
        self.current = KeptFile(node / "cur_freq")
        self.power = KeptFile(self.device / "power/runtime_status")


class GpuFrequency(Sensor):
    """Reads ``gpu.frequency_hz``, ``gpu.frequency_ratio`` and ``gpu.utilisation_ratio``.

    The ratio is to the highest frequency of the driver's list, or where there is none, to the
    highest that the present power mode allows. The GPU is looked for every ``rescan_s`` until it is
    there, and again when it stops answering.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        rescan_s: How often the GPU, its load file and its highest clock are looked for, seconds.

    Source:
        Linux kernel, Documentation/ABI/testing/sysfs-class-devfreq (Hz); L4T's nvgpu driver: load
        is in thousandths.
    """

    name = "devfreq"

    def __init__(self, root: Path, *, rescan_s: float = 1.0) -> None:
        self._root, self._rescan_s = root, rescan_s
        self._gpu: _Gpu | None = None
        self._load: KeptFile | None = None
        self._max_hz = _NO_GPU
        self._scanned_s = float("-inf")

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read the GPU once."""
        if not 0 <= now_s - self._scanned_s < self._rescan_s:
            self._scanned_s = now_s
            self._look()
        gpu, load = self._gpu, self._load
        if gpu is None:
            return dict.fromkeys(_NAMES, _NO_GPU)
        if gpu.power.text(now_s).value == "suspended":
            return dict.fromkeys(_NAMES, _GATED)
        frequency_hz = _in_hz(gpu.current.number(now_s), gpu.current.path)
        return {
            "gpu.frequency_hz": frequency_hz,
            "gpu.frequency_ratio": _share(frequency_hz, self._max_hz),
            "gpu.utilisation_ratio": _NO_LOAD
            if load is None
            else _of_thousand(load.number(now_s), load.path),
        }

    def close(self) -> None:
        """Close all descriptors; the next reading looks for the GPU again."""
        self._gpu = self._load = None  # their files close themselves
        self._scanned_s = float("-inf")

    def _look(self) -> None:
        if self._gpu is None or not exists(self._gpu.node / "cur_freq"):
            node = next(_gpu_nodes(self._root), None)
            self._gpu = None if node is None else _Gpu(node)
        if self._gpu is None:
            self._load = None
            return
        loads = (self._gpu.device / "load", *(self._root / each for each in _LOADS))
        load = next((each for each in loads if exists(each)), None)
        if load is None:
            self._load = None
        elif self._load is None or self._load.path != str(load):
            self._load = KeptFile(load)
        self._max_hz = _read_max_hz(self._gpu.node)


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of the embedded GPU under ``root``."""
    return GpuFrequency(root)


def _gpu_nodes(root: Path) -> Iterator[Path]:
    for node in matching(root, "sys/class/devfreq/*"):
        kind = read_text(node / "device/of_node/name").value or node.name.rpartition(".")[2]
        if node.name.startswith("gpu-gpc-") or kind in _NODE_NAMES:
            yield node
    # Some kernels show it only beside the device, and under either of these names.
    for folder in _FOLDERS:
        for device in matching(root, f"{folder}/*.g*[bu]"):
            if device.name.rpartition(".")[2] in _NODE_NAMES:
                for place in ("devfreq/*", "devfreq_dev"):
                    clocks = matching(root, f"{folder}/{device.name}/{place}/cur_freq")
                    yield from (each.parent for each in clocks)


def _read_max_hz(node: Path) -> Quantity:
    listed = (read_text(node / "available_frequencies").value or "").split()
    frequencies_hz = [int(each) for each in listed if each.isdecimal() and int(each) < 2**62]
    if any(frequencies_hz):
        return Quantity.ok(float(max(frequencies_hz)))
    return _in_hz(read_number(node / "max_freq"), f"{node}/max_freq")


def _in_hz(frequency_hz: NumberReading, path: str) -> Quantity:
    if frequency_hz.value is None:
        return Quantity.missing(frequency_hz.quality, frequency_hz.reason)
    if not frequency_hz.value:
        return Quantity.missing("masked", f"{path} says 0: switched off")
    return Quantity.ok(float(frequency_hz.value))


def _share(frequency_hz: Quantity, max_hz: Quantity) -> Quantity:
    if frequency_hz.value is None or max_hz.value is None:
        return frequency_hz if frequency_hz.value is None else max_hz
    return Quantity.ok(min(1.0, frequency_hz.value / max_hz.value))


def _of_thousand(load: NumberReading, path: str) -> Quantity:
    if load.value is None:
        return Quantity.missing(load.quality, load.reason)
    if load.value > 1000:
        return Quantity.missing("unsupported", f"{path} says {load.value}, expected 0 to 1000")
    return Quantity.ok(load.value / 1000)

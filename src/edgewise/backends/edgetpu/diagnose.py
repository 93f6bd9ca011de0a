"""Why an Edge TPU cannot be opened: its driver says no more than "failed to load delegate"."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgewise.device.files import exists, matching, read_number, read_text

Cause = Literal["library", "no-device", "no-driver", "permission", "held", "unknown"]
Access = Callable[[Path, int], bool]

# Vendor and product, before and after the runtime has loaded the stick's firmware.
USB_IDS = frozenset({("1a6e", "089a"), ("18d1", "9302")})
PCI_ID = ("0x1ac1", "0x089a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What stands in the way.

    Attributes:
        cause: In one word; ``unknown`` where everything that can be seen looks right.
        problem: In a sentence.
        help: The next step.
        pid: Process that holds the device, where one was seen.
    """

    cause: Cause
    problem: str
    help: str
    pid: int | None = None


def diagnose(
    said: str,
    *,
    library: str = "libedgetpu.so.1",
    root: Path = Path("/"),
    access: Access = os.access,
    ignore_pids: Iterable[int] = (),
) -> Diagnosis:
    """Look for the reason in what the machine shows.

    Args:
        said: The delegate's own message.
        library: What was loaded.
        root: Where the file tree starts. Tests pass a planted one.
        access: Tells whether a file may be read and written, as `os.access`.
        ignore_pids: Processes that may hold the device: our own.

    Source:
        coral.ai "Get started with the USB Accelerator" (vendor numbers, udev rule);
        google-coral/edgetpu issues 359 and 756 (a second process).
    """
    if "cannot open shared object" in said or "image not found" in said:
        return Diagnosis(
            cause="library",
            problem=f"the Edge TPU's library cannot be loaded: {said}",
            help=f"install libedgetpu1-std, or name the library's file instead of {library!r}",
        )
    nodes = list(_nodes(root))
    if not nodes:
        return _absent(root)
    refused = [n for n in nodes if not access(n, os.R_OK | os.W_OK)]
    if len(refused) == len(nodes):
        return Diagnosis(
            cause="permission",
            problem=f"an Edge TPU is there, but {refused[0]} may not be read and written",
            help="add a udev rule for it and yourself to its group (plugdev for USB, apex for"
            " PCIe), then log in again",
        )
    holder = _holder(root, nodes, ignore=set(ignore_pids))
    if holder is not None:
        pid, name = holder
        return Diagnosis(
            cause="held",
            problem=f"process {pid} ({name}) holds the Edge TPU; only one process can",
            help=f"end it (kill {pid}), or send your requests to it",
            pid=pid,
        )
    return Diagnosis(
        cause="unknown",
        problem=f"an Edge TPU is there and free, but its library refused it: {said}",
        help="check that runtime and libedgetpu are built for each other; unplug it, plug it in"
        " again at a port with enough power",
    )


def _absent(root: Path) -> Diagnosis:
    for device in matching(root, "sys/bus/pci/devices/*"):
        if (read_text(device / "vendor").value, read_text(device / "device").value) == PCI_ID:
            return Diagnosis(
                cause="no-driver",
                problem=f"an Edge TPU is on the PCIe bus ({device.name}), but /dev/apex_0 is"
                " missing: its kernel driver is not loaded",
                help="install gasket-dkms and load it: modprobe apex",
            )
    return Diagnosis(
        cause="no-device",
        problem="no Edge TPU is plugged in: neither on USB (1a6e:089a, 18d1:9302) nor as"
        " /dev/apex_0",
        help="plug it in; in a container or virtual machine pass /dev/bus/usb or /dev/apex_0 on",
    )


def _nodes(root: Path) -> Iterable[Path]:
    """Device files of every Edge TPU."""
    yield from matching(root, "dev/apex_*")
    for device in matching(root, "sys/bus/usb/devices/*"):
        ids = (read_text(device / "idVendor").value, read_text(device / "idProduct").value)
        bus, number = read_number(device / "busnum").value, read_number(device / "devnum").value
        if ids in USB_IDS and bus is not None and number is not None:
            yield root / f"dev/bus/usb/{bus:03d}/{number:03d}"


def _holder(root: Path, nodes: Iterable[Path], *, ignore: set[int]) -> tuple[int, str] | None:
    """A process that has one of these files open, as far as this user may see."""
    wanted = {f"/{node.relative_to(root)}" for node in nodes}
    for folder in matching(root, "proc/[0-9]*"):
        pid = int(folder.name) if folder.name.isdigit() else None
        if pid is None or pid in ignore or not exists(folder / "fd"):
            continue
        try:
            links = [os.readlink(folder / "fd" / name) for name in os.listdir(folder / "fd")]  # noqa: PTH208, PTH115 - names alone
        except OSError:  # another user's, or it has just ended
            continue
        if wanted.intersection(links):
            return pid, read_text(folder / "comm").value or "name unknown"
    return None

"""How much memory the machine has, and how much of it this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgewise.device.cgroups import limit_directories
from edgewise.device.files import read_number, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the machine and of this process's control group.

    Attributes:
        total_bytes: Installed and visible to the kernel; ``None`` where it does not say.
        available_bytes: Free without swapping, by the kernel's estimate; ``None`` likewise.
        limit_bytes: Tightest control-group limit; ``None`` where there is none.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None


def read_memory(root: Path = Path("/")) -> Memory:
    """Read the memory of this machine.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Source:
        proc_meminfo(5): values are in kiB, whatever the "kB" beside them says.
    """
    kib: dict[str, int] = {}
    for line in (read_text(root / "proc/meminfo").value or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.removesuffix("kB").strip()
        if number.isdecimal():
            kib[name] = int(number)
    total = kib["MemTotal"] * 1024 if kib.get("MemTotal") else None
    available = kib["MemAvailable"] * 1024 if "MemAvailable" in kib else None
    limits = [
        limit
        for version, directory in limit_directories("memory", root)
        if (
            limit := read_number(
                directory / ("memory.max" if version == 2 else "memory.limit_in_bytes")
            ).value
        )
        # Version 1 prints "no limit" as the largest number of whole pages.
        and (total is None or limit < total)
    ]
    return Memory(
        total_bytes=total, available_bytes=available, limit_bytes=min(limits, default=None)
    )

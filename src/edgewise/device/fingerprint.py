"""Names the machine a measurement was made on, so that it is not used on another one."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from edgewise.device.cores import usable_cores
from edgewise.device.files import exists, parse_cpu_list, read_text
from edgewise.device.memory import read_memory

# Extensions that numeric kernels choose between; the rest does not change a cost.
_X86 = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni")
_X86_WIDE = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16")
_X86_TILE = ("amx_tile", "amx_int8", "amx_bf16")
_ARM = ("asimd", "asimdhp", "asimddp", "fphp", "neon", "i8mm", "bf16", "sve", "sve2", "sme")
_ISA = frozenset((*_X86, *_X86_WIDE, *_X86_TILE, *_ARM))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFingerprint:
    """What a machine is, as far as it decides what a computation costs.

    Attributes:
        id: Short hash of architecture, CPU, extensions, cores present, board and hypervisor. It
            survives reboots, renaming, updates of the kernel and changed limits.
        arch: Instruction set, such as ``"x86_64"``.
        cpu_model: Name, with family, model and stepping where the kernel gives them; ``None`` if
            unknown.
        isa: Extensions that matter to numeric kernels, sorted; empty if unknown.
        cores: CPUs present, online or not; ``None`` if unknown.
        usable_cores: What this process may use of them now; not part of ``id``.
        memory_bytes: Memory of the machine; ``None`` if unknown. Not part of ``id``.
        board: Name of the board or machine; ``None`` if unknown.
        hypervisor: Whether this is a virtual machine; ``None`` if unknown.
        os: Name of the system; ``None`` if unknown. Not part of ``id``.
        kernel: Release of the kernel; ``None`` if unknown. Not part of ``id``.
    """

    id: str = field(init=False)
    arch: str
    cpu_model: str | None
    isa: tuple[str, ...]
    cores: int | None
    usable_cores: float
    memory_bytes: int | None
    board: str | None
    hypervisor: bool | None
    os: str | None
    kernel: str | None

    def __post_init__(self) -> None:
        identity = [
            self.arch,
            self.cpu_model,
            list(self.isa),
            self.cores,
            self.board,
            self.hypervisor,
        ]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        object.__setattr__(self, "id", digest[:12])


def device_fingerprint(
    root: Path = Path("/"), *, arch: str | None = None, affinity: Collection[int] | None = None
) -> DeviceFingerprint:
    """Describe this machine.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        arch: Instruction set; asked of the running system by default.
        affinity: CPUs the scheduler may use; asked of the kernel by default.

    Returns:
        The description. Two calls on one machine give the same ``id``.
    """
    arch = arch or platform.machine()
    cpus = _cpuinfo(root)
    flags = {flag for cpu in cpus for name in _FLAG_KEYS for flag in cpu.get(name, "").split()}
    present = parse_cpu_list(read_text(root / "sys/devices/system/cpu/present").value or "")
    kernel = read_text(root / "proc/sys/kernel/osrelease").value
    if kernel is None and root == Path("/"):
        kernel = platform.release() or None
    return DeviceFingerprint(
        arch=arch,
        cpu_model=_cpu_model(cpus),
        isa=tuple(sorted(_ISA & flags)),
        cores=len(present) if present else (len(cpus) or _counted(root)),
        usable_cores=usable_cores(root, affinity=affinity).usable,
        memory_bytes=read_memory(root).total_bytes,
        board=_board(root),
        hypervisor=_hypervisor(root, arch, flags),
        os=_os_name(root),
        kernel=kernel,
    )


_FLAG_KEYS = ("flags", "Features")


def _counted(root: Path) -> int | None:
    return os.cpu_count() if root == Path("/") else None


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    text = read_text(root / "proc/cpuinfo").value or ""
    cpus: list[dict[str, str]] = []
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        cpu = {name.strip(): value.strip() for name, colon, value in pairs if colon}
        if "processor" in cpu:
            cpus.append(cpu)
    return cpus


def _cpu_model(cpus: list[dict[str, str]]) -> str | None:
    kinds: list[str] = []
    for cpu in cpus:
        name = cpu.get("model name") or cpu.get("uarch") or ""
        if "cpu family" in cpu:
            family, model, stepping = (
                cpu.get(each, "?") for each in ("cpu family", "model", "stepping")
            )
            # A hypervisor may hide the marketing name; these three stay.
            name = f"{name} (family {family}, model {model}, stepping {stepping})"
        elif "CPU part" in cpu:
            codes = "/".join(cpu.get(f"CPU {each}", "?") for each in ("implementer", "part"))
            revision = f"r{cpu.get('CPU variant', '?')}p{cpu.get('CPU revision', '?')}"
            name = f"{name} ({codes} {revision})"
        if name.strip() and name.strip() not in kinds:
            kinds.append(name.strip())  # big and little cores: each kind once
    return " + ".join(kinds) or None


def _board(root: Path) -> str | None:
    for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        if name := read_text(root / path).value:
            return name
    vendor = read_text(root / "sys/class/dmi/id/sys_vendor").value
    product = read_text(root / "sys/class/dmi/id/product_name").value
    if vendor and product and product.startswith(vendor):
        return product
    return " ".join(each for each in (vendor, product) if each) or None


def _hypervisor(root: Path, arch: str, flags: set[str]) -> bool | None:
    if "hypervisor" in flags or exists(root / "proc/device-tree/hypervisor"):
        return True
    if read_text(root / "sys/hypervisor/type").value:
        return True
    # Only x86 has a flag whose absence says something.
    return False if arch in {"x86_64", "i686", "AMD64"} and flags else None


def _os_name(root: Path) -> str | None:
    for line in (read_text(root / "etc/os-release").value or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip().strip("\"'") or None
    return platform.system() if root == Path("/") else None

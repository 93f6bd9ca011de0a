from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from edgewise.device import device_fingerprint

Plant = Callable[[Mapping[str, str]], Path]

X86 = """processor\t: 0
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse4_2 avx avx2 fma f16c hypervisor
"""
JETSON = """processor\t: 0
model name\t: ARMv8 Processor rev 1 (v8l)
Features\t: fp asimd asimdhp asimddp fphp
CPU implementer\t: 0x41
CPU variant\t: 0x0
CPU part\t: 0xd42
CPU revision\t: 1
"""
VM = {
    "proc/cpuinfo": X86 + "\n" + X86.replace(": 0", ": 1", 1),
    "proc/meminfo": "MemTotal:       24683656 kB\nMemAvailable:   23365548 kB\n",
    "proc/sys/kernel/osrelease": "6.1.0\n",
    "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n',
    "sys/devices/system/cpu/present": "0-1\n",
    "sys/class/dmi/id/sys_vendor": "QEMU\n",
    "sys/class/dmi/id/product_name": "Standard PC\n",
}


def test_a_virtual_machine_is_described(plant: Plant) -> None:
    found = device_fingerprint(plant(VM), arch="x86_64", affinity=range(2))

    assert found.cpu_model == "AMD EPYC (family 25, model 1, stepping 1)"
    assert found.isa == ("avx", "avx2", "f16c", "fma", "sse4_2")
    assert (found.cores, found.usable_cores) == (2, 2.0)
    assert found.memory_bytes == 24683656 * 1024
    assert found.board == "QEMU Standard PC"
    assert found.hypervisor is True
    assert (found.os, found.kernel) == ("Debian GNU/Linux 12", "6.1.0")


def test_a_board_is_named_by_its_device_tree_without_the_trailing_nul(plant: Plant) -> None:
    root = plant(
        {"proc/cpuinfo": JETSON, "proc/device-tree/model": "NVIDIA Jetson Orin Nano Super\0"}
    )

    found = device_fingerprint(root, arch="aarch64", affinity=range(6))

    assert found.board == "NVIDIA Jetson Orin Nano Super"
    assert found.cpu_model == "ARMv8 Processor rev 1 (v8l) (0x41/0xd42 r0x0p1)"
    assert found.isa == ("asimd", "asimddp", "asimdhp", "fphp")
    assert found.hypervisor is None


def test_the_identity_survives_an_update_of_the_kernel_and_a_new_limit(plant: Plant) -> None:
    before = device_fingerprint(plant(VM), arch="x86_64", affinity=range(2))
    root = plant({"proc/sys/kernel/osrelease": "6.9.9\n", "proc/meminfo": "MemTotal: 1 kB\n"})
    after = device_fingerprint(root, arch="x86_64", affinity=[0])

    assert after.id == before.id
    assert after != before


def test_another_processor_has_another_identity(plant: Plant) -> None:
    before = device_fingerprint(plant(VM), arch="x86_64", affinity=range(2))
    root = plant({"proc/cpuinfo": X86.replace("model\t\t: 1", "model\t\t: 17")})
    after = device_fingerprint(root, arch="x86_64", affinity=range(2))

    assert after.id != before.id


def test_a_machine_that_says_nothing_is_unknown_and_not_zero(plant: Plant) -> None:
    found = device_fingerprint(plant({}), arch="riscv64", affinity=())

    assert found.cpu_model is None
    assert found.cores is None
    assert found.memory_bytes is None
    assert found.board is None
    assert found.hypervisor is None
    assert found.os is None
    assert found.kernel is None
    assert len(found.id) == 12


def test_this_machine_has_one_identity() -> None:
    assert device_fingerprint().id == device_fingerprint().id

"""Machines that are not here, as trees of files: built by code, and changed while a test watches.

Each builder writes below the root it is given and returns it. Paths, units and traps are those of
L4T 35 and 36, JetPack 7 and Raspberry Pi OS; the values are ours.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

CPUS = "sys/devices/system/cpu"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
DEVFREQ = "sys/class/devfreq"
THERMAL = "sys/class/thermal"
PUBLISHED = "run/edgewise/emc.json"
BOOT_ID = "c0ffee00-0000-4000-8000-000000000001"
XAVIER_GPU = "sys/devices/17000000.gv11b"
ORIN_GPU = "sys/devices/platform/bus@0/17000000.gpu"
PI_THROTTLED = (
    "sys/devices/platform/soc/soc:firmware/get_throttled",
    "sys/devices/platform/soc:firmware/get_throttled",
)


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files in place, as a kernel does: who has one open sees the new content."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def xavier_nx_jp5(root: Path) -> Path:
    """JetPack 5: three policies of two cores, core 5 offline, GPU load under ``gpu.0``."""
    _cpus(root, policies=[(0, 1), (2, 3), (4, 5)], khz=1_190_400, max_khz=1_907_200)
    _gpu(root, XAVIER_GPU, kind="gv11b", hz=[114_750_000, 599_250_000, 1_109_250_000])
    link(root, "sys/devices/gpu.0", XAVIER_GPU)
    _emc(root, rate_hz=1_600_000_000, max_hz=1_866_000_000)
    write(root, {"sys/kernel/actmon_avg_activity/mc_all": "20480\n"})
    _thermal(root, {"CPU-therm": 41_500, "GPU-therm": -256_000, "AUX-therm": 40_000})
    _ina3221(root, "7-0040/hwmon/hwmon4")
    write(root, {"sys/firmware/devicetree/base/model": "NVIDIA Jetson Xavier NX\0"})
    take_offline(root, {5})
    return root


def orin_nano_jp6(root: Path) -> Path:
    """JetPack 6: GPU behind a chain of links, over-current counters, activity in BPMP."""
    _cpus(root, policies=[(0, 1, 2, 3), (4, 5)], khz=1_036_800, max_khz=1_728_000)
    add_orin_gpu(root)
    _emc(root, rate_hz=2_133_000_000, max_hz=3_199_000_000)
    write(root, {"sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity": "0\n"})
    _thermal(root, {"cpu-thermal": 48_562, "gpu-thermal": 47_031, "cv0-thermal": -256_000})
    _ina3221(root, "1-0040/hwmon/hwmon1")
    oc = "sys/class/hwmon/hwmon2"
    write(root, {f"{oc}/name": "soctherm_oc\n"})
    write(root, {f"{oc}/oc{n}_event_cnt": f"{n}\n" for n in (1, 2, 3)})
    write(root, {f"{oc}/oc{n}_throt_en": "1\n" for n in (1, 2, 3)})
    write(root, {"sys/firmware/devicetree/base/model": "NVIDIA Jetson Orin Nano\0"})
    return root


def orin_nano_jp6_nonroot(root: Path) -> Path:
    """The same with debugfs closed, for who is not root; nothing is published yet."""
    orin_nano_jp6(root)
    (root / "sys/kernel/debug").chmod(0o700)
    return root


def thor_jp7(root: Path) -> Path:
    """JetPack 7: a GPU without load file, the memory clock under devfreq for everybody."""
    _cpus(root, policies=[(n,) for n in range(14)], khz=1_300_000, max_khz=2_601_000)
    for name, hz in (("gpu-gpc-0", 787_500_000), ("gpu-nvd-0", 1_000_000_000)):
        files = {"cur_freq": hz, "min_freq": 315_000_000, "max_freq": 1_575_000_000}
        write(root, {f"{DEVFREQ}/{name}/{file}": f"{value}\n" for file, value in files.items()})
    files = {"cur_freq": 2_133_000_000, "min_freq": 665_600_000, "max_freq": 4_266_000_000}
    write(root, {f"{DEVFREQ}/bwmgr/{file}": f"{value}\n" for file, value in files.items()})
    write(root, {f"{DEVFREQ}/bwmgr/governor": "userspace\n"})
    _thermal(root, {"cpu-thermal": 39_000, "tj-thermal": 40_250})
    return root


def rpi4(root: Path) -> Path:
    """One policy for four cores; the firmware's word in the older of its places."""
    return _rpi(root, PI_THROTTLED[0], khz=1_500_000, max_khz=1_800_000)


def rpi5(root: Path) -> Path:
    """The same with the firmware's word in the newer place, and only sticky bits set."""
    return _rpi(root, PI_THROTTLED[1], khz=1_500_000, max_khz=2_400_000)


def vm(root: Path) -> Path:
    """A virtual machine: two cores, and nothing about clocks, heat or power."""
    listed = {"present": "0-1\n", "online": "0-1\n", "possible": "0-1\n"}
    write(root, {f"{CPUS}/{name}": text for name, text in listed.items()})
    for core in (0, 1):
        (root / CPUS / f"cpu{core}").mkdir()
    (root / THERMAL).mkdir(parents=True)
    _process(root)
    tick(root, busy=dict.fromkeys((0, 1), 100), idle=dict.fromkeys((0, 1), 100), own=10)
    return root


def garbage(root: Path, text: str) -> Path:
    """An Orin Nano with a Pi's firmware whose every value is ``text``; lists of cores are whole."""
    orin_nano_jp6(root)
    publish(root, stamp_s=0.0)
    write(root, dict.fromkeys(PI_THROTTLED, "0\n"))
    write(root, {f"{DEVFREQ}/bwmgr/cur_freq": "1\n", f"{DEVFREQ}/bwmgr/max_freq": "1\n"})
    write(root, {"proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"})
    quota(root, "cpu.max", "50000 100000\n")
    garbage_values(root, text)
    return root


def garbage_values(root: Path, text: str) -> None:
    """Replace every value by ``text``; names, lists and links stay, so that values are found."""
    kept = {"online", "present", "type", "name", "cgroup", "mountinfo"}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name not in kept:
            path.write_text(text, encoding="utf-8")


def take_offline(root: Path, cores: Collection[int]) -> None:
    """What a power mode does: the cores leave the list, their clocks and /proc/stat."""
    online = [core for core in _listed(root, "online") if core not in cores]
    write(root, {f"{CPUS}/online": _as_list(online)})
    for core in cores:
        (root / CPUS / f"cpu{core}/cpufreq").unlink(missing_ok=True)
    lines = (root / "proc/stat").read_text(encoding="utf-8").splitlines(keepends=True)
    gone = {f"cpu{core}" for core in cores}
    kept = [line for line in lines if line.split()[0] not in gone]
    write(root, {"proc/stat": "".join(kept)})


def bring_online(root: Path, core: int, *, policy: int) -> None:
    """The core is listed and has a clock again; /proc/stat follows with the next tick."""
    write(root, {f"{CPUS}/online": _as_list(sorted({*_listed(root, "online"), core}))})
    (root / CPUS / f"cpu{core}/cpufreq").symlink_to(f"../cpufreq/policy{policy}")


def add_orin_gpu(root: Path) -> None:
    """The GPU's nodes, which may appear long after a monitor was started."""
    _gpu(root, ORIN_GPU, kind="gpu", hz=[306_000_000, 612_000_000, 1_020_000_000])
    link(root, "sys/devices/platform/17000000.gpu", ORIN_GPU)


def remove_gpu(root: Path, device: str = ORIN_GPU) -> None:
    """Take the GPU's nodes away."""
    shutil.rmtree(root / device)
    for entry in (root / DEVFREQ).iterdir():
        if entry.is_symlink() and not entry.exists():
            entry.unlink()


def publish(
    root: Path,
    *,
    stamp_s: float,
    frequency_hz: float = 2.133e9,
    max_frequency_hz: float = 3.199e9,
    boot_id: str = BOOT_ID,
) -> Path:
    """What the publisher of the memory clock writes."""
    content = {
        "version": 1,
        "boot_id": boot_id,
        "monotonic_s": stamp_s,
        "frequency_hz": frequency_hz,
        "max_frequency_hz": max_frequency_hz,
    }
    write(root, {PUBLISHED: json.dumps(content)})
    return root / PUBLISHED


def tick(root: Path, *, busy: Mapping[int, int], idle: Mapping[int, int], own: int) -> None:
    """Counters of /proc since boot, in ticks; only cores in ``busy`` have a line.

    The kernel's sum over all cores is left at zero: who uses it is found out.
    """
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
    for core in busy:
        # Spread over the kinds of busy time (user, system, softirq) and of idle time.
        user, system = busy[core] // 2, busy[core] // 3
        rest, waiting = busy[core] - user - system, idle[core] // 5
        fields = (user, 0, system, idle[core] - waiting, waiting, 0, rest, 0, 0, 0)
        lines.append(f"cpu{core} " + " ".join(map(str, fields)))
    lines += ["intr 12345 0 9", "ctxt 1", "btime 1700000000", "procs_running 1"]
    write(root, {"proc/stat": "\n".join(lines) + "\n"})
    before = "42 (edge) wise (x)) R 1 42 42 0 -1 4194304 97 0 0 0"
    write(root, {"proc/self/stat": f"{before} {own // 2} {own - own // 2} 7 7 20 0 1 0 1\n"})


def quota(root: Path, name: str, text: str, *, group: str = "app/inner") -> None:
    """A file of a version-2 control group that this process belongs to."""
    write(root, {f"sys/fs/cgroup/{group}/{name}": text})


def link(root: Path, name: str, target: str) -> None:
    """Make ``name`` a relative link to ``target``, both under the root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/".join([".."] * (len(Path(name).parts) - 1) + [target]))


def _cpus(root: Path, *, policies: Iterable[tuple[int, ...]], khz: int, max_khz: int) -> None:
    cores: list[int] = []
    for policy in policies:
        directory = f"{CPUS}/cpufreq/policy{policy[0]}"
        files = {
            "scaling_cur_freq": khz,
            "scaling_max_freq": max_khz // 2,  # a power mode's, not the silicon's
            "cpuinfo_max_freq": max_khz,
            "cpuinfo_cur_freq": 999,  # never to be read
            "related_cpus": " ".join(map(str, policy)),
        }
        write(root, {f"{directory}/{name}": f"{value}\n" for name, value in files.items()})
        for core in policy:
            (root / CPUS / f"cpu{core}").mkdir(parents=True)
            (root / CPUS / f"cpu{core}/cpufreq").symlink_to(f"../cpufreq/policy{policy[0]}")
        cores += policy
    write(root, dict.fromkeys((f"{CPUS}/online", f"{CPUS}/present"), _as_list(sorted(cores))))
    _process(root)
    tick(root, busy=dict.fromkeys(cores, 500), idle=dict.fromkeys(cores, 9500), own=100)


def _process(root: Path) -> None:
    mounts = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
    write(root, {"proc/self/cgroup": "0::/app/inner\n", "proc/self/mountinfo": mounts})
    write(root, {"proc/sys/kernel/random/boot_id": f"{BOOT_ID}\n"})


def _gpu(root: Path, device: str, *, kind: str, hz: list[int]) -> None:
    name = Path(device).name
    node = f"{device}/devfreq/{name}"
    files = {
        f"{node}/cur_freq": hz[1],
        f"{node}/min_freq": hz[0],
        f"{node}/max_freq": hz[1],  # a power mode's, not the silicon's
        f"{node}/available_frequencies": " ".join(map(str, hz)),
        f"{device}/load": 250,
        f"{device}/railgate_enable": 1,
        f"{device}/power/runtime_status": "active",
    }
    write(root, {name: f"{value}\n" for name, value in files.items()})
    write(root, {f"{device}/of_node/name": f"{kind}\0"})
    (root / node / "device").symlink_to(f"../../../{name}")
    link(root, f"{DEVFREQ}/{name}", node)


def _emc(root: Path, *, rate_hz: int, max_hz: int) -> None:
    files = {"rate": rate_hz, "min_rate": 204_000_000, "max_rate": max_hz, "mrq_rate_locked": 0}
    write(root, {f"{EMC}/{name}": f"{value}\n" for name, value in files.items()})
    write(root, {"sys/kernel/nvpmodel_emc_cap/emc_iso_cap": "0\n"})


def _thermal(root: Path, zones: Mapping[str, int]) -> None:
    for number, (kind, millicelsius) in enumerate(zones.items()):
        zone = f"{THERMAL}/thermal_zone{number}"
        write(root, {f"{zone}/type": f"{kind}\n", f"{zone}/temp": f"{millicelsius}\n"})


def _ina3221(root: Path, place: str) -> None:
    monitor = f"sys/bus/i2c/drivers/ina3221/{place}"
    rails = {"VDD_IN": (4984, 1856), "VDD_CPU_GPU_CV": (4976, 320), "VDD_SOC": (4976, 480)}
    for number, (label, (mv, ma)) in enumerate(rails.items(), 1):
        write(root, {f"{monitor}/in{number}_label": f"{label}\n"})
        write(root, {f"{monitor}/in{number}_input": f"{mv}\n"})
        write(root, {f"{monitor}/curr{number}_input": f"{ma}\n"})
    write(root, {f"{monitor}/in7_label": "sum of shunt voltages\n", f"{monitor}/in7_input": "2\n"})


def _rpi(root: Path, throttled: str, *, khz: int, max_khz: int) -> Path:
    _cpus(root, policies=[(0, 1, 2, 3)], khz=khz, max_khz=max_khz)
    _thermal(root, {"cpu-thermal": 55_504})
    write(root, {throttled: "50000\n"})
    alarm = "sys/class/hwmon/hwmon1"
    return write(root, {f"{alarm}/name": "rpi_volt\n", f"{alarm}/in0_lcrit_alarm": "0\n"})


def _listed(root: Path, name: str) -> list[int]:
    text = (root / CPUS / name).read_text(encoding="utf-8")
    return [int(each) for each in text.split(",")]


def _as_list(cores: Iterable[int]) -> str:
    return ",".join(map(str, cores)) + "\n"

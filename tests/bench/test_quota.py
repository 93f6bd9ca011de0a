from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgewise.bench import quota as quota_module
from edgewise.bench.background import Load
from edgewise.bench.quota import (
    CpuQuota,
    GroupFiles,
    QuotaSchedule,
    QuotaUnavailable,
    quota_effect,
    remove_stale_groups,
)
from edgewise.device import usable_cores
from edgewise.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

SRC = Path(quota_module.__file__).parents[2]
OWN = str(os.getpid())


def why_not_here() -> str:
    """Why quotas cannot be tested on this machine; empty where they can."""
    try:
        with CpuQuota() as quota:
            quota.set_ratio(0.9)
    except QuotaUnavailable as error:
        return error.message
    return ""


REFUSED = why_not_here() if sys.platform == "linux" else "no control groups"


def permitted(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of real control groups, which finds groups that another process just made."""
    skip = pytest.mark.skipif(bool(REFUSED), reason=f"quotas are not permitted: {REFUSED}")
    marked: Callable[..., None] = skip(pytest.mark.usefixtures("whole_machine")(test))
    return marked


class FakeGroups(GroupFiles):
    """Does to plain files what the kernel does to control groups, as far as quotas need it."""

    def __init__(self, root: Path, *, version: int, others: tuple[str, ...] = ()) -> None:
        self.root, self.version = root, version
        self.written: list[tuple[str, str]] = []
        self.fail: Callable[[Path, str], OSError | None] = lambda _path, _text: None
        mount = root / "sys/fs/cgroup" / ("cpu" if version == 1 else "")
        self.top = mount
        self.home = mount / "user/mine"
        self.home.mkdir(parents=True)
        kind = "cgroup cgroup rw,cpu" if version == 1 else "cgroup2 cgroup2 rw"
        where = f"/{mount.relative_to(root)}"
        line = "1:cpu:/user/mine" if version == 1 else "0::/user/mine"
        proc = root / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "self/cgroup").write_text(f"5:memory:/elsewhere\n{line}\n")
        (proc / "self/mountinfo").write_text(f"30 1 0:2 / {where} rw - {kind}\n")
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text("0a1b2c3d-rest\n")
        self.lives(OWN, started=100)
        for group in (mount, mount / "user", self.home):
            self._fill(group, has_cpu=True)
        (self.home / "cgroup.procs").write_text("\n".join((OWN, *others)) + "\n")

    def lives(self, pid: str, *, started: int) -> None:
        (self.root / "proc" / pid).mkdir(exist_ok=True)
        before = " ".join("0" * 18)
        (self.root / "proc" / pid / "stat").write_text(f"{pid} (a b) S {before} {started} 0")

    def members(self, group: Path) -> list[str]:
        return (group / "cgroup.procs").read_text().split()

    def make(self, group: Path) -> None:
        if (error := self.fail(group, "")) is not None:
            raise error
        group.mkdir()
        self._fill(group, has_cpu=self.version == 1)

    def remove(self, group: Path) -> None:
        if self.members(group):
            raise OSError(errno.EBUSY, "busy")
        shutil.rmtree(group)

    def write(self, path: Path, text: str) -> None:
        if (error := self.fail(path, text)) is not None:
            raise error
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file")
        self.written.append((path.name, text))
        if path.name == "cgroup.procs":
            self._move(text, path.parent)
        elif path.name == "cgroup.subtree_control":
            self._delegate(path.parent, lend=text == "+cpu")
        else:
            if path.name == "cpu.cfs_quota_us" and 0 <= int(text) < 1000:
                raise OSError(errno.EINVAL, "invalid argument")
            path.write_text(text + "\n")

    def _fill(self, group: Path, *, has_cpu: bool) -> None:
        (group / "cgroup.procs").write_text("")
        if self.version == 1:
            (group / "tasks").write_text("")
            (group / "cpu.cfs_quota_us").write_text("-1\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (group / "cgroup.controllers").write_text("cpu memory\n" if has_cpu else "\n")
            (group / "cgroup.subtree_control").write_text("")
            if has_cpu:
                (group / "cpu.max").write_text("max 100000\n")

    def _move(self, pid: str, to: Path) -> None:
        if (to / "cgroup.subtree_control").exists() and (to / "cgroup.subtree_control").read_text():
            raise OSError(errno.EBUSY, "processes stand in leaves")
        for group in self.top.rglob("cgroup.procs"):
            others = [p for p in group.read_text().split() if p != pid]
            group.write_text("\n".join(others))
        (to / "cgroup.procs").write_text("\n".join([*self.members(to), pid]))

    def _delegate(self, group: Path, *, lend: bool) -> None:
        if lend and self.members(group):
            raise OSError(errno.EBUSY, "processes stand in leaves")
        (group / "cgroup.subtree_control").write_text("cpu" if lend else "")
        for child in group.glob("edgewise-*"):
            if lend:
                (child / "cpu.max").write_text("max 100000\n")
            else:
                (child / "cpu.max").unlink()


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> FakeGroups:
    return FakeGroups(tmp_path, version=request.param)


def quota_in(groups: FakeGroups, **options: float) -> CpuQuota:
    return CpuQuota(root=groups.root, files=groups, **options)  # type: ignore[arg-type]


def limit(group: Path) -> list[str]:
    if (group / "cpu.max").exists():
        return (group / "cpu.max").read_text().split()
    return [(group / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period")]


def test_the_process_is_in_a_group_of_its_own_and_its_share_is_written(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        group = quota.group
        assert group is not None
        assert group.parent == groups.home
        assert group.name == f"edgewise-{OWN}-100-0a1b2c3d"
        assert groups.members(group) == [OWN]
        assert limit(group)[0] in {"-1", "max"}
        quota.set_ratio(0.25)
        assert limit(group) == ["2000", "8000"]
        quota.set_ratio(1.0)
        assert limit(group)[0] in {"-1", "max"}

    assert groups.members(groups.home) == [OWN]
    assert not group.exists()
    assert quota.group is None


def test_what_usable_cores_reads_is_what_was_set(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        quota.set_ratio(0.5)
        assert quota.group is not None
        line = f"/{quota.group.relative_to(groups.top)}"
        prefix = "1:cpu:" if groups.version == 1 else "0::"
        (groups.root / "proc/self/cgroup").write_text(f"{prefix}{line}\n")

        assert usable_cores(groups.root, affinity={0, 1}).quota_cores == 0.5


def test_a_share_too_small_for_the_period_gets_a_longer_one(groups: FakeGroups) -> None:
    with quota_in(groups, period_s=0.004) as quota:
        quota.set_ratio(0.1)
        assert quota.group is not None
        assert limit(quota.group) == ["1000", "10000"]
        quota.set_ratio(0.5)
        assert limit(quota.group) == ["2000", "4000"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
def test_the_process_is_moved_back_when_the_block_is_left_by(
    error: type[BaseException], groups: FakeGroups
) -> None:
    def leave() -> None:
        with quota_in(groups) as quota:
            quota.set_ratio(0.5)
            raise error

    with pytest.raises(error):
        leave()

    assert groups.members(groups.home) == [OWN]
    assert not list(groups.home.glob("edgewise-*"))


def test_what_was_started_meanwhile_is_moved_up_before_the_group_goes(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        assert quota.group is not None
        (quota.group / "cgroup.procs").write_text(f"{OWN}\n4242\n")

    assert groups.members(groups.home) == [OWN, "4242"]
    assert not list(groups.home.glob("edgewise-*"))


def test_a_process_can_be_exempt_and_is_not_when_nothing_is_at_work(tmp_path: Path) -> None:
    groups = FakeGroups(tmp_path, version=1)
    quota = quota_in(groups)
    quota.exempt([4242])
    assert groups.written == []

    with quota:
        quota.exempt([4242])
        assert groups.members(groups.home) == ["4242"]


def test_only_version_1_lets_a_single_thread_out(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        assert quota.exempt_thread() is (groups.version == 1)
    assert not quota.exempt_thread()


def test_groups_of_killed_processes_are_removed_and_those_of_live_ones_are_not(
    groups: FakeGroups,
) -> None:
    groups.lives("77", started=5)
    names = {
        "edgewise-77-5-0a1b2c3d": "alive",
        "edgewise-77-4-0a1b2c3d": "its number was given again",
        "edgewise-78-4-0a1b2c3d": "gone",
        "edgewise-77-5-ffffffff": "another boot",
        "edgewise-notes": "somebody else's",
        "edgewise-79-4-0a1b2c3d": "in another container",
    }
    for name in names:
        groups.make(groups.home / name)
    (groups.home / "edgewise-78-4-0a1b2c3d/cgroup.procs").write_text("4243\n")
    (groups.home / "edgewise-79-4-0a1b2c3d/cgroup.procs").write_text("0\n")
    removed = remove_stale_groups(groups.home, root=groups.root, files=groups)

    assert len(removed) == 3
    left = {group.name for group in groups.home.glob("edgewise-*")}
    assert left == {"edgewise-77-5-0a1b2c3d", "edgewise-notes", "edgewise-79-4-0a1b2c3d"}
    assert groups.members(groups.home) == [OWN, "4243"]


@pytest.mark.parametrize("where", ["make", "cgroup.procs", "limit"])
def test_what_is_not_permitted_says_so_and_leaves_nothing(where: str, groups: FakeGroups) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    names = {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"} if where == "limit" else {where}
    groups.fail = lambda path, _: (
        denied
        if (path.parent.name.startswith("edgewise-") and path.name in names)
        or (where == "make" and path.name.startswith("edgewise-"))
        else None
    )
    with pytest.raises(QuotaUnavailable, match="EACCES, Permission denied") as caught:
        quota_in(groups).start()

    assert "run as root" in (caught.value.help or "")
    assert groups.members(groups.home) == [OWN]
    assert not list(groups.home.glob("edgewise-*"))


def test_version_2_says_that_other_processes_are_in_the_way(tmp_path: Path) -> None:
    groups = FakeGroups(tmp_path, version=2, others=("4242",))
    with pytest.raises(QuotaUnavailable, match="other processes are in the group above"):
        quota_in(groups).start()

    assert sorted(groups.members(groups.home)) == sorted([OWN, "4242"])
    assert not list(groups.home.glob("edgewise-*"))


def test_version_2_gives_the_controller_back(tmp_path: Path) -> None:
    groups = FakeGroups(tmp_path, version=2)
    with quota_in(groups):
        assert (groups.home / "cgroup.subtree_control").read_text() == "cpu"

    assert (groups.home / "cgroup.subtree_control").read_text() == ""


def test_a_machine_without_the_controller_says_so(tmp_path: Path) -> None:
    groups = FakeGroups(tmp_path, version=2)
    (groups.home / "cgroup.controllers").write_text("memory\n")
    with pytest.raises(QuotaUnavailable, match="no control group with a cpu controller"):
        quota_in(groups).start()
    (tmp_path / "proc/self/cgroup").unlink()
    with pytest.raises(QuotaUnavailable, match="no control group with a cpu controller"):
        quota_in(groups).start()


def test_a_step_the_kernel_refuses_says_so(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        groups.fail = lambda path, text: (
            OSError(errno.EINVAL, "Invalid argument")
            if path.name.startswith("cpu.") and text.startswith("4000")
            else None
        )
        with pytest.raises(QuotaUnavailable, match=r"a quota of 0\.5 was refused: EINVAL"):
            quota.set_ratio(0.5)
        quota.set_ratio(0.25)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.01, float("nan")], ids=str)
def test_a_share_out_of_range_is_refused(ratio: float, groups: FakeGroups) -> None:
    with quota_in(groups) as quota, pytest.raises(ConfigError, match="expected a quota"):
        quota.set_ratio(ratio)


def test_a_quota_is_used_only_while_it_is_at_work(groups: FakeGroups) -> None:
    quota = quota_in(groups)
    with pytest.raises(ConfigError, match="not at work"):
        quota.set_ratio(0.5)
    with quota, pytest.raises(ConfigError, match="started already"):
        quota.start()
    quota.stop()


def test_a_period_no_kernel_accepts_is_refused() -> None:
    for period_s in (0.0, 5e-4, 2.0, float("nan")):
        with pytest.raises(ConfigError, match="from 1 ms to 1 s"):
            CpuQuota(period_s=period_s)


def test_a_schedule_steps_the_quota_and_lifts_it_at_its_end(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        with QuotaSchedule(quota, [(0.0, 1.0), (0.02, 0.5), (0.04, 0.25)]) as schedule:
            until_s = time.monotonic() + 30
            while schedule.is_playing and time.monotonic() < until_s:
                time.sleep(0.005)
            assert quota.ratio == 0.25
        assert quota.ratio is None

    assert [step.ratio for step in schedule.played] == [1.0, 0.5, 0.25]
    assert [step.at_s for step in schedule.played] == sorted(s.at_s for s in schedule.played)
    assert schedule.played[1].at_s >= 0.02
    assert not any(t.name == "edgewise-quota" for t in threading.enumerate())


def test_a_schedule_that_fails_tells_who_stops_it(groups: FakeGroups) -> None:
    schedule = QuotaSchedule(quota_in(groups), [(0.0, 0.5)])  # a quota that is not at work
    schedule.start()
    with pytest.raises(ConfigError, match="not at work"):
        schedule.stop()


def test_a_schedule_left_early_ends_at_once(groups: FakeGroups) -> None:
    with quota_in(groups) as quota:
        with QuotaSchedule(quota, [(0.0, 0.5), (600.0, 0.25)]) as schedule:
            pass
        assert not schedule.is_playing
        with pytest.raises(ConfigError, match="started before"):
            schedule.start()


@pytest.mark.parametrize(
    "steps", [[(1.0, 0.5), (0.0, 1.0)], [(-1.0, 0.5)], [(0.0, 0.0)], [(0.0, 2.0)]], ids=str
)
def test_steps_that_make_no_sense_are_refused(
    steps: list[tuple[float, float]], groups: FakeGroups
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        QuotaSchedule(quota_in(groups), steps)


def groups_here() -> list[Path]:
    with CpuQuota() as quota:
        assert quota.group is not None
        home = quota.group.parent
    return list(home.glob("edgewise-*"))


def cgroup_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@permitted
def test_the_kernel_limits_this_process_and_not_what_is_exempt() -> None:
    before = cgroup_of("self")
    with CpuQuota() as quota, Load("cpu", duty_ratio=0.1, engine="builtin") as load:
        quota.set_ratio(0.3)
        assert usable_cores().quota_cores == pytest.approx(0.3)
        assert cgroup_of(load.pids[0]) == cgroup_of("self") != before
        quota.exempt(load.pids)
        assert cgroup_of(load.pids[0]) == before

    assert cgroup_of("self") == before
    assert groups_here() == []


@permitted
def test_a_computation_gets_its_share_of_a_core_and_no_more() -> None:
    # A busy machine may give less, and each start of a period a little more, never the whole core.
    (effect,) = quota_effect([0.008], ratio=0.25, seconds=0.4)

    assert 0.0 < effect.got_ratio < 0.5
    assert effect.p50_s > 0.01
    assert effect.p05_s <= effect.p50_s <= effect.p95_s


@permitted
@pytest.mark.parametrize(
    ("body", "left"),
    [("", 0), ("raise SystemExit(3)", 0), ("1 / 0", 0), ("os.kill(os.getpid(), 9)", 1)],
    ids=["end of program", "exit", "exception", "kill -9"],
)
def test_only_a_killed_process_leaves_its_group_and_the_next_use_removes_it(
    body: str, left: int
) -> None:
    program = f"""
import os
from edgewise.bench.quota import CpuQuota
quota = CpuQuota()
quota.start()
quota.set_ratio(0.5)
print(quota.group, flush=True)
{body}
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    group = Path(ran.stdout.strip())

    assert group.name.startswith("edgewise-")
    assert group.exists() is bool(left)
    assert groups_here() == []
    assert not group.exists()


@permitted
def test_another_process_can_be_limited() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:  # noqa: S607
        try:
            with CpuQuota(pid=child.pid) as quota:
                quota.set_ratio(0.5)
                assert f"edgewise-{child.pid}-" in cgroup_of(child.pid)
                assert "edgewise-" not in cgroup_of("self")
            assert "edgewise-" not in cgroup_of(child.pid)
        finally:
            child.send_signal(signal.SIGKILL)
    with pytest.raises(QuotaUnavailable, match="has ended"):
        CpuQuota(pid=child.pid).start()


@permitted
def test_a_fork_does_not_own_the_group() -> None:
    with CpuQuota() as quota:
        pid = os.fork()
        if pid == 0:
            quota.stop()
            os._exit(0)
        os.waitpid(pid, 0)

        assert quota.group is not None
        assert quota.group.exists()


def test_stale_groups_are_looked_for_only_where_there_are_any(tmp_path: Path) -> None:
    assert remove_stale_groups(tmp_path) == []

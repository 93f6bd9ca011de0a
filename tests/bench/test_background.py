from __future__ import annotations

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

from edgewise.bench import _load_worker, background
from edgewise.bench.background import LOAD_KINDS, Load, LoadSchedule, stop_all_loads
from edgewise.errors import ConfigError, EdgeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses prctl")

SRC = Path(background.__file__).parents[2]


def eventually(happened: Callable[[], bool], *, within_s: float = 30.0) -> bool:
    """Wait for something that takes as long as the machine lets it; the limit only ends a hang."""
    until_s = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


FAKE_STRESS_NG = """#!/bin/sh
trap 'kill "$worker"; exit 0' TERM
sh -c 'while :; do :; done' "$@" &
worker=$!
while kill -0 $$; do wait; done
"""


def family_of(pid: int) -> list[int]:
    return background.process_family(pid, Path("/proc"))


@pytest.fixture
def fake_stress_ng(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name first on the path."""

    def install(script: str) -> None:
        program = tmp_path / "stress-ng"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def gentle(kind: str = "cpu") -> Load:
    return Load(kind, duty_ratio=0.1)


def start_parent(body: str) -> tuple[subprocess.Popen[str], int]:
    """Run a program that starts a load and prints its worker's number; return both."""
    program = f"""
import os, sys, time
from edgewise.bench.background import Load
load = Load("cpu", duty_ratio=0.1)
load.start()
print(load.pids[0], flush=True)
{body}
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert parent.stdout is not None
    with parent.stdout:
        return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("kind", LOAD_KINDS)
def test_a_load_consumes_processor_time_until_it_is_stopped(kind: str) -> None:
    load = Load(kind, duty_ratio=0.5, engine="builtin")
    assert not load.is_running
    assert load.cpu_time_s is None

    load.start()
    (pid,) = load.pids
    assert load.is_running
    assert eventually(lambda: (load.cpu_time_s or 0.0) >= 0.1)

    load.stop()
    assert not load.is_running
    assert is_gone(pid)
    assert load.pids == ()
    assert (load.cpu_time_s or 0.0) >= 0.1


def test_every_process_of_a_load_runs_and_ends_and_the_load_can_start_again() -> None:
    load = Load("cpu", duty_ratio=0.1, processes=2)
    with load:
        first = load.pids
    with load:
        second = load.pids
        assert load.is_running

    assert len(first) == len(second) == 2
    assert all(map(is_gone, first + second))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
def test_a_load_ends_when_its_block_is_left_by(error: type[BaseException]) -> None:
    pids: list[int] = []

    def leave() -> None:
        with gentle() as load:
            pids.extend(load.pids)
            raise error

    with pytest.raises(error):
        leave()

    assert pids
    assert all(map(is_gone, pids))


def test_a_worker_that_does_not_react_to_being_asked_is_killed() -> None:
    load = Load("cpu", duty_ratio=0.1, grace_s=0.05)
    load.start()
    (pid,) = load.pids
    os.kill(pid, signal.SIGSTOP)  # a stopped process does not handle SIGTERM
    load.stop()

    assert is_gone(pid)


def test_a_worker_that_died_by_itself_is_noticed_and_reaped() -> None:
    load = gentle()
    load.start()
    (pid,) = load.pids
    os.kill(pid, signal.SIGKILL)

    assert eventually(lambda: not load.is_running)
    load.stop()
    assert load.pids == ()
    assert load.problem == "1 of 1 load processes ended by themselves, with code -9"

    with load:
        assert load.problem == ""
    assert load.problem == ""


def test_the_worker_vanishes_when_its_parent_is_killed() -> None:
    parent, pid = start_parent("time.sleep(600)")
    assert not is_gone(pid)
    parent.kill()
    parent.wait()

    assert eventually(lambda: is_gone(pid))


def test_a_fork_that_keeps_the_pipe_open_does_not_keep_the_worker_alive(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent, pid = start_parent(f"""
if os.fork() == 0:
    os.close(1)
    with open({str(note)!r}, "w") as note:
        print(os.getpid(), file=note)
    time.sleep(120)
    os._exit(0)
time.sleep(600)
""")
    assert eventually(lambda: note.exists() and note.read_text().endswith("\n"))
    fork_pid = int(note.read_text())
    parent.kill()
    parent.wait()
    try:
        assert eventually(lambda: is_gone(pid))
        assert not is_gone(fork_pid)
    finally:
        os.kill(fork_pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "body",
    ["", "raise SystemExit(3)", "os._exit(0)", "os.kill(os.getpid(), 15)"],
    ids=["end of program", "exit", "hard exit", "sigterm"],
)
def test_the_worker_vanishes_when_its_parent_ends_without_stopping_it(body: str) -> None:
    parent, pid = start_parent(body)
    parent.wait()

    assert eventually(lambda: is_gone(pid))


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    load = gentle()
    thread = threading.Thread(target=load.start)
    thread.start()
    thread.join()
    try:
        spent_s = load.cpu_time_s or 0.0
        assert eventually(lambda: (load.cpu_time_s or 0.0) > spent_s + 0.02)
        assert load.is_running
    finally:
        load.stop()


def test_all_loads_can_be_ended_at_once() -> None:
    loads = [gentle(), gentle("periodic")]
    for load in loads:
        load.start()
    pids = [pid for load in loads for pid in load.pids]
    stop_all_loads()

    assert all(map(is_gone, pids))
    assert not any(load.is_running for load in loads)


def test_a_load_takes_its_niceness_and_its_processors() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Load("cpu", duty_ratio=0.1, nice=5, cpus=[cpu]) as load:
        (pid,) = load.pids

        assert os.sched_getaffinity(pid) == {cpu}
        assert os.getpriority(os.PRIO_PROCESS, pid) == 5
        assert os.getpgid(pid) == pid


def test_processors_that_do_not_exist_are_refused_and_nothing_keeps_running() -> None:
    load = Load("cpu", cpus=[1023])
    with pytest.raises(ConfigError, match="refused the load") as caught:
        load.start()

    assert "CPUs this process may use" in (caught.value.help or "")
    assert load.pids == ()


def test_a_load_that_runs_is_not_started_twice() -> None:
    with gentle() as load, pytest.raises(ConfigError, match="runs already"):
        load.start()


def test_an_unknown_kind_of_load_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        Load("memroy")


@pytest.mark.parametrize(
    "wrong",
    [
        {"duty_ratio": 0.0},
        {"duty_ratio": 1.1},
        {"duty_ratio": float("nan")},
        {"processes": 0},
        {"nice": 20},
        {"cpus": []},
        {"cpus": [-1]},
        {"period_s": 0.0},
        {"grace_s": float("inf")},
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Load("cpu", **wrong)  # type: ignore[arg-type]


def test_the_label_says_what_runs() -> None:
    assert Load("cpu").label == "cpu"
    assert Load("memory", processes=2, duty_ratio=0.5).label == "2 × memory at 50 %"
    assert Load("map").label == "map"
    assert Load("audio", duty_ratio=0.5).label == "audio at 50 %"


def test_stress_ng_does_the_work_where_it_is_installed_and_ends_with_all_it_started(
    fake_stress_ng: Callable[[str], None],
) -> None:
    fake_stress_ng(FAKE_STRESS_NG)
    load = Load("cpu", duty_ratio=0.5)
    assert load.engine == "stress-ng"

    with load:
        family = family_of(load.pids[0])
        assert len(family) == 3
        said = Path(f"/proc/{family[1]}/cmdline").read_text().split("\0")
        assert said[said.index("--cpu-load") + 1] == "50"
        assert eventually(lambda: (load.cpu_time_s or 0.0) >= 0.1)

    assert eventually(lambda: all(map(is_gone, family[:2])))
    assert eventually(lambda: is_gone(family[2]))
    assert load.problem == ""


def test_stress_ng_that_dies_is_noticed(fake_stress_ng: Callable[[str], None]) -> None:
    fake_stress_ng(FAKE_STRESS_NG)
    with Load("memory") as load:
        _, main, worker = family_of(load.pids[0])
        os.kill(main, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

        assert eventually(lambda: not load.is_running)
    assert "ended by themselves" in load.problem


def test_stress_ng_that_cannot_start_says_why(fake_stress_ng: Callable[[str], None]) -> None:
    fake_stress_ng("#!/bin/sh\necho no such option >&2\nexit 3\n")
    load = Load("cpu")
    with pytest.raises(ConfigError, match="ended with code 3: no such option"):
        load.start()

    assert load.pids == ()


def test_what_stress_ng_cannot_do_is_done_here_or_refused_when_asked_for(
    fake_stress_ng: Callable[[str], None],
) -> None:
    fake_stress_ng(FAKE_STRESS_NG)

    assert {Load(kind).engine for kind in ("periodic", "map", "audio")} == {"builtin"}
    with pytest.raises(ConfigError, match="no load like 'map' at 50%"):
        Load("map", engine="stress-ng")


def test_stress_ng_that_is_not_installed_is_only_missed_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert Load("cpu").engine == "builtin"
    with pytest.raises(ConfigError, match="not installed"):
        Load("cpu", engine="stress-ng")
    with pytest.raises(ConfigError, match="did you mean 'stress-ng'"):
        Load("cpu", engine="stressng")  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("stress-ng") is None, reason="stress-ng is not installed")
@pytest.mark.parametrize("kind", ["cpu", "memory"])
def test_the_real_stress_ng_runs_and_ends(kind: str) -> None:
    with Load(kind, engine="stress-ng") as load:
        family = family_of(load.pids[0])
        assert eventually(lambda: (load.cpu_time_s or 0.0) >= 0.1)

    assert len(family) >= 3
    assert eventually(lambda: all(map(is_gone, family)))


def test_the_worker_imports_neither_numpy_nor_edgewise() -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c"),
            "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)",
            _load_worker.__file__,
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert not {"numpy", "edgewise", "json", "logging"} & set(found)


def test_a_schedule_plays_its_loads_and_says_when_they_ran() -> None:
    first, second = gentle(), gentle("periodic")
    with LoadSchedule([(0.0, 0.05, first), (0.02, 0.1, second)]) as schedule:
        assert eventually(lambda: not schedule.is_playing)

    assert [load.label for load in schedule.played] == [first.label, second.label]
    assert all(load.stop_s > load.start_s >= 0.0 for load in schedule.played)
    assert schedule.played[0].stop_s >= 0.05
    assert not first.is_running
    assert not second.is_running


def test_a_schedule_says_which_load_ended_by_itself() -> None:
    load, other = gentle(), gentle()
    with LoadSchedule([(0.0, 0.5, load), (0.0, 0.4, other)]) as schedule:
        assert eventually(lambda: load.is_running)
        os.kill(load.pids[0], signal.SIGKILL)
        assert eventually(lambda: not schedule.is_playing)

    assert "code -9" in schedule.played[-1].problem
    assert schedule.played[0].problem == ""


def test_one_load_may_be_scheduled_twice_back_to_back() -> None:
    load = gentle()
    with LoadSchedule([(0.0, 0.02, load), (0.02, 0.04, load)]) as schedule:
        assert eventually(lambda: not schedule.is_playing)

    assert len(schedule.played) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["exception", "ctrl-c"])
def test_a_schedule_ends_its_loads_when_its_block_is_left_by(error: type[BaseException]) -> None:
    load = gentle()
    schedule = LoadSchedule([(0.0, 600.0, load)])
    pids: list[int] = []

    def leave() -> None:
        with schedule:
            assert eventually(lambda: load.is_running)
            pids.extend(load.pids)
            raise error

    with pytest.raises(error):
        leave()

    assert pids
    assert all(map(is_gone, pids))
    assert not schedule.is_playing
    assert len(schedule.played) == 1


def test_a_load_that_cannot_start_is_reported_by_the_schedule() -> None:
    good = gentle()
    schedule = LoadSchedule([(0.0, 600.0, good), (0.0, 600.0, Load("cpu", cpus=[1023]))])
    schedule.start()
    assert eventually(lambda: not schedule.is_playing)

    with pytest.raises(EdgeError, match="refused the load"):
        schedule.stop()
    assert not good.is_running


def test_a_schedule_is_started_once() -> None:
    with LoadSchedule([]) as schedule, pytest.raises(ConfigError, match="started before"):
        schedule.start()


@pytest.mark.parametrize(
    "span", [(1.0, 1.0), (-1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)], ids=str
)
def test_a_span_that_makes_no_sense_is_refused(span: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="expected 0 <= start < stop"):
        LoadSchedule([(*span, gentle())])


def test_overlapping_spans_of_one_load_are_refused() -> None:
    load = gentle()
    with pytest.raises(ConfigError, match="before it was stopped"):
        LoadSchedule([(0.0, 2.0, load), (1.0, 3.0, load)])

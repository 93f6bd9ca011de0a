from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgewise.backends.threads import (
    Coresidency,
    Interference,
    busy_threads,
    check_threads,
    govern,
    interference,
    onnxruntime_options,
    openvino_settings,
    require,
    set_torch_threads,
    thread_environment,
)
from edgewise.backends.threads.interference import NAIVE, summarise
from edgewise.backends.threads.states import cores_state, openmp_libraries, waiting_state
from edgewise.clock import VirtualClock
from edgewise.errors import BackendError, BackendUnavailable, ConfigError
from edgewise.profiles.records import ThreadPolicy

ONE, TWO = ThreadPolicy(threads=1), ThreadPolicy(threads=2)
NEW = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores are needed",
)


def in_a_new_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=NEW | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def an_openmp_library() -> Path:
    spec = importlib.util.find_spec("torch")
    found = sorted(Path(spec.origin).parent.glob("lib/libgomp*")) if spec and spec.origin else []
    if not found:
        pytest.skip("torch brings no libgomp here")
    return found[0]


class Working(VirtualClock):
    """A clock during whose sleep threads of a made-up process use processor time."""

    def __init__(self, root: Path, ticks: dict[int, int]) -> None:
        super().__init__()
        self.root, self.ticks = root, ticks

    def sleep_s(self, duration_s: float) -> None:
        super().sleep_s(duration_s)
        for thread, count in self.ticks.items():
            write_thread(self.root, thread, 100 + count)


def write_thread(root: Path, thread: int, ticks: int) -> None:
    folder = root / "proc/self/task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", *["0"] * 10, str(ticks - 7), "7", "0"]
    (folder / "stat").write_text(f"{thread} (a (name) 9) {' '.join(fields)}\n")


# --- what is found ---


def test_a_thread_that_uses_a_core_while_the_caller_sleeps_is_named(tmp_path: Path) -> None:
    per_s = os.sysconf("SC_CLK_TCK")
    ticks = {11: 0, 12: per_s, 13: per_s // 10}
    for thread in ticks:
        write_thread(tmp_path, thread, 100)

    found = busy_threads(1.0, root=tmp_path, clock=Working(tmp_path, ticks))

    assert found is not None
    assert list(found) == [12]
    assert found[12] == pytest.approx((per_s - 1) / per_s)


def test_one_tick_of_a_counter_makes_no_thread_spin_however_short_the_window(
    tmp_path: Path,
) -> None:
    write_thread(tmp_path, 11, 100)
    clock = Working(tmp_path, {11: 1})

    assert busy_threads(1 / os.sysconf("SC_CLK_TCK"), root=tmp_path, clock=clock) == {}


def test_a_thread_that_spins_is_named_in_the_shortest_window(tmp_path: Path) -> None:
    write_thread(tmp_path, 11, 100)
    clock = Working(tmp_path, {11: 5})

    assert busy_threads(0.001, root=tmp_path, clock=clock) == pytest.approx({11: 0.8})


def test_a_thread_that_starts_within_the_window_is_not_judged(tmp_path: Path) -> None:
    write_thread(tmp_path, 11, 100)
    clock = Working(tmp_path, {11: 0, 12: os.sysconf("SC_CLK_TCK")})

    assert busy_threads(1.0, root=tmp_path, clock=clock) == {}


def test_without_proc_nobody_knows_who_spins(tmp_path: Path) -> None:
    assert busy_threads(1.0, root=tmp_path, clock=VirtualClock()) is None

    last = check_threads(ONE, window_s=1.0, root=tmp_path, clock=VirtualClock())[-1]
    assert (last.fits, last.found) == (None, "unknown: no /proc/self/task")


def test_openmp_runtimes_are_found_among_the_mapped_files(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(
        "7f00-7f01 r-xp 0 08:01 1  /usr/lib/with blanks/libgomp-a34.so.1\n"
        "7f01-7f02 r--p 0 08:01 1  /usr/lib/with blanks/libgomp-a34.so.1\n"
        "7f02-7f03 r-xp 0 08:01 2  /usr/lib/libm.so\n"
        "7f03-7f04 rw-p 0 00:00 0\n"
        "7f04-7f05 r-xp 0 08:01 3  /opt/libiomp5.so\n"
    )

    assert openmp_libraries(tmp_path) == ("libgomp-a34.so.1", "libiomp5.so")


@pytest.mark.parametrize(
    ("policy", "environment", "fits"),
    [
        (ONE, {}, True),
        (TWO, {}, False),
        (TWO, {"OMP_WAIT_POLICY": "passive"}, True),
        (ThreadPolicy(threads=2, spinning=True), {}, True),
        (None, {}, None),
    ],
    ids=["alone", "two that spin", "two asleep", "spinning is the policy", "nothing asked"],
)
def test_waiting_fits_where_nobody_waits_or_all_sleep(
    policy: ThreadPolicy | None,
    environment: dict[str, str],
    fits: bool | None,  # noqa: FBT001 - a case
) -> None:
    state = waiting_state(policy, environment, ("libgomp.so.1",))

    assert state.fits is fits
    assert bool(state.help) == (fits is False)


def test_what_torch_has_is_compared_with_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(get_num_threads=lambda: 4, get_num_interop_threads=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", torch)

    states = {(s.runtime, s.what): s for s in check_threads(TWO, window_s=0.0)}

    assert states["torch", "intra-op threads"].fits is False
    assert states["torch", "intra-op threads"].found == "4"
    assert states["torch", "inter-op threads"].fits is None


# --- cores that a runtime took away ---


def test_cores_that_were_taken_away_are_named_with_who_took_them() -> None:
    state = cores_state(
        ONE, at_start=(0, 1, 2, 3), now=(2,), environment={"GOMP_CPU_AFFINITY": "2"}
    )

    assert state.fits is False
    assert state.help == "CPUs 0 1 3 were taken away; unset GOMP_CPU_AFFINITY=2"


def test_measuring_with_fewer_cores_than_at_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected cores 2 \(0 1\), found 1 \(0\)") as caught:
        require(ONE, at_start=(0, 1), now=(0,), environment={"OMP_PROC_BIND": "true"})

    assert caught.value.help == "CPUs 1 were taken away; unset OMP_PROC_BIND=true"


def test_cores_outside_the_policys_affinity_are_refused_too() -> None:
    bound = ThreadPolicy(threads=1, affinity=(1,))

    require(bound, at_start=(0, 1), now=(1,), environment={})
    with pytest.raises(ConfigError, match="expected cores"):
        require(bound, at_start=(0, 1), now=(0, 1), environment={})


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="a core for each of 2 threads, found 1"):
        require(TWO, at_start=(0,), now=(0,), environment={})


def test_measuring_with_other_threads_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 2))

    with pytest.raises(ConfigError, match="expected torch to have 1 threads, found 2"):
        require(ONE, at_start=(0, 1), now=(0, 1), environment={})


# --- what is set ---


def test_torch_that_is_imported_later_finds_its_threads_and_sleeps() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    said = in_a_new_process(
        "from edgewise.backends.threads import check_threads, govern, require\n"
        "policy = govern(1)\n"
        "import torch\n"
        "require(policy)\n"
        "wrong = [s for s in check_threads(policy) if s.fits is False]\n"
        "print(policy.key, torch.get_num_threads(), wrong)\n"
    )

    assert said == "1 thread, no spin 1 []"


@needs_two_cores
@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, True), ({"OMP_WAIT_POLICY": "PASSIVE"}, False)],
    ids=["not told", "told before"],
)
def test_what_comes_too_late_for_openmp_is_said(
    environment: dict[str, str],
    spins: bool,  # noqa: FBT001 - a case
) -> None:
    library = an_openmp_library()
    said = in_a_new_process(
        "import ctypes, logging, os, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "from edgewise.backends.threads import govern\n"
        f"ctypes.CDLL({str(library)!r})\n"
        "policy = govern(2)\n"
        "print(policy.spinning, os.environ.get('OMP_WAIT_POLICY'))\n",
        **environment,
    )

    assert said.splitlines()[-1] == f"{spins} {environment.get('OMP_WAIT_POLICY')}"
    assert ("torch was imported before" in said) == spins


@needs_two_cores
def test_a_runtime_that_binds_this_process_to_a_core_is_caught() -> None:
    library = an_openmp_library()
    first = str(min(os.sched_getaffinity(0)))
    said = in_a_new_process(
        "import ctypes\n"
        "from edgewise.backends.threads import require\n"
        "from edgewise.errors import ConfigError\n"
        "from edgewise.profiles.records import ThreadPolicy\n"
        "require(ThreadPolicy(threads=1))\n"
        f"ctypes.CDLL({str(library)!r})\n"
        "try:\n"
        "    require(ThreadPolicy(threads=1))\n"
        "except ConfigError as error:\n"
        "    print(error.help)\n",
        GOMP_CPU_AFFINITY=first,
    )

    assert said.endswith(f"unset GOMP_CPU_AFFINITY={first}")


@needs_two_cores
def test_an_affinity_binds_threads_that_run_already() -> None:
    first = min(os.sched_getaffinity(0))
    said = in_a_new_process(
        "import os, threading\n"
        "from edgewise.backends.threads import govern, require\n"
        "stop, seen = threading.Event(), []\n"
        "def work():\n"
        "    stop.wait()\n"
        "    seen.append(os.sched_getaffinity(0))\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        f"policy = govern(1, affinity=[{first}])\n"
        "stop.set()\n"
        "thread.join()\n"
        "require(policy)\n"
        "print(policy.key, os.sched_getaffinity(0), seen)\n"
    )

    assert said == f"1 thread, no spin, CPUs {first} {{{first}}} [{{{first}}}]"


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one thread, found 0"):
        govern(0)
    with pytest.raises(ConfigError, match="usable cores, found 100000"):
        govern(100_000)
    with pytest.raises(ConfigError, match="at least one thread"):
        thread_environment(0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities on this system")
@pytest.mark.parametrize("affinity", [[], [99_999]], ids=["none", "no such core"])
def test_cpus_this_process_may_not_use_are_refused(affinity: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected some of the CPUs"):
        govern(1, affinity=affinity)


def test_sessions_of_onnxruntime_do_not_spin() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    options = onnxruntime_options(2, log_severity=4)

    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    assert options.log_severity_level == 4
    for pool in ("intra", "inter"):
        assert options.get_session_config_entry(f"session.{pool}_op.allow_spinning") == "0"
    with pytest.raises(ConfigError, match="at least one thread"):
        onnxruntime_options(0)


@pytest.mark.parametrize(("threads", "spins"), [(1, "0"), (2, "1")])
def test_sessions_that_may_spin_do_so_in_calls_alone(threads: int, spins: str) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    options = onnxruntime_options(threads, spin_in_calls=True)

    assert options.get_session_config_entry("session.intra_op.allow_spinning") == spins
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"
    if spins == "1":
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_only_openvinos_cpu_has_threads_of_ours() -> None:
    on_cpu, on_gpu = openvino_settings(2), openvino_settings(2, "GPU")

    assert on_cpu["INFERENCE_NUM_THREADS"] == 2
    assert on_cpu["ENABLE_CPU_PINNING"] is False
    assert "INFERENCE_NUM_THREADS" not in on_gpu
    assert on_gpu["INFERENCE_PRECISION_HINT"] == "f32"


def test_torch_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(BackendUnavailable, match="needs torch"):
        set_torch_threads(1)


# --- interference ---


def measured(policy: ThreadPolicy, alone_s: float, in_turn_s: float, idle: float) -> Interference:
    run = {
        "torch": [alone_s] * 12,
        "onnxruntime": [alone_s] * 12,
        "torch_in_turn": [in_turn_s] * 12,
        "onnxruntime_in_turn": [alone_s] * 12,
        "idle_cores": [idle] * 12,
    }
    return summarise(policy, run)


def test_the_ratio_is_of_each_round_and_its_median_is_told() -> None:
    run = {
        "torch": [1.0, 1.0, 1.0],
        "onnxruntime": [1.0, 3.0, 1.0],
        "torch_in_turn": [1.0, 2.0, 18.0],
        "onnxruntime_in_turn": [1.0, 3.0, 2.0],
        "idle_cores": [0.0, 0.5, 1.0],
    }

    found = summarise(TWO, run)

    assert found.ratio == 1.25  # of 1, 1.25 and 10
    assert found.low <= found.ratio <= found.high
    assert (found.torch_in_turn_s, found.idle_cores, found.rounds) == (2.0, 0.5, 3)
    assert summarise(TWO, run, run).rounds == 6


def test_naive_runtimes_that_disturb_each_other_lead_to_advice() -> None:
    found = Coresidency(
        governed=measured(ONE, 1e-3, 1.2e-3, 0.0), naive=measured(NAIVE, 1e-3, 39e-3, 0.9)
    )

    assert found.holds
    assert found.naive_over_governed == pytest.approx(20)
    said = " ".join(found.findings())
    assert "1.10 times what they take alone" in said
    assert "OMP_WAIT_POLICY=PASSIVE" in said
    assert "idle threads burn 0.9 cores" in said


def test_a_machine_too_busy_for_the_governor_is_told_so() -> None:
    found = Coresidency(governed=measured(ONE, 1e-3, 3e-3, 0.0), naive=measured(NAIVE, 1, 1, 0.0))

    assert not found.holds
    assert any("try again when it is quieter" in said for said in found.findings())


def test_runtimes_that_do_not_disturb_each_other_need_no_advice() -> None:
    found = Coresidency(governed=measured(ONE, 1, 1, 0.0), naive=measured(NAIVE, 1, 1, 0.0))

    assert found.findings()[-1].startswith("the runtimes do not disturb each other here")


def test_the_test_of_interference_runs_and_refuses_nonsense() -> None:
    for package in ("torch", "onnxruntime", "onnx"):
        pytest.importorskip(package, reason=f"{package} is not installed")

    found = interference(rounds=1, calls=1)

    assert found.ratio > 0
    assert found.rounds == 1
    with pytest.raises(ConfigError, match="at least one round and call"):
        interference(rounds=0)
    with pytest.raises(BackendError, match="usable cores, found 100000"):
        interference(rounds=1, calls=1, threads=100_000)

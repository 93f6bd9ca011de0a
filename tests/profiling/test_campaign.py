from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.device import DeviceFingerprint
from edgewise.errors import BackendError, ConfigError, ProfileError
from edgewise.model.staged import StagedModel
from edgewise.profiles import Profile, ProfileStore, UnitKey
from edgewise.profiling import CONTROLLER, QUICK, THOROUGH, Progress, campaign_notes, measure

MakeProgram = Callable[..., NullProgram]
MakeModel = Callable[..., StagedModel]


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    """A machine that says nothing about its load."""
    root = tmp_path / "machine"
    root.mkdir()
    return root


@pytest.fixture
def profile(store: ProfileStore, clock: VirtualClock, make_program: MakeProgram) -> Profile:
    return measure({"null": make_program(clock)}, store, rounds=20, clock=clock)


def test_the_costs_of_all_units_are_recovered(
    profile: Profile, costs_s: Mapping[str, float]
) -> None:
    assert set(profile.names("null")) == {*costs_s, CONTROLLER}
    for name, cost_s in costs_s.items():
        # A virtual clock adds up doubles: nothing but their rounding remains.
        assert profile.cost(name, "null").present_s == pytest.approx(cost_s, abs=1e-12)


def test_an_empty_pass_costs_no_unit_anything(profile: Profile) -> None:
    assert profile.cost(CONTROLLER, "null").median_s == 0.0


def test_every_unit_has_one_sample_in_every_round(profile: Profile) -> None:
    assert profile.num_rounds == 20
    assert {cost.count for cost in profile.units.values()} == {20}


def test_kinds_of_units_are_told(profile: Profile) -> None:
    assert Counter(key.kind for key in profile.units) == {
        "segment": 5, "head": 3, "controller": 1,
    }  # fmt: skip


def test_a_profile_on_the_null_backend_calls_itself_simulated(profile: Profile) -> None:
    assert profile.provenance == "simulated"
    assert profile.method.clock.startswith("VirtualClock")


def test_the_method_says_what_was_done(profile: Profile) -> None:
    method = profile.method

    assert method.synchronised
    assert method.interleaved
    assert method.warmup_rounds == THOROUGH.warmup_rounds
    assert "garbage collection off" in method.clock
    assert "20 rounds" in method.stop_rule


def test_single_stages_run_in_order_each_right_after_the_stage_before(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    program = make_program(clock)

    measure({"null": program}, store, rounds=1, clock=clock)

    ran = program.ran[-(len(program.ran) // (1 + THOROUGH.warmup_rounds)) :]
    first, second, third = "segment:0-1", "segment:1-2", "segment:2-3"
    assert ran[:5] == [first, first, second, second, third]
    for unit, position in {"head:0": 1, "head:1": 2, "head:2": 3}.items():
        assert ran[ran.index(unit) - 1] == f"segment:{position - 1}-{position}"


def test_backends_take_turns_within_each_round_in_an_order_from_the_seed(
    store: ProfileStore, make_program: MakeProgram
) -> None:
    def order(seed: int) -> list[str]:
        clock = VirtualClock()
        turns: list[str] = []
        programs = {}
        for name in ("fast", "slow"):
            program = make_program(clock)
            costs = program.cost_s

            def cost_s(unit: str, name: str = name, costs: Callable[[str], float] = costs) -> float:
                if unit == "segment:0-3":
                    turns.append(name)
                return costs(unit)

            program.cost_s = cost_s
            programs[name] = program
        measure(programs, store, rounds=8, clock=clock, rng=np.random.default_rng(seed))
        return turns

    first = order(1)

    assert first == order(1)
    rounds = {tuple(first[i : i + 2]) for i in range(0, len(first), 2)}
    assert rounds == {("fast", "slow"), ("slow", "fast")}


def test_several_backends_share_one_profile_and_its_rounds(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    programs = {"fast": make_program(clock), "slow": make_program(clock, scale=3.0)}

    profile = measure(programs, store, rounds=5, clock=clock)

    assert profile.backends() == ("fast", "slow")
    assert profile.cost("segment:0-3", "slow").median_s == pytest.approx(0.015)
    assert profile.matrix(["head:0", "head:1"], "fast").shape == (5, 2)


def test_batch_sizes_are_units_of_their_own(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    profile = measure(
        {"null": make_program(clock)}, store, rounds=3, batches=(2, 1, 2), clock=clock
    )

    assert profile.names("null", batch=2) == profile.names("null", batch=1)


def test_it_stops_when_every_unit_is_steady(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, quiet: Path
) -> None:
    profile = measure({"null": make_program(clock)}, store, clock=clock, root=quiet)

    assert profile.num_rounds == THOROUGH.min_rounds
    assert campaign_notes(profile) == ()


def test_a_unit_that_does_not_settle_is_named(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, quiet: Path
) -> None:
    program = make_program(clock)
    steady = program.cost_s
    noise = np.random.default_rng(3)
    program.cost_s = lambda unit: (
        steady(unit) * (noise.uniform(0.5, 1.5) if unit == "segment:0-2" else 1.0)
    )

    profile = measure({"null": program}, store, rounds=30, clock=clock, root=quiet)

    assert profile.num_rounds == 30
    assert campaign_notes(profile) == ("1 of 9 units did not settle: segment:0-2 on null",)


def test_noise_in_a_unit_that_is_a_sliver_of_the_whole_is_no_reason_to_go_on(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    program = make_program(clock)
    steady = program.cost_s
    noise = np.random.default_rng(3)
    program.cost_s = lambda unit: noise.uniform(1e-6, 2e-5) if unit == "head:0" else steady(unit)

    profile = measure({"null": program}, store, clock=clock)

    assert profile.num_rounds == THOROUGH.min_rounds


def test_the_time_cap_ends_it_but_never_before_the_fewest_rounds(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    slow = make_program(clock, scale=1000.0)
    flicker = slow.cost_s
    noise = np.random.default_rng(0)
    slow.cost_s = lambda unit: flicker(unit) * noise.uniform(0.5, 1.5)

    profile = measure({"null": slow}, store, quick=True, clock=clock)

    assert profile.num_rounds == QUICK.min_rounds


def test_a_quick_campaign_of_a_ten_millisecond_net_takes_less_than_five_seconds(
    store: ProfileStore, clock: VirtualClock, make_model: MakeModel
) -> None:
    noise = np.random.default_rng(0)

    def cost_s(unit: str) -> float:
        if unit.startswith("head"):
            return noise.uniform(1e-4, 1e-3)  # never steady
        start, stop = map(int, unit.removeprefix("segment:").split("-"))
        return 0.010 * (stop - start) / 8

    program = NullProgram(make_model(8), clock=clock, cost_s=cost_s)
    start_s = clock.now_s()

    profile = measure({"null": program}, store, quick=True, clock=clock)

    assert clock.now_s() - start_s < 5.0
    assert profile.num_rounds >= 40


def test_progress_says_what_is_left(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    seen: list[Progress] = []

    measure({"null": make_program(clock)}, store, rounds=10, clock=clock, on_progress=seen.append)

    warm, measuring = seen[: THOROUGH.warmup_rounds], seen[THOROUGH.warmup_rounds :]
    assert all(each.remaining_s is None and each.done_ratio == 0.0 for each in warm)
    assert [each.rounds for each in measuring] == list(range(1, 11))
    left = [each.remaining_s for each in measuring if each.remaining_s is not None]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0.0
    assert measuring[-1].done_ratio == 1.0


def test_an_abandoned_campaign_goes_on_where_it_was(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    class Killed(Exception):
        pass

    def kill(progress: Progress) -> None:
        if progress.rounds == 4:
            raise Killed

    program = make_program(clock)
    with pytest.raises(Killed):
        measure({"null": program}, store, rounds=10, clock=clock, on_progress=kill)
    first_runs = len(program.ran)
    seen: list[Progress] = []

    profile = measure({"null": program}, store, rounds=10, clock=clock, on_progress=seen.append)

    assert profile.num_rounds == 10
    assert seen[-1].resumed_rounds == 4
    assert len(store.list()) == 1
    per_round = first_runs // (THOROUGH.warmup_rounds + 4)
    assert len(program.ran) - first_runs == per_round * (THOROUGH.warmup_rounds + 6)


def test_a_campaign_over_other_backends_does_not_go_on_with_this_one(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    def stop(progress: Progress) -> None:
        if progress.rounds == 2:
            raise KeyboardInterrupt

    programs = {"a": make_program(clock)}
    with pytest.raises(KeyboardInterrupt):
        measure(programs, store, rounds=5, clock=clock, on_progress=stop)

    profile = measure({"b": make_program(clock)}, store, rounds=5, clock=clock)

    assert profile.backends() == ("b",)


def test_an_interrupt_says_what_is_kept(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    def stop(progress: Progress) -> None:
        if progress.rounds == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the 27 samples taken so far are kept"):
        measure({"null": make_program(clock)}, store, rounds=9, clock=clock, on_progress=stop)

    assert store.list()[0].num_samples == 27
    assert gc.isenabled()


def test_a_runtime_that_fails_midway_keeps_what_was_measured(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    program = make_program(clock)
    cost = program.cost_s

    def fail_late(unit: str) -> float:
        if len(program.ran) > 150:
            raise BackendError("the runtime gave up")
        return cost(unit)

    program.cost_s = fail_late
    with pytest.raises(BackendError, match="gave up"):
        measure({"null": program}, store, rounds=20, clock=clock)

    assert gc.isenabled()
    (unfinished,) = store.list()
    assert not unfinished.finished
    assert unfinished.num_samples > 0
    program.cost_s = cost
    assert measure({"null": program}, store, rounds=20, clock=clock).num_rounds == 20


def test_a_full_disk_says_what_is_kept_and_a_rerun_goes_on(
    tmp_path: Path, clock: VirtualClock, make_program: MakeProgram
) -> None:
    def limit(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 12")

    noise = np.random.default_rng(0)
    program = make_program(clock)
    program.cost_s = lambda _: noise.uniform(0.001, 0.002)  # never steady
    small = ProfileStore(tmp_path / "p.sqlite3", on_connect=limit)
    with pytest.raises(ProfileError, match="the disk is full") as caught:
        measure({"null": program}, small, rounds=5000, clock=clock)

    store = ProfileStore(small.path)
    (unfinished,) = store.list()
    assert f"the {unfinished.num_samples} samples stored before are kept" in caught.value.message
    seen: list[Progress] = []
    with pytest.raises(KeyboardInterrupt):
        measure(
            {"null": program}, store, rounds=5000, clock=clock,
            on_progress=lambda p: seen.append(p) if p.remaining_s is None else interrupt(),
        )  # fmt: skip
    assert seen[0].resumed_rounds > 0


def interrupt() -> None:
    raise KeyboardInterrupt


def test_the_garbage_collector_rests_while_a_unit_is_timed(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram
) -> None:
    program = make_program(clock)
    cost, seen = program.cost_s, set()

    def watch(unit: str) -> float:
        seen.add(gc.isenabled())
        return cost(unit)

    program.cost_s = watch
    measure({"null": program}, store, rounds=2, clock=clock)

    assert seen == {False}
    assert gc.isenabled()


def test_the_state_of_the_machine_is_kept_from_before_and_after(profile: Profile) -> None:
    assert profile.state["when"] == "before"
    later = profile.state["resumed"]
    assert isinstance(later, list)
    assert later[-1]["when"] == "after"
    assert later[-1]["rounds"] == 20
    for entry in (profile.state, later[-1]):
        assert (entry["frequencies_hz"] is None) <= bool(entry["frequencies_reason"])
        assert (entry["other_cores"] is None) <= bool(entry["load_reason"])


def test_a_noisy_machine_is_told_and_the_profile_is_finished(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    stat, own = tmp_path / "proc/stat", tmp_path / "proc/self/stat"
    own.write_text("1 (python) S " + "0 " * 40)
    stat.write_text("cpu 0 0 0 0 0 0 0 0\ncpu0 0\ncpu1 0\n")

    def get_busy(progress: Progress) -> None:
        # Two cores, half of their time is spent by somebody else and a tenth is stolen.
        ticks = 100 * (progress.rounds + 1)
        stat.write_text(f"cpu {5 * ticks} 0 0 {4 * ticks} 0 0 0 {ticks}\ncpu0 0\ncpu1 0\n")

    profile = measure(
        {"null": make_program(clock)}, store, rounds=20, clock=clock, root=tmp_path,
        on_progress=get_busy,
    )  # fmt: skip

    assert store.list()[0].finished
    assert campaign_notes(profile) == (
        "the machine was noisy: other programs used 1.0 cores while it was measured",
        "the machine was noisy: its hypervisor gave 10% of its time to others",
    )


def test_the_device_is_kept_as_it_was_given(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, device: DeviceFingerprint
) -> None:
    profile = measure({"null": make_program(clock)}, store, rounds=2, clock=clock, device=device)

    assert profile.device_id == device.id
    assert profile.device["isa"] == ["neon"]


def test_what_cannot_share_a_profile_is_refused(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, make_model: MakeModel
) -> None:
    one = make_program(clock)
    another_model = make_program(clock, model=make_model(digest="bb"))
    more_threads = make_program(clock, threads=2)
    pretended = make_program(clock)
    pretended.backend = "onnxruntime:CPU"
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "at least one backend"),
        ({"a": one, "b": another_model}, {}, "run one model"),
        ({"a": one, "b": more_threads}, {}, "one number of threads"),
        ({"a": one, "b": pretended}, {}, "simulated and measured"),
        ({"a": one}, {"rounds": 0}, "at least one round"),
        ({"a": one}, {"time_cap_s": 0.0}, "above zero"),
        ({"a": one}, {"time_cap_s": float("nan")}, "above zero"),
        ({"a": one}, {"batches": ()}, "batch sizes"),
        ({"a": one}, {"batches": (0,)}, "batch sizes"),
    ]
    for programs, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            measure(programs, store, clock=clock, **options)

    assert store.list() == ()


def test_two_loadings_of_one_model_may_share_a_profile(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, make_model: MakeModel
) -> None:
    programs = {name: make_program(clock, model=make_model()) for name in ("a", "b")}

    assert measure(programs, store, rounds=2, clock=clock).backends() == ("a", "b")


def test_an_unbatchable_model_is_refused_before_anything_is_stored(
    store: ProfileStore, clock: VirtualClock, make_program: MakeProgram, make_model: MakeModel
) -> None:
    model = make_model()
    fixed = type("Fixed", (type(model.source),), {"dynamic_batch": False})("aa")
    program = make_program(clock, model=dataclasses.replace(model, source=fixed))

    with pytest.raises(BackendError, match="one sample"):
        measure({"null": program}, store, batches=(1, 4), clock=clock)

    assert store.list() == ()


KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import conftest
from edgewise.backends.null import NullProgram
from edgewise.clock import MonotonicClock
from edgewise.profiles import ProfileStore
from edgewise.profiling import measure

log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def cost_s(unit):
    os.write(log, unit.encode() + b"\\n")
    return 0.0005
program = NullProgram(conftest.make_model(), clock=MonotonicClock(), cost_s=cost_s)
profile = measure({"null": program}, ProfileStore(Path(sys.argv[2])), rounds=int(sys.argv[4]))
print(profile.num_rounds)
"""


def test_kill_9_loses_at_most_the_sample_in_flight_and_a_rerun_goes_on(
    tmp_path: Path, store: ProfileStore
) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable, "-c", textwrap.dedent(KILLED), str(Path(__file__).parent), str(store.path),
        str(log),
    ]  # fmt: skip
    assert edgewise.__file__ is not None
    env = {**os.environ, "PYTHONPATH": str(Path(edgewise.__file__).parents[1])}
    with subprocess.Popen([*command, "40"], env=env) as process:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and process.poll() is None:
            if log.exists() and log.read_text().count("segment:0-3") >= 12:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL

    # Heads and fused segments are never run untimed, except to warm up.
    ran = Counter(log.read_text().split())
    always_timed = [name for name in ran if name.startswith("head") or name[-3:] in {"0-2", "0-3"}]
    with sqlite3.connect(store.path) as connection:
        kept = dict(
            connection.execute(
                "SELECT name, COUNT(*) FROM units JOIN samples USING (unit_id) GROUP BY name"
            ).fetchall()
        )
    connection.close()
    lost = {name: ran[name] - THOROUGH.warmup_rounds - kept[name] for name in always_timed}
    assert len(always_timed) == 5
    assert sorted(lost.values()) in ([0, 0, 0, 0, 0], [0, 0, 0, 0, 1])

    done = subprocess.run([*command, "40"], env=env, capture_output=True, text=True, check=True)
    rounds = int(done.stdout)
    (summary,) = store.list()
    profile = store.get(summary.profile_id)
    for name, count in kept.items():
        unit = UnitKey(name=name, kind=kind_of(name), backend="null")
        assert count < rounds
        assert profile.units[unit].count in {rounds, rounds - 1}  # one round was cut short


def kind_of(name: str) -> Any:
    return name.partition(":")[0]

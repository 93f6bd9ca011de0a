from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.backends.operators import Weights
from edgewise.clock import VirtualClock
from edgewise.device import DeviceFingerprint
from edgewise.errors import BackendError, ConfigError, OpUnsupported, ProfileError
from edgewise.profiles.operators import OperatorShape, OperatorTable
from edgewise.profiles.records import ThreadPolicy
from edgewise.profiling.operator_energy import EnergyMeter
from edgewise.profiling.operators import (
    OperatorEffort,
    OperatorProgress,
    compare,
    copies_beyond_cache,
    expected_s,
    last_cache_bytes,
    measure_operators,
    summarise,
)

torch: Any = pytest.importorskip("torch")

LINEAR = OperatorShape(kind="linear", m=2, k=8, n=8)
NORM = OperatorShape(kind="rmsnorm", m=2, k=8, n=8)
ADD = OperatorShape(kind="add", m=2, k=8, n=8)
MLP = OperatorShape(kind="mlp", m=2, k=8, n=8, function="silu-gated")
BACKENDS = ("torch:cpu", "quick:x", "slow:x")
COSTS_S = {"torch:cpu": 2e-3, "quick:x": 1e-3, "slow:x": 4e-3}
EFFORT = OperatorEffort(samples=12, min_samples=10, switch_rounds=12, energy_pairs=2)


class Program:
    """Doubles its input, in a time of the virtual clock."""

    any_rows = True

    def __init__(self, shape: OperatorShape, backend: str, bench: Bench) -> None:
        self.shape, self.backend, self.bench = shape, backend, bench

    def __call__(self, *inputs: Any) -> Any:
        self.bench.calls.append((self.shape, self.backend, id(self)))
        self.bench.on_call(self)
        self.bench.clock.sleep_s(self.bench.costs_s[self.backend])
        return inputs[0] * 2 + self.bench.errors.get(self.backend, 0.0)


class Bench:
    """Backends that cost what a test says."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.costs_s = dict(COSTS_S)
        self.errors: dict[str, float] = {}
        self.calls: list[tuple[OperatorShape, str, int]] = []
        self.loads: list[tuple[OperatorShape, str, int]] = []
        self.on_call: Callable[[Program], object] = lambda _: None
        self.on_load: Callable[[OperatorShape, str], object] = lambda *_: None

    def load(self, shape: OperatorShape, weights: Weights, backend: str, *, threads: int) -> Any:
        self.on_load(shape, backend)
        self.loads.append((shape, backend, id(weights)))
        assert threads == 1
        return Program(shape, backend, self)

    def measure(self, shapes: Any = (LINEAR,), **fields: Any) -> OperatorTable:
        given: dict[str, Any] = {
            "backends": BACKENDS,
            "effort": EFFORT,
            "device": device("a CPU"),
            "policy": ThreadPolicy(threads=1),
            "find_meter": lambda _: (None, "no meter in a test"),
            "load": self.load,
            "make_weights": lambda *_: Weights(),
            "make_inputs": lambda s, _: (torch.ones(2, 8),) * (2 if s.kind == "add" else 1),
            "clock": self.clock,
            "root": Path("/nowhere"),
        }
        return measure_operators(shapes, **{**given, **fields})


def device(cpu: str) -> DeviceFingerprint:
    return DeviceFingerprint(
        arch="x", cpu_model=cpu, isa=(), cores=2, usable_cores=2, memory_bytes=None, board=None,
        hypervisor=None, os=None, kernel=None,
    )  # fmt: skip


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- what comes out ------------------------------------------------------------------------------


def test_every_shape_is_measured_on_every_backend(bench: Bench) -> None:
    table = bench.measure([LINEAR, NORM, LINEAR])
    medians = {
        (s.kind, b): c.latency.median_s
        for (s, b), c in table.costs.items()
        if c.latency is not None
    }

    assert table.shapes() == (LINEAR, NORM)
    assert medians == pytest.approx(
        {(kind, b): COSTS_S[b] for kind in ("linear", "rmsnorm") for b in BACKENDS}
    )
    assert not table.excluded()
    assert table.provenance == "measured"


def test_what_is_not_dispatched_runs_on_torch_alone(bench: Bench) -> None:
    table = bench.measure([ADD], switches=False)

    assert [b for _, b in table.costs] == ["torch:cpu"]


def test_torch_is_always_measured_since_it_is_the_reference(bench: Bench) -> None:
    assert bench.measure(backends=["quick:x"]).backends() == ("torch:cpu", "quick:x")


def test_each_switch_is_in_the_table_and_costs_nothing_where_nothing_is_lost(bench: Bench) -> None:
    table = bench.measure()

    assert len(table.switches) == 6
    assert all(s.at_s(65536) == pytest.approx(0.0, abs=1e-8) for s in table.switches.values())


def test_all_backends_get_the_same_number_of_samples_within_the_time(bench: Bench) -> None:
    effort = dataclasses.replace(EFFORT, samples=500, min_samples=10, time_cap_s=0.1)
    table = bench.measure(effort=effort, switches=False)
    counts = {c.latency.samples for c in table.costs.values() if c.latency is not None}

    assert len(counts) == 1
    assert 30 <= counts.pop() <= 50  # a round takes 7 ms, led in 8 ms, of 0.3 s


def test_the_least_number_of_samples_is_taken_whatever_the_time(bench: Bench) -> None:
    effort = dataclasses.replace(EFFORT, time_cap_s=1e-9)
    table = bench.measure(effort=effort, switches=False)

    assert {c.latency.samples for c in table.costs.values() if c.latency} == {10}


def test_a_short_operator_is_called_several_times_in_a_sample(bench: Bench) -> None:
    bench.costs_s = dict.fromkeys(BACKENDS, 1e-5)
    latency = bench.measure(switches=False).costs[LINEAR, "quick:x"].latency

    assert latency is not None
    assert latency.calls == pytest.approx(5 * latency.samples)  # of 10 µs in 50 µs
    assert latency.median_s == pytest.approx(1e-5)


def test_backends_take_turns_so_that_drift_hits_all_alike(bench: Bench) -> None:
    def slower_and_slower(_: Program) -> None:
        bench.costs_s = {b: c * 1.01 for b, c in bench.costs_s.items()}

    bench.on_call = slower_and_slower
    table = bench.measure(switches=False)
    quick, slow = (table.costs[LINEAR, b].latency for b in ("quick:x", "slow:x"))

    assert quick is not None
    assert slow is not None
    # One after the other, dozens of calls would lie between them.
    assert slow.median_s / quick.median_s == pytest.approx(4, rel=0.1)


# --- weights -------------------------------------------------------------------------------------


def _weights(shape: OperatorShape, *_: Any) -> Weights:
    return Weights(tensors={"weight": torch.full((shape.n, shape.k), 0.5)})


def test_weights_come_from_memory_because_copies_take_turns(bench: Bench) -> None:
    wide = OperatorShape(kind="linear", m=1, k=8, n=2**20)  # 32 MiB of an unknown cache
    bench.measure([wide], make_weights=_weights, backends=["torch:cpu"], switches=False)
    used = [number for _, _, number in bench.calls]

    assert len(set(used)) == 2
    assert all(a != b for a, b in zip(used[-20:], used[-19:], strict=False))


def test_one_copy_is_called_in_a_loop_when_asked(bench: Bench) -> None:
    wide = OperatorShape(kind="linear", m=1, k=8, n=2**20)
    table = bench.measure([wide], make_weights=_weights, warm_weights=True, switches=False)

    assert len({number for _, b, number in bench.calls if b == "quick:x"}) == 1
    assert "cache" in table.notes["weights"]


def test_shapes_with_the_same_weights_are_loaded_once(bench: Bench) -> None:
    more = dataclasses.replace(LINEAR, m=5)
    bench.measure([LINEAR, more, NORM], switches=False)

    assert [(s, b) for s, b, _ in bench.loads] == [(s, b) for s in (LINEAR, NORM) for b in BACKENDS]


def test_a_backend_of_one_number_of_rows_is_loaded_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "any_rows", False)
    bench.measure([LINEAR, dataclasses.replace(LINEAR, m=5)], switches=False)

    assert len(bench.loads) == 6


def test_subnormal_weights_are_said(bench: Bench) -> None:
    tiny = Weights(tensors={"weight": torch.tensor([1e-40, 1.0])})
    table = bench.measure(make_weights=lambda *_: tiny, switches=False)

    assert "50.00%" in table.notes["subnormal"]
    assert "subnormal" not in bench.measure(make_weights=_weights, switches=False).notes


def test_copies_are_twice_the_cache_together_and_small_ones_have_none() -> None:
    assert copies_beyond_cache(2**20, backends=2, cache_bytes=2**24) == 16
    assert copies_beyond_cache(2**30, backends=2, cache_bytes=2**24) == 1
    assert copies_beyond_cache(1000, backends=2, cache_bytes=2**24) == 1
    assert copies_beyond_cache(2**20, backends=2, cache_bytes=0) == 1


def test_the_cache_is_read_from_the_kernel(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "16M")):
        file = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size"
        file.parent.mkdir(parents=True)
        file.write_text(size + "\n")

    assert last_cache_bytes(tmp_path) == 2**24
    assert last_cache_bytes(tmp_path / "none") == 2**25


# --- failures ------------------------------------------------------------------------------------


def test_a_backend_that_cannot_run_a_shape_is_kept_with_the_reason(bench: Bench) -> None:
    def refuse(shape: OperatorShape, backend: str) -> None:
        if (shape.kind, backend) == ("linear", "slow:x"):
            raise OpUnsupported("slow has no linear")

    bench.on_load = refuse
    table = bench.measure([LINEAR, NORM])

    assert [(c.backend, c.reason) for c in table.excluded()] == [("slow:x", "slow has no linear")]
    assert table.costs[NORM, "slow:x"].usable


def test_wrong_answers_are_kept_and_never_used(bench: Bench) -> None:
    bench.errors = {"quick:x": 2e-3}
    row = bench.measure(switches=False).costs[LINEAR, "quick:x"]

    assert not row.usable
    assert row.latency is None
    assert row.correctness is not None
    assert row.correctness.max_abs == pytest.approx(2e-3, rel=1e-3)
    assert "differ" in row.reason


def test_one_that_fails_while_timed_leaves_the_others(bench: Bench) -> None:
    def fail_later(program: Program) -> None:
        if program.backend == "quick:x" and len(bench.calls) > 30:
            raise BackendError("quick broke")

    bench.on_call = fail_later
    table = bench.measure(switches=False)

    assert [c.reason for c in table.excluded()] == ["quick broke"]
    assert table.costs[LINEAR, "slow:x"].usable


def test_where_torch_itself_fails_no_backend_is_trusted(bench: Bench) -> None:
    def refuse(_: OperatorShape, backend: str) -> None:
        if backend == "torch:cpu":
            raise BackendError("torch broke")

    bench.on_load = refuse
    table = bench.measure(switches=False)

    assert [c.reason for c in table.excluded()] == ["torch broke"] * 3


def test_what_needs_more_memory_than_there_is_is_not_loaded(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2 kB\nMemAvailable: 1 kB\n")
    big = OperatorShape(kind="linear", m=1, k=64, n=64)
    table = bench.measure([big], root=tmp_path, switches=False)

    assert not bench.loads
    assert all("of memory" in c.reason for c in table.excluded())


def test_nothing_to_measure_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="at least one shape"):
        bench.measure([])
    with pytest.raises(ConfigError, match="at least one sample"):
        OperatorEffort(min_samples=0)
    with pytest.raises(ConfigError, match="above zero"):
        OperatorEffort(time_cap_s=0.0)


# --- energy --------------------------------------------------------------------------------------


def test_energy_is_none_with_the_reason_where_there_is_no_meter(bench: Bench) -> None:
    energy = bench.measure(switches=False).costs[LINEAR, "quick:x"].energy

    assert energy.energy_j is None
    assert energy.note == "no meter in a test"


def test_energy_above_idle_comes_from_the_meter_that_covers_the_backend(bench: Bench) -> None:
    # 3 W always, and 2 mJ more for each call.
    meter = EnergyMeter(
        note="a meter",
        kind="counter",
        period_s=0.001,
        read=lambda: 3 * bench.clock.now_s() + 2e-3 * len(bench.calls),
    )
    asked = []

    def find(backend: str) -> tuple[EnergyMeter | None, str]:
        asked.append(backend)
        return meter, "a meter"

    table = bench.measure(find_meter=find)

    assert table.costs[LINEAR, "quick:x"].energy.energy_j == pytest.approx(2e-3)
    assert table.switches["quick:x", "slow:x"].fixed_j == pytest.approx(0.0, abs=1e-9)
    assert asked == ["torch:cpu", "quick:x"]  # once for each device


# --- keeping, going on ---------------------------------------------------------------------------


def test_a_stopped_campaign_keeps_its_rows_and_goes_on_from_there(
    bench: Bench, tmp_path: Path
) -> None:
    journal = tmp_path / "rows"

    def stop(progress: OperatorProgress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="3 rows measured so far are kept"):
        bench.measure([LINEAR, NORM], journal=journal, on_progress=stop)
    bench.calls.clear()
    table = bench.measure([LINEAR, NORM], journal=journal, switches=False)

    assert {s for s, _, _ in bench.calls} == {NORM}
    assert len(table.costs) == 6


def test_known_rows_are_kept_and_only_what_is_missing_is_measured(bench: Bench) -> None:
    known = bench.measure([LINEAR])
    bench.calls.clear()
    table = bench.measure([LINEAR, NORM], known=known, backends=[*BACKENDS])

    assert {s for s, _, _ in bench.calls} == {NORM}
    assert table.costs[LINEAR, "quick:x"] == known.costs[LINEAR, "quick:x"]
    assert table.switches == known.switches


def test_a_row_that_failed_before_is_tried_again(bench: Bench) -> None:
    bench.errors = {"quick:x": 1.0}
    known = bench.measure([LINEAR])
    bench.errors = {}
    table = bench.measure([LINEAR], known=known)

    assert not known.costs[LINEAR, "quick:x"].usable
    assert table.costs[LINEAR, "quick:x"].usable
    assert table.costs[LINEAR, "slow:x"] is known.costs[LINEAR, "slow:x"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": device("another")}, "device"),
        ({"policy": ThreadPolicy(threads=1, affinity=(0,))}, "CPUs 0"),
        ({"state": "beside cpu"}, "beside cpu"),
        ({"effort": dataclasses.replace(EFFORT, samples=99)}, "99 samples"),
        ({"warm_weights": True}, "weights"),
    ],
)
@pytest.mark.parametrize("kept", ["journal", "known"])
def test_rows_of_another_situation_are_not_mixed(
    fields: dict[str, Any], said: str, kept: str, bench: Bench, tmp_path: Path
) -> None:
    journal = tmp_path / "rows"
    known = bench.measure(journal=journal, switches=False)
    again: dict[str, Any] = {"journal": journal} if kept == "journal" else {"known": known}

    with pytest.raises(ProfileError, match=said) as caught:
        bench.measure([LINEAR, NORM], **again, **fields)
    assert "--no-resume" in str(caught.value)


def test_progress_counts_shapes_and_tells_the_time_left(bench: Bench) -> None:
    seen: list[OperatorProgress] = []
    bench.measure([LINEAR, NORM], on_progress=seen.append)

    assert [(p.done, p.total) for p in seen] == [(0, 2), (1, 2), (2, 2)]
    assert seen[0].remaining_s is None
    assert seen[1].remaining_s is not None
    assert seen[1].remaining_s > 0


def test_large_shapes_are_expected_to_take_longer_than_small_ones() -> None:
    large = OperatorShape(kind="linear", m=128, k=2048, n=100_352)

    assert expected_s(large, EFFORT, backends=3) > 50 * expected_s(LINEAR, EFFORT, backends=3)


# --- numbers -------------------------------------------------------------------------------------


def test_statistics_are_those_of_numpy() -> None:
    samples = np.random.default_rng(0).lognormal(-9, 0.3, size=400)
    found = summarise(samples, calls_per_sample=3)

    assert found.median_s == pytest.approx(np.median(samples), rel=1e-5)
    assert found.p99_s == pytest.approx(np.quantile(samples, 0.99), rel=1e-5)
    assert found.std_s == pytest.approx(np.std(samples), rel=1e-5)
    assert found.median_low_s < found.median_s < found.median_high_s
    assert (found.calls, found.samples) == (1200, 400)


def test_too_few_samples_for_an_interval_give_their_own_ends() -> None:
    found = summarise([1.0, 2.0, 4.0])

    assert (found.median_low_s, found.median_high_s) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("shape", "error", "passed"),
    [
        (NORM, 0.9e-5, True),
        (NORM, 3e-5, False),
        (LINEAR, 0.9e-3, True),
        (LINEAR, 3e-3, False),
        (MLP, 0.9e-1, True),  # 1e-3 of the values' scale, which is 100
        (MLP, 3e-1, False),
    ],
    ids=str,
)
def test_the_papers_tolerances_decide(shape: OperatorShape, error: float, *, passed: bool) -> None:
    scale = 100.0 if shape is MLP else 1e-3
    right = torch.full((2, 8), scale)

    found = compare(shape, [right + error], [right])

    assert found.passed is passed
    assert found.max_abs == pytest.approx(error, rel=1e-2)


def test_nan_another_shape_and_a_missing_output_never_pass() -> None:
    right = torch.ones(2, 8)

    assert not compare(LINEAR, [right * torch.nan], [right]).passed
    assert not compare(LINEAR, [torch.ones(2, 7)], [right]).passed
    assert not compare(MLP, [right], [right, right]).passed
    assert not compare(LINEAR, [right * torch.nan], [right * torch.nan]).passed

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.replay import METHODS, missing_shapes, replay
from edgewise.dispatch.trace import Trace
from edgewise.errors import ConfigError, ProfileError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import (
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

BACKENDS = ("torch:cpu", "onnxruntime:CPU", "torch:cuda")
TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=32,
)
OTHER = dataclasses.replace(TINY, name="other", hidden_size=16, num_hidden_layers=3, head_dim=8)
_NAMES = ("mean", "median", "min", "max", "p90", "p95", "p99")


def passes(architecture: Architecture) -> tuple[Trace, ...]:
    return tuple(trace_forward(architecture, length=n) for n in (2, 4))


TRACES = {each.name: passes(each) for each in (TINY, OTHER)}


def make_table(
    *,
    spread: float = 0.0,
    energy: bool = True,
    switch_s: float = 0.2,
    backends: tuple[str, ...] = BACKENDS,
    segments: Callable[[OperatorShape], float] | None = None,
) -> OperatorTable:
    """Costs of about a second, drawn once; what is cheap in time is often dear in energy."""
    rng = np.random.default_rng(3)
    nodes = [n.shape for traces in TRACES.values() for t in traces for n in t.operators]
    parts = [p for traces in TRACES.values() for t in traces for c in t.candidates for p in c.parts]
    shapes = list(dict.fromkeys([*nodes, *(parts if segments is not None else ())]))
    costs = []
    for shape, backend in itertools.product(shapes, backends):
        s, w = rng.lognormal(0, 0.4), rng.lognormal(0, 0.4)
        if shape.is_segment and segments is not None:
            s *= segments(shape)
        latency = LatencySummary(
            **dict.fromkeys((f"{n}_s" for n in _NAMES), s),
            median_low_s=s / (1 + spread),
            median_high_s=s * (1 + spread),
            std_s=0.0,
            calls=1,
            samples=1,
        )
        costs.append(
            OperatorCost(
                shape=shape,
                backend=backend,
                latency=latency,
                correctness=None,
                energy=Energy(energy_j=s * w) if energy else Energy(),
                thread_policy=ThreadPolicy(threads=1),
            )
        )
    switches = [
        SwitchCost(source=a, target=b, fixed_s=switch_s, fixed_j=switch_s if energy else None)
        for a, b in itertools.permutations(backends, 2)
    ]
    return table_of(
        costs,
        switches,
        name="made",
        device_id="here",
        device={},
        thread_policy=ThreadPolicy(threads=1),
        provenance="simulated",
    )


def test_exact_plans_are_never_dearer_than_greedy_or_operator_local_ones() -> None:
    found = replay(TRACES, make_table())

    assert len(found.rows) == 6
    for row in found.rows:
        cost = {m: o.totals.of(row.objective) for m, o in row.outcomes.items()}
        assert tuple(cost) == METHODS
        assert cost["viterbi"] <= min(cost.values()) * (1 + 1e-12)
        assert row.outcomes["viterbi"].exact
        assert row.greedy_gap == pytest.approx(cost["greedy"] / cost["viterbi"] - 1)
        assert row.outcomes["viterbi"].gain.ratio >= 0


def test_the_baseline_is_the_cheapest_single_backend_counted_by_hand() -> None:
    table = make_table()

    row = replay({"tiny": TRACES["tiny"]}, table, objectives=["energy"]).rows[0]

    by_hand = {
        name: sum(
            table.cost(node.shape, name).energy.energy_j or np.nan
            for trace in TRACES["tiny"]
            for node in trace.operators
        )
        for name in BACKENDS
    }
    assert row.baseline == min(by_hand, key=lambda name: by_hand[name])
    assert {n: t.energy_j for n, t in row.statics.items()} == pytest.approx(by_hand)
    assert row.outcomes["static"].gain.ratio == 0


def test_the_mean_gain_weighs_all_models_alike() -> None:
    found = replay(TRACES, make_table(), objectives=["latency"])

    each = [row.outcomes["greedy"].gain.ratio for row in found.of("latency")]
    assert found.means["latency", "greedy"].ratio == pytest.approx(np.mean(each))


def test_costs_that_are_known_exactly_give_no_interval() -> None:
    found = replay(TRACES, make_table(), objectives=["latency"])

    assert found.means["latency", "viterbi"].low is None


def test_an_interval_holds_the_gain_and_narrows_with_the_costs() -> None:
    wide, narrow = (
        replay(TRACES, make_table(spread=spread), objectives=["latency"]).means["latency", "local"]
        for spread in (0.2, 0.02)
    )

    for gain in (wide, narrow):
        assert gain.low is not None
        assert gain.high is not None
        assert gain.low < gain.ratio < gain.high
    assert (wide.high or 0) - (wide.low or 0) > 4 * ((narrow.high or 0) - (narrow.low or 0))


def test_the_best_single_backend_has_no_gain_over_itself_in_any_draw() -> None:
    table = make_table(spread=0.1, backends=BACKENDS[:1])

    gain = replay(TRACES, table, objectives=["latency"]).means["latency", "static"]

    assert gain.low == gain.high == 0.0


def test_one_backend_leaves_nothing_to_choose() -> None:
    found = replay(TRACES, make_table(), backends=["torch:cpu"], objectives=["latency"])

    assert found.backends == ("torch:cpu",)
    assert {o.gain.ratio for row in found.rows for o in row.outcomes.values()} == {0.0}
    assert found.switches("latency", "viterbi") == (0, 0, 0)
    assert found.fewer_switches("latency", "viterbi") is None


def test_without_energy_only_latency_is_judged_and_the_rest_said() -> None:
    table = make_table(energy=False)

    found = replay(TRACES, table)

    assert {row.objective for row in found.rows} == {"latency"}
    assert set(found.left_out) == {"energy", "edp"}
    with pytest.raises(ProfileError, match="energy") as caught:
        replay(TRACES, table, objectives=["edp"])
    assert "--objective latency" in (caught.value.help or "")


def test_segments_that_cost_a_tenth_are_taken_and_counted_in_the_interval() -> None:
    table = make_table(spread=0.1, segments=lambda _: 0.1)

    alone, together = (
        replay(TRACES, table, objectives=["latency"], segments=s).of("latency")
        for s in (False, True)
    )

    for before, after in zip(alone, together, strict=True):
        best = after.outcomes["best"]
        assert best.segments > 0
        assert best.gain.ratio > before.outcomes["viterbi"].gain.ratio + 0.1
        assert before.outcomes["viterbi"].gain == after.outcomes["viterbi"].gain
        assert (best.gain.low or 0) < best.gain.ratio < (best.gain.high or 1)


def test_a_backend_that_cannot_run_everything_is_no_baseline() -> None:
    table = make_table()
    first = TRACES["tiny"][0].operators[0].shape
    costs = {
        key: dataclasses.replace(cost, latency=None, reason="refused")
        if key == (first, "torch:cuda")
        else cost
        for key, cost in table.costs.items()
    }

    found = replay(TRACES, dataclasses.replace(table, costs=costs), objectives=["latency"])

    tiny, other = found.of("latency")
    assert set(tiny.statics) == {"torch:cpu", "onnxruntime:CPU"}
    assert set(other.statics) == set(BACKENDS)
    assert [cost.reason for cost in found.excluded] == ["refused"]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="oracle"):
        replay(TRACES, make_table(), methods=["oracle"])


def test_shapes_that_no_chosen_backend_can_run_are_missing() -> None:
    table = make_table()
    shape = TRACES["tiny"][0].operators[0].shape
    costs = {key: cost for key, cost in table.costs.items() if key != (shape, "torch:cuda")}
    fewer = dataclasses.replace(table, costs=costs)

    assert missing_shapes(TRACES["tiny"], fewer) == ()
    assert missing_shapes(TRACES["tiny"], fewer, backends=["torch:cuda"]) == (shape,)

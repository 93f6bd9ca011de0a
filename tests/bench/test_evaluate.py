from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.null import NullProgram
from edgewise.bench.evaluate import (
    Sample,
    bootstrap,
    compared_policies,
    evaluate,
    make_for_budget,
)
from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError, DataError, ShapeError
from edgewise.exits import PolicyInputs
from edgewise.exits.policies.pabee import patient_exits
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel, Validation
from edgewise.predict import CostTable
from edgewise.report.evaluation import Evaluation

EXITS, CLASSES, NUM = 4, 5, 12
COSTS = CostTable.from_costs([1.0] * EXITS, [0.1] * EXITS)


def answers(seed: int, num: int) -> Validation:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, num)
    logits = rng.normal(size=(EXITS, num, CLASSES))
    for k in range(EXITS):
        logits[k, np.arange(num), labels] += 0.7 * (k + 1)
    return Validation(logits=logits.astype(np.float32), labels=labels)


TEST = answers(1, NUM)


def outline(*, validation: Validation | None = None) -> StagedModel:
    model = outline_model(EXITS, num_classes=CLASSES)
    if validation is None:
        return model
    accuracy = dict(enumerate(validation.accuracy().tolist()))
    return model.with_heads({}, accuracy=accuracy, validation=validation)


class World:
    """A program whose input number n is answered as sample n of the test data."""

    def __init__(self, model: StagedModel, *, slower: Callable[[int], float] | None = None) -> None:
        self.clock = VirtualClock()
        self.asked: list[int] = []
        self.program = NullProgram(
            model, clock=self.clock, cost_s=self._cost_s, logits=self._logits
        )
        self._slower = slower or (lambda _: 1.0)
        self._count = 0

    def _cost_s(self, unit: str) -> float:
        self._count += 1
        kind, _, place = unit.partition(":")
        if kind == "head":
            return 0.1 * self._slower(self._count)
        start, stop = map(int, place.split("-"))
        return (stop - start) * self._slower(self._count)

    def _logits(self, k: int, x: np.ndarray) -> np.ndarray:
        n = int(x[0, 0, 0, 0])
        self.asked.append(n)
        return np.asarray(TEST.logits[k, n][None])


def sample() -> Sample:
    inputs = np.zeros((NUM, 3, 8, 8), dtype=np.float32)
    inputs[:, 0, 0, 0] = np.arange(NUM)
    return Sample(inputs=inputs, labels=TEST.labels, source="made up")


def compare(
    policies: tuple[str, ...] = ("edgewise", "full_depth", "msdnet", "oracle"),
    *,
    model: StagedModel | None = None,
    slower: Callable[[int], float] | None = None,
    **options: Any,
) -> Evaluation:
    world = World(model or outline(validation=answers(0, 80)), slower=slower)
    return evaluate(world.program, COSTS, sample(), policies=policies, clock=world.clock, **options)


def test_the_same_comparison_twice_gives_the_same_numbers() -> None:
    one, two = (
        compare(compared_policies(), budgets=(0.8,), slower=lambda n: 0.8 + 0.4 * (n * 7 % 10) / 10)
        for _ in range(2)
    )

    assert asdict(one) == asdict(two)
    assert one.provenance == "simulated"


def test_there_is_a_row_for_each_policy_at_each_budget() -> None:
    found = compare(budgets=(0.5, 1.0))

    assert [(r.budget_ratio, r.policy) for r in found.rows] == [
        (b, p) for b in (0.5, 1.0) for p in ("edgewise", "full_depth", "msdnet", "oracle")
    ]
    assert found.full_depth_s == pytest.approx(4.1)
    assert [r.budget_s for r in found.rows[::4]] == pytest.approx([2.05, 4.1])
    assert all(r.requests == NUM for r in found.rows)


def test_full_depth_is_judged_by_its_last_exit() -> None:
    row = compare(("full_depth",), budgets=(0.5, 1.1)).rows

    assert [r.dsr.value for r in row] == [0.0, 1.0]
    assert row[0].accuracy is not None
    assert row[0].accuracy.value == pytest.approx(TEST.correct[-1].mean())
    assert [r.accuracy_in_time.value for r in row] == [0.0, row[0].accuracy.value]
    assert [r.mean_depth_ratio.value for r in row] == [1.0, 1.0]
    assert [r.p50_s for r in row] == pytest.approx([4.1, 4.1])


def test_every_head_that_ran_is_counted() -> None:
    model = outline(validation=answers(0, 80))
    inputs = PolicyInputs.of(model, COSTS, segments=frozenset())
    patience = vars(make_for_budget("pabee", inputs, budget_s=8.2))["patience"]

    rows = {r.policy: r for r in compare(("pabee", "full_depth"), model=model, budgets=(2.0,)).rows}

    assert rows["full_depth"].flops_ratio.value == pytest.approx(
        model.flops_to(EXITS - 1) / model.flops
    )
    exits = patient_exits(TEST.logits.argmax(axis=2), patience=patience)
    work = [model.flops_to(int(k), every_head=True) / model.flops for k in exits]
    assert rows["pabee"].flops_ratio.value == pytest.approx(np.mean(work))


def test_each_input_goes_to_every_policy_before_the_next_does() -> None:
    world = World(outline())
    evaluate(
        world.program,
        COSTS,
        sample(),
        policies=("edgewise", "full_depth"),
        budgets=(2.0,),
        clock=world.clock,
    )

    measured = world.asked[-2 * NUM :]
    assert measured == [n for n in range(NUM) for _ in range(2)]


def test_the_order_rotates_so_that_no_policy_is_always_first() -> None:
    world = World(outline())
    evaluate(
        world.program,
        COSTS,
        sample(),
        policies=("fixed", "full_depth"),
        budgets=(2.0,),
        clock=world.clock,
    )

    heads = [unit for unit in world.program.ran if unit.startswith("head:")][-2 * NUM :]
    firsts = heads[::2]
    assert firsts.count("head:0") == firsts.count("head:3") == NUM // 2


def test_the_oracle_is_marked_as_a_bound() -> None:
    found = compare(budgets=(1.0,))

    assert [r.policy for r in found.rows if r.is_bound] == ["oracle"]


def test_the_edge_over_another_policy_is_the_difference_over_the_same_inputs() -> None:
    found = compare(("edgewise", "full_depth"), budgets=(0.5,))

    mine, other = found.rows
    assert mine.edge_over is None
    assert other.edge_over is not None
    assert other.edge_over.value == pytest.approx(
        mine.accuracy_in_time.value - other.accuracy_in_time.value
    )


def test_without_a_meter_there_are_no_joules_and_the_reason_is_kept() -> None:
    found = compare(energy_note="no energy meter covers this machine")

    assert all(r.energy_j is None for r in found.rows)
    assert found.energy_note == "no energy meter covers this machine"


def test_with_a_meter_each_request_is_charged_what_it_used() -> None:
    world = World(outline())
    found = evaluate(
        world.program,
        COSTS,
        sample(),
        policies=("full_depth",),
        budgets=(1.0,),
        clock=world.clock,
        read_energy=lambda: 2.0 * world.clock.now_s(),  # two watts
    )

    assert found.rows[0].energy_j is not None
    assert found.rows[0].energy_j.value == pytest.approx(8.2)


def test_all_leaves_out_who_lacks_validation_logits_and_says_why() -> None:
    found = compare(("edgewise", "msdnet"), model=outline(), skip_unable=True)

    assert found.policies == ("edgewise",)
    assert "validation logits" in found.skipped["msdnet"]


def test_a_named_policy_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ConfigError, match="validation logits"):
        compare(("edgewise", "msdnet"), model=outline())
    with pytest.raises(ConfigError, match="no policy can be compared"):
        compare(("msdnet",), model=outline(), skip_unable=True)


def test_refused_requests_are_late_and_not_judged() -> None:
    world = World(outline())
    found = evaluate(
        world.program, COSTS, sample(), policies=("edgewise",), budgets=(1e-6,), clock=world.clock
    )

    assert found.rows[0].dsr.value == 0.0
    assert found.rows[0].accuracy is not None  # edgewise runs anyway unless told otherwise


@pytest.mark.parametrize("budgets", [(), (0.0,), (-1.0,), (float("nan"),), (0.5, 0.5)])
def test_budgets_that_make_no_sense_are_refused(budgets: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="budget"):
        compare(budgets=budgets)


def test_labels_that_no_class_has_are_refused() -> None:
    world = World(outline())
    wrong = replace(sample(), labels=np.full(NUM, CLASSES))

    with pytest.raises(DataError, match="labels from 0 to 4"):
        evaluate(world.program, COSTS, wrong, policies=("edgewise",))
    with pytest.raises(ShapeError, match="one label for each"):
        evaluate(
            world.program, COSTS, replace(wrong, labels=TEST.labels[:3]), policies=("edgewise",)
        )
    with pytest.raises(DataError, match="no inputs"):
        evaluate(
            world.program,
            COSTS,
            replace(wrong, inputs=wrong.inputs[:0], labels=wrong.labels[:0]),
            policies=("edgewise",),
        )


def test_all_policies_begin_with_the_hero_and_leave_out_who_must_be_told_where() -> None:
    names = compared_policies("all")

    assert names[0] == "edgewise"
    assert "fixed" not in names
    assert {"msdnet", "msdnet_anytime", "pabee", "eenet", "spinn", "bandit", "oracle"} < set(names)


def test_named_policies_are_taken_once_in_their_order() -> None:
    assert compared_policies("pabee, edgewise,pabee") == ("pabee", "edgewise")


@pytest.mark.parametrize("chosen", ["", " , ", "edgwise"])
def test_unknown_or_no_policies_are_refused(chosen: str) -> None:
    with pytest.raises(ConfigError):
        compared_policies(chosen)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        values = (rng.random(100) < 0.7).astype(float)
        weights = rng.multinomial(100, [0.01] * 100, 300)
        found = bootstrap(values, weights)
        covered += found.low <= 0.7 <= found.high

    # Binomial of 200 at 0.95: 181 to 198 with 99.9 %; percentile intervals are a little narrow.
    assert covered >= 178


def test_a_mean_over_some_values_ignores_the_others() -> None:
    weights = np.ones((3, 4), dtype=np.int64)

    found = bootstrap(np.array([1.0, 0.0, 9.0, 9.0]), weights, of=np.array([1.0, 1.0, 0.0, 0.0]))

    assert found.value == 0.5
    assert (found.low, found.high) == (0.5, 0.5)

from __future__ import annotations

from dataclasses import replace

import pytest

from edgewise.dispatch.explain import class_of, explain_phase, say_reason, seconds_by_class
from edgewise.dispatch.plan import REASONS, PhasePlan, Step

LAYER = Step(
    name="model.layers.0.mlp.gate_proj",
    kind="linear",
    backend="openvino:CPU",
    covers=("model.layers.0.mlp.gate_proj",),
    shapes=("linear m=1 k=4 n=8",),
    predicted_s=1e-3,
    switch_s=1e-4,
    predicted_j=2e-3,
    best_other="torch:cpu",
    margin_s=1e-4,
    margin_j=-1e-3,
)


def phase_of(*steps: Step) -> PhasePlan:
    return PhasePlan(
        phase="decode",
        length=1,
        past=0,
        steps=steps,
        predicted_s=2.0,
        predicted_j=3.0,
        best_static="torch:cpu",
        best_static_s=2.0,
        switch_s=0.25,
        fixed_s=0.5,
    )


def numbered(count: int, step: Step = LAYER) -> list[Step]:
    return [
        replace(step, name=step.name.replace(".0.", f".{i}."), covers=(f"{i}",))
        for i in range(count)
    ]


def test_thirty_equal_layers_are_one_row() -> None:
    (row,) = explain_phase(phase_of(*numbered(30)))

    assert (row.name, row.count) == ("model.layers.*.mlp.gate_proj", 30)
    assert row.predicted_s == pytest.approx(30e-3)
    assert row.switch_s == pytest.approx(3e-3)
    assert row.margin_s == pytest.approx(3e-3)
    assert row.margin_ratio == pytest.approx(0.1)
    assert row.text == "torch:cpu takes 10.0 % more"


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "torch:cpu"},
        {"shapes": ("linear m=2 k=4 n=8",)},
        {"best_other": None},
        {"tie": True},
        {"reason": "guard"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_in_anything_are_rows_of_their_own(change: dict[str, object]) -> None:
    steps = [*numbered(3), replace(LAYER, **change)]  # type: ignore[arg-type]

    assert [row.count for row in explain_phase(phase_of(*steps))] == [3, 1]


def test_margins_are_in_what_is_made_small() -> None:
    phase = phase_of(LAYER)

    assert explain_phase(phase, "energy")[0].margin_ratio == pytest.approx(-0.5)
    # d(E L) = E dL + L dE with E = 3 J and L = 2 s of the whole pass.
    edp = (3 * 1e-4 + 2 * -1e-3) / (3 * 1e-3 + 2 * 2e-3)
    assert explain_phase(phase, "edp")[0].margin_ratio == pytest.approx(edp)


def test_unknown_energy_stays_unknown() -> None:
    (row,) = explain_phase(phase_of(LAYER, replace(LAYER, predicted_j=None)))

    assert row.predicted_j is None
    assert row.predicted_s == pytest.approx(2e-3)


def test_every_reason_has_words_that_name_the_other_backend() -> None:
    (row,) = explain_phase(phase_of(LAYER))

    texts = {reason: say_reason(replace(row, reason=reason)) for reason in REASONS}

    assert len(set(texts.values())) == len(REASONS)
    assert all("torch:cpu" in text for reason, text in texts.items() if reason != "only one")


def test_a_segment_says_what_one_by_one_would_cost() -> None:
    (row,) = explain_phase(phase_of(replace(LAYER, one_by_one_s=2e-3, reason="segment")))

    assert row.text == "one piece; torch:cpu takes 10.0 % more; one by one 100.0 % more"


def test_time_by_class_makes_the_total_with_switches_and_what_is_fixed() -> None:
    steps = [*numbered(2), replace(LAYER, kind="rmsnorm", predicted_s=4e-3)]

    found = seconds_by_class(phase_of(*steps))

    assert found == {"fixed": 0.5, "switches": 0.25, "rmsnorm": 4e-3, "linear": 2e-3}
    assert list(found) == ["fixed", "switches", "rmsnorm", "linear"]


def test_only_numbers_between_dots_are_layers() -> None:
    assert class_of("model.layers.12") == "model.layers.*"
    assert class_of("head.norm2") == "head.norm2"

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.device.state import DeviceState, Quantity
from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.dispatch.states import (
    UTILISATION,
    Choice,
    Contended,
    StateChooser,
    StatePlans,
    flips,
    lost_ratio,
    preferences,
    read_state_plans,
    write_state_plans,
)
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.operators import (
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

LINEAR = OperatorShape(kind="linear", m=16, k=576, n=1536)
NORM = OperatorShape(kind="rmsnorm", m=16, k=576, n=576)
TORCH, ORT = "torch:cpu", "onnxruntime:CPU"


def plan(state: str, *, threads: int = 1, model: str = "smollm2-135m") -> DispatchPlan:
    step = Step(
        name="lm_head",
        kind="linear",
        backend=TORCH,
        covers=("lm_head",),
        shapes=(LINEAR.key,),
        predicted_s=1e-3,
    )
    phase = PhasePlan(
        phase="prefill",
        length=16,
        past=0,
        steps=(step,),
        predicted_s=1e-3,
        predicted_j=None,
        best_static=TORCH,
        best_static_s=1e-3,
    )
    return DispatchPlan(
        model=model,
        objective="latency",
        method="best",
        backends=(TORCH, ORT),
        state=state,
        device_id="abc",
        thread_policy=ThreadPolicy(threads=threads),
        provenance="measured",
        table="here",
        phases=(phase,),
    )


PLANS = StatePlans(
    calm=plan("calm", threads=2),
    contended=(
        Contended(plan=plan("one co-runner"), from_cores=0.5),
        Contended(plan=plan("two co-runners"), from_cores=1.5),
    ),
    hysteresis_cores=0.2,
)


def state(at_s: float, ratio: float | None) -> DeviceState:
    read = Quantity.missing("denied", "no permission") if ratio is None else Quantity.ok(ratio)
    return DeviceState(at_s=at_s, quantities={UTILISATION: read})


# --- which plan holds ---


@pytest.mark.parametrize(
    ("cores", "current", "level"),
    [
        (0.0, 0, 0),
        (0.55, 0, 0),
        (0.6, 0, 1),
        (0.45, 1, 1),
        (0.39, 1, 0),
        (5.0, 0, 2),
        (1.45, 2, 2),
        (1.45, 1, 1),
        (0.0, 2, 0),
        (None, 2, 0),
        (math.nan, 1, 0),
        (0.7, 99, 1),
    ],
    ids=[
        "calm",
        "within the hysteresis from below",
        "above it",
        "within the hysteresis from above",
        "below it",
        "two states at once",
        "the busiest stays",
        "the middle stays",
        "back at once",
        "unknown",
        "not a number",
        "no such plan",
    ],
)
def test_the_plan_follows_the_load_with_hysteresis(
    cores: float | None, current: int, level: int
) -> None:
    assert PLANS.level(cores, current=current) == level
    assert PLANS.choose(cores, current=current) is PLANS.plans[level]


@given(
    centre=st.floats(0, 4),
    wobble=st.lists(st.floats(-0.0999, 0.0999), min_size=2, max_size=20),
    current=st.integers(0, 2),
)
def test_a_load_that_wobbles_less_than_the_hysteresis_changes_plans_at_most_once(
    centre: float, wobble: list[float], current: int
) -> None:
    levels = [current]
    for each in wobble:
        levels.append(PLANS.level(centre + each, current=levels[-1]))

    assert len(set(levels[1:])) <= 2
    assert levels[1:] in (sorted(levels[1:]), sorted(levels[1:], reverse=True))


@given(low=st.floats(0, 4), more=st.floats(0, 4), current=st.integers(0, 2))
def test_more_load_never_leads_to_a_calmer_plan(low: float, more: float, current: int) -> None:
    assert PLANS.level(low + more, current=current) >= PLANS.level(low, current=current)


@pytest.mark.parametrize("bounds", [(0.5, 0.5), (1.0, 0.5), (0.05,), (math.inf,)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="expected bounds that rise"):
        StatePlans(
            calm=plan("calm"),
            contended=tuple(Contended(plan=plan("busy"), from_cores=b) for b in bounds),
        )


def test_plans_of_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="plans of one model, found other, smollm2-135m"):
        StatePlans(
            calm=plan("calm"),
            contended=(Contended(plan=plan("busy", model="other"), from_cores=1.0),),
        )


def test_the_chooser_publishes_what_holds_and_why() -> None:
    chooser = StateChooser(PLANS, cores=4, hold_s=0.5)
    assert chooser.plan is PLANS.calm
    assert "no state of the device is known yet" in chooser.chosen.reason

    chooser.on_state(state(1.0, 0.25))

    assert chooser.plan.state == "one co-runner"
    assert chooser.chosen.others_busy_cores == pytest.approx(1.0)
    assert chooser.chosen.reason == "one co-runner: others use 1.00 cores"


def test_the_chooser_holds_a_plan_for_a_while() -> None:
    chooser = StateChooser(PLANS, cores=2, hold_s=0.5)
    for at_s, ratio in ((0.0, 1.0), (0.1, 0.0), (0.4, 0.0)):
        chooser.on_state(state(at_s, ratio))

    assert (chooser.chosen.level, chooser.changes) == (2, 1)
    chooser.on_state(state(0.6, 0.0))
    assert (chooser.chosen.level, chooser.changes) == (0, 2)


def test_a_load_that_becomes_unknown_leads_to_the_calm_plan_with_the_reason() -> None:
    chooser = StateChooser(PLANS, cores=2, hold_s=0.0)
    chooser.on_state(state(0.0, 1.0))
    chooser.on_state(state(1.0, None))

    assert chooser.plan is PLANS.calm
    assert chooser.chosen.reason == "calm: others' load is unknown: no permission"


def test_a_chooser_without_cores_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected cores above zero"):
        StateChooser(PLANS, cores=0)


# --- files ---


def test_plans_for_states_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"

    write_state_plans(PLANS, path)

    assert read_state_plans(path) == PLANS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something"}, "holds no plans for states"),
        ({"format_version": 99}, "has format 99"),
        ({"calm": {}}, "calm is no plan"),
        ({"contended": 7}, "is damaged"),
        ({"hysteresis_cores": "wide"}, "is damaged"),
    ],
    ids=["another file", "newer", "no plan", "no list", "no number"],
)
def test_damaged_files_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "plans.json"
    write_state_plans(PLANS, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(ConfigError, match=message):
        read_state_plans(path)


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    with pytest.raises(ConfigError, match="cannot read the plans"):
        read_state_plans(path)
    write_state_plans(PLANS, path)
    document = json.loads(path.read_text())
    del document["contended"][0]["from_cores"]
    path.write_text(json.dumps(document))

    with pytest.raises(ConfigError, match="no field 'from_cores'"):
        read_state_plans(path)


# --- flips ---


def latency(median_s: float, half_s: float) -> LatencySummary:
    names = [f.name for f in dataclasses.fields(LatencySummary) if f.name.endswith("_s")]
    whole = LatencySummary(**dict.fromkeys(names, median_s), calls=8, samples=8)
    return dataclasses.replace(
        whole, median_low_s=median_s - half_s, median_high_s=median_s + half_s
    )


def table(
    medians_s: Mapping[tuple[OperatorShape, str], float],
    *,
    threads: int = 1,
    half_s: float = 0.1,
    device_id: str = "here",
) -> OperatorTable:
    policy = ThreadPolicy(threads=threads)
    return table_of(
        [
            OperatorCost(
                shape=shape,
                backend=backend,
                latency=latency(median_s, half_s),
                correctness=None,
                energy=Energy(),
                thread_policy=policy,
            )
            for (shape, backend), median_s in medians_s.items()
        ],
        (),
        name="built",
        device_id=device_id,
        device={},
        thread_policy=policy,
        provenance="simulated",
    )


CALM = {(LINEAR, TORCH): 1.0, (LINEAR, ORT): 2.0, (NORM, TORCH): 1.0, (NORM, ORT): 3.0}
BUSY = {(LINEAR, TORCH): 5.0, (LINEAR, ORT): 3.0, (NORM, TORCH): 2.0, (NORM, ORT): 4.0}


def test_a_shape_flips_where_both_orders_are_beyond_the_intervals() -> None:
    (flip,) = flips(table(CALM), table(BUSY))

    assert flip.shape == LINEAR
    assert (flip.calm, flip.contended) == (Choice(TORCH, 1), Choice(ORT, 1))
    assert flip.lost_s == 2.0


@pytest.mark.parametrize(
    ("calm_half_s", "busy_half_s"), [(0.6, 0.1), (0.1, 1.1)], ids=["calm", "contended"]
)
def test_overlapping_intervals_in_either_state_are_a_tie(
    calm_half_s: float, busy_half_s: float
) -> None:
    tables = table(CALM, half_s=calm_half_s), table(BUSY, half_s=busy_half_s)

    assert flips(*tables) == ()
    linear, norm = preferences(*tables)
    assert linear.differs
    assert not linear.certain
    assert not norm.differs


def test_the_number_of_threads_can_flip_as_well() -> None:
    calm = [table({(LINEAR, TORCH): 2.0}), table({(LINEAR, TORCH): 1.0}, threads=2)]
    busy = [table({(LINEAR, TORCH): 2.0}), table({(LINEAR, TORCH): 9.0}, threads=2)]

    (flip,) = flips(calm, busy)

    assert [str(flip.calm), str(flip.contended)] == ["torch:cpu, 2 threads", "torch:cpu, 1 thread"]
    assert (flip.calm_s, flip.contended_s) == ((1.0, 2.0), (9.0, 2.0))


def test_only_choices_that_both_states_have_are_compared() -> None:
    busy = table({(LINEAR, ORT): 3.0})

    (only,) = preferences(table(CALM), busy)

    assert (only.shape, only.calm, only.contended) == (LINEAR, Choice(ORT, 1), Choice(ORT, 1))
    assert preferences(table(CALM), busy, [NORM]) == ()


def test_two_devices_are_not_compared() -> None:
    with pytest.raises(ProfileError, match="one device in two states"):
        flips(table(CALM), table(BUSY, device_id="elsewhere"))


def test_the_loss_counts_each_shape_as_often_as_it_is_run() -> None:
    found = preferences(table(CALM), table(BUSY))

    assert lost_ratio(found) == pytest.approx(2 / 5)
    assert lost_ratio(found, {LINEAR: 2, NORM: 1}) == pytest.approx(4 / 8)
    with pytest.raises(ProfileError, match="no shape"):
        lost_ratio([])

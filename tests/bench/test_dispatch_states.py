from __future__ import annotations

import numpy as np
import pytest

from edgewise.bench.background import Load
from edgewise.bench.dispatch_states import (
    CALM,
    StateTimes,
    cheapest,
    loss,
    measure_states,
    model_shapes,
)
from edgewise.dispatch.states import Choice
from edgewise.errors import BackendUnavailable, ConfigError
from edgewise.profiles.operators import Correctness, OperatorShape

NORM = OperatorShape(kind="rmsnorm", m=2, k=16, n=16)
LINEAR = OperatorShape(kind="linear", m=2, k=16, n=8)
ONE, TWO = Choice("torch:cpu", 1), Choice("torch:cpu", 2)


def times(samples: dict[tuple[OperatorShape, Choice], list[float]]) -> StateTimes:
    return StateTimes(
        state=CALM,
        samples_s={key: np.array(values) for key, values in samples.items()},
        correctness={},
        others_cores=None,
    )


BUILT = times(
    {
        (NORM, ONE): [1.0, 1.0, 1.0, 1.0],
        (NORM, TWO): [2.0, 2.0, 2.0, 2.0],
        (LINEAR, ONE): [4.0, 4.0, 8.0, 4.0],
        (LINEAR, TWO): [2.0, 2.0, 2.0, 2.0],
    }
)


def test_a_small_model_has_its_operators_and_segments_counted() -> None:
    counts = model_shapes("smollm2-135m", (1, 16, 64))

    assert 20 <= len(counts) <= 40
    assert {shape.m for shape in counts} == {1, 16, 64}
    assert {"rmsnorm", "linear", "activation", "mlp", "norm_mlp", "norm_linear", "layer"} == {
        shape.kind for shape in counts
    }
    assert counts[OperatorShape(kind="rmsnorm", m=16, k=576, n=576)] == 61  # 2 a layer, and last


def test_each_number_of_threads_has_a_table_of_its_own() -> None:
    one, two = BUILT.tables(slice(2), spinning=True)

    assert (one.thread_policy.key, two.thread_policy.key) == (
        "1 thread, no spin",
        "2 threads, spin",
    )
    latency = one.cost(LINEAR, "torch:cpu").latency
    assert latency is not None
    assert (latency.median_s, latency.samples) == (4.0, 2)


def test_the_cheapest_choice_may_be_held_to_a_number_of_threads() -> None:
    tables = BUILT.tables()

    assert cheapest(tables) == {NORM: ONE, LINEAR: TWO}
    assert cheapest(tables, threads=1) == {NORM: ONE, LINEAR: ONE}


def test_wrong_answers_are_never_the_cheapest() -> None:
    wrong = Correctness(passed=False, max_abs=1, mean_abs=1, max_rel=1, rtol=1e-4, atol=1e-5)
    spoilt = StateTimes(
        state=CALM,
        samples_s=BUILT.samples_s,
        correctness={(LINEAR, TWO): wrong},
        others_cores=None,
    )

    assert cheapest(spoilt.tables())[LINEAR] == ONE


def test_a_loss_is_of_totals_in_the_same_rounds() -> None:
    ones, best = {NORM: ONE, LINEAR: ONE}, {NORM: ONE, LINEAR: TWO}

    found = loss(BUILT, ones, best, {NORM: 2, LINEAR: 1})

    assert found.ratio == pytest.approx(6 / 4 - 1)
    assert (found.first_s, found.second_s) == (6.0, 4.0)
    assert loss(BUILT, best, best, {}).high == 0.0
    assert loss(BUILT, ones, best, {}, rounds=slice(2, 3)).ratio == pytest.approx(9 / 3 - 1)


def test_operators_are_timed_in_all_states_and_torch_is_put_back() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before = torch.get_num_threads()

    found = measure_states(
        [NORM, LINEAR],
        {"busy": Load("cpu", duty_ratio=0.1, engine="builtin")},
        backends=["torch:cpu"],
        rounds=2,
        passes=1,
        settle_s=0.0,
    )

    assert list(found) == [CALM, "busy"]
    for each in found.values():
        assert set(each.samples_s) == {(NORM, ONE), (LINEAR, ONE)}
        assert all((s > 0).all() and s.shape == (2,) for s in each.samples_s.values())
        assert all(c.passed for c in each.correctness.values())
    assert torch.get_num_threads() == before


def test_campaigns_without_rounds_or_backends_are_refused() -> None:
    pytest.importorskip("torch", reason="torch is not installed")

    with pytest.raises(ConfigError, match="at least one shape"):
        measure_states([NORM], {}, rounds=0)
    with pytest.raises(BackendUnavailable, match="no backend runs operators here"):
        measure_states([NORM], {}, backends=[])

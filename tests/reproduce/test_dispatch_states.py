from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from edgewise.bench.dispatch_states import CALM, StateTimes
from edgewise.dispatch.states import Choice
from edgewise.errors import ConfigError
from edgewise.profiles.operators import OperatorShape
from edgewise.reproduce import Setup, claim_ids
from edgewise.reproduce import dispatch_states as claim

LINEAR = OperatorShape(kind="linear", m=16, k=576, n=1536)
NORM = OperatorShape(kind="rmsnorm", m=16, k=576, n=576)
TORCH, ORT = Choice("torch:cpu", 1), Choice("onnxruntime:CPU", 1)
TORCH_2, ORT_2 = Choice("torch:cpu", 2), Choice("onnxruntime:CPU", 2)
COUNTS = {LINEAR: 3, NORM: 2}
ROUNDS = 24

Medians = Mapping[tuple[OperatorShape, Choice], float]

CALM_S = {
    (LINEAR, TORCH): 4.0, (LINEAR, ORT): 5.0, (LINEAR, TORCH_2): 3.0, (LINEAR, ORT_2): 2.0,
    (NORM, TORCH): 1.0, (NORM, ORT): 2.0, (NORM, TORCH_2): 1.5, (NORM, ORT_2): 2.0,
}  # fmt: skip
BUSY_S = {
    (LINEAR, TORCH): 6.0, (LINEAR, ORT): 5.0, (LINEAR, TORCH_2): 30.0, (LINEAR, ORT_2): 9.0,
    (NORM, TORCH): 1.0, (NORM, ORT): 2.0, (NORM, TORCH_2): 9.0, (NORM, ORT_2): 2.0,
}  # fmt: skip


def times(
    state: str, medians_s: Medians, *, noise: float = 0.01, others: float = 0.1
) -> StateTimes:
    rng = np.random.default_rng(0)
    return StateTimes(
        state=state,
        samples_s={
            key: value * (1 + noise * rng.standard_normal(ROUNDS))
            for key, value in medians_s.items()
        },
        correctness={},
        others_cores=others,
    )


def test_the_claim_is_found_by_its_name() -> None:
    assert "dispatch-states" in claim_ids()


def test_flips_of_backends_and_of_threads_are_told_apart() -> None:
    found = claim.compare_states(times(CALM, CALM_S), times("beside cpu", BUSY_S), COUNTS)

    assert [(f.shape, f.calm, f.contended) for f in found.flips] == [(LINEAR, ORT_2, ORT)]
    assert [(f.shape, f.calm, f.contended) for f in found.one_thread_flips] == [
        (LINEAR, TORCH, ORT)
    ]
    assert found.threads == (2, 1)
    assert found.threads_s[1] == pytest.approx((3 * 4 + 2 * 1, 3 * 5 + 2 * 1), rel=0.02)
    assert found.by_table == pytest.approx((3 * 9 + 2) / (3 * 5 + 2) - 1, rel=0.05)
    assert found.timed.ratio == pytest.approx((3 * 9 + 2) / (3 * 5 + 2) - 1, rel=0.05)
    assert found.timed_one_thread.ratio == pytest.approx((3 * 6 + 2) / (3 * 5 + 2) - 1, rel=0.1)


def test_a_quiet_machine_gets_verdicts_and_a_row_for_each_shape() -> None:
    states = {CALM: times(CALM, CALM_S), "beside cpu": times("beside cpu", BUSY_S, others=1.1)}

    found = claim.report(states, COUNTS, model="built")

    assert [v.holds for v in found.verdicts] == [True, True, True]
    notes = {f.name: f.note for f in found.figures}
    assert notes[f"beside cpu: {NORM.key}"] == "torch:cpu, 1 thread in both"
    assert notes[f"beside cpu: {LINEAR.key}"].endswith("onnxruntime:CPU, 1 thread: flips")
    assert found.details["beside cpu"]["threads"] == [2, 1]
    assert "beside cpu: 1.10 cores" in found.setting["load of others"]


def test_where_nothing_flips_that_is_said() -> None:
    slower = {key: 2 * value for key, value in CALM_S.items()}
    states = {CALM: times(CALM, CALM_S), "beside cpu": times("beside cpu", slower)}

    found = claim.report(states, COUNTS, model="built")

    backends, threads, plan = found.verdicts
    assert (backends.holds, threads.holds, plan.holds) == (False, False, False)
    assert backends.detail == "0 of 2 shapes: none"
    assert plan.detail == "both plans are the same"


def test_noise_is_no_flip() -> None:
    flat = dict.fromkeys(CALM_S, 1.0)
    states = {CALM: times(CALM, flat, noise=0.2), "busy": times("busy", flat, noise=0.2)}

    found = claim.compare_states(states[CALM], states["busy"], COUNTS)

    assert found.flips == found.one_thread_flips == ()
    assert found.threads == (None, None)


def test_a_machine_that_was_not_calm_gets_no_verdict() -> None:
    states = {
        CALM: times(CALM, CALM_S, others=0.9),
        "beside cpu": times("beside cpu", BUSY_S, others=1.7),
    }

    found = claim.report(states, COUNTS, model="built")

    assert [v.holds for v in found.verdicts] == [None, None, None]
    assert any("was not calm (calm: 0.90 cores)" in note for note in found.notes)


def test_one_number_of_threads_leaves_that_question_open() -> None:
    alone = [{k: v for k, v in s.items() if k[1].threads == 1} for s in (CALM_S, BUSY_S)]
    states = {CALM: times(CALM, alone[0]), "beside cpu": times("beside cpu", alone[1])}

    found = claim.report(states, COUNTS, model="built")

    assert [v.holds for v in found.verdicts] == [True, None, True]
    assert found.verdicts[1].detail == "one core only"


def test_one_round_or_two_models_are_refused() -> None:
    short = StateTimes(
        state=CALM, samples_s={(NORM, TORCH): np.ones(1)}, correctness={}, others_cores=0.0
    )
    with pytest.raises(ConfigError, match="at least two rounds, found 1"):
        claim.report({CALM: short}, {}, model="built")
    with pytest.raises(ConfigError, match="expected one model"):
        claim.run(Setup(models=("a", "b")))

from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.bench.dispatch_runs import Pass, Rest, times_of
from edgewise.dispatch.plan import PhasePlan, Step
from edgewise.errors import BackendUnavailable


def step(kind: str, backend: str = "torch:cpu", *, seconds: float = 1e-3) -> Step:
    return Step(
        name=kind,
        kind=kind,  # type: ignore[arg-type]
        backend=backend,
        covers=(kind,),
        shapes=("linear m=1 k=2 n=3",),
        predicted_s=seconds,
        switch_s=1e-4,
    )


def phase(*steps: Step) -> PhasePlan:
    return PhasePlan(
        phase="decode",
        length=1,
        past=4,
        steps=steps,
        predicted_s=0.0,
        predicted_j=None,
        best_static="torch:cpu",
        best_static_s=0.0,
    )


REST = Rest(outside_s=1.0, layers_s=8.0, mlps_s=4.0, layer_call_s=0.1)


def test_operators_alone_leave_the_whole_rest() -> None:
    assert REST.of(phase(step("linear")), num_layers=4) == pytest.approx(1 + 8 + 4)


def test_a_segment_saves_the_rest_of_what_it_covers() -> None:
    found = REST.of(phase(step("layer"), step("norm_mlp"), step("linear")), num_layers=4)

    # One layer of four is covered whole, one MLP of the other three.
    assert found == pytest.approx(1 + 8 * 3 / 4 + 4 * 2 / 4 + 0.1)


def test_a_prediction_is_operators_switches_and_rest() -> None:
    from edgewise.bench.dispatch_runs import predicted

    found = predicted(phase(step("linear"), step("layer")), REST, num_layers=4)

    assert found == pytest.approx(2 * (1e-3 + 1e-4) + 1 + 8 * 3 / 4 + 4 * 3 / 4 + 0.1)


def test_times_have_a_median_within_its_interval() -> None:
    found = times_of([3.0, 1.0, 2.0, 5.0, 4.0])

    assert found.low_s <= found.median_s == 3.0 <= found.high_s


def test_choosing_a_program_takes_next_to_nothing() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from edgewise.bench.dispatch import decision_figures

    found = decision_figures(blocks=5, calls=200)

    assert 0 <= found["decision_p50_s"] < 1e-3


def test_the_papers_operators_are_planned_and_counted() -> None:
    from edgewise.bench.dispatch import planning_figures

    found = planning_figures(rounds=1)

    assert found["viterbi_operators"] == 9584
    assert found["viterbi_9584_s"] > 0


def test_a_peer_that_is_not_here_says_so(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from edgewise.bench.dispatch_peers import open_peer
    from edgewise.bench.dispatch_runs import Runner

    runner = Runner(None, vocabulary=8)

    with pytest.raises(BackendUnavailable, match=r"(?i)aitune"):
        open_peer("AITune", runner, Pass(phase="prefill", length=4), threads=1, folder=tmp_path)

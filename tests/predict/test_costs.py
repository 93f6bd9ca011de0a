from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import ProfileError
from edgewise.predict import CostTable
from edgewise.profiles import Cost, Method, Profile, ThreadPolicy, UnitKey

BACKEND = "onnxruntime:CPU"
SAMPLES_S = {
    "segment:0-1": [1.0, 2.0, 3.0],
    "head:0": [0.1, 0.2, 0.3],
    "segment:1-2": [4.0, 5.0, float("nan")],
    "head:1": [0.4, 0.5, 0.6],
    "segment:0-2": [5.0, 6.0, 7.0],
    "controller": [0.01, 0.02, 0.03],
}


def profile_of(
    samples_s: Mapping[str, list[float]] = SAMPLES_S,
    batches: Mapping[int, float] | None = None,
) -> Profile:
    """A profile of a model of two stages; larger batches are given by their factor."""
    costs = {}
    for batch, factor in {1: 1.0, **(batches or {})}.items():
        for name, values in samples_s.items():
            kind = name.partition(":")[0]
            key = UnitKey(name=name, kind=kind, backend=BACKEND, batch=batch)  # type: ignore[arg-type]
            costs[key] = Cost(unit=key, samples_s=factor * np.array(values))
    return Profile(
        model_id="net",
        model_version="v",
        device_id="d",
        device={},
        thread_policy=ThreadPolicy(threads=1),
        method=Method(
            warmup_rounds=1, clock="c", synchronised=True, interleaved=True, stop_rule="r"
        ),
        provenance="measured",
        created_unix_s=0.0,
        units=costs,
    )


def table(profile: Profile) -> CostTable:
    return CostTable.from_profile(profile, backend=BACKEND, num_exits=2)


def test_a_profile_gives_the_medians_of_every_unit() -> None:
    costs = table(profile_of())

    assert costs.stage_s.tolist() == [2.0, 4.5]
    assert costs.head_s.tolist() == [0.2, 0.5]
    assert costs.segment_s == {(0, 1): 2.0, (1, 2): 4.5, (0, 2): 6.0}
    assert costs.overhead_s == 0.02
    assert costs.provenance == "measured"


def test_samples_are_the_complete_rounds_in_the_order_of_a_request() -> None:
    costs = table(profile_of())

    assert costs.samples.tolist() == [[1.0, 0.1, 4.0, 0.4], [2.0, 0.2, 5.0, 0.5]]
    assert costs.medians.tolist() == [2.0, 0.2, 4.5, 0.5]


@pytest.mark.parametrize("name", ["segment:1-2", "head:0"])
def test_a_unit_that_was_not_measured_is_not_free(name: str) -> None:
    samples_s = {n: v for n, v in SAMPLES_S.items() if n != name}

    with pytest.raises(ProfileError, match=f"no measurement of '{name}'") as caught:
        table(profile_of(samples_s))
    assert caught.value.help == f"edgewise profile net --backend {BACKEND}"


def test_a_backend_that_was_not_measured_is_refused_with_those_that_were() -> None:
    with pytest.raises(ProfileError, match=f"it has {BACKEND}"):
        CostTable.from_profile(profile_of(), backend="openvino:CPU", num_exits=2)


def test_a_profile_without_controller_costs_has_no_overhead() -> None:
    samples_s = {n: v for n, v in SAMPLES_S.items() if n != "controller"}

    assert table(profile_of(samples_s)).overhead_s == 0.0


def test_a_batch_costs_what_was_measured_else_the_next_larger_else_its_size() -> None:
    costs = table(profile_of(batches={2: 1.5, 8: 4.0}))

    assert [costs.batch_factor(b) for b in (1, 2, 4, 8)] == pytest.approx([1.0, 1.5, 4.0, 4.0])
    assert costs.batch_factor(16) == 16.0


def test_a_batch_never_costs_less_than_one_sample() -> None:
    assert table(profile_of(batches={2: 0.5})).batch_factor(2) == 1.0


def test_without_a_measured_batch_the_cost_grows_with_the_size() -> None:
    assert table(profile_of()).batch_factor(4) == 4.0


@settings(deadline=None)  # the machine may be busy
@given(
    stage_s=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_way_to_an_exit_is_its_stages_and_one_head(
    stage_s: list[float], data: st.DataObject
) -> None:
    head_s = [0.1 * (k + 1) for k in range(len(stage_s))]
    costs = CostTable.from_costs(stage_s, head_s)
    exit_index = data.draw(st.integers(0, len(stage_s) - 1))
    position = data.draw(st.integers(0, exit_index + 1))
    expected = sum(stage_s[k] for k in range(position, exit_index + 1)) + head_s[exit_index]

    assert costs.remaining_s(position, exit_index) == pytest.approx(expected)


def test_full_depth_is_the_fused_network_where_it_was_measured() -> None:
    singles = CostTable.from_costs([1.0, 2.0], [0.1, 0.2])
    fused = CostTable.from_costs([1.0, 2.0], [0.1, 0.2], segment_s={(0, 2): 2.5})

    assert singles.full_depth_s() == pytest.approx(3.2)
    assert fused.full_depth_s() == pytest.approx(2.7)


def test_numbers_that_nobody_measured_are_called_estimated() -> None:
    assert CostTable.from_costs([1.0], [0.0]).provenance == "estimated"

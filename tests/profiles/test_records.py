from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ProfileError
from edgewise.profiles import Cost, Method, Profile, ThreadPolicy, UnitKey

ONE_THREAD = ThreadPolicy(threads=1)
METHOD = Method(
    warmup_rounds=3,
    clock="perf_counter_ns",
    synchronised=True,
    interleaved=True,
    stop_rule="median ±2 % or 60 s",
)
STAGE_0 = UnitKey(name="stage:0", kind="stage", backend="null")
STAGE_1 = UnitKey(name="stage:1", kind="stage", backend="null")
HEAD_0 = UnitKey(name="head:0", kind="head", backend="null")


def profile(**changes: Any) -> Profile:
    samples = {
        STAGE_0: [0.001, 0.002, 0.003],
        STAGE_1: [0.010, math.nan, 0.030],
        HEAD_0: [0.0001, 0.0002, 0.0003],
    }
    fields: dict[str, Any] = {
        "model_id": "net",
        "model_version": "aa11",
        "device_id": "board-1",
        "device": {"cpu": "A76", "cores": 4},
        "thread_policy": ONE_THREAD,
        "method": METHOD,
        "provenance": "measured",
        "created_unix_s": 0.0,
        "state": {"load_ratio": 0.1},
        "units": {key: Cost(unit=key, samples_s=np.array(s)) for key, s in samples.items()},
    }
    return Profile(**{**fields, **changes})


def test_a_cost_counts_only_rounds_with_a_sample() -> None:
    cost = profile().cost("stage:1", "null")

    assert cost.count == 2
    assert cost.median_s == 0.020
    assert cost.quantile_s(1.0) == 0.030
    assert cost.present_s.tolist() == [0.010, 0.030]


def test_unknown_energy_is_none_with_a_reason() -> None:
    cost = profile().cost("stage:0", "null")

    assert cost.energy_j is None
    assert cost.energy_note


def test_samples_of_a_cost_cannot_be_changed() -> None:
    given = np.array([1.0, 2.0])
    cost = Cost(unit=STAGE_0, samples_s=given)
    given[0] = 9.0

    assert cost.samples_s[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        cost.samples_s[0] = 9.0


@pytest.mark.parametrize(
    ("samples_s", "reason"),
    [
        ([], "no sample"),
        ([math.nan], "no sample"),
        ([-1.0], "negative"),
        ([math.inf], "infinite"),
        ([[1.0]], "shape"),
    ],
    ids=["empty", "all missing", "negative", "infinite", "a matrix"],
)
def test_impossible_samples_are_refused(samples_s: object, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        Cost(unit=STAGE_0, samples_s=np.array(samples_s))


def test_the_matrix_keeps_rounds_together_and_gaps_open() -> None:
    matrix = profile().matrix(["stage:0", "stage:1"], "null")

    np.testing.assert_array_equal(matrix, [[0.001, 0.010], [0.002, math.nan], [0.003, 0.030]])
    assert profile().matrix([], "null").shape == (3, 0)


def test_sums_use_complete_rounds_only() -> None:
    sums_s = profile().sums_s(["stage:0", "stage:1", "head:0"], "null")

    np.testing.assert_allclose(sums_s, [0.0111, 0.0333], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "backend", "batch", "says"),
    [
        ("stage:0", "nul", 1, "did you mean 'null'"),
        ("stage:7", "null", 1, "did you mean 'stage:"),
        ("stage:0", "null", 8, "measured batch sizes: 1"),
    ],
    ids=["backend", "unit", "batch"],
)
def test_an_unknown_cost_is_named_with_what_is_near(
    name: str, backend: str, batch: int, says: str
) -> None:
    with pytest.raises(ProfileError, match=says):
        profile().cost(name, backend, batch)


def test_backends_and_names_are_sorted() -> None:
    assert profile().backends() == ("null",)
    assert profile().names("null") == ("head:0", "stage:0", "stage:1")


SITUATION: dict[str, Any] = {
    "model_version": "aa11",
    "device_id": "board-1",
    "thread_policy": ONE_THREAD,
}


def test_a_profile_of_this_very_situation_is_usable() -> None:
    profile().check_usable(**SITUATION)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"device_id": "board-2"},
            "is for another device (profile: 'board-1', here: 'board-2')",
        ),
        (
            {"device_id": "board-2", "device": {"cpu": "A55", "cores": 4}},
            "is for another device (profile: 'board-1', here: 'board-2'; cpu: 'A76', here 'A55')",
        ),
        (
            {"thread_policy": ThreadPolicy(threads=4, spinning=True)},
            "is for another thread policy (profile: '1 thread, no spin', here: '4 threads, spin')",
        ),
        (
            {"model_version": "bb22"},
            "is for another model version (profile: 'aa11', here: 'bb22')",
        ),
        (
            {"device_id": "board-2", "model_version": "bb22"},
            "(profile: 'board-1', here: 'board-2') and for another model version",
        ),
    ],
    ids=["device", "device with fields", "threads", "model", "two at once"],
)
def test_a_profile_of_another_situation_is_refused_with_both_values(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ProfileError) as caught:
        profile().check_usable(**{**SITUATION, **change})

    assert says in caught.value.message
    assert caught.value.help == "edgewise profile net"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units": {}}, "no unit"),
        ({"units": {STAGE_1: Cost(unit=STAGE_0, samples_s=np.ones(1))}}, "filed under"),
        (
            {
                "units": {
                    STAGE_0: Cost(unit=STAGE_0, samples_s=np.ones(1)),
                    STAGE_1: Cost(unit=STAGE_1, samples_s=np.ones(2)),
                }
            },
            "number of rounds",
        ),
        (
            {
                "units": {
                    key: Cost(unit=key, samples_s=np.ones(1))
                    for key in (STAGE_0, dataclasses.replace(STAGE_0, kind="segment"))
                }
            },
            "two units",
        ),
    ],
    ids=["empty", "misfiled", "rounds differ", "one name twice"],
)
def test_a_profile_that_contradicts_itself_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        profile(**change)


def test_the_digest_is_the_same_for_the_same_content() -> None:
    reordered = dict(reversed(list(profile().units.items())))

    assert profile().digest() == profile(units=reordered, created_unix_s=0).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model_version": "bb22"},
        {"provenance": "simulated"},
        {"state": {"load_ratio": 0.2}},
        {"units": {STAGE_0: Cost(unit=STAGE_0, samples_s=np.array([0.001, 0.002, 0.003]))}},
    ],
    ids=["version", "provenance", "state", "units"],
)
def test_the_digest_changes_with_every_part(change: dict[str, Any]) -> None:
    assert profile(**change).digest() != profile().digest()


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ProfileError, match="JSON values only"):
        profile(device={"load": math.nan}).digest()


def test_an_affinity_is_a_set_of_cpus() -> None:
    one = ThreadPolicy(threads=2, affinity=(3, 1, 3))

    assert one == ThreadPolicy(threads=2, affinity=(1, 3))
    assert one.key == "2 threads, no spin, CPUs 1 3"


@pytest.mark.parametrize(
    "fields", [{"threads": 0}, {"threads": 1, "affinity": ()}], ids=["no thread", "no cpu"]
)
def test_an_impossible_thread_policy_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ThreadPolicy(**fields)


@pytest.mark.parametrize(
    "change",
    [{"kind": "stages"}, {"name": ""}, {"backend": ""}, {"batch": 0}],
    ids=["kind", "name", "backend", "batch"],
)
def test_an_impossible_unit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unit"):
        dataclasses.replace(STAGE_0, **change)


def test_an_unknown_provenance_is_refused() -> None:
    with pytest.raises(ValueError, match="guessed"):
        profile(provenance="guessed")

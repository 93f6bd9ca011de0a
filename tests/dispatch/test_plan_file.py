from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.dispatch.plan_file import plan_from_json, plan_to_json, read_plan, write_plan
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.records import ThreadPolicy

STEP = Step(
    name="lm_head",
    kind="linear",
    backend="torch:cpu",
    covers=("lm_head",),
    shapes=("linear m=1 k=4 n=8",),
    predicted_s=1e-3,
    predicted_j=None,
    best_other="openvino:CPU",
    margin_s=2e-4,
)
PLAN = DispatchPlan(
    model="m",
    objective="latency",
    method="best",
    backends=("torch:cpu", "openvino:CPU"),
    state="calm",
    device_id="d",
    thread_policy=ThreadPolicy(threads=1, affinity=(0, 1)),
    provenance="simulated",
    table="t",
    phases=(
        PhasePlan(
            phase="decode",
            length=1,
            past=3,
            steps=(STEP,),
            predicted_s=1e-3,
            predicted_j=None,
            best_static="torch:cpu",
            best_static_s=1e-3,
            static_s={"torch:cpu": 1e-3},
        ),
    ),
    notes={"switches": "between neighbours"},
)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    write_plan(PLAN, path)

    assert read_plan(path) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_infinity_survives_json() -> None:
    phase = replace(PLAN.phases[0], best_static="", best_static_s=math.inf)
    plan = replace(PLAN, phases=(phase,))

    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan), allow_nan=False))) == plan


def test_a_folder_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot write the plan"):
        write_plan(PLAN, tmp_path / "nowhere" / "plan.json")


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(PLAN, path)
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")

    with pytest.raises(ConfigError, match="not one whole JSON document"):
        read_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the plan .*No such file"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize("field", sorted(plan_to_json(PLAN)))
def test_a_missing_field_is_refused(field: str) -> None:
    document = {k: v for k, v in plan_to_json(PLAN).items() if k != field}

    with pytest.raises(ConfigError, match=r"no plan of dispatch|plan format None|no field"):
        plan_from_json(document)


@pytest.mark.parametrize("part", ["phase", "step"])
def test_a_field_that_is_missing_inside_is_refused(part: str) -> None:
    plain = json.loads(json.dumps(plan_to_json(PLAN)))
    target = plain["phases"][0] if part == "phase" else plain["phases"][0]["steps"][0]
    for field in list(target):
        value = target.pop(field)
        with pytest.raises(ConfigError, match=f"the plan has no field '{field}'"):
            plan_from_json(plain)
        target[field] = value
    assert plan_from_json(plain) == PLAN


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        pytest.param(("format_version",), 2, "plan format 2; this Edgewise reads 1", id="newer"),
        pytest.param(("format",), "edgewise-profile", "is no plan of dispatch", id="another kind"),
        pytest.param(("phases",), [], "it has no phases", id="no phases"),
        pytest.param(("objective",), "speed", "objective is 'speed'", id="objective"),
        pytest.param(("backends",), "torch:cpu", "backends as a list", id="no list"),
        pytest.param(("thread_policy", "threads"), 0, "at least one thread", id="no thread"),
        pytest.param(("phases", 0, "phase"), "train", "phase is 'train'", id="phase"),
        pytest.param(("phases", 0, "length"), 0, "length as a whole number >= 1", id="length"),
        pytest.param(("phases", 0, "predicted_s"), None, "predicted_s as a finite", id="no time"),
        pytest.param(("phases", 0, "predicted_s"), math.nan, "predicted_s as a finite", id="NaN"),
        pytest.param(("phases", 0, "steps", 0, "kind"), "conv", "kind is 'conv'", id="kind"),
        pytest.param(("phases", 0, "steps", 0, "reason"), "luck", "reason is 'luck'", id="reason"),
        pytest.param(("phases", 0, "steps", 0, "covers"), [], "covers no operator", id="empty"),
        pytest.param(("phases", 0, "steps", 0, "shapes"), ["x"], "no key of an", id="shape"),
        pytest.param(("phases", 0, "steps", 0), 7, "is damaged", id="no step"),
    ],
)
def test_a_wrong_field_is_refused(path: tuple[Any, ...], value: object, said: str) -> None:
    document = copy.deepcopy(json.loads(json.dumps(plan_to_json(PLAN))))
    *above, last = path
    target = document
    for key in above:
        target = target[key]
    target[last] = value

    with pytest.raises(ConfigError, match=said):
        plan_from_json(document)


@pytest.mark.parametrize("document", [None, [], "plan", {}])
def test_what_is_no_object_is_no_plan(document: object) -> None:
    with pytest.raises(ConfigError, match="is no plan of dispatch"):
        plan_from_json(document)

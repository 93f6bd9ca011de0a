from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edgewise.errors import ConfigError, EdgeError, ProfileError
from edgewise.placement.workload import Rate, Workload, load_workload
from edgewise.placement.workload_schema import SCHEMA, workload_schema
from edgewise.profiles.partition import PartitionProfile, write_partition_profile

GOOD = """\
[device]
accelerator = "coral-usb"
cores = 2
objective = "weighted"
residency = "best"
horizon_s = 30
seed = 7

[[tenant]] # the door
name = "door"
model = "door"
profile = "door.json"
rate = 5
budget = "50 ms"
weight = 2
priority = 1

[[tenant]]
name = "plate"
model = "plate.onnx"
[tenant.rate]
kind = "stepped"
steps = [[0, 1], [10, 3], [20, 0]]

[[tenant]]
name = "yard"
model = "plate.onnx"
rate = {kind = "trace", file = "yard.txt"}
"""


def make_profile(model: str, *, accelerator: str = "coral-usb") -> PartitionProfile:
    return PartitionProfile(
        model_id=model,
        cuts=("x", "a", "y"),
        depth_ratio=np.array([0, 0.5, 1]),
        prefix_bytes=np.array([0, 2e6, 4e6]),
        boundary_bytes=np.array([1e4, 1e4, 1e3]),
        accelerator_s=np.array([0, 1e-3, 2e-3]),
        threads=(1, 2),
        cpu_s=np.array([[0.02, 0.012], [0.01, 0.006], [0, 0]]),
        accelerator=accelerator,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_partition_profile(make_profile("door"), tmp_path / "door.json")
    write_partition_profile(make_profile("plate"), tmp_path / "plate.partition.json")
    write_partition_profile(make_profile("odd", accelerator="npu"), tmp_path / "odd.json")
    (tmp_path / "plate.onnx").write_bytes(b"not read by the planner")
    (tmp_path / "yard.txt").write_text("# seconds\n0.5\n1.0\n2.0\n")
    (tmp_path / "back.txt").write_text("1.0\n0.5\n")
    return tmp_path


def load(folder: Path, text: str) -> Workload:
    path = folder / "shop.toml"
    path.write_text(text, encoding="utf-8")
    return load_workload(path)


def test_a_workload_becomes_records(folder: Path) -> None:
    found = load(folder, GOOD)
    assert found.name == "shop"
    assert found.accelerator is not None
    assert found.accelerator.name == "coral-usb"
    assert (found.cores, found.objective, found.horizon_s, found.seed) == (2, "weighted", 30, 7)
    assert found.residencies == ("switch", "pinned")
    door, plate, yard = found.tenants
    assert (door.model, plate.model) == (None, folder / "plate.onnx")
    assert (door.budget_s, door.weight, door.priority) == (0.05, 2, 1)
    assert plate.rate.steps == ((0, 1), (10, 3), (20, 0))
    assert yard.rate.instants_s == (0.5, 1, 2)
    assert found.phases_s == (0, 10, 20)


def test_the_planner_gets_rates_deadlines_and_burstiness(folder: Path) -> None:
    problem = load(folder, GOOD).problem()
    assert list(problem.rates) == [5, 1, 1.5]
    assert problem.residency == "switch"
    assert problem.tenants[0].deadline_s == 0.05
    assert problem.tenants[2].arrival_cv2 == pytest.approx(1 / 9)  # gaps of 0.5 and 1 s


def test_rates_follow_the_steps_and_may_be_replaced(folder: Path) -> None:
    found = load(folder, GOOD)
    assert found.rates_per_s(15) == (5, 3, 1.5)
    assert found.rates_per_s(25)[1] == pytest.approx(0.03)  # silent: 1 % of its highest rate
    assert found.rates_per_s(instead={"door": 9}) == (9, 1, 1.5)
    with pytest.raises(ConfigError, match="did you mean 'door'"):
        found.rates_per_s(instead={"dor": 9})


def test_a_workload_may_plan_for_the_cpu_alone(folder: Path) -> None:
    found = load(folder, GOOD.replace('"coral-usb"', '"none"'))
    assert found.accelerator is None
    assert found.residencies == ("switch",)
    assert list(found.problem().last) == [0, 0, 0]


@pytest.mark.parametrize("jitter", [0.0, 0.3, 1.0])
def test_jitter_of_a_camera_gives_a_sixth_of_its_square(jitter: float) -> None:
    draws = np.random.default_rng(0).random(200_000)
    gaps = np.diff(np.arange(len(draws)) + jitter * draws)
    rate = Rate(kind="periodic", per_s=10, jitter_ratio=jitter)
    assert rate.arrival_cv2 == pytest.approx(gaps.var() / gaps.mean() ** 2, rel=0.02, abs=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("cores = 2", "coers = 2", 3, "did you mean 'cores'"),
        ("cores = 2", "cores = 0", 3, "of at least 1"),
        ("cores = 2", "cores = true", 3, "expected cores as whole number"),
        ("cores = 2", 'cores = "two"', 3, "found 'two'"),
        ("cores = 2\n", "", 1, "the key 'cores' is missing"),
        ('"weighted"', '"wieghted"', 4, "did you mean 'weighted'"),
        ('"weighted"', '"deadline-miss"', None, ""),  # there is a budget: allowed
        ("horizon_s = 30", "horizon_s = inf", 6, "horizon_s"),
        ('"coral-usb"', '"coral-ubs"', 2, "did you mean 'coral-usb'"),
        ("rate = 5", "rate = 0", 13, "leave it out"),
        ("rate = 5", "rate = -1.5", 13, "found -1.5"),
        ("rate = 5", "rate = nan", 13, "found nan"),
        ("rate = 5", "rate = {kind = 'steady', per_s = 5}", 13, "unknown kind 'steady'"),
        ("rate = 5", "rate = {kind = 'periodic'}", 13, "needs the key 'per_s'"),
        ("rate = 5", "rate = {per_s = 5, jitter_ratio = 0.1}", 13, "it has per_s"),
        ("rate = 5", "rate = {kind='periodic', per_s=5, jitter_ratio=2}", 13, "at most 1"),
        ("rate = 5", "rate = {kind = 'trace', file = 'back.txt'}", 13, "back.txt, line 2"),
        ("rate = 5", "rate = {kind = 'trace', file = 'none.txt'}", 13, "cannot read the trace"),
        ('budget = "50 ms"', "budget = 50", 14, "with its unit in quotes"),
        ('budget = "50 ms"', 'budget = "50"', 14, "has no unit"),
        ('budget = "50 ms"', "exits = true", 14, "early exits need a budget"),
        ("weight = 2", "wait = 2", 15, "did you mean 'weight'"),
        ("priority = 1", "priority = 1.5", 16, "whole number"),
        ('profile = "door.json"', 'profile = "odd.json"', 12, "accelerator 'npu'"),
        ('name = "plate"', 'name = "door"', 19, "two tenants are called 'door'"),
        ('model = "plate.onnx"\n[', 'model = "plates.onnx"\n[', 20, "there is no file"),
        ("[[0, 1], [10, 3]", "[[1, 1], [10, 3]", 23, "rise from 0 s"),
        ("[[0, 1], [10, 3]", "[[0, 1], [10, 'x']", 23, "found [10, 'x']"),
        ("[device]", "[devise]", 1, "did you mean 'device'"),
        ("[[tenant]] #", "[[tenants]] #", 9, "did you mean 'tenant'"),
    ],
)
def test_a_bad_key_is_named_with_its_line(
    folder: Path, old: str, new: str, line: int | None, says: str
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if line is None:
        load(folder, text)
        return
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    assert f"shop.toml, line {line}: " in caught.value.message
    assert says in str(caught.value)


def test_a_missing_profile_names_the_command_that_makes_it(folder: Path) -> None:
    (folder / "plate.partition.json").unlink()
    with pytest.raises(ProfileError, match="line 20") as caught:
        load(folder, GOOD)
    assert caught.value.help is not None
    assert "--segments --export" in caught.value.help


def test_an_unknown_profile_is_told_with_its_line(folder: Path) -> None:
    with pytest.raises(ProfileError, match=r"shop\.toml, line 12: no partition profile ships"):
        load(folder, GOOD.replace('"door.json"', '"doors.json"'))


def test_a_damaged_profile_says_where_it_was_asked_for(folder: Path) -> None:
    (folder / "door.json").write_text('{"format": "something else"}')
    with pytest.raises(ProfileError, match=r"line 12: .*door\.json is no partition profile"):
        load(folder, GOOD)


@pytest.mark.parametrize(
    "text",
    ["", "[device", "device = 3", "[device]\naccelerator = 'none'\ncores = 1\n", "tenant = []"],
)
def test_what_is_no_workload_is_refused_in_words(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"shop\.toml"):
        load(folder, text)


def test_a_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.toml", tmp_path / "binary.toml"):
        with pytest.raises(EdgeError, match="cannot read the workload"):
            load_workload(path)


def test_the_schema_tells_every_key() -> None:
    text = workload_schema()
    for keys in SCHEMA.values():
        for key in keys:
            assert re.search(rf"^\| `{key}` \|", text, re.MULTILINE)


def test_a_networks_own_profile_beside_the_workload_goes_before_the_shipped_one(
    folder: Path,
) -> None:
    text = GOOD.replace('model = "door"\nprofile = "door.json"', 'model = "squeezenet"')
    shipped = load(folder, text).tenants[0]
    assert shipped.model is None
    assert shipped.model_name == "squeezenet"
    assert shipped.profile.model_id == "squeezenet"
    write_partition_profile(make_profile("measured"), folder / "squeezenet.partition.json")
    assert load(folder, text).tenants[0].profile.model_id == "measured"

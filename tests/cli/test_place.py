from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgewise.cli.main import main
from edgewise.cli.place import plan_workload
from edgewise.placement.plan import read_shares
from edgewise.placement.workload import load_workload
from edgewise.profiles.partition import PartitionProfile, write_partition_profile

WORKLOAD = """\
[device]
accelerator = "coral-usb"
cores = 2

[[tenant]]
name = "door"
model = "small.json"
rate = 10
budget = "50 ms"

[[tenant]]
name = "plate"
model = "large.json"
[tenant.rate]
kind = "stepped"
steps = [[0, 1], [30, 4]]
"""


def make_profile(name: str, weight_bytes: float, cpu_s: float, places: int) -> PartitionProfile:
    depth = np.linspace(0, 1, places + 1)
    return PartitionProfile(
        model_id=name,
        cuts=("input", *(f"block{p}/add" for p in range(1, places)), "answer"),
        depth_ratio=depth,
        prefix_bytes=weight_bytes * depth**2,
        boundary_bytes=np.full(places + 1, 1e4),
        accelerator_s=0.1 * cpu_s * depth,
        cpu_s=cpu_s * (1 - depth[:, None]),
        accelerator="coral-usb",
        accelerator_provenance="simulated",
    )


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    write_partition_profile(make_profile("small", 4e6, 0.03, 3), tmp_path / "small.json")
    write_partition_profile(make_profile("large", 40e6, 0.2, 5), tmp_path / "large.json")
    path = tmp_path / "shop.toml"
    path.write_text(WORKLOAD, encoding="utf-8")
    return path


def test_a_plan_is_shown_with_predictions_and_what_else_there_is(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", str(workload)]) == 0
    out = capsys.readouterr().out
    for words in (
        "shop: coral-usb (models switch) and 2 cores; objective mean",
        "what other methods would give",
        "compiler",
        "as rates change",
        "30 s",
        "accelerator busy",
        "accelerator simulated, CPU measured",
    ):
        assert words in out
    tables = [line for line in out.splitlines() if "shop:" not in line and "from costs" not in line]
    assert max(map(len, tables)) <= 80


def test_reasons_are_given_on_demand(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", str(workload), "--explain", "--rates", "plate=3"]) == 0
    out = capsys.readouterr().out
    assert "the best other place" in out
    assert "what binds: " in out
    assert "as rates change" not in out  # rates were given


def test_json_holds_everything_the_tables_show(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", str(workload), "--json", "--explain"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [s["tenant"] for s in found["placement"]["shares"]] == ["door", "plate"]
    assert found["mean_s"] > 0
    assert [p["from_s"] for p in found["phases"]] == [0, 30]
    assert found["phases"][0]["mean_s"] == pytest.approx(found["mean_s"])
    assert len(found["explanation"]["tenants"]) == 2
    assert "compiler" in {p["method"] for p in found["alternatives"]}
    assert set(found["costs_are"]) == {"door", "plate"}


@pytest.mark.parametrize("method", ["best", "multi-start"])
def test_the_better_residency_is_taken_where_it_is_left_open(workload: Path, method: str) -> None:
    scores = {}
    for residency in ("switch", "pinned", "best"):
        text = WORKLOAD.replace("cores = 2", f'cores = 2\nresidency = "{residency}"')
        workload.write_text(text, encoding="utf-8")
        problem, plan = plan_workload(load_workload(workload), method=method)
        scores[residency] = plan.score
        assert problem.residency == plan.residency
        assert residency in ("best", plan.residency)
    assert scores["best"] == pytest.approx(min(scores["switch"], scores["pinned"]), rel=1e-6)


def test_a_written_plan_can_be_read_for_the_same_workload(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["place", str(workload), "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["placement"]
    read = read_shares(out, load_workload(workload).problem())
    assert list(read.places) == [s["place"] for s in shown["shares"]]
    assert read.score == pytest.approx(shown["score"])


def test_rates_that_nothing_keeps_up_with_show_the_closest_plan(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    command = ["place", str(workload), "--rates", "plate=300", "--out", str(out)]
    assert main(command) == 5
    said = capsys.readouterr()
    assert "∞" in said.out
    assert "no other method has a plan that keeps up" in said.out
    assert "% busy" in said.err
    assert "of all rates would be feasible: door" in said.err
    assert not out.exists()


def test_more_tenants_than_cores_without_an_accelerator_say_what_would_help(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = WORKLOAD.replace('"coral-usb"', '"none"').replace("cores = 2", "cores = 1")
    workload.write_text(text, encoding="utf-8")
    assert main(["place", str(workload)]) == 5
    assert "add cores, an accelerator or fewer tenants" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rates", "door"], "NAME=RATE"),
        (["--rates", "door=-1"], "above zero"),
        (["--rates", "dor=1"], "did you mean 'door'"),
        (["--method", "exakt"], "did you mean 'exact'"),
        (["--figure", "plan.bmp"], "end it in .png"),
    ],
)
def test_a_bad_option_is_refused_in_words(
    workload: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", str(workload), *options]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_bad_file_is_refused_with_its_line(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload.write_text(WORKLOAD.replace("rate = 10", "rate = 0"), encoding="utf-8")
    assert main(["place", str(workload)]) == 2
    assert "shop.toml, line 8: " in capsys.readouterr().err


def test_the_figure_shows_places_over_rates(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = tmp_path / "places.svg"
    assert main(["place", str(workload), "--figure", str(figure)]) == 0
    assert f"figure: {figure}" in capsys.readouterr().err
    assert "<svg" in figure.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["cameras", "changing_rates"])
def test_the_examples_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "workloads" / f"{name}.toml"
    assert main(["place", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"]["stable"]

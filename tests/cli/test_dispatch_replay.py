from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from edgewise.cli.main import main
from edgewise.profiles.operator_file import write_operator_table
from edgewise.profiles.operator_tables import load_operator_table
from edgewise.profiles.operators import Energy, OperatorTable

ARGUMENTS = ["dispatch", "replay", "--table", "jetson-like"]


@pytest.fixture(name="small", scope="module")
def one_model_of_the_table() -> OperatorTable:
    """Rows of the smallest model alone, as if they had been measured on another machine."""
    from edgewise.dispatch.forward import paper_traces
    from edgewise.model.transformer import load_architecture

    table = load_operator_table("jetson-like")
    traces = paper_traces(load_architecture("smollm2-135m"))
    shapes = {node.shape for trace in traces for node in trace.operators}
    costs = {key: cost for key, cost in table.costs.items() if key[0] in shapes}
    return dataclasses.replace(table, costs=costs, provenance="measured", device_id="elsewhere")


def test_json_has_gains_switches_and_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*ARGUMENTS, "smollm2-135m", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["provenance"] == "simulated"
    assert [row["objective"] for row in found["rows"]] == ["latency", "energy", "edp"]
    for row in found["rows"]:
        methods = row["methods"]
        gains = [methods[m]["gain"]["ratio"] for m in ("local", "greedy", "viterbi")]
        assert gains == sorted(gains)
        assert row["instances"] == 1510
        assert row["greedy_gap_ratio"] >= 0
    assert found["fewer_switches_ratio"]["latency"]["viterbi"] > 0.15


def test_the_table_names_the_baseline_and_counts_three_kinds_of_switches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    csv = tmp_path / "replay.csv"
    asked = ["--objective", "latency", "--rule", "paper", "--csv", str(csv)]

    code = main([*ARGUMENTS, "modernbert-base", *asked])

    out = capsys.readouterr().out
    assert code == 0
    assert "simulated: a stated model" in out
    assert "backend / device / framework" in out
    assert "724" in out  # the paper's count of this model
    assert len(csv.read_text().splitlines()) == 1 + 4


def test_one_backend_is_said_to_leave_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*ARGUMENTS, "smollm2-135m", "--backends", "torch:cpu"])

    out = capsys.readouterr().out
    assert code == 0
    assert "nothing to choose" in out
    assert "greedy" not in out


def test_models_that_a_table_lacks_are_left_out_and_its_device_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, small: OperatorTable
) -> None:
    path = tmp_path / "small.json"
    write_operator_table(small, path)

    code = main(["dispatch", "replay", "--table", str(path), "--objective", "latency"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.count("left out: ") == 6
    assert "is of device elsewhere" in out


def test_rows_without_a_number_are_listed_and_unknown_energy_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, small: OperatorTable
) -> None:
    (key, first), *rest = small.costs.items()
    broken = dataclasses.replace(first, latency=None, reason="it gave NaN", energy=Energy())
    others = {k: dataclasses.replace(c, energy=Energy()) for k, c in rest}
    path = tmp_path / "broken.json"
    write_operator_table(dataclasses.replace(small, costs={key: broken, **others}), path)

    code = main(["dispatch", "replay", "smollm2-135m", "--table", str(path)])

    out = capsys.readouterr().out
    assert code == 0
    assert "1 row of the table that no plan uses" in out
    assert "it gave NaN" in out
    assert "no edp: " in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["smolm"], 2, "smollm2-135m"),
        (["smollm2-135m", "--objective", "speed"], 2, "expected latency, energy, edp or all"),
        (["smollm2-135m", "--rule", "mine"], 2, "expected clean or paper"),
        (["smollm2-135m", "--backends", "tpu"], 2, "no cost on backend 'tpu'"),
        (["smollm2-135m", "--table", "jetson"], 3, "jetson-like"),
    ],
    ids=["model", "objective", "rule", "backend", "table"],
)
def test_a_word_that_is_not_known_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert main([*ARGUMENTS, *arguments]) == code
    assert said in capsys.readouterr().err

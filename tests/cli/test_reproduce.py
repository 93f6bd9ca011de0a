from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgewise.cli import main as cli
from edgewise.cli.reproduce import reproduction_table
from edgewise.report.chart import Chart, Series
from edgewise.reproduce import Figure, Reproduction, Verdict, claim_ids, uniexit_table6


def test_the_claims_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list", "--json"]) == 0

    assert list(json.loads(capsys.readouterr().out)["claims"]) == list(claim_ids())


def test_an_unknown_claim_gets_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "uniexit-tabel6"]) == 2
    assert "uniexit-table6" in capsys.readouterr().err


def test_without_a_name_the_list_is_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce"]) == 2
    assert "--list" in capsys.readouterr().err


def test_a_count_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "uniexit-table6", "--limit", "0"]) == 2
    assert "--limit" in capsys.readouterr().err


def test_a_claim_is_one_object_with_its_verdicts(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "uniexit-table6", "--quick", "--model", str(checkpoint)]
    assert cli.main([*arguments, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["claim"] == "uniexit-table6"
    assert found["holds"] is True
    assert found["figures"][0]["paper"] == 418.8

    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "ours, estimated" in shown
    assert "holds: LLaMA 3.2-1B" in shown


def test_a_claim_that_does_not_hold_is_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Reproduction(
        title="t",
        source="s",
        setting={"ours": "here"},
        figures=(),
        verdicts=(Verdict(claim="it is so", holds=False, detail="it is not"),),
    )
    monkeypatch.setattr(uniexit_table6, "run", lambda _: failed)

    assert cli.main(["reproduce", "uniexit-table6"]) == 1
    assert "does not hold: it is so: it is not" in capsys.readouterr().out


def test_measured_simulated_and_paper_never_share_a_column() -> None:
    figures = (
        Figure(name="a", unit="s", paper=0.1, ours=0.002, provenance="measured"),
        Figure(name="b", unit="%", ours=50.0, low=40.0, high=60.0, provenance="simulated"),
    )
    found = Reproduction(title="t", source="s", setting={}, figures=figures, verdicts=())

    table = reproduction_table(found)

    assert [c.header for c in table.columns][:4] == [
        "figure",
        "paper",
        "ours, measured",
        "ours, simulated",
    ]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[1] == ["100 ms", "–"]
    assert cells[2] == ["2 ms", ""]
    assert cells[3] == ["", "50.0 % [40.0 %–60.0 %]"]


def test_the_table_and_the_figure_are_written_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chart = Chart(
        title="DSR",
        x_label="deadline, s",
        y_label="%",
        provenance="simulated",
        series=(Series(name="ours", x=(1, 2), y=(3, 4)),),
    )
    found = Reproduction(
        title="T",
        source="S",
        setting={},
        figures=(Figure(name="a, b", unit="%", ours=1.5, provenance="simulated"),),
        verdicts=(),
        charts=(chart,),
    )
    monkeypatch.setattr("edgewise.reproduce.run_claim", lambda _claim, _setup: found)
    table, figure = tmp_path / "t.csv", tmp_path / "f.png"
    command = ["reproduce", "uniexit-table6", "--csv", str(table), "--figure", str(figure)]
    assert cli.main(command) == 0
    assert table.read_text().splitlines() == [
        "name,unit,paper,ours,low,high,provenance,note",
        '"a, b",%,,1.5,,,simulated,',
    ]
    assert figure.stat().st_size > 1000
    assert "figure:" in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgewise.reproduce.run_claim", lambda *_: pytest.fail("it ran"))
    assert cli.main(["reproduce", "uniexit-table6", "--figure", str(tmp_path / "f.doc")]) == 2

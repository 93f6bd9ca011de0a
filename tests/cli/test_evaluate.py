from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from edgewise.cli import main as cli
from edgewise.cli.evaluate import check_limit, parse_budgets
from edgewise.errors import ConfigError


def test_budgets_are_read_in_per_cent() -> None:
    assert parse_budgets("25,50 %, 100") == (0.25, 0.5, 1.0)


@pytest.mark.parametrize("text", ["", "0", "-5", "50,50", "half", "inf", "25,,50"])
def test_budgets_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budgets in per cent"):
        parse_budgets(text)


def test_quick_means_fewer_inputs_and_a_limit_means_itself() -> None:
    assert check_limit(None, quick=True) < check_limit(None, quick=False)
    assert check_limit(7, quick=True) == 7
    with pytest.raises(ConfigError, match="at least one input"):
        check_limit(0, quick=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "edgwise"], "did you mean"),
        (["--budgets", "x"], "budgets in per cent"),
        (["--figure", "curves.docx"], "cannot draw a picture"),
    ],
    ids=["policy", "budget", "figure"],
)
def test_mistakes_are_told_before_a_model_is_looked_for(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", "no-such-model", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_an_error_with_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["evaluate", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_a_comparison_prints_one_object_and_writes_its_table_and_figure(
    checkpoint: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["evaluate", str(checkpoint), "--data", str(images), "--limit", "4"]
    arguments += ["--policies", "edgewise,edgewise_saving,msdnet,oracle", "--budgets", "50,100"]
    arguments += ["--backend", "onnxruntime", "--store", str(tmp_path / "profiles.sqlite")]

    code = cli.main(
        [
            *arguments,
            "--json",
            *("--csv", str(tmp_path / "t.csv")),
            *("--figure", str(tmp_path / "t.svg")),
        ]
    )

    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["provenance"] == "measured"
    assert len(found["rows"]) == 8
    assert {row["requests"] for row in found["rows"]} == {4}
    with (tmp_path / "t.csv").open(encoding="utf-8") as lines:
        assert len(list(csv.DictReader(lines))) == 8
    assert (tmp_path / "t.svg").stat().st_size > 0

    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "all measured" in shown
    assert "energy:" in shown

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from edgewise.cli import bench
from edgewise.cli.main import main

RESULT = {
    "decision_p50_s": 5e-7,
    "staged_ratio": {"torch:cpu": {"resnet50": 1.01}},
    "whole_s": {"torch:cpu": 0.25},
    "speedup_vs_torch": None,
    "threads": 1,
    "provenance": "measured",
    "notes": ["mobilenet_v2: torch is not installed"],
}


@pytest.fixture(autouse=True)
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A bench that takes no time."""
    calls: list[Any] = []
    module = types.ModuleType("edgewise_fake_bench")

    def run(*, quick: bool, say: Any) -> dict[str, Any]:
        say("something")
        calls.append(quick)
        return RESULT

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "edgewise_fake_bench", module)
    monkeypatch.setitem(bench._BENCHES, "fake", ("edgewise_fake_bench", "nothing"))
    return calls


def test_the_list_names_every_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0

    shown = capsys.readouterr().out
    assert "exits: the router's decision" in shown
    assert "fake: nothing" in shown


def test_the_list_is_one_json_object_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["benches"]) >= {"exits", "fake"}


def test_json_is_the_result_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fake", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT


@pytest.mark.parametrize("quick", [False, True])
def test_quick_is_passed_on(fake_bench: list[Any], *, quick: bool) -> None:
    assert main(["bench", "fake", *(["--quick"] if quick else [])]) == 0
    assert fake_bench == [quick]


def test_the_table_gives_every_number_its_unit_and_notes_follow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["bench", "fake"]) == 0

    shown = capsys.readouterr().out
    assert "bench fake (measured, 1 thread)" in shown
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip()
            for line in shown.splitlines() if line.startswith("│")}  # fmt: skip
    assert rows["decision_p50_s"] == "500 ns"
    assert rows["staged_ratio.torch:cpu.resnet50"] == "1.01"
    assert rows["whole_s.torch:cpu"] == "250 ms"
    assert rows["speedup_vs_torch"] == "–"
    assert "note: mobilenet_v2: torch is not installed" in shown


@pytest.mark.parametrize(
    ("value", "shown"), [(4096, "4,096"), (12, "12"), (0, "0"), (4096.4, "4.1e+03"), (0.5, "0.5")]
)
def test_counts_are_shown_whole(value: float, shown: str) -> None:
    assert bench._cell("tokens", value) == shown


def test_an_unknown_bench_gets_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exit"]) == 2

    said = capsys.readouterr().err
    assert "unknown bench 'exit'" in said
    assert "did you mean 'exits'?" in said


def test_without_a_name_the_list_is_pointed_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "help: edgewise bench --list" in capsys.readouterr().err


@pytest.mark.slow
def test_the_exits_bench_reports_every_figure_it_promises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    assert main(["bench", "exits", "--quick", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    promised = {"decision_p50_s", "decision_p99_s", "staged_ratio", "speedup_vs_torch", "import_s"}
    assert promised <= set(found)
    assert 0 < found["decision_p50_s"] <= found["decision_p99_s"]


def test_rows_have_a_table_of_their_own_with_the_columns_named_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"name": "full", "tpot_s": 0.02, "weight_bytes": 2048, "equal": True, "depths": {3: 5}},
        {"name": "calm", "tpot_s": None, "weight_bytes": 1, "equal": False, "depths": {}},
    ]
    module = sys.modules["edgewise_fake_bench"]
    monkeypatch.setattr(module, "run", lambda **_: RESULT | {"part": {"rows": rows}})
    monkeypatch.setattr(
        module, "COLUMNS", {"part.rows": ("name", "tpot_s", "weight_bytes", "equal")}, raising=False
    )
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["bench", "fake"]) == 0

    shown = capsys.readouterr().out
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert "part.rows" in shown
    assert ["full", "20 ms", "2 KiB", "yes"] in cells
    assert ["calm", "–", "1 B", "no"] in cells
    assert "depths" not in shown

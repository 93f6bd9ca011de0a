from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgewise.cli.generate import _line
from edgewise.cli.main import main

PROMPT = "a b"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once for all tests of this file."""
    return tmp_path_factory.mktemp("store") / "profiles.sqlite"


@pytest.fixture
def run(language_folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*arguments: str) -> int:
        return main(
            [
                "generate",
                str(language_folder),
                "--store",
                str(store),
                "--exits",
                "1,2,3",
                *arguments,
            ]
        )

    return run


def test_text_goes_to_one_stream_and_its_summary_to_the_other(run: Any, capsys: Any) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", "6", "--tpot", "5 s") == 0
    out, err = capsys.readouterr()

    assert out.endswith("\n")
    assert "6 tokens (length)" in err
    assert "100.0 % within 5 s" in err
    assert "layers 4: 6" in err


def test_json_is_one_object_with_every_token_and_its_reason(run: Any, capsys: Any) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", "5", "--tpot", "1 us", "--json") == 0
    record = json.loads(capsys.readouterr().out)

    assert record["summary"]["dsr"] == 0.0
    assert record["summary"]["floor_s"] > 1e-6
    assert [t["exit_layer"] for t in record["tokens"]] == [4, 1, 1, 1, 1]
    assert all("below the floor" in t["cause"] for t in record["tokens"][1:])
    assert record["exit_layers"] == [1, 2, 3, 4]


def test_exact_says_what_full_depth_says(run: Any, capsys: Any) -> None:
    ids = []
    for more in (["--exact", "--tpot", "1 us"], []):
        assert run("--prompt", PROMPT, "--max-tokens", "12", "--json", *more) == 0
        ids.append(json.loads(capsys.readouterr().out)["summary"]["token_ids"])

    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "either --prompt or --prompt-file"),
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--prompt", "x" * 200], 2, "reads at most 96"),
        (["--prompt", "a", "--tpot", "50"], 2, "has no unit"),
        (["--prompt", "a", "--exits", "0"], 2, "exits after 1 to 3"),
        (["--prompt", "a", "--exits", "4,9"], 2, "exits after 1 to 3"),
        (["--prompt", "a", "--exits", "deep"], 2, "expected layers"),
        (["--prompt", "a", "--kv", "forget"], 2, "unknown KV policy"),
        (["--prompt", "a", "--window", "wide"], 2, "window"),
        (["--prompt", "a", "--precision", "int1"], 2, "--precision"),
        (["--prompt", "a", "--head", "loose"], 2, "--head"),
        (["--prompt", "a", "--gate", "0.9"], 2, "no gate was fitted"),
        (["--prompt", "a", "--gate", "0.9", "--exact"], 2, "--gate leaves before"),
        (["--prompt", "a", "--predictor", "nowhere.npz"], 3, "nowhere.npz"),
        (["--prompt", "a", "--profile", "nowhere.json"], 3, "cannot read the profile"),
        (["--prompt", "a", "--head", "shortlist"], 2, "no short list was fitted"),
        (["--prompt", "a", "--chat"], 4, "no chat template"),
        (["--prompt", "a", "--tpot", "1 us", "--on-infeasible", "raise"], 5, "soonest exit"),
    ],
    ids=str,
)
def test_bad_input_is_told_without_a_traceback(
    run: Any, capsys: Any, arguments: list[str], code: int, said: str
) -> None:
    assert run(*arguments) == code
    err = " ".join(capsys.readouterr().err.split())

    assert said in err
    assert "Traceback" not in err


def test_an_infeasible_budget_is_an_outcome_with_its_floor_for_programs_too(
    run: Any, capsys: Any
) -> None:
    asked = ("--tpot", "1 us", "--on-infeasible", "raise", "--json")

    assert run("--prompt", "a", *asked) == 5
    found = json.loads(capsys.readouterr().out)

    assert found["outcome"] == "infeasible"
    assert found["floor_s"] > 1e-6
    assert found["head"] == "affine"


def test_a_prompt_file_that_is_not_utf_8_is_told_with_the_byte(
    run: Any, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"caf\xe9 au lait")

    assert run("--prompt-file", str(path)) == 2
    assert "found byte 0xe9 at 3" in " ".join(capsys.readouterr().err.split())


def test_ctrl_c_ends_with_what_there_is(
    run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgewise.runtime.generation.generation import Generation

    asked, step = [], Generation.__next__

    def third_is_interrupted(self: Generation) -> Any:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Generation, "__next__", third_is_interrupted)

    assert run("--prompt", PROMPT) == 0
    assert "2 tokens (closed)" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [None, RuntimeError("no luck")], ids=["well", "badly"])
def test_the_line_at_the_foot_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, fails: Exception | None
) -> None:
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("COLUMNS", "20")
    written = io.StringIO()
    console = Console(file=written, force_terminal=True)
    with contextlib.suppress(RuntimeError), _line(console, shown=True) as show:
        show("20.1 tokens/s · 98 % in time")
        if fails:
            raise fails
    text = written.getvalue()

    assert "20.1 tokens/s · 98 \x1b" in text  # no wider than the terminal
    assert text.index("\x1b[1;23r") < text.index("20.1") < text.index("\x1b[r")
    assert text.endswith("\x1b[24;1H\x1b[2K\x1b8")
    assert text.count("\x1b7") == text.count("\x1b8")

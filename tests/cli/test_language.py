"""A language model goes the way of every other: profile, fit, run with the state."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import edgewise
from edgewise.bench import state_campaign
from edgewise.bench.state_campaign import measure_states
from edgewise.cli.language import is_language
from edgewise.cli.main import main
from edgewise.device.monitor import THREAD_NAME
from edgewise.predict.fitted import FittedPredictor
from edgewise.profiles import ProfileStore, read_profile

EXITS = ["--exits", "1,3"]


@pytest.fixture(autouse=True)
def _no_fitted_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_names_and_paths_of_language_models_are_known_from_others(
    language_folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "any.GGUF").write_bytes(b"GGUF")
    (tmp_path / "any.onnx").write_bytes(b"")

    assert is_language("smollm2-135m")
    assert is_language("SmolLM2-135M")
    assert is_language(str(language_folder))
    assert is_language(str(tmp_path / "any.GGUF"))
    for other in ("fashion-lite0", "resnet50", "nothing", checkpoint, tmp_path / "any.onnx"):
        assert not is_language(str(other))


@pytest.mark.parametrize(
    ("command", "known"),
    [(["profile"], ["mobilenet_v2", "fashion-lite0"]), (["fit", "--measure"], ["fashion-lite0"])],
    ids=["profile", "fit"],
)
def test_a_name_that_is_no_model_is_told_with_those_that_are(
    capsys: Any, command: list[str], known: list[str]
) -> None:
    assert main([*command, "xyzzy"]) == 2
    err = capsys.readouterr().err
    assert "unknown model 'xyzzy'" in err
    assert all(name in err for name in ["smollm2-135m", *known])
    assert main([*command, "smolm2-135m"]) == 2
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err


def test_a_token_is_profiled_as_a_request_is_and_a_session_finds_it(
    language_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    store, export = tmp_path / "p.sqlite3", tmp_path / "p.json"
    arguments = [*EXITS, "--rounds", "3", "--store", str(store), "--export", str(export)]
    assert main(["profile", str(language_folder), *arguments, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)

    assert said.err == ""
    assert found["model"] == language_folder.name
    assert [turn["backend"] for turn in found["backends"]] == [
        "torch:cpu after 24 tokens, mask",
        "torch:cpu after 24 tokens, propagate",
        "torch:cpu after 72 tokens, propagate",
    ]
    for turn in found["backends"]:
        assert [(u["unit"], u["depth_ratio"], u["samples"]) for u in turn["units"]] == [
            ("segment:0-1", 0.25, 3),
            ("segment:1-2", 0.75, 3),
            ("segment:2-3", 1.0, 3),
            ("head:0", 0.25, 3),
            ("head:1", 0.75, 3),
            ("head:2", 1.0, 3),
            ("controller", None, 3),
        ]
        assert turn["stages_s"] > 0
        assert turn["whole_s"] is None
    session = edgewise.load_language(
        language_folder, exit_layers=[1, 3], store=store, profile="stored"
    )
    assert session.costs.mask.samples.shape == (3, 6)
    assert read_profile(export).model_version == found["model_version"]
    assert len(ProfileStore(store).list()) == 1


def test_people_read_the_table_and_that_no_exits_are_fitted(
    language_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    store = ["--store", str(tmp_path / "p.sqlite3")]
    assert main(["profile", str(language_folder), "--rounds", "2", *store]) == 0
    out = " ".join(capsys.readouterr().out.split())

    assert "torch:cpu after 72 tokens, propagate, batch 1" in out
    assert "no exits are fitted: full depth alone was measured" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["profile", "FOLDER", "--batch", "2"], 2, "--batch has no meaning for a language model"),
        (["profile", "FOLDER", "--backend", "openvino"], 4, "no backend 'openvino' runs language"),
        (["profile", "FOLDER", "--precision", "int8"], 4, "no weights of int8"),
        (["profile", "FOLDER", "--exits", "7"], 2, "exits after 1 to 3"),
        (["profile", "FOLDER", "--threads", "0"], 2, "at least one thread"),
        (["profile", "FOLDER", "--segments", "--precision", "int8"], 2, "--precision has no"),
        (["profile", "fashion-lite0", "--precision", "int8"], 2, "without a language model"),
        (["fit", "fashion-lite0", "--measure", "--exits", "1"], 2, "without a language model"),
        (["fit", "--device", "jetson-orin-nano", "--head", "raw"], 2, "without a language model"),
        (["fit", "FOLDER", "--measure", "--head", "loose"], 2, "for --head, found 'loose'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_told(
    language_folder: Path, capsys: Any, arguments: list[str], code: int, said: str
) -> None:
    given = [str(language_folder) if a == "FOLDER" else a for a in arguments]
    assert main(given) == code
    err = " ".join(capsys.readouterr().err.split())

    assert said in err
    assert "Traceback" not in err


def test_what_is_fitted_to_a_token_watches_the_device_while_it_generates(
    language_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real campaign, in states without co-runners.
    states = functools.partial(
        measure_states, quotas=(1.0,), loads=((),) * 6, rounds=8, settle_s=0.0
    )
    monkeypatch.setattr(state_campaign, "measure_this_machine", states)
    out, store = tmp_path / "p.npz", tmp_path / "store.sqlite3"
    folder = str(language_folder)
    fit = ["fit", folder, *EXITS, "--measure", "--kind", "static", "--out", str(out), "--json"]
    assert main(fit) == 0
    found, facts = json.loads(capsys.readouterr().out), FittedPredictor.load(out).facts

    assert (found["provenance"], found["states"]) == ("measured", 6)
    assert facts["exit_layers"] == [1, 3, 4]
    assert (facts["backend"], facts["precision"], facts["threads"]) == ("torch:cpu", "fp32", 1)
    watched: list[bool] = []
    generate = edgewise.LanguageSession.generate

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        watched.append(any(t.name == THREAD_NAME for t in threading.enumerate()))
        assert self.policy().unit_costs().seconds["head:0"] > 0
        return generate(self, *args, **options)

    monkeypatch.setattr("edgewise.runtime.generation.LanguageSession.generate", spy)
    run = ["generate", folder, *EXITS, "--store", str(store), "--prompt", "a", "--json"]
    run += ["--predictor", str(out), "--tpot", "5 s", "--max-tokens", "3"]
    assert main(run) == 0
    record = json.loads(capsys.readouterr().out)

    assert watched == [True]
    assert not any(t.name == THREAD_NAME for t in threading.enumerate())
    assert record["summary"]["dsr"] == 1.0
    assert main([*run, "--threads", "2"]) == 3
    assert "another threads" in capsys.readouterr().err
    run[run.index("1,3")] = "2"
    assert main(run) == 3
    assert "another exit layers" in capsys.readouterr().err

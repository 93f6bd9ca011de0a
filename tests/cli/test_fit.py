from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.bench import state_campaign
from edgewise.cli.fit import parse_states
from edgewise.cli.main import main
from edgewise.device import device_fingerprint
from edgewise.device.state import FEATURES
from edgewise.errors import ConfigError
from edgewise.frontends.checkpoint import load_model
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.samples_file import load_samples, save_samples
from edgewise.predict.state_samples import StateSamples

Out = pytest.CaptureFixture[str]


@pytest.fixture
def samples_file(tmp_path: Path) -> Callable[[int], Path]:
    """``samples_file(count)``: a CPU whose clock and load vary, measured in so many states."""

    def write(count: int) -> Path:
        rng = np.random.default_rng(0)
        clock, load = rng.uniform(0.2, 1.0, count), rng.uniform(0.0, 0.8, count)
        true = (1e-3 / clock * (1 + load))[:, None] * np.array([1.0, 2.0, 0.2, 0.3])
        nothing = np.full(count, np.nan)
        samples = StateSamples(
            features=FEATURES,
            states=np.column_stack([clock, nothing, nothing, load, nothing, np.ones(count)]),
            units=("stage:0", "stage:1", "head:0", "head:1"),
            seconds=true[:, None] * np.exp(0.02 * rng.standard_normal((count, 3, 4))),
            provenance="measured",
            elapsed_s=3600.0,
        )
        path = tmp_path / "samples.npz"
        save_samples(samples, path)
        return path

    return write


def fitted(capsys: Out, *arguments: str) -> dict[str, Any]:
    code = main(["fit", *arguments, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_samples_in_a_file_give_a_predictor_in_a_file(
    samples_file: Callable[[int], Path], tmp_path: Path, capsys: Out
) -> None:
    out = tmp_path / "predictor.npz"
    found = fitted(capsys, "net", "--samples", str(samples_file(60)), "--out", str(out))
    kept = FittedPredictor.load(out)

    assert found["chosen"] == kept.predictor.kind == "physical"
    assert found["provenance"] == kept.provenance == "measured"
    assert found["features"] == ["cpu.frequency_ratio", "cpu.utilisation_ratio"]
    assert found["left_out"]["gpu.frequency_ratio"] == "not known in any state"
    assert found["skipped"]["mlp"] == "needs 108 states, found 60"
    assert kept.facts["model"] == "net"
    by_kind = {score["kind"]: score for score in found["kinds"]}
    assert kept.coverage == by_kind["physical"]["coverage_ratio"]
    assert by_kind["physical"]["stage"]["mape_ratio"] < by_kind["static"]["stage"]["mape_ratio"]
    assert found["profiling_saved_s"] == 0.0


def test_few_states_chosen_are_checked_on_the_others(
    samples_file: Callable[[int], Path], capsys: Out
) -> None:
    found = fitted(
        capsys, "--samples", str(samples_file(400)), "--states", "10%", "--kind", "physical"
    )

    assert (found["states"], found["states_to_choose_from"]) == (40, 400)
    assert found["states_not_used"]["states"] == 360
    assert found["states_not_used"]["stage"]["mape_ratio"] < 0.02
    assert found["profiling_saved_s"] == pytest.approx(0.9 * 3600)


def test_a_simulated_device_is_said_to_be_simulated(tmp_path: Path, capsys: Out) -> None:
    out = tmp_path / "predictor.npz"
    arguments = ["resnet50", "--device", "jetson-orin-nano", "--states", "1%"]
    found = fitted(capsys, *arguments, "--kind", "physical", "--out", str(out))

    assert found["provenance"] == FittedPredictor.load(out).provenance == "simulated"
    assert (found["states"], found["states_to_choose_from"]) == (176, 17_600)
    assert found["energy"]
    assert found["predictor_bytes"] <= 100 * 1024
    # What issue and paper ask of predictors of image networks.
    for group in ("stage", "head"):
        assert found["states_not_used"][group]["mape_ratio"] <= 0.018
        assert found["states_not_used"][group]["p95_ape_ratio"] <= 0.048


def test_people_read_a_table_and_the_reason(
    samples_file: Callable[[int], Path], capsys: Out
) -> None:
    assert main(["fit", "--samples", str(samples_file(60)), "--states", "50"]) == 0
    shown = capsys.readouterr().out

    assert "50 of 60 states, measured; 5 folds, no state in two" in shown
    assert "chosen: physical; " in shown
    assert "does not read cpu.quota_ratio: the same in all states: 1" in shown
    assert "mlp was skipped: needs 108 states, found 50" in shown
    assert "in the 10 states not used: MAPE" in shown


def test_the_same_seed_prints_the_same_numbers(
    samples_file: Callable[[int], Path], capsys: Out
) -> None:
    arguments = ["--samples", str(samples_file(60)), "--kind", "physical", "--seed", "3"]
    first, second = fitted(capsys, *arguments), fitted(capsys, *arguments)
    for found in (first, second):
        for score in found["kinds"]:
            score.pop("fit_s")  # the only number that a clock gives

    assert first == second


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected one of --measure, --samples FILE and --device NAME"),
        (["--measure", "--samples", "SAMPLES"], "expected one of --measure"),
        (["--measure"], "what is to be measured?"),
        (["--device", "jetson-orin-nano"], "what runs on it"),
        (["--device", "jetson-tx9", "--work", "resnet50"], "jetson-tx9"),
        (["--device", "jetson-orin-nano", "--work", "resnet"], "resnet50"),
        (["--samples", "SAMPLES", "--kind", "fysical"], "did you mean 'physical'"),
        (["--samples", "SAMPLES", "--states", "0"], "a share such as 10%"),
        (["--samples", "SAMPLES", "--folds", "1"], "at least 2 folds"),
        (["--samples", "SAMPLES", "--level", "2"], "a level from 0.5 up to 1"),
    ],
    ids=[
        "nothing",
        "two sources",
        "no model",
        "no work",
        "device",
        "work",
        "kind",
        "states",
        "folds",
        "level",
    ],
)
def test_a_mistake_is_named_with_the_next_step(
    samples_file: Callable[[int], Path], capsys: Out, arguments: list[str], said: str
) -> None:
    path = str(samples_file(60))
    code = main(["fit", *(path if a == "SAMPLES" else a for a in arguments)])
    printed = capsys.readouterr()

    assert code == 2
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_too_few_states_and_damaged_files_are_profile_errors(
    samples_file: Callable[[int], Path], tmp_path: Path, capsys: Out
) -> None:
    assert main(["fit", "--samples", str(samples_file(2))]) == 3
    assert "too few states to fit: found 2" in capsys.readouterr().err
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(samples_file(60).read_bytes()[:200])
    assert main(["fit", "--samples", str(damaged)]) == 3
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "-1", "1e9", "101%", "ten", "nan%"])
def test_a_count_of_states_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a count of states"):
        parse_states(text, 100)


def test_what_was_measured_here_is_kept_with_the_device_and_the_model_it_is_of(
    samples_file: Callable[[int], Path],
    tmp_path: Path,
    capsys: Out,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    given = load_samples(samples_file(60))
    monkeypatch.setattr(state_campaign, "measure_this_machine", lambda *_, **__: given)
    out, kept = tmp_path / "predictor.npz", tmp_path / "kept.npz"
    command = ["fashion-lite0", "--measure", "--backend", "onnxruntime", "--kind", "physical"]

    found = fitted(capsys, *command, "--out", str(out), "--keep-samples", str(kept))

    facts = FittedPredictor.load(out).facts
    assert found["provenance"] == "measured"
    assert facts["device_id"] == device_fingerprint().id
    assert facts["model_version"] == load_model("fashion-lite0").version()
    assert (facts["backend"], facts["threads"]) == ("onnxruntime:CPU", 1)
    assert np.array_equal(load_samples(kept).seconds, given.seconds)

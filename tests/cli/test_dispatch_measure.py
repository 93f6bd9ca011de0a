from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgewise.backends import operators
from edgewise.cli.dispatch.measure import shapes_of
from edgewise.cli.main import main
from edgewise.device import device_fingerprint
from edgewise.model.transformer import architecture_names
from edgewise.profiles.operator_file import read_operator_table
from edgewise.profiles.operator_tables import operator_table_path
from edgewise.profiling import operators as campaign

pytest.importorskip("torch")

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip
QUICKER = {"samples": 3, "min_samples": 1, "switch_rounds": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("FULL", "QUICK_OPERATORS"):
        monkeypatch.setattr(campaign, name, campaign.OperatorEffort(**QUICKER))
    monkeypatch.setenv("EDGEWISE_HOME", str(tmp_path / "home"))
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["dispatch", "measure", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def _tiny(model: Path, *arguments: object) -> list[object]:
    return [model, "--lengths", "3", "--past", "4", "--backends", "torch:cpu", *arguments]


def _load_with(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    measure = campaign.measure_operators
    monkeypatch.setattr(campaign, "measure_operators", functools.partial(measure, load=load))


def test_seven_models_have_the_240_shapes_that_are_counted() -> None:
    shapes = shapes_of(architecture_names(), lengths=(16, 32, 64, 128), past=64)
    free = [s for s in shapes if not s.is_fixed and not s.is_segment]

    assert len(free) == 240
    assert len(shapes) == len(set(shapes))
    assert 140 < sum(s.is_segment for s in shapes) < 155


def test_shapes_with_the_same_weights_stand_together(model: Path) -> None:
    keys = [(s.kind, s.k, s.n, s.bias) for s in shapes_of([str(model)], lengths=(3, 5))]
    changes = sum(a != b for a, b in itertools.pairwise(keys))

    assert changes == len(set(keys)) - 1


def test_a_measured_table_is_written_and_summarised(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json.gz"
    code, said, _ = _run(capsys, *_tiny(model, "--out", out, "--name", "mine"))
    table = read_operator_table(out)

    assert code == 0
    assert table.name == "mine"
    assert set(table.shapes()) == set(shapes_of([str(model)], lengths=(3,), past=4))
    assert not table.excluded()
    assert table.device_id == device_fingerprint().id
    assert "fastest, in shapes" in said
    assert "energy: not known" in said
    assert not list(tmp_path.glob("*.partial"))


def test_json_is_one_object_with_a_reason_for_each_unknown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, err = _run(
        capsys,
        *_tiny(model, "--no-segments", "--no-decode", "--json", "--out", tmp_path / "t.json"),
    )
    found = json.loads(said)

    assert (code, err) == (0, "")
    assert {each["kind"] for each in found["classes"]} == {"linear", "rmsnorm", "activation"}
    assert found["left_out"] == ["segments: --segments measures them"]
    assert found["thread_policy"]["threads"] == 1
    assert found["rows"] == found["shapes"]
    assert not found["excluded"]


def test_without_a_file_the_table_is_kept_for_this_device(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = _run(capsys, *_tiny(model, "--quick", "--no-segments"))

    assert code == 0
    assert operator_table_path().exists()
    assert operator_table_path().name in said.replace("\n", "")


def test_the_same_command_measures_only_what_is_missing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.json"
    _run(capsys, *_tiny(model, "--no-segments", "--out", out))
    first = read_operator_table(out)
    loaded = []

    def load(shape: Any, *rest: Any, **more: Any) -> Any:
        loaded.append(shape)
        return operators.load_operator(shape, *rest, **more)

    _load_with(monkeypatch, load)
    _run(capsys, *_tiny(model, "--segments", "--out", out))
    both = read_operator_table(out)

    assert all(shape.is_segment for shape in loaded)
    assert all(both.costs[key] == cost for key, cost in first.costs.items())
    assert len(both.costs) > len(first.costs)


def test_stopped_by_hand_it_says_what_is_kept_and_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.json"
    loads = iter(range(100))

    def load(*rest: Any, **more: Any) -> Any:
        if next(loads) == 5:
            raise KeyboardInterrupt
        return operators.load_operator(*rest, **more)

    _load_with(monkeypatch, load)
    code, _, err = _run(capsys, *_tiny(model, "--out", out))
    stopped = not out.exists() and (tmp_path / "t.json.partial").exists()
    again, _, _ = _run(capsys, *_tiny(model, "--out", out))

    assert (code, again, stopped) == (130, 0, True)
    assert "rows measured so far are kept" in err
    assert out.exists()


def test_a_table_of_another_device_is_not_added_to_but_can_be_replaced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    arguments = _tiny(model, "--no-segments", "--out", out)
    _run(capsys, *arguments)
    out.write_text(out.read_text().replace(device_fingerprint().id, "elsewhere"))
    refused, _, err = _run(capsys, *arguments)
    replaced, _, _ = _run(capsys, *arguments, "--no-resume")

    assert (refused, replaced) == (3, 0)
    assert "elsewhere" in err
    assert "--no-resume" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["smolm2-135m"], 2, "smollm2-135m"),
        (["--lengths", "16,x"], 2, "numbers of tokens"),
        (["--lengths", "0"], 2, "numbers of tokens"),
        (["--backends", "tensorrt:cuda"], 4, "tensorrt:cuda"),
        (["--beside", "gpu"], 2, "cpu"),
        (["--time-cap", "0"], 2, "above zero"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments_are_refused_with_the_next_step(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = _run(capsys, *arguments)

    assert (found, out) == (code, "")
    assert said in err


def test_quick_says_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    from edgewise.cli.dispatch import measure

    monkeypatch.setattr(measure, "_QUICK_MODEL", str(model))
    _, said, _ = _run(
        capsys, "--quick", "--lengths", "3", "--backends", "torch", "--out", tmp_path / "t.json"
    )

    assert "left out: other models:" in said
    assert "olmo2-1b" in said

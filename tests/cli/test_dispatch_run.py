from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgewise.bench.dispatch_runs import passes_of, shapes_of, traces_of
from edgewise.cli.main import main
from edgewise.device import device_fingerprint
from edgewise.model.transformer import load_architecture
from edgewise.profiles.operator_file import write_operator_table
from edgewise.profiles.operators import (
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")

BACKENDS = ("torch:cpu", "onnxruntime:CPU")
POLICY = ThreadPolicy(threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small Llama, without weights."""
    found = tmp_path_factory.mktemp("model") / "tiny"
    found.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "hidden_act": "silu",
    }
    (found / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def table(folder: Path) -> OperatorTable:
    """Made-up costs: norms and activations are cheaper on torch, all else elsewhere."""
    architecture = load_architecture(folder)
    traces = traces_of(architecture, passes_of(architecture, (6,), past=4))
    shapes = shapes_of(traces, segments=True)
    return table_of(
        [cost(s, b) for s in shapes for b in (BACKENDS[:1] if s.is_fixed else BACKENDS)],
        [SwitchCost(source=a, target=b, fixed_s=1e-6) for a, b in (BACKENDS, BACKENDS[::-1])],
        name="made up",
        device_id=device_fingerprint().id,
        device={},
        thread_policy=POLICY,
        provenance="measured",
    )


def cost(shape: OperatorShape, backend: str) -> OperatorCost:
    light = shape.kind in {"rmsnorm", "activation"} or shape.is_fixed
    seconds = 2e-5 if light == (backend == "torch:cpu") else 6e-5
    summary = LatencySummary(
        **dict.fromkeys(("mean_s", "median_s", "min_s", "max_s"), seconds),
        **dict.fromkeys(("p90_s", "p95_s", "p99_s", "median_low_s", "median_high_s"), seconds),
        std_s=0.0,
        calls=10,
        samples=10,
    )
    return OperatorCost(
        shape=shape,
        backend=backend,
        latency=summary,
        correctness=None,
        energy=Energy(),
        thread_policy=POLICY,
    )


@pytest.fixture(scope="module")
def file(table: OperatorTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("table") / "costs.json"
    write_operator_table(table, found)
    return found


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*options: str) -> tuple[int, str, str]:
        common = ["--lengths", "6", "--past", "4", "--rounds", "2"]
        code = main(["dispatch", "run", str(folder), *common, *options])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


def test_a_mixed_plan_is_run_beside_what_it_competes_with(run: Any, file: Path) -> None:
    code, out, err = run("--table", str(file), "--no-segments", "--json")

    assert code == 0, err
    found = json.loads(out)
    assert [each["pass"] for each in found["passes"]] == ["prefill 6", "decode, 4 in the cache"]
    for each in found["passes"]:
        assert set(each["times"]) == {
            "torch eager",
            "plan",
            "static torch:cpu",
            "static onnxruntime:CPU",
        }
        assert set(each["predicted_s"]) == set(each["times"]) - {"torch eager"}
        assert each["largest_deviation"] < 1e-4
        assert each["switches"]
        assert {(c["kind"], c["backend"]) for c in each["classes"]} == {
            ("linear", "onnxruntime:CPU"),
            ("rmsnorm", "torch:cpu"),
            ("activation", "torch:cpu"),
        }
        assert sum(c["steps"] for c in each["classes"]) == 2 * 7 + 1 + 5 + 2
    assert found["provenance"]["predicted"].startswith("estimated")


def test_tables_for_people_list_every_switch(run: Any, file: Path) -> None:
    code, out, err = run("--table", str(file), "--no-segments", "--switches", "--no-decode")

    assert code == 0, err
    assert "torch:cpu -> onnxruntime:CPU before model.layers.0.self_attn.q_proj" in out
    assert "estimated" in out
    assert "measured" in out
    assert "decode" not in out


def test_a_plan_with_segments_is_read_and_run(
    run: Any, folder: Path, table: OperatorTable, tmp_path: Path
) -> None:
    from edgewise.bench.dispatch_runs import plan_for
    from edgewise.dispatch.plan_file import write_plan

    architecture = load_architecture(folder)
    plan = plan_for(traces_of(architecture, passes_of(architecture, (6,), past=4)), table)
    write_plan(plan, tmp_path / "plan.json")

    code, out, err = run("--plan", str(tmp_path / "plan.json"), "--json")

    assert code == 0, err
    found = json.loads(out)
    kinds = {c["kind"] for each in found["passes"] for c in each["classes"]}
    assert "layer" in kinds
    assert all(each["largest_deviation"] < 1e-4 for each in found["passes"])
    assert all("plan" in each["predicted_s"] for each in found["passes"])
    assert found["weight_copies_bytes"]["plan"] > 0


def test_a_plan_of_another_model_ends_in_an_error(
    run: Any, table: OperatorTable, folder: Path, tmp_path: Path
) -> None:
    from edgewise.bench.dispatch_runs import plan_for
    from edgewise.dispatch.plan_file import write_plan

    architecture = load_architecture(folder)
    plan = plan_for(traces_of(architecture, passes_of(architecture, (6,), past=None)), table)
    first = plan.phases[0].steps[0]
    other = dataclasses.replace(first, covers=("encoder.norm",), name="encoder.norm")
    phase = dataclasses.replace(plan.phases[0], steps=(other, *plan.phases[0].steps[1:]))
    write_plan(dataclasses.replace(plan, phases=(phase,)), tmp_path / "plan.json")

    code, _, err = run("--plan", str(tmp_path / "plan.json"))

    assert code != 0
    assert "error:" in err
    assert "encoder.norm" in err


def test_a_table_that_lacks_an_operator_says_what_to_measure(run: Any, file: Path) -> None:
    code, _, err = run("--table", str(file), "--lengths", "7")

    assert code != 0
    assert "dispatch measure" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "1"], "--rounds"),
        (["--objective", "heat"], "heat"),
        (["--lengths", "x"], "--lengths"),
        (["--plan", "p.json", "--measure"], "--plan has its costs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(run: Any, file: Path, options: Any, said: str) -> None:
    given = options if "--plan" in options else ["--table", str(file), *options]

    code, _, err = run(*given)

    assert code == 2
    assert said in err

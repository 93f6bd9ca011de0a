from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.cli.main import main
from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.plan_file import read_plan
from edgewise.dispatch.synthetic_table import random_table
from edgewise.model.transformer import load_architecture
from edgewise.profiles.operator_file import write_operator_table

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Plans for a small model on a made-up table, prefill 16 and decode after 8."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    architecture = load_architecture(folder)
    traces = [
        trace_forward(architecture, length=16),
        trace_forward(architecture, phase="decode", past=8),
    ]
    table = random_table(traces, np.random.default_rng(1), switch_s=2e-6, error_ratio=0.01)
    write_operator_table(table, tmp_path / "table.json")

    def tell(*arguments: str, code: int = 0, passes: str = "both") -> str:
        which = {"both": ["--lengths", "16", "--decode", "--past", "8"], "": []}[passes]
        command = ["dispatch", "plan", str(folder), "--table", str(tmp_path / "table.json")]
        assert main([*command, *which, *arguments]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return tell


def test_a_plan_is_shown_against_every_backend_alone(told: Callable[..., str]) -> None:
    said = told()

    assert "small: objective latency, method best; costs made up (simulated, calm" in said
    for word in ("torch", "onnxruntime", "openvino", "saves", "switches", "prefill 16"):
        assert word in said
    assert "exact: no plan of this kind costs less" in said
    assert "guard: prefill 16" in said
    table = said[said.index("predicted time") : said.index("exact")]
    assert all(len(line) <= 80 for line in table.splitlines())


def test_a_gain_is_not_called_sure_where_the_table_has_no_intervals(
    told: Callable[..., str], tmp_path: Path
) -> None:
    assert "surely" in told()

    traces = [trace_forward(load_architecture(tmp_path / "small"), length=16)]
    exact = random_table(traces, np.random.default_rng(1), switch_s=2e-6, error_ratio=0.0)
    write_operator_table(exact, tmp_path / "table.json")
    said = told("--lengths", "16", passes="")

    assert "surely" not in said
    assert "how sure that is was not measured: kept" in said


def test_why_is_said_for_each_kind_of_operator(told: Callable[..., str]) -> None:
    said = told("--no-segments", "--explain", "--no-guard")

    assert "why: prefill 16" in said
    assert "mlp.gate_proj" in said
    assert "cheapest" in said
    assert all(len(line) <= 80 for line in said[said.index("why:") :].splitlines())


def test_json_is_one_object_and_the_file_comes_back(
    told: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"

    found: dict[str, Any] = json.loads(told("--json", "--out", str(path)))

    plan = read_plan(path)
    assert found["plan"]["phases"][0]["predicted_s"] == plan.phases[0].predicted_s
    assert [phase.what for phase in plan.phases] == ["prefill 16", "decode, 8 in the cache"]
    assert all(phase.predicted_s <= phase.best_static_s for phase in plan.phases)
    assert {row["reason"] for rows in found["explanation"] for row in rows}
    assert any("is for device made-up" in note for note in found["notes"])


def plan_of(said: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(said)["plan"]
    return plan


def total_s(plan: dict[str, Any]) -> float:
    return sum(float(phase["predicted_s"]) for phase in plan["phases"])


def test_segments_and_exactness_never_cost_more(told: Callable[..., str]) -> None:
    best, single, local, static = (
        total_s(plan_of(told("--json", "--no-guard", *options)))
        for options in (
            [],
            ["--no-segments"],
            ["--method", "local"],
            ["--method", "static", "--no-segments"],
        )
    )

    assert best <= single <= min(local, static)


def test_the_guard_takes_the_best_single_backend_for_a_plan_that_loses(
    told: Callable[..., str],
) -> None:
    plans = [
        plan_of(told("--json", "--method", "local", "--no-segments", *more))
        for more in ([], ["--no-guard"])
    ]

    guarded, free = (
        [(p["predicted_s"], p["best_static_s"]) for p in plan["phases"]] for plan in plans
    )
    assert all(own <= static for own, static in guarded)
    assert any(own > static for own, static in free)


@pytest.mark.parametrize("objective", ["energy", "edp"])
def test_energy_and_edp_are_shown_in_their_unit(objective: str, told: Callable[..., str]) -> None:
    said = told("--objective", objective)

    assert "J" in said
    assert f"objective {objective}" in said


def test_copies_are_counted_by_tensor_on_request(told: Callable[..., str]) -> None:
    said = told("--dag")

    assert "method residency" in said
    assert "tensors are copied" in said
    plan = plan_of(told("--dag", "--json"))
    assert {step["kind"] for step in plan["phases"][0]["steps"]} == {
        "linear",
        "rmsnorm",
        "activation",
    }


def test_memory_is_one_limit_for_all_passes(told: Callable[..., str]) -> None:
    free = plan_of(told("--json", "--no-guard"))
    within = told("--memory", "100 kB")
    none = plan_of(told("--json", "--memory", "0"))

    assert "of 97.66 KiB, over all passes" in within
    assert total_s(none) >= total_s(free)
    outside = [s for p in none["phases"] for s in p["steps"] if s["backend"] != "torch:cpu"]
    assert {s["kind"] for s in outside} <= {"activation"}  # nothing else is without weights


def test_only_backends_that_are_named_are_used(told: Callable[..., str]) -> None:
    plan = plan_of(told("--json", "--backends", "torch:cpu, openvino:CPU"))

    assert plan["backends"] == ["torch:cpu", "openvino:CPU"]
    assert {s["backend"] for p in plan["phases"] for s in p["steps"]} <= set(plan["backends"])


def test_a_cap_that_nothing_meets_says_what_is_least(told: Callable[..., str]) -> None:
    assert "no plan takes at most 1 ns" in told("--cap", "1 ns", code=5)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--objective", "speed"], 2, "no objective 'speed'"),
        (["--method", "viterby"], 2, "did you mean 'viterbi'"),
        (["--backends", "openvino:NPU"], 2, "openvino:NPU"),
        (["--memory", "lots"], 2, "--memory: expected a size, found 'lots'"),
        (["--memory", "1 MB", "--cap", "1 s"], 2, "give one of them"),
        (["--dag", "--objective", "edp"], 2, "--dag finds the least latency or energy"),
        (["--table", "nowhere"], 3, "nowhere"),
        (["--lengths", "17"], 3, "no usable cost of 'rmsnorm m=17"),
    ],
    ids=["objective", "method", "backend", "size", "two limits", "dag", "table", "length"],
)
def test_mistakes_are_told(
    arguments: list[str], code: int, said: str, told: Callable[..., str]
) -> None:
    assert said in told(*arguments, code=code)

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgewise.cli.main import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path / "small")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def tell(*arguments: str, code: int = 0) -> str:
        assert main(["dispatch", "trace", *arguments]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return tell


def test_a_model_is_summed_up_for_each_pass(model: str, told: Callable[..., str]) -> None:
    said = told(model, "--lengths", "16,32", "--decode", "--past", "7")

    assert "small (llama): 2 layers, 64 wide" in said
    for line in ("prefill 16 ", "prefill 32 ", "decode, 7 in the cache "):
        assert line in said
    # 7 linears, 2 norms, 1 activation in each of 2 layers; last norm and head.
    assert "15     5    2   22" in said
    assert "in all 66 operators to choose for" in said
    assert "6 attention" in said
    assert all(len(line) <= 80 for line in said.splitlines()[1:])


@pytest.mark.parametrize(
    ("rule", "operators", "groups", "rows", "candidates", "directed"),
    [
        ("clean", "8,736", 248, 744, "2,232", "1,488"),
        ("paper", "9,584", 278, 834, "2,502", "1,668"),
    ],
    ids=["clean", "paper"],
)
def test_all_seven_models_are_counted_by_either_rule(  # noqa: PLR0917
    rule: str,
    operators: str,
    groups: int,
    rows: int,
    candidates: str,
    directed: str,
    told: Callable[..., str],
) -> None:
    said = told("all", "--rule", rule)

    assert f"in all {operators} operators in 34 passes, {groups} groups ({rule} rule)" in said
    assert f"on 3 backends {rows} shape-backend rows, {rows} contexts" in said
    assert f"{candidates} candidate rows: {rows} same-backend, {directed} directed" in said


def test_every_operator_is_listed_with_what_it_reads(model: str, told: Callable[..., str]) -> None:
    said = told(model, "--lengths", "16", "--operators")

    assert " 2  0  self_attn.q_proj" in said
    assert "(self_attn.attention)" in said
    assert "16 × 64 → 100" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_json_has_every_operator_and_edge(model: str, told: Callable[..., str]) -> None:
    found: dict[str, Any] = json.loads(told(model, "--lengths", "16", "--json"))

    (only,) = found["passes"]
    names = [o["name"] for o in only["operators"]]
    attention = names.index("model.layers.0.self_attn.attention")
    feeding = {names[a] for a, b in only["edges"] if b == attention}
    assert feeding == {f"model.layers.0.self_attn.{n}" for n in ("rope_q", "rope_k", "v_proj")}
    assert only["edges"][0] == ["input", 0]
    gate = only["operators"][names.index("model.layers.0.mlp.gate_proj")]
    assert (gate["m"], gate["k"], gate["n"], gate["dtype"]) == (16, 64, 96, "float32")
    assert gate["weight_bytes"] == 64 * 96 * 4
    assert {c["kind"] for c in only["segments"]} == {"norm_linear", "mlp", "norm_mlp", "layer"}
    assert found["models"]["small"]["hidden_size"] == 64


def test_csv_has_one_line_for_each_operator(
    model: str, tmp_path: Path, told: Callable[..., str]
) -> None:
    path = tmp_path / "operators.csv"

    told(model, "--lengths", "16", "--decode", "--csv", str(path))

    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["phase"] for row in rows} == {"prefill", "decode"}
    assert len(rows) == 2 * sum(row["phase"] == "decode" for row in rows)
    assert next(r for r in rows if r["kind"] == "attention")["reads"] == "5 6 4"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["MODEL", "--lengths", "16,0"], "found '0' in '16,0'"),
        (["MODEL", "--lengths", "16,16"], "expected distinct numbers"),
        (["MODEL", "--lengths", ""], "there is no pass to trace"),
        (["MODEL", "--rule", "papper"], "did you mean 'paper'"),
        (["MODEL", "--past", "4"], "--past is the cache of the decode pass"),
        (["modernbert-base", "--decode"], "'modernbert-base' is an encoder"),
    ],
    ids=["name", "zero", "twice", "nothing", "rule", "past without decode", "encoder"],
)
def test_mistakes_are_told_with_what_to_do(
    arguments: list[str], said: str, model: str, told: Callable[..., str]
) -> None:
    assert said in told(*(model if a == "MODEL" else a for a in arguments), code=2)

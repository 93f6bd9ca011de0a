from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest

from edgewise.dispatch.counting import candidates, count
from edgewise.dispatch.forward import Rule, paper_traces, trace_forward
from edgewise.dispatch.trace import Trace
from edgewise.errors import ConfigError
from edgewise.model.transformer import (
    Architecture,
    architecture_names,
    architecture_of,
    load_architecture,
)

MODELS = [load_architecture(name) for name in architecture_names()]

# What counting the modules of the published models gives, by hand from their configurations:
# linears, norms, activations in one pass, passes, and groups for one length by the paper's rule.
BY_HAND = {
    "qwen2.5-0.5b": (169, 49, 24, 5, 8),
    "qwen3-0.6b": (197, 113, 28, 5, 11),
    "tinyllama-1.1b": (155, 45, 22, 5, 8),
    "smollm2-135m": (211, 61, 30, 5, 8),
    "smollm2-360m": (225, 65, 32, 5, 8),
    "olmo2-1b": (113, 65, 16, 5, 7),
    "modernbert-base": (90, 46, 23, 4, 7),
}


@cache
def passes_of(model: Architecture, rule: Rule) -> tuple[Trace, ...]:
    return paper_traces(model, rule=rule)


def traced(rule: Rule, models: list[Architecture] = MODELS) -> list[tuple[Architecture, Trace]]:
    return [(a, trace) for a in models for trace in passes_of(a, rule)]


def test_the_clean_rule_counts_8736_operators_in_248_groups() -> None:
    found = count(traced("clean"))

    assert (found.forwards, found.instances, found.groups) == (34, 8736, 248)
    assert found.by_kind == {"linear": 5710, "rmsnorm": 1990, "layernorm": 184, "activation": 852}


def test_the_papers_rule_counts_9584_operators_in_278_groups() -> None:
    found = count(traced("paper"))

    assert (found.instances, found.groups) == (9584, 278)
    assert found.by_kind["activation"] == 852 + 848  # the MLP once more for each layer


def test_278_groups_come_to_the_papers_rows() -> None:
    groups, names = range(278), ("torch:cpu", "torch:cuda", "onnxruntime:CPU")
    listed = list(itertools.product(groups, names, names))  # each after each

    found = candidates(278)

    assert found.candidate_rows == len(listed) == 2502
    assert found.shape_backend_rows == len({(g, b) for g, _, b in listed}) == 834
    assert found.contexts == len({(g, a) for g, a, _ in listed}) == 834
    assert found.same_backend == sum(a == b for _, a, b in listed) == 834
    assert found.directed_changes == sum(a != b for _, a, b in listed) == 1668


@pytest.mark.parametrize("model", MODELS, ids=lambda a: a.name)
def test_each_model_has_the_operators_that_its_configuration_says(model: Architecture) -> None:
    linears, norms, activations, passes, groups = BY_HAND[model.name]

    clean, paper = count(traced("clean", [model])), count(traced("paper", [model]))

    kinds = Counter(clean.by_kind)
    assert clean.forwards == passes
    assert kinds["linear"] == linears * passes
    assert kinds["rmsnorm"] + kinds["layernorm"] == norms * passes
    assert kinds["activation"] == activations * passes
    assert paper.instances - clean.instances == model.num_hidden_layers * passes
    assert paper.groups == groups * passes


@pytest.mark.parametrize(
    ("name", "gflop"),
    [
        ("qwen2.5-0.5b", 238),
        ("qwen3-0.6b", 287),
        ("tinyllama-1.1b", 499),
        ("smollm2-135m", 65),
        ("smollm2-360m", 174),
        ("olmo2-1b", 617),
        ("modernbert-base", 72),
    ],
)
def test_work_is_that_of_the_published_models(name: str, gflop: float) -> None:
    found = count(traced("clean", [load_architecture(name)]))

    assert found.flops / 1e9 == pytest.approx(gflop, abs=0.5)  # published to whole GFLOP


@pytest.mark.parametrize("model", MODELS, ids=lambda a: a.name)
@pytest.mark.parametrize("rule", ["clean", "paper"])
def test_candidates_agree_with_the_operators_they_replace(model: Architecture, rule: Rule) -> None:
    trace = passes_of(model, rule)[0]

    for candidate in trace.candidates:
        inside = trace.nodes[candidate.start : candidate.stop]
        matrices = sum(n.shape.flops for n in inside if n.supported)
        weights = sum(n.shape.weight_bytes for n in inside if n.supported)
        outside = {
            t
            for n in (*trace.nodes[: candidate.start], *trace.nodes[candidate.stop :])
            for t in n.inputs
        } | {trace.nodes[-1].output}
        leaving = [n for n in inside if n.output in outside]

        assert sum(part.flops for part in candidate.parts) == matrices, candidate.name
        if candidate.kind == "norm_linear":  # each of its parts answers for one operator
            assert len(candidate.parts) == sum(n.supported for n in inside) - 1
        else:
            # One piece gives one tensor, the last; what it holds is what its operators hold.
            assert [n.output for n in leaving] == [inside[-1].output]
            assert len(candidate.parts) == 1
            assert candidate.parts[0].weight_bytes == weights


def test_a_norm_that_is_joined_with_linears_is_read_by_nobody_else() -> None:
    for model in MODELS:
        trace = passes_of(model, "clean")[0]
        for c in trace.candidates:
            if c.kind in {"norm_linear", "norm_mlp"}:
                norm = trace.nodes[c.start]
                readers = [i for i, n in enumerate(trace.nodes) if norm.output in n.inputs]

                assert norm.shape.kind in {"rmsnorm", "layernorm"}
                assert all(c.start < i < c.stop for i in readers)


def test_only_the_last_token_is_answered_for_when_asked() -> None:
    trace = trace_forward(MODELS[-1], length=16, all_logits=False)

    assert trace.nodes[-1].shape.m == 1
    assert trace.nodes[-2].shape.m == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"length": 0}, "length of at least 1, found 0", id="no token"),
        pytest.param({"phase": "decode", "length": 2}, "pass of one token, found 2", id="decode 2"),
        pytest.param({"past": -1}, "found 1 after -1", id="a negative cache"),
    ],
)
def test_a_pass_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trace_forward(load_architecture("smollm2-135m"), **options)


@pytest.mark.parametrize("options", [{"phase": "decode"}, {"past": 4}], ids=["decode", "cache"])
def test_an_encoder_has_no_cache_and_no_decode(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is an encoder"):
        trace_forward(load_architecture("modernbert-base"), **options)


# --- against what the classes of transformers really do ---------------------------------------

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILY = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Olmo2": {"num_key_value_heads": 4},
    "ModernBert": {"cls_token_id": 1, "sep_token_id": 2},
}


@pytest.mark.parametrize("family", FAMILY)
def test_the_trace_is_what_transformers_runs(family: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILY[family])
    head = "MaskedLM" if family == "ModernBert" else "CausalLM"
    model = getattr(transformers, f"{family}For{head}")(config).eval()
    seen: list[tuple[object, ...]] = []

    def watch(path: str, module: Any) -> None:
        def note(_: Any, inputs: Any, output: Any) -> None:
            x, bias = inputs[0], getattr(module, "bias", None)
            seen.append(
                (path, x.numel() // x.shape[-1], x.shape[-1], output.shape[-1], bias is not None)
            )

        module.register_forward_hook(note)

    wanted = ("Linear", "RMSNorm", "LayerNorm", "Activation")
    for path, module in model.named_modules():
        if type(module).__name__.endswith(wanted):
            watch(path, module)
    with torch.no_grad():
        model(torch.arange(5)[None])
    trace = trace_forward(architecture_of(config.to_dict(), name=family, where=family), length=5)

    ours = [(n.name, n.shape.m, n.shape.k, n.shape.n, n.shape.bias) for n in trace.operators]
    assert ours == seen

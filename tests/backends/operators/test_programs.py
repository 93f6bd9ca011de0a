"""Every kind of operator on every backend, against torch and the transformers library."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgewise.backends.operators import (  # noqa: E402 - needs torch
    Weights,
    load_operator,
    operator_backends,
    random_inputs,
    random_weights,
    subnormal_share,
)
from edgewise.backends.operators.weights import weight_sizes  # noqa: E402
from edgewise.errors import (  # noqa: E402
    BackendUnavailable,
    ConfigError,
    OpUnsupported,
    ShapeError,
)
from edgewise.profiles.operators import AttentionShape, OperatorShape, parse_shape  # noqa: E402

BACKENDS = operator_backends()
COMPILED = BACKENDS[1:]

# At the paper's tolerances: rtol 1e-4 everywhere.
ATOL = {"linear": 1e-3, "norm_linear": 1e-3, "mlp": 1e-3, "norm_mlp": 1e-3, "layer": 1e-3}
ROWS = [
    "linear m=5 k=48 n=80",
    "linear m=5 k=48 n=80 bias",
    "activation m=5 k=80 n=80 silu",
    "activation m=5 k=80 n=80 gelu",
    "rmsnorm m=5 k=48 n=48",
    "layernorm m=5 k=48 n=48",
    "layernorm m=5 k=48 n=48 bias",
    "norm_linear m=5 k=48 n=80 rmsnorm bias",
    "norm_linear m=5 k=48 n=80 layernorm",
    "mlp m=5 k=48 n=80 silu-gated",
    "mlp m=5 k=48 n=80 gelu-packed",
    "norm_mlp m=5 k=48 n=80 silu-gated",
    "norm_mlp m=5 k=48 n=80 gelu-packed",
]


def make(key: str, seed: int = 0) -> tuple[OperatorShape, Weights, tuple[Any, ...]]:
    shape, rng = parse_shape(key), np.random.default_rng(seed)
    return shape, random_weights(shape, rng), random_inputs(shape, rng)


def assert_close(found: Any, expected: Any, kind: str) -> None:
    for y, z in zip(
        *((v,) if isinstance(v, torch.Tensor) else v for v in (found, expected)), strict=True
    ):
        assert y.shape == z.shape
        torch.testing.assert_close(y, z, rtol=1e-4, atol=ATOL.get(kind, 1e-5))


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("key", ROWS)
def test_a_compiled_operator_answers_as_torch_does_for_any_rows(key: str, backend: str) -> None:
    shape, weights, _ = make(key)
    reference, program = (load_operator(shape, weights, b) for b in ("torch:cpu", backend))
    assert program.any_rows
    assert (program.shape, program.backend, program.threads) == (shape, backend, 1)
    for m in (5, 1, 2, 5):
        (x,) = random_inputs(dataclasses.replace(shape, m=m), np.random.default_rng(m))
        assert_close(program(x), reference(x), shape.kind)
        assert_close(program(x[0]), reference(x[0]), shape.kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_before_a_packed_mlp_may_have_a_bias(backend: str) -> None:
    shape, weights, (x,) = make("norm_mlp m=2 k=48 n=80 gelu-packed")
    tensors = {**weights.tensors, "norm.bias": torch.full((48,), 0.5)}
    found = load_operator(shape, Weights(tensors=tensors), backend)(x)
    normed = torch.nn.functional.layer_norm(x, (48,), tensors["norm.weight"], tensors["norm.bias"])
    mlp = dataclasses.replace(shape, kind="mlp")
    assert_close(found, load_operator(mlp, weights, "torch:cpu")(normed), "mlp")


@pytest.mark.parametrize("backend", COMPILED)
def test_a_norm_of_heads_keeps_leading_dimensions(backend: str) -> None:
    shape, weights, _ = make("rmsnorm m=12 k=16 n=16")
    x = torch.randn(1, 4, 3, 16)
    expected = load_operator(shape, weights, "torch:cpu")(x)
    assert_close(load_operator(shape, weights, backend)(x), expected, "rmsnorm")


# --- the library itself ---


@pytest.fixture(scope="module")
def library() -> Any:
    pytest.importorskip("transformers")
    from transformers.activations import ACT2FN
    from transformers.models.llama import modeling_llama
    from transformers.models.modernbert import modeling_modernbert
    from transformers.models.olmo2 import modeling_olmo2
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    return {
        "llama": modeling_llama,
        "modernbert": modeling_modernbert,
        "olmo2": modeling_olmo2,
        "qwen2": modeling_qwen2,
        "qwen3": modeling_qwen3,
        "act": ACT2FN,
    }


def test_torch_operators_are_those_of_the_library(library: Mapping[str, Any]) -> None:
    config = library["modernbert"].ModernBertConfig(hidden_size=48, intermediate_size=80)
    packed = library["modernbert"].ModernBertMLP(config).eval()
    llama = library["llama"].LlamaConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=4
    )
    gated = library["llama"].LlamaMLP(llama)
    norm = library["llama"].LlamaRMSNorm(48, eps=1e-3)
    cases = [
        ("activation m=5 k=48 n=48 silu", library["act"]["silu"], {}),
        ("activation m=5 k=48 n=48 gelu", library["act"]["gelu"], {}),
        ("rmsnorm m=5 k=48 n=48", norm, {"weight": norm.weight}),
        (
            "mlp m=5 k=48 n=80 silu-gated",
            gated,
            {f: getattr(gated, f"{f}_proj").weight for f in ("gate", "up", "down")},
        ),
        (
            "mlp m=5 k=48 n=80 gelu-packed",
            packed,
            {"gate_up": packed.Wi.weight, "down": packed.Wo.weight},
        ),
    ]
    for key, module, tensors in cases:
        shape, _, (x,) = make(key)
        program = load_operator(shape, Weights(tensors=tensors, eps=1e-3), "torch:cpu")
        with torch.no_grad():
            assert torch.equal(program(x), module(x)), key
        y: Any = program(x)
        assert not y.requires_grad


def decoder_layer(library: Mapping[str, Any], family: str, kv_heads: int) -> Any:
    """A real decoder layer, its shape without a past, its weights, and its rotary embedding."""
    module = library[family]
    name = family.capitalize()
    config = getattr(module, f"{name}Config")(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=12,
        vocab_size=16,
        rms_norm_eps=1e-3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    layer = getattr(module, f"{name}DecoderLayer")(config, 0).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    a, m = layer.self_attn, layer.mlp
    tensors = {role: getattr(a, f"{role}_proj").weight for role in "qkvo"}
    tensors |= {role: getattr(m, f"{role}_proj").weight for role in ("gate", "up", "down")}
    if family == "qwen2":
        tensors |= {f"{role}.bias": getattr(a, f"{role}_proj").bias for role in "qkv"}
    if family in {"qwen3", "olmo2"}:
        tensors |= {"q_norm": a.q_norm.weight, "k_norm": a.k_norm.weight}
    first = "post_attention_layernorm" if family == "olmo2" else "input_layernorm"
    second = "post_feedforward_layernorm" if family == "olmo2" else "post_attention_layernorm"
    tensors |= {
        "input_norm": getattr(layer, first).weight,
        "post_norm": getattr(layer, second).weight,
    }
    shape = OperatorShape(
        kind="layer",
        m=5,
        k=48,
        n=80,
        bias=family == "qwen2",
        function="silu-gated",
        attention=AttentionShape(
            heads=4,
            kv_heads=kv_heads,
            head_dim=12,
            qk_norm={"qwen3": "head", "olmo2": "full"}.get(family, ""),  # type: ignore[arg-type]
            post_norm=family == "olmo2",
        ),
    )
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    return layer, shape, Weights(tensors=tensors, eps=1e-3), rotary


@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [("llama", 1), ("llama", 2), ("qwen2", 2), ("qwen3", 2), ("olmo2", 4)],
)
def test_a_layer_is_the_librarys_with_and_without_a_past(
    library: Mapping[str, Any], family: str, kv_heads: int
) -> None:
    from transformers import DynamicCache

    layer, shape, weights, rotary = decoder_layer(library, family, kv_heads)
    programs = [load_operator(shape, weights, backend) for backend in BACKENDS]
    cache: Any = DynamicCache()
    known = inspect.signature(layer.self_attn.forward).parameters
    cache_name = "cache" if "cache" in known else "past_key_values"  # the older name
    past = [torch.empty(1, kv_heads, 0, 12) for _ in range(2)]
    position = 0
    for rows in (5, 1, 3, 1):
        x = torch.randn(1, rows, 48)
        places = torch.arange(position, position + rows)[None]
        seen = torch.ones(rows, position + rows, dtype=torch.bool).tril(diagonal=position)
        with torch.no_grad():
            angles = rotary(x, places)
            expected = layer(
                x,
                attention_mask=seen[None, None] if position and rows > 1 else None,
                position_embeddings=angles,
                use_cache=True,
                **{cache_name: cache},
            )
        keys, values = cache.layers[0].keys, cache.layers[0].values
        expected = (expected, keys[:, :, -rows:], values[:, :, -rows:])
        for program in programs:
            assert_close(program(x, *angles, *past), expected, "layer")
        past, position = [keys, values], position + rows


@pytest.mark.parametrize("past", [0, 3])
def test_fixed_operators_put_together_are_the_layers_attention(past: int) -> None:
    a = AttentionShape(heads=4, kv_heads=2, head_dim=12, past=past)
    shape = OperatorShape(kind="layer", m=3, k=48, n=80, function="silu-gated", attention=a)
    rng = np.random.default_rng(0)
    weights, (x, cos, sin, *cache) = random_weights(shape, rng), random_inputs(shape, rng)

    def run(kind: Any, *inputs: Any, width: int = 48, **fields: Any) -> Any:
        part = OperatorShape(kind=kind, m=3, k=width, n=width, **fields)
        return load_operator(part, fields.pop("weights", Weights()), "torch:cpu")(*inputs)

    w = weights.tensors
    normed = torch.nn.functional.rms_norm(x, (48,), w["input_norm"], weights.eps)
    q, k, v = (normed @ w[role].T for role in "qkv")
    of_q, of_k = (dataclasses.replace(a, heads=h, kv_heads=h, past=0) for h in (4, 2))
    q = run("rope", q, cos, sin, attention=of_q)
    k = run("rope", k, cos, sin, width=24, attention=of_k)
    v = v.view(1, 3, 2, 12).transpose(1, 2)
    y = run("add", x, run("attention", q, k, v, *cache, attention=a) @ w["o"].T)
    mlp = dataclasses.replace(shape, kind="norm_mlp", attention=None)
    tensors = {**w, "norm.weight": w["post_norm"]}
    y = run("add", y, load_operator(mlp, Weights(tensors=tensors), "torch:cpu")(y))
    assert_close((y, k, v), load_operator(shape, weights, "torch:cpu")(x, cos, sin, *cache), "mlp")
    assert torch.equal(run("multiply", x, y), x * y)


def test_an_embedding_looks_rows_up_and_refuses_tokens_outside_it() -> None:
    from edgewise.errors import BackendError

    shape, weights, (tokens,) = make("embedding m=4 k=8 n=8")
    program = load_operator(shape, weights, "torch:cpu")
    assert torch.equal(program(tokens), weights.tensors["weight"][tokens])
    with pytest.raises(BackendError, match="index out of range"):
        program(torch.tensor([[1 << 20]]))
    with pytest.raises(ShapeError, match=r"torch\.int64"):
        program(tokens.float())


@pytest.mark.device
def test_torch_on_cuda_answers_as_on_the_cpu() -> None:
    if "torch:cuda" not in BACKENDS:
        pytest.skip("torch finds no CUDA device")
    for key in (*ROWS, "layer m=5 k=48 n=80 silu-gated heads=4/2x12 past=3"):
        shape, weights, inputs = make(key)
        found, expected = (
            load_operator(shape, weights, b)(*inputs) for b in ("torch:cuda", "torch:cpu")
        )
        assert_close(found, expected, shape.kind)


# --- what is refused at loading ---


def test_torch_on_cuda_is_unavailable_without_a_device() -> None:
    if "torch:cuda" in BACKENDS:
        pytest.skip("here is one")
    shape, weights, _ = make(ROWS[0])
    with pytest.raises(BackendUnavailable, match="finds no CUDA device"):
        load_operator(shape, weights, "torch:cuda")


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    shape, weights, _ = make(ROWS[0])
    with pytest.raises(BackendUnavailable, match="did you mean 'onnxruntime:CPU'"):
        load_operator(shape, weights, "onnxruntime:cpu")
    with pytest.raises(ConfigError, match="at least one thread"):
        load_operator(shape, weights, "torch:cpu", threads=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_function_is_unsupported(backend: str) -> None:
    for key in ("activation m=1 k=8 n=8 relu", "mlp m=1 k=8 n=8 relu-gated"):
        shape, weights, _ = make(key)
        with pytest.raises(OpUnsupported, match="relu"):
            load_operator(shape, weights, backend)


@pytest.mark.parametrize("backend", COMPILED)
def test_fixed_operators_stay_on_torch(backend: str) -> None:
    shape, weights, _ = make("add m=1 k=8 n=8")
    with pytest.raises(OpUnsupported, match="stays on torch"):
        load_operator(shape, weights, backend)


def test_weights_must_be_there_and_fit() -> None:
    shape, weights, _ = make("linear m=1 k=8 n=4 bias")
    full = dict(weights.tensors)
    wrong = [
        ({"weight": full["weight"]}, "needs the weights weight, bias; found weight"),
        (full | {"weight": full["weight"].T}, "strides"),
        (full | {"weight": full["weight"].double()}, "float64"),
        (full | {"weight": torch.zeros(8, 4).T}, r"strides \(1, 4\)"),
    ]
    for tensors, message in wrong:
        with pytest.raises(ShapeError, match=message):
            load_operator(shape, Weights(tensors=tensors), "torch:cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_bytes_are_what_the_backend_copies(backend: str) -> None:
    shape, weights, _ = make("norm_linear m=1 k=48 n=80 rmsnorm bias")
    copied = 0 if backend == "torch:cpu" else 4 * 48 * 80
    if backend != "torch:cuda":
        assert load_operator(shape, weights, backend).weight_bytes == copied


# --- random weights ---


def test_random_weights_have_all_roles_and_nothing_subnormal() -> None:
    for key in (*ROWS, "layer m=5 k=48 n=80 silu-gated bias heads=4/2x12 past=0 qk-norm=full"):
        shape, weights, _ = make(key)
        assert {r: tuple(t.shape) for r, t in weights.tensors.items()} == weight_sizes(shape)
        assert subnormal_share(weights) == 0.0
        again = make(key)[1]
        assert all(torch.equal(t, again.tensors[r]) for r, t in weights.tensors.items())


def test_random_weights_keep_the_scale_of_activations() -> None:
    for key in ("linear m=64 k=256 n=256", "norm_linear m=64 k=256 n=256 rmsnorm"):
        shape, weights, (x,) = make(key)
        assert (
            0.9 < float(torch.as_tensor(load_operator(shape, weights, "torch:cpu")(x)).std()) < 1.1
        )


def test_subnormal_weights_are_counted() -> None:
    values = torch.tensor([0.0, -0.0, 1e-39, -1e-45, 1.2e-38, 1.0, float("inf"), float("nan")])
    assert subnormal_share(Weights(tensors={"weight": values})) == 2 / 8
    assert subnormal_share(Weights()) == 0.0


def test_a_decode_cache_in_random_inputs_is_as_long_as_the_shape_says() -> None:
    _, _, inputs = make("layer m=1 k=48 n=80 silu-gated heads=4/2x12 past=7")
    assert [tuple(x.shape) for x in inputs] == [
        (1, 1, 48), (1, 1, 12), (1, 1, 12), (1, 2, 7, 12), (1, 2, 7, 12),
    ]  # fmt: skip
    # RoPE turns the first pair by one radian a token.
    assert float(inputs[1][0, 0, 0]) == pytest.approx(np.cos(7.0), abs=1e-6)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.backends.operators import operator_backends
from edgewise.dispatch.plan import DispatchPlan
from edgewise.errors import BackendUnavailable, ConfigError
from edgewise.model.transformer import Architecture
from edgewise.runtime.dispatching import model as dispatching

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "modernbert")
CAUSAL = FAMILIES[:4]
SEGMENTS = ("norm_linear", "mlp", "norm_mlp", "layer")
HOME = "torch:cpu"
TOKENS = torch.tensor([[3, 41, 7, 60, 12, 9]])

Plan = Callable[..., DispatchPlan]
Model = Callable[[str], Any]
Arch = Callable[[str], Architecture]


LOADED: dict[str, Any] = {family: {} for family in FAMILIES}  # OpenVINO compiles slowly


def dispatched_by(net: Any, made: DispatchPlan) -> Any:
    """The model by a plan, with the programs that other tests have loaded for it."""
    family = made.model.partition("-")[2]
    return edgewise.dispatch_model(net, made, loaded=LOADED[family])


def need(*backends: str) -> None:
    missing = [name for name in backends if name not in operator_backends()]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")


def logits(model: Any, tokens: Any = TOKENS, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(tokens, **kwargs).logits


def generated(model: Any) -> list[int]:
    found: list[int] = model.generate(
        TOKENS, max_new_tokens=5, do_sample=False, use_cache=True
    ).tolist()
    return found


def assert_near(found: Any, expected: Any) -> None:
    """Relative 1e-4, and as much of the largest logit: small ones are differences of large ones."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def at_random(seed: int) -> Callable[[int], str]:
    backends = operator_backends()
    numbers = np.random.default_rng(seed).integers(0, len(backends), 1000)
    return lambda number: backends[numbers[number]]


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["torch:cpu", "onnxruntime:CPU"])
def test_one_backend_for_everything_answers_as_torch_does(
    family: str, backend: str, model: Model, architecture: Arch, plan: Plan
) -> None:
    need(backend)
    net = model(family)
    expected = logits(net)

    with dispatched_by(net, plan(architecture(family), backend)) as dispatched:
        assert_near(logits(dispatched), expected)
        assert not dispatched.fallbacks


@pytest.mark.parametrize("family", CAUSAL)
def test_a_random_mixture_generates_the_same_tokens(
    family: str, model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model(family)
    expected, tokens = logits(net), generated(net)

    with dispatched_by(net, plan(architecture(family), at_random(1))) as dispatched:
        assert_near(logits(dispatched), expected)
        assert generated(net) == tokens
        assert not dispatched.fallbacks


def test_openvino_alone_answers_as_torch_does(model: Model, architecture: Arch, plan: Plan) -> None:
    need("openvino:CPU")
    net = model("llama")
    expected, tokens = logits(net), generated(net)

    with dispatched_by(net, plan(architecture("llama"), "openvino:CPU")) as dispatched:
        assert_near(logits(dispatched), expected)
        assert generated(net) == tokens


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_answer_as_their_operators_do(
    family: str, segment: str, model: Model, architecture: Arch, plan: Plan
) -> None:
    need("onnxruntime:CPU")
    net = model(family)
    expected = logits(net)
    tokens = generated(net) if family in CAUSAL else []
    made = plan(architecture(family), "onnxruntime:CPU", segment=segment)

    with dispatched_by(net, made) as dispatched:
        assert_near(logits(dispatched), expected)
        assert not tokens or generated(net) == tokens
        assert not dispatched.fallbacks


def test_segments_that_alternate_between_runtimes_answer_as_torch_does(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("qwen3")
    expected, tokens = logits(net), generated(net)

    for segment in ("norm_mlp", "layer"):
        made = plan(architecture("qwen3"), at_random(2), segment=segment)
        with dispatched_by(net, made) as dispatched:
            assert_near(logits(dispatched), expected)
            assert generated(net) == tokens


def test_phases_may_differ_in_their_segments(model: Model, architecture: Arch, plan: Plan) -> None:
    net = model("llama")
    tokens, long = generated(net), torch.arange(20)[None]
    expected = logits(net, long)
    layers = plan(architecture("llama"), HOME, segment="layer", lengths=(16,))
    fused = plan(architecture("llama"), HOME, segment="norm_mlp", lengths=(4,), pasts=(8,))
    joined = plan(architecture("llama"), HOME, segment="norm_linear")
    phases = (layers.phases[0], fused.phases[0], joined.phases[1])

    with dispatched_by(net, dataclasses.replace(layers, phases=phases)) as dispatched:
        assert generated(net) == tokens
        assert_near(logits(net, long), expected)
        assert not dispatched.fallbacks


def test_a_layer_that_is_whole_for_some_lengths_only_is_itself_for_others_after_swapping_again(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    short, long = torch.arange(4)[None], torch.arange(20)[None]
    expected = logits(net, short), logits(net, long)
    whole = plan(architecture("llama"), HOME, segment="layer", lengths=(20,)).phases[0]
    single = plan(architecture("llama"), HOME, lengths=(4,))
    mixed = dataclasses.replace(single, phases=(single.phases[0], whole))

    with dispatched_by(net, mixed) as dispatched:
        for _ in range(2):
            assert_near(logits(net, short), expected[0])
            assert_near(logits(net, long), expected[1])
            dispatched.restore()
            dispatched.swap()


def test_a_plan_that_joins_the_last_norm_is_refused_since_the_model_shows_what_it_gives(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    made = plan(architecture("llama"), HOME)
    *steps, norm, head = made.phases[0].steps
    joined = dataclasses.replace(
        head,
        kind="norm_linear",
        covers=(*norm.covers, *head.covers),
        shapes=(head.shapes[0].replace("linear", "norm_linear") + " rmsnorm",),
    )
    phase = dataclasses.replace(made.phases[0], steps=(*steps, joined))

    with pytest.raises(ConfigError, match="an answer of the model by itself"):
        dispatched_by(model("llama"), dataclasses.replace(made, phases=(phase,)))


@pytest.mark.parametrize("tokens", [1, 3, 6, 17], ids="{} tokens".format)
def test_a_length_outside_of_the_plan_takes_the_nearest(
    tokens: int, model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    ids = torch.arange(tokens)[None]
    expected = logits(net, ids)

    with dispatched_by(net, plan(architecture("llama"), at_random(3))) as dispatched:
        assert_near(logits(net, ids), expected)
        assert not dispatched.fallbacks


def test_no_tokens_give_no_rows(model: Model, architecture: Arch, plan: Plan) -> None:
    net = model("llama")
    made = plan(architecture("llama"), at_random(4))

    with dispatched_by(net, made), torch.no_grad():
        layer = net.model.layers[0]
        assert layer.mlp.gate_proj(torch.empty(1, 0, 32)).shape == (1, 0, 48)
        assert layer.input_layernorm(torch.empty(1, 0, 32)).shape == (1, 0, 32)


def test_tensors_that_are_not_contiguous_are_read_right(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    linear = net.model.layers[0].mlp.gate_proj
    x = torch.randn(1, 32, 6).transpose(1, 2)
    with torch.no_grad():
        expected = linear(x)

    with dispatched_by(net, plan(architecture("llama"), at_random(5))), torch.no_grad():
        assert not x.is_contiguous()
        assert_near(linear(x), expected)


def test_two_threads_run_one_model_at_once(model: Model, architecture: Arch, plan: Plan) -> None:
    net = model("llama")
    inputs = [torch.randint(0, 64, (1, n)) for n in (5, 6, 7, 8)] * 3
    expected = [logits(net, ids) for ids in inputs]
    made = plan(architecture("llama"), at_random(6), segment="norm_mlp")

    with dispatched_by(net, made), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda ids: logits(net, ids), inputs))

    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


# --- what no program computes ----------------------------------------------------------------


@pytest.mark.parametrize("segment", ["", "norm_linear", "norm_mlp", "layer"])
def test_what_a_plan_cannot_run_falls_back_and_is_counted(
    segment: str,
    model: Model,
    architecture: Arch,
    plan: Plan,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model("llama")
    batch = torch.randint(0, 64, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    expected = [logits(net, batch), logits(net, attention_mask=mask)]

    with dispatched_by(net, plan(architecture("llama"), HOME, segment=segment)) as dispatched:
        assert_near(logits(net, batch), expected[0])
        assert_near(logits(net, attention_mask=mask), expected[1])

        reasons = set(dispatched.fallbacks)
        assert "a batch of 2" in reasons
        assert any("mask" in why for why in reasons) == (segment == "layer")
        said = [record.message for record in caplog.records if "a batch of 2" in record.message]
        assert len(said) == 1


def test_gradients_and_training_fall_back(model: Model, architecture: Arch, plan: Plan) -> None:
    net = model("llama")
    made = plan(architecture("llama"), at_random(7), segment="norm_mlp")

    with dispatched_by(net, made) as dispatched:
        embedded = net.model.embed_tokens(TOKENS).detach().requires_grad_()
        net(inputs_embeds=embedded).logits.sum().backward()
        assert embedded.grad is not None
        assert embedded.grad.abs().sum() > 0
        net.train()
        try:
            logits(net)
        finally:
            net.eval()

    assert set(dispatched.fallbacks) == {"gradients are on", "the model is in training mode"}


def test_hidden_states_are_collected_and_attentions_fall_back(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    with torch.no_grad():
        expected = net(TOKENS, output_hidden_states=True).hidden_states
    made = plan(architecture("llama"), HOME, segment="layer")

    with dispatched_by(net, made) as dispatched, torch.no_grad():
        found = dispatched(TOKENS, output_hidden_states=True).hidden_states
        assert not dispatched.fallbacks
        assert len(found) == len(expected) == 3
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
        dispatched(TOKENS, output_attentions=True)
        assert set(dispatched.fallbacks) == {"the argument output_attentions"}


def test_a_second_prefill_after_a_cache_falls_back(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")

    def in_two_parts() -> Any:
        with torch.no_grad():
            first = net(TOKENS[:, :3], use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"
            return net(TOKENS[:, 3:], **{name: first[name]}).logits

    expected = in_two_parts()

    with dispatched_by(net, plan(architecture("llama"), HOME, segment="layer")) as dispatched:
        assert_near(in_two_parts(), expected)
        assert dispatched.fallbacks.total() == 2


# --- putting back ----------------------------------------------------------------------------


def state_of(net: Any) -> list[tuple[str, int, int]]:
    modules = [(name, id(m), id(m.__dict__.get("forward"))) for name, m in net.named_modules()]
    return modules + [(name, id(p), p._version) for name, p in net.named_parameters()]


def test_restoring_leaves_every_module_and_weight_as_it_was(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    before, keys = state_of(net), list(net.state_dict())
    made = plan(architecture("llama"), at_random(8), segment="layer")

    with dispatched_by(net, made) as dispatched:
        assert list(net.state_dict()) == keys
        logits(net)
    dispatched.restore()  # a second time does nothing

    assert state_of(net) == before
    with dispatched:
        assert state_of(net) != before
    assert state_of(net) == before


def test_a_failure_while_swapping_leaves_the_model_as_it_was(
    model: Model, architecture: Arch, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model("llama")
    before = state_of(net)
    replace = dispatching.DispatchedModel._replace
    done: list[str] = []

    def failing(self: Any, path: str, *rest: Any) -> None:
        if len(done) == 5:
            raise MemoryError("no more")
        done.append(path)
        replace(self, path, *rest)

    monkeypatch.setattr(dispatching.DispatchedModel, "_replace", failing)
    with pytest.raises(MemoryError):
        dispatched_by(net, plan(architecture("llama"), HOME))

    assert len(done) == 5
    assert state_of(net) == before


def test_a_backend_that_is_not_here_is_told_before_anything_is_swapped(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    before = state_of(net)
    made = plan(architecture("llama"), lambda i: "tensorrt:GPU" if i == 9 else HOME)

    with pytest.raises(BackendUnavailable, match="tensorrt:GPU"):
        edgewise.dispatch_model(net, made)

    assert state_of(net) == before


@pytest.mark.parametrize("other", ["qwen2", "qwen3", "modernbert"])
def test_a_plan_of_another_model_is_refused(
    other: str, model: Model, architecture: Arch, plan: Plan
) -> None:
    with pytest.raises(ConfigError, match="the plan is of"):
        edgewise.dispatch_model(model("llama"), plan(architecture(other), HOME))


def test_a_plan_of_other_sizes_is_refused(model: Model, architecture: Arch, plan: Plan) -> None:
    wider = dataclasses.replace(architecture("llama"), intermediate_size=64)

    with pytest.raises(ConfigError, match="instead of"):
        edgewise.dispatch_model(model("llama"), plan(wider, HOME, segment="mlp"))


def test_a_plan_for_other_threads_is_refused(model: Model, architecture: Arch, plan: Plan) -> None:
    with pytest.raises(ConfigError, match="2 threads"):
        edgewise.dispatch_model(model("llama"), plan(architecture("llama"), HOME, threads=2))


def test_a_model_is_dispatched_once_at_a_time(model: Model, architecture: Arch, plan: Plan) -> None:
    made = plan(architecture("llama"), HOME)

    with (
        edgewise.dispatch_model(model("llama"), made),
        pytest.raises(ConfigError, match="dispatched already"),
    ):
        edgewise.dispatch_model(model("llama"), made)


def test_half_precision_is_refused(architecture: Arch, plan: Plan) -> None:
    from edgewise.runtime.dispatching.build import build_model

    half = build_model(architecture("llama")).bfloat16()

    with pytest.raises(ConfigError, match="float32"):
        edgewise.dispatch_model(half, plan(architecture("llama"), HOME))


# --- several plans ---------------------------------------------------------------------------


def test_programs_are_shared_between_lengths_and_between_plans(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    need("onnxruntime:CPU")
    net = model("llama")
    loaded: dict[Any, Any] = {}
    made = plan(architecture("llama"), "onnxruntime:CPU", lengths=(4, 8))

    edgewise.dispatch_model(net, made, loaded=loaded).restore()
    count = len(loaded)
    edgewise.dispatch_model(net, made, loaded=loaded).restore()

    assert count == len(made.phases[0].steps)
    assert len(loaded) == count


def test_the_decode_plan_nearest_to_the_cache_is_taken(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    need("onnxruntime:CPU")
    net = model("llama")
    tokens = generated(net)
    near = plan(architecture("llama"), HOME, segment="norm_mlp", pasts=(6,))
    far = plan(architecture("llama"), "onnxruntime:CPU", pasts=(10,))
    made = dataclasses.replace(near, phases=(*near.phases, far.phases[1]))

    with dispatched_by(net, made) as dispatched, dispatched.timed() as samples:
        assert generated(net) == tokens

    path = "model.layers.0.mlp"
    # Pasts of 6, 7 and 8 are as near to 6; 9 is nearer to 10.
    assert len(samples[f"{path}.down_proj", "linear", "onnxruntime:CPU"]) == 1
    assert len(samples[path, "norm_mlp", HOME]) == 4


def test_a_pass_keeps_to_the_plan_of_its_state(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    need("onnxruntime:CPU")
    from edgewise.dispatch.states import Contended, StateChooser, StatePlans

    net = model("llama")
    expected = logits(net)
    calm = plan(architecture("llama"), HOME, segment="norm_mlp")
    busy = plan(architecture("llama"), "onnxruntime:CPU", state="beside cpu")
    plans = StatePlans(calm=calm, contended=(Contended(plan=busy, from_cores=1.0),))
    chooser = StateChooser(plans, cores=2)

    with (
        edgewise.dispatch_model(net, calm, states=chooser) as dispatched,
        dispatched.timed() as samples,
    ):
        assert_near(logits(net), expected)
        assert {backend for _, _, backend in samples} == {HOME}
        chooser._published = dataclasses.replace(chooser.chosen, plan=busy, level=1)
        assert_near(logits(net), expected)

    assert {backend for _, _, backend in samples} == {HOME, "onnxruntime:CPU"}


def test_timing_counts_every_piece_once_a_pass(
    model: Model, architecture: Arch, plan: Plan
) -> None:
    net = model("llama")
    made = plan(architecture("llama"), HOME)

    with dispatched_by(net, made) as dispatched, dispatched.timed() as samples:
        logits(net)
        logits(net)

    assert len(samples) == len(made.phases[0].steps)
    assert {len(values) for values in samples.values()} == {2}
    assert all(value > 0 for values in samples.values() for value in values)

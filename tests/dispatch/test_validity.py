from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgewise.dispatch.assemble import make_plan
from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.plan import DispatchPlan, Step
from edgewise.dispatch.problem import build_problem
from edgewise.dispatch.search import decide
from edgewise.dispatch.synthetic_table import BACKENDS, random_table
from edgewise.dispatch.trace import Node, Tensor, Trace
from edgewise.dispatch.validity import boundary, check_plan, find_circle
from edgewise.errors import BackendUnavailable, ConfigError
from edgewise.model.transformer import architecture_of
from edgewise.profiles.operators import OperatorShape
from edgewise.profiles.records import ThreadPolicy


def trace_of(family: str = "llama", length: int = 16) -> Trace:
    document = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    return trace_forward(architecture_of(document, name=family, where="test"), length=length)


def plan_for(trace: Trace, *, segments: bool = True, seed: int = 0) -> DispatchPlan:
    table = random_table([trace], np.random.default_rng(seed), switch_s=1e-6)
    problem = build_problem([trace], table, segments=segments)
    return make_plan(
        [(problem, decide(problem))], table, model=trace.model, objective="latency", method="best"
    )


def with_steps(plan: DispatchPlan, *steps: Step) -> DispatchPlan:
    return replace(plan, phases=(replace(plan.phases[0], steps=steps),))


@pytest.mark.parametrize("segments", [False, True], ids=["operators", "segments"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2", "modernbert"])
def test_what_is_decided_is_valid(family: str, *, segments: bool) -> None:
    trace = trace_of(family)

    for seed in range(3):
        plan = plan_for(trace, segments=segments, seed=seed)
        found = check_plan(plan, [trace], backends=BACKENDS, device_id="made-up")

        assert not found.warnings
        assert len(found.boundaries[0]) == len(plan.phases[0].steps)
        assert all(b.outputs for b in found.boundaries[0])


def test_a_boundary_is_what_crosses_and_each_tensor_once() -> None:
    trace = trace_of()
    layer = next(c for c in trace.candidates if c.kind == "layer")
    mlp = next(c for c in trace.candidates if c.kind == "mlp")
    projections = [i for i, n in enumerate(trace.nodes) if n.name.endswith(("q_proj", "k_proj"))]

    whole = boundary(trace, range(layer.start, layer.stop), name="layer", backend="b")
    inner = boundary(trace, range(mlp.start, mlp.stop), name="mlp", backend="b")
    both = boundary(trace, projections[:2], name="q and k", backend="b")

    assert (whole.inputs, whole.outputs) == (("model.embed_tokens",), ("model.layers.0.add_mlp",))
    assert whole.size_bytes == 2 * 16 * 64 * 4
    assert inner.inputs == ("model.layers.0.post_attention_layernorm",)  # read by gate and up
    assert inner.outputs == ("model.layers.0.mlp.down_proj",)
    assert both.inputs == ("model.layers.0.input_layernorm",)
    assert len(both.outputs) == 2


def test_operators_that_are_left_out_repeated_or_disordered_are_found() -> None:
    trace = trace_of()
    plan = plan_for(trace, segments=False)
    first, second, *rest = plan.phases[0].steps

    def check(*steps: Step) -> None:
        check_plan(with_steps(plan, *steps), [trace], backends=BACKENDS)

    with pytest.raises(ConfigError, match="1 operators have no backend, first"):
        check(second, *rest)
    with pytest.raises(ConfigError, match=r"input_layernorm' is covered 2 times"):
        check(first, first, second, *rest)
    with pytest.raises(ConfigError, match=r"q_proj' stands where .*input_layernorm'"):
        check(second, first, *rest)
    with pytest.raises(ConfigError, match=r"names operator 'lm_hed'.*mean 'lm_head'"):
        check(first, second, *rest[:-1], replace(rest[-1], covers=("lm_hed",)))


def test_a_segment_that_is_none_of_the_models_is_found() -> None:
    trace = trace_of()
    plan = plan_for(trace, segments=False)
    first, second, *rest = plan.phases[0].steps
    joined = replace(first, kind="mlp", covers=(*first.covers, *second.covers))

    with pytest.raises(ConfigError, match="as one mlp, which is no segment of this model"):
        check_plan(with_steps(plan, joined, *rest), [trace], backends=BACKENDS)


def test_a_segment_that_data_leaves_and_enters_again_is_found() -> None:
    trace = trace_of()
    plan = plan_for(trace, segments=False)
    q, o = (f"model.layers.0.self_attn.{letter}_proj" for letter in "qo")
    steps = {step.name: step for step in plan.phases[0].steps}
    joined = replace(steps[q], kind="norm_linear", covers=(q, o))  # with attention between them
    rest = [joined if step.name == q else step for name, step in steps.items() if name != o]

    with pytest.raises(ConfigError, match=r"in a circle: .*self_attn\.attention") as caught:
        check_plan(with_steps(plan, *rest), [trace], backends=BACKENDS)

    assert "split the segment" in (caught.value.help or "")


def test_two_pieces_that_wait_for_each_other_are_a_circle() -> None:
    shape = OperatorShape(kind="activation", m=1, k=4, n=4)

    def node(name: str, reads: int, makes: int) -> Node:
        return Node(name=name, shape=shape, inputs=(reads,), output=makes)

    # Two strands, a to b and c to d.
    trace = Trace(
        model="strands",
        phase="prefill",
        length=1,
        past=0,
        nodes=(node("a", 0, 1), node("c", 0, 2), node("b", 1, 3), node("d", 2, 4)),
        tensors=tuple(Tensor(name=f"t{i}", size_bytes=16) for i in range(5)),
    )

    assert not find_circle(trace, [{0, 1}, {2, 3}])
    assert not find_circle(trace, [{0, 2}, {1, 3}])
    assert set(find_circle(trace, [{0, 3}, {1, 2}])) == {0, 1}  # a with d, c with b


def test_a_backend_that_is_not_here_is_named_with_what_to_do() -> None:
    trace = trace_of()
    plan = plan_for(trace, segments=False)
    plan = with_steps(plan, *(replace(s, backend="openvino:NPU") for s in plan.phases[0].steps))

    with pytest.raises(BackendUnavailable, match=r"runs .* on 'openvino:NPU'") as caught:
        check_plan(plan, [trace], backends=["torch:cpu"])

    assert "--backends torch:cpu" in (caught.value.help or "")


def test_another_device_or_thread_policy_is_a_warning() -> None:
    trace = trace_of()
    plan = plan_for(trace)

    found = check_plan(
        plan,
        [trace],
        backends=BACKENDS,
        device_id="elsewhere",
        thread_policy=ThreadPolicy(threads=2),
    )

    assert "for device made-up, this is elsewhere" in found.warnings[0]
    assert "for 1 thread, no spin, in force is 2 threads, no spin" in found.warnings[1]


def test_a_plan_of_another_pass_is_refused() -> None:
    plan = plan_for(trace_of())

    with pytest.raises(ConfigError, match="prefill 16: the forward pass is prefill 32"):
        check_plan(plan, [trace_of(length=32)], backends=BACKENDS)
    with pytest.raises(ConfigError, match="has 1 phases, found 0 traces"):
        check_plan(plan, [], backends=BACKENDS)

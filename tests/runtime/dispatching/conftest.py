"""Small transformers of each family, and plans for them made by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.dispatch.trace import Candidate, Node, Trace
from edgewise.model.transformer import Architecture
from edgewise.profiles.records import ThreadPolicy

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "modernbert")
Choose = Callable[[int], str]


def tiny(family: str) -> Architecture:
    """Two layers of a family."""
    encoder = family == "modernbert"
    return Architecture(
        name=f"tiny-{family}",
        model_type=family,  # type: ignore[arg-type]
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if encoder else 2,
        head_dim=8,
        vocab_size=64,
        hidden_act="gelu" if encoder else "silu",
        tie_word_embeddings=family != "olmo2",
    )


def make_plan(
    architecture: Architecture,
    choose: Choose | str,
    *,
    segment: str = "",
    lengths: Sequence[int] = (6,),
    pasts: Sequence[int] = (6,),
    state: str = "calm",
    threads: int = 1,
) -> DispatchPlan:
    """Plan every operator, and every segment of a kind, on ``choose(number)``."""
    pick = (lambda _: choose) if isinstance(choose, str) else choose
    traces = [trace_forward(architecture, length=n) for n in lengths]
    if architecture.causal:
        traces += [trace_forward(architecture, phase="decode", past=n) for n in pasts]
    return DispatchPlan(
        model=architecture.name,
        objective="latency",
        method="by hand",
        backends=("torch:cpu", "onnxruntime:CPU", "openvino:CPU"),
        state=state,
        device_id="here",
        thread_policy=ThreadPolicy(threads=threads),
        provenance="estimated",
        table="none",
        phases=tuple(_phase(trace, pick, segment) for trace in traces),
    )


def _phase(trace: Trace, choose: Choose, segment: str) -> PhasePlan:
    taken = {c.start: c for c in trace.candidates if c.kind == segment}
    steps: list[Step] = []
    at = 0
    while at < len(trace.nodes):
        node, candidate = trace.nodes[at], taken.get(at)
        if candidate is not None:
            steps.append(_segment(trace.nodes, candidate, choose(len(steps))))
            at = candidate.stop
            continue
        at += 1
        if node.supported:
            steps.append(_step(node, choose(len(steps))))
    return PhasePlan(
        phase=trace.phase,
        length=trace.length,
        past=trace.past,
        steps=tuple(steps),
        predicted_s=0.0,
        predicted_j=None,
        best_static="torch:cpu",
        best_static_s=0.0,
    )


def _step(node: Node, backend: str) -> Step:
    return Step(
        name=node.name,
        kind=node.shape.kind,
        backend=backend,
        covers=(node.name,),
        shapes=(node.shape.key,),
        predicted_s=0.0,
    )


def _segment(nodes: Sequence[Node], candidate: Candidate, backend: str) -> Step:
    covered = [n.name for n in nodes[candidate.start : candidate.stop] if n.supported]
    return Step(
        name=candidate.name,
        kind=candidate.kind,
        backend=backend,
        covers=tuple(covered),
        shapes=tuple(part.key for part in candidate.parts),
        predicted_s=0.0,
        reason="segment",
    )


@pytest.fixture(scope="session")
def plan() -> Callable[..., DispatchPlan]:
    """Makes plans by hand."""
    return make_plan


@pytest.fixture(scope="session")
def model() -> Callable[[str], Any]:
    """A small model of each family, made once."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.set_num_threads(1)
    from edgewise.runtime.dispatching.build import build_model

    @functools.cache
    def build(family: str) -> Any:
        built = build_model(tiny(family))
        built.config.use_cache = family != "modernbert"
        with torch.no_grad():  # outputs that differ from token to token
            for parameter in built.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
                else:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
        return built

    return build


@pytest.fixture(scope="session")
def architecture() -> Callable[[str], Architecture]:
    """Sizes of the small models."""
    return tiny

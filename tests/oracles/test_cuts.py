"""Cuts of real nets against an experiment that knows nothing of graphs.

A tensor separates a net exactly if, once it is held at what another input made of it, the answer no
longer depends on the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.model import legal_cuts

FAMILIES = ("chain", "residual", "dense", "inception", "in_place", "attention", "hf_vit")


def names_by_experiment(source: Any, one: Any, other: Any) -> set[str]:
    """Hold each tensor in turn; the exported graph is run by torch's own interpreter."""
    import torch

    module = source._module

    class Recorder(torch.fx.Interpreter):
        def __init__(self, held: str = "", value: Any = None) -> None:
            super().__init__(module)
            self.held, self.value = held, value
            self.seen: dict[str, Any] = {}

        def run_node(self, n: Any) -> Any:
            result = self.value if n.name == self.held else super().run_node(n)
            self.seen[n.name] = result
            return result

    with torch.no_grad():
        first = Recorder()
        wanted = first.run(one)
        found = set()
        for name, value in first.seen.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                answer = Recorder(name, value).run(other)
                if torch.equal(answer, wanted):
                    found.add(name)
    assert not torch.equal(Recorder().run(other), wanted)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_are_where_holding_one_tensor_holds_the_answer(
    family: str, nets: Any, staged: Any
) -> None:
    source = staged(family).source
    one, other = nets.example(family, 2), nets.example(family, 2).flip(0) * 0.5 + 0.1

    by_experiment = names_by_experiment(source, one, other)

    ends = {*source.graph.inputs, *source.graph.outputs}
    by_liveness = {c.tensor.name for c in legal_cuts(source.graph)}
    assert by_liveness <= by_experiment
    # What separates but may not cross: tensors whose first axis is not the batch.
    assert {n for n in by_experiment - ends if n in source.graph.tensors} == by_liveness
    assert len(by_liveness) >= 3


@pytest.mark.parametrize(
    "family",
    ["residual", "attention", "hf_resnet", pytest.param("inception", marks=pytest.mark.slow)],
)
def test_torch_and_onnx_agree_on_the_cuts_and_the_work(family: str, staged: Any) -> None:
    """The exporter drops, merges and splits elementwise operators; contractions must be equal."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    from edgewise.frontends.onnx_file import OnnxSource
    from edgewise.model import StagedModel

    source = staged(family).source
    whole = source.onnx_segment(source.graph.inputs[0], source.graph.outputs[0], batch=1)
    again = OnnxSource(whole, name=family)

    def contractions(graph: Any) -> float:
        return float(sum(op.flops for op in graph.ops if op.is_contraction))

    by_torch = {c.tensor.shape: c for c in legal_cuts(source.graph)}
    by_onnx = {c.tensor.shape: c for c in legal_cuts(again.graph)}
    maps = {s for s in by_torch if len(s) in (3, 4)}
    assert contractions(again.graph) == contractions(source.graph)
    assert again.graph.flops == pytest.approx(source.graph.flops, rel=0.15)
    assert {s for s in by_onnx if len(s) in (3, 4)} >= maps - {(1, 8, 1, 1), (1, 14, 1, 1)}
    depths = [StagedModel.from_source(s, exits=3, name="n").exits for s in (source, again)]
    np.testing.assert_allclose(
        [e.depth_ratio for e in depths[0]], [e.depth_ratio for e in depths[1]], atol=0.05
    )

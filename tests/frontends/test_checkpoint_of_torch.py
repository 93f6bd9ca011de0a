"""Checkpoints of torch modules: exporting takes seconds, so these stand apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgewise.backends import load_program
from edgewise.backends.base import probe_input
from edgewise.errors import OpUnsupported
from edgewise.frontends.checkpoint import load_checkpoint, save_checkpoint
from edgewise.model.staged import StagedModel

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


class _Maps(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 12, 3, 2, bias=False), nn.BatchNorm2d(12), nn.ReLU6()),
            nn.Sequential(nn.Conv2d(12, 16, 3), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )


class _Tokens(nn.Module):
    """Patches, two transformer layers, mean, answer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 36, 16) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.answer = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        answer: Tensor = self.answer(x.mean(1))
        return answer


@pytest.mark.parametrize("family", [_Maps, _Tokens], ids=["maps", "tokens"])
def test_a_torch_module_runs_from_its_checkpoint_without_torch(
    family: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = StagedModel.from_module(family(), torch.zeros(1, 3, 24, 24), exits=3)
    model = model.with_random_heads(width=8)
    path = save_checkpoint(model, tmp_path / "x", weights_dtype="float32")
    loaded = load_checkpoint(path)
    x = probe_input(model, batch=2)
    logits = []
    for each, backend in ((model, "torch"), (loaded, "onnxruntime")):
        program = load_program(each, backend, check=False)
        with program.context(batch=2) as context:
            context.set_boundary(0, x)
            for k in range(model.num_exits):
                context.run_segment(k, k + 1)
            logits.append([context.run_head(k) for k in range(model.num_exits)])

    assert [e.name for e in loaded.exits] == [e.name for e in model.exits]
    for own, other in zip(*logits, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(OpUnsupported, match="no torch form"):
        load_program(loaded, "torch")
    assert str(tmp_path.anchor + "home").encode() not in (path / "graph.onnx").read_bytes()
    assert b".py" not in (path / "graph.onnx").read_bytes()

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.onnx_pieces import head_proto
from edgewise.model.heads import default_head_spec, random_head


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("shape", "kind"), [((1, 6, 5, 4), "conv"), ((1, 6, 5, 4), "pool"), ((1, 9, 6), "token")]
)
def test_a_head_in_onnx_answers_as_in_numpy(shape: Any, kind: str, batch: int) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(3)
    head = random_head(default_head_spec(shape, 11, kind=kind, width=8), rng)
    x = rng.standard_normal((batch, *shape[1:])).astype(np.float32)

    proto = head_proto(head, batch=batch)
    onnx.checker.check_model(proto, full_check=True)
    found = np.asarray(next(iter(ReferenceEvaluator(proto).run(None, {"features": x}))))

    assert found.shape == (batch, 11)
    np.testing.assert_allclose(found, head(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "kind"), [((1, 6, 5, 4), "conv"), ((1, 6, 5, 4), "pool"), ((1, 9, 6), "token")]
)
def test_a_head_in_torch_answers_as_in_numpy(shape: Any, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from edgewise.backends.torch import torch_head

    rng = np.random.default_rng(3)
    head = random_head(default_head_spec(shape, 11, kind=kind, width=8), rng)
    x = rng.standard_normal((2, *shape[1:])).astype(np.float32)
    given = torch.from_numpy(x.copy())

    found = torch_head(torch, head)(given).numpy()

    np.testing.assert_allclose(found, head(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(given.numpy(), x)

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgewise.model.heads import HeadSpec
from edgewise.training.heads import TrainableHead

SHAPES = {"conv": (1, 6, 5, 4), "pool": (1, 6, 5, 4), "token": (1, 20, 6)}


def _fitted(kind: str, features: np.ndarray) -> TrainableHead:
    """A head whose every array and statistic has moved away from where it started."""
    spec = HeadSpec(kind=kind, feature_shape=SHAPES[kind], width=7, num_classes=3)  # type: ignore[arg-type]
    head = TrainableHead.draw(spec, features, seed=1)
    rng = np.random.default_rng(2)
    for name, tensor in head.arrays.items():
        step = torch.from_numpy(rng.uniform(0.1, 0.6, tensor.shape).astype(np.float32))
        head.arrays[name] = tensor + step
    return head


@pytest.mark.parametrize("kind", ["conv", "pool", "token"])
def test_a_folded_head_answers_as_the_one_that_was_fitted(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, *SHAPES[kind][1:])).astype(np.float32) * 3 + 2
    flat = x if kind == "token" else x.reshape(9, 6, -1).transpose(0, 2, 1)  # [N, P, C]
    given = np.ascontiguousarray(flat if kind == "conv" else flat.mean(axis=1))
    head = _fitted(kind, given.astype(np.float16))

    expected = head.logits(torch.from_numpy(given), training=False).numpy()
    # Float32 sums in another order: 1e-5 of the scale.
    np.testing.assert_allclose(head.folded()(x), expected, rtol=1e-5, atol=1e-5)


def test_scales_are_measured_on_the_features() -> None:
    rng = np.random.default_rng(0)
    features = (rng.standard_normal((5000, 6)) * 4 - 3).astype(np.float16)
    features[:, 2] = 7  # a channel that never changes must not be divided by zero
    spec = HeadSpec(kind="pool", feature_shape=SHAPES["pool"], width=7, num_classes=3)

    arrays = TrainableHead.draw(spec, features, seed=0).arrays
    expected = features.astype(np.float64)
    np.testing.assert_allclose(arrays["scale.mean"], expected.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(arrays["scale.std"][:2], expected.std(axis=0)[:2], rtol=1e-5)
    assert arrays["scale.std"][2] == 1


def test_the_same_seed_draws_the_same_head() -> None:
    features = np.ones((4, 6), dtype=np.float16)
    spec = HeadSpec(kind="pool", feature_shape=SHAPES["pool"], width=7, num_classes=3)
    one, again, other = (TrainableHead.draw(spec, features, seed=s) for s in (3, 3, 4))

    assert torch.equal(one.arrays["hidden.weight"], again.arrays["hidden.weight"])
    assert not torch.equal(one.arrays["hidden.weight"], other.arrays["hidden.weight"])

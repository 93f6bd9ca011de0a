from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.rotary import rotary_tables


def test_a_turn_keeps_lengths_and_depends_on_the_distance_alone(language: Any) -> None:
    architecture = language.tiny().architecture
    cos, sin = rotary_tables(architecture, 40)
    half = architecture.head_dim // 2
    q, k = np.random.default_rng(0).normal(size=(2, half, 2))

    def turned(x: Any, place: int) -> Any:
        c, s = cos[place], sin[place]
        return np.stack([x[:, 0] * c - x[:, 1] * s, x[:, 1] * c + x[:, 0] * s], axis=1)

    assert np.linalg.norm(turned(q, 17)) == pytest.approx(np.linalg.norm(q))
    scores = [np.sum(turned(q, 9 + at) * turned(k, at)) for at in range(30)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


def test_tables_are_those_of_transformers_far_out(language: Any) -> None:
    torch = pytest.importorskip("torch")
    source = language.transformers_model(
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    )
    architecture = language.language_model(source).architecture
    with torch.no_grad():
        cos, sin = source.model.rotary_emb(torch.zeros(1), torch.arange(8192)[None])

    found = rotary_tables(architecture, 8192)
    half = architecture.head_dim // 2
    for ours, theirs in zip(found, (cos, sin), strict=True):
        # A last bit of the frequency, 1.2e-7, times the position.
        np.testing.assert_allclose(ours, theirs[0, :, :half].numpy(), atol=1.5e-3)
        np.testing.assert_allclose(ours[:64], theirs[0, :64, :half].numpy(), atol=1e-5)

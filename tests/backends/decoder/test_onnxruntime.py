from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder import load_decoder, quantise
from edgewise.backends.decoder.onnxruntime import OnnxRuntimeDecoder
from edgewise.errors import OpUnsupported

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 160, 12)]
EXITS = (1, 2)  # of 4 layers: groups of one, one and two


@pytest.fixture(scope="module")
def tiny(language: Any) -> Any:
    return language.tiny()


@pytest.fixture(scope="module")
def program(tiny: Any) -> OnnxRuntimeDecoder:
    return OnnxRuntimeDecoder(tiny, exit_layers=EXITS)


def run(program: Any, cache: Any, first: int, count: int) -> Any:
    states = program.embed(TOKENS[first : first + count])
    return program.run_layers(states, cache, start=0, stop=3, first=first)


@pytest.mark.parametrize("count", [1, 3], ids=["one token", "three at once"])
def test_layers_of_one_group_may_lack_different_cells(program: Any, tiny: Any, count: int) -> None:
    found = []
    for each in (program, load_decoder(tiny, "torch:cpu", exit_layers=EXITS)):
        cache = each.new_cache(len(TOKENS))
        run(each, cache, 0, 9)
        cache.present[1, 2:4] = cache.present[2, 5] = cache.present[3, [0, 6]] = False
        states = run(each, cache, 9, count)
        found.append((states, cache.keys[:, :, 9 : 9 + count], cache.values[:, :, 9 : 9 + count]))

    for ours, theirs in zip(*found, strict=True):
        # Sums of a few hundred float32 in another order.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


def test_cells_that_are_absent_keep_what_they_hold(program: Any) -> None:
    cache = program.new_cache(len(TOKENS))
    run(program, cache, 0, 9)
    cache.present[:, 4] = False
    before = cache.keys[:, :, :9].copy()
    run(program, cache, 9, 1)

    np.testing.assert_array_equal(cache.keys[:, :, :9], before)


def test_what_is_kept_for_a_cache_goes_with_it(tiny: Any) -> None:
    program: Any = OnnxRuntimeDecoder(tiny)
    cache = program.new_cache(4)
    program.run_layers(program.embed(TOKENS[:1]), cache, start=0, stop=1, first=0)

    assert len(program._calls) == 1
    del cache
    gc.collect()
    assert len(program._calls) == 0


def test_a_cache_that_was_given_other_arrays_is_bound_anew(program: Any) -> None:
    cache = program.new_cache(len(TOKENS))
    run(program, cache, 0, 5)
    expected = run(program, cache, 5, 1)
    cache.keys, cache.values = cache.keys.copy(), cache.values.copy()
    cache.keys[:, :, 5] = 0.0
    found = run(program, cache, 5, 1)

    np.testing.assert_array_equal(found, expected)
    assert cache.keys[:, :, 5].any()


@pytest.mark.parametrize("count", [1, 3], ids=["one token", "three at once"])
@pytest.mark.parametrize("family", ["llama", "olmo2"], ids=["norms first", "norms last"])
@pytest.mark.parametrize("worth", [-1.0, 1.0], ids=["with means of blocks", "without"])
def test_layers_that_are_filled_together_get_what_each_gets_alone(
    language: Any, family: str, count: int, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "_WORTH", worth)
    model = language.tiny(family)
    found = []
    for exits in ((1,), (1, 2, 3)):
        program = OnnxRuntimeDecoder(model, exit_layers=exits, precision="int4")
        cache = program.new_cache(4)
        states = np.random.default_rng(0).standard_normal(
            (count, model.architecture.hidden_size), dtype=np.float32
        )
        program.fill(states, cache, start=1, first=1)
        found.append((cache.keys, cache.values))

    (keys, values), alone = found
    np.testing.assert_array_equal(keys, alone[0])
    np.testing.assert_array_equal(values, alone[1])
    assert (keys[1:, :, 1 : 1 + count] != 0).all()
    assert not keys[0].any()


def test_fewer_bits_are_fewer_bytes(program: Any, tiny: Any) -> None:
    sizes = [
        OnnxRuntimeDecoder(tiny, precision=precision, exit_layers=EXITS).weight_bytes
        for precision in ("int4", "int8")
    ]
    matrices = sum(w.nbytes for n, w in tiny.weights.items() if w.ndim == 2 and "head" not in n)

    assert sizes[0] < sizes[1] < program.weight_bytes
    assert matrices <= program.weight_bytes < 1.05 * matrices


def test_heads_whose_width_it_cannot_rotate_are_refused(language: Any) -> None:
    with pytest.raises(OpUnsupported, match="multiple of 16, found 24"):
        OnnxRuntimeDecoder(language.tiny(head_dim=24))

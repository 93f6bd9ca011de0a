from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.torch import Call, EagerDecoder, FusedDecoder, TorchDecoder, load
from edgewise.errors import BackendError
from edgewise.model.decoding import KvCache
from edgewise.model.language import LanguageModel

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
DEPTH = 4
TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 160, 12)]


@pytest.fixture(scope="module")
def tiny(language: Any) -> Callable[..., LanguageModel]:
    return functools.cache(language.tiny)


@functools.cache
def watched(plain: type[TorchDecoder]) -> type[TorchDecoder]:
    """A forward that notes which layers run, and breaks in one of them."""

    class Watched(plain):  # type: ignore[valid-type, misc]
        ran: list[int]
        breaks: dict[int, BaseException]

        def _layer(self, layer: int, state: Any, call: Call, mask: Any) -> Any:
            self.ran.append(layer)
            found = super()._layer(layer, state, call, mask)
            if layer in self.breaks:
                raise self.breaks[layer]
            return found

    return Watched


@pytest.fixture(params=[EagerDecoder, FusedDecoder])
def program(request: pytest.FixtureRequest, tiny: Any) -> Any:
    made: Any = watched(request.param)(tiny(), backend="torch:cpu", exit_layers=(1, 3))
    made.ran, made.breaks = [], {}
    return made


def run(program: TorchDecoder, cache: KvCache, count: int) -> Any:
    tokens = TOKENS[cache.length : cache.length + count]
    states = program.run_layers(program.embed(tokens), cache, start=0, stop=3, first=cache.length)
    cache.length += count
    return states


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize("error", [RuntimeError("broke"), MemoryError(), KeyboardInterrupt()])
def test_a_raise_in_any_layer_changes_no_later_call(
    program: Any, layer: int, error: BaseException
) -> None:
    untouched, cache = program.new_cache(12), program.new_cache(12)
    run(program, untouched, 5)
    expected = run(program, untouched, 2)
    run(program, cache, 5)

    program.breaks = {layer: error}
    wanted = BackendError if isinstance(error, Exception) else type(error)
    with pytest.raises(wanted):
        run(program, cache, 2)
    assert not cache.present[:, 5:].any()
    program.breaks = {}

    np.testing.assert_array_equal(run(program, cache, 2), expected)
    np.testing.assert_array_equal(cache.keys, untouched.keys)
    np.testing.assert_array_equal(cache.present, untouched.present)


def test_layers_behind_an_exit_do_not_run(program: Any) -> None:
    cache = program.new_cache(12)
    states = program.run_layers(program.embed(TOKENS[:2]), cache, start=0, stop=1, first=0)
    program.fill(states, cache, start=1, first=0)
    assert program.ran == [0]
    program.run_layers(states, cache, start=1, stop=2, first=0)
    assert program.ran == [0, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forwards_agree_on_cells_and_states(family: str, tiny: Any) -> None:
    found = []
    for backend in ("torch:cpu", "torch-eager:cpu"):
        program = load(tiny(family), backend=backend, exit_layers=(1, 3))
        cache = program.new_cache(12)
        for first, stop in [(0, 3), (4, 1), (6, 2), (7, 3)]:
            last = {0: 4, 4: 6, 6: 7, 7: 12}[first]
            states = program.embed(TOKENS[first:last])
            states = program.run_layers(states, cache, start=0, stop=stop, first=first)
            if first == 4:  # the next leaves a hole
                program.fill(states, cache, start=stop, first=first)
        found.append((states, cache.keys, cache.values))
        assert cache.present.sum() == 12 * DEPTH - 1

    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("make", [EagerDecoder, FusedDecoder])
def test_the_models_weights_are_only_read(make: type[TorchDecoder], language: Any) -> None:
    model = language.tiny("olmo2")
    before = {name: w.copy() for name, w in model.weights.items()}
    program = make(model, backend="torch:cpu", exit_layers=(1,))
    cache = program.new_cache(12)
    states = program.run_layers(program.embed(TOKENS), cache, start=0, stop=2, first=0)
    program.fill(states, cache, start=1, first=0)
    program.logits(states, position=2)

    for name, weight in model.weights.items():
        assert not weight.flags.writeable
        np.testing.assert_array_equal(weight, before[name])


def test_the_plain_forward_shares_the_models_memory(tiny: Any) -> None:
    model = tiny()
    program: Any = EagerDecoder(model, backend="torch:cpu")
    address = model.weights["model.layers.0.mlp.up_proj.weight"].ctypes.data

    assert program._layers[0]["up"].data_ptr() == address
    assert program._head.data_ptr() == model.weights["lm_head.weight"].ctypes.data


def test_every_call_sees_to_its_threads(tiny: Any) -> None:
    torch = pytest.importorskip("torch")
    program = load(tiny(), threads=1)
    cache = program.new_cache(12)
    torch.set_num_threads(2)
    try:
        program.run_layers(program.embed(TOKENS), cache, start=0, stop=1, first=0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_a_long_prompt_is_masked_as_in_one_token_steps(tiny: Any) -> None:
    """Longer than the blocks of 32 and more that attention kernels work in."""
    program = load(tiny("qwen3"))
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 160, 96)]
    whole, cache = program.new_cache(96), program.new_cache(96)
    expected = program.run_layers(program.embed(tokens), whole, start=0, stop=1, first=0)
    program.run_layers(program.embed(tokens[:50]), cache, start=0, stop=1, first=0)
    rest = program.run_layers(program.embed(tokens[50:95]), cache, start=0, stop=1, first=50)
    last = program.run_layers(program.embed(tokens[95:]), cache, start=0, stop=1, first=95)

    found = np.concatenate([rest, last])
    np.testing.assert_allclose(found, expected[50:], rtol=0, atol=1e-5 * np.abs(expected).max())


def test_gelu_is_an_activation_too(language: Any) -> None:
    source = language.transformers_model("llama", hidden_act="gelu")
    model = language.language_model(source)
    expected = language.reference(source, TOKENS).logits
    for backend in ("torch:cpu", "torch-eager:cpu"):
        program = load(model, backend=backend)
        cache = program.new_cache(12)
        states = program.run_layers(program.embed(TOKENS), cache, start=0, stop=1, first=0)
        found = program.logits(states, position=1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_several_rows_equal_as_many_single_ones(family: str, tiny: Any) -> None:
    program = load(tiny(family), exit_layers=(1, 3))
    for count in range(2, 10):
        one, some = program.new_cache(16), program.new_cache(16)
        for cache in (one, some):
            program.run_layers(program.embed(TOKENS[:3]), cache, start=0, stop=3, first=0)
        tokens = (TOKENS * 2)[3 : 3 + count]
        found = program.run_layers(program.embed(tokens), some, start=0, stop=3, first=3)
        answers = program.logits(found, position=3)
        for i, token in enumerate(tokens):
            state = program.embed([token])
            state = program.run_layers(state, one, start=0, stop=3, first=3 + i)
            answer = program.logits(state, position=3)

            most = 1e-5 * np.abs(found).max()
            np.testing.assert_allclose(found[i], state[0], rtol=0, atol=most)
            most = 1e-5 * np.abs(answers).max()
            np.testing.assert_allclose(answers[i], answer[0], rtol=0, atol=most)
            assert answers[i].argmax() == answer[0].argmax()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_is_the_same_however_many_rows_and_threads(tiny: Any, threads: int) -> None:
    torch = pytest.importorskip("torch")
    program: Any = FusedDecoder(tiny(), backend="torch:cpu")
    program.threads = threads  # which way is taken; torch keeps its one
    matrix = program._layers[0].qkv
    weight = np.concatenate([part.numpy() for part in matrix.parts])
    for rows in range(1, 10):
        x = np.random.default_rng(rows).normal(size=(rows, 64)).astype(np.float32)
        found = program._times(torch.from_numpy(x), matrix)

        assert found.is_contiguous()
        np.testing.assert_allclose(found.numpy(), x @ weight.T, rtol=0, atol=1e-4)


def test_several_rows_read_the_models_own_memory(tiny: Any) -> None:
    model = tiny()
    program: Any = FusedDecoder(model, backend="torch:cpu")
    layer, w = program._layers[1], model.weights
    at = "model.layers.1."

    for matrix, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.o, ("self_attn.o_proj",)),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
        (layer.down, ("mlp.down_proj",)),
    ):
        found = [part.data_ptr() for part in matrix.parts]
        assert found == [w[f"{at}{n}.weight"].ctypes.data for n in names]
    assert program._head.parts[0].data_ptr() == w["lm_head.weight"].ctypes.data

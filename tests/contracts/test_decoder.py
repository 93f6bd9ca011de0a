"""What every decoder backend promises, asked of each that is installed, at each precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends.decoder import DecoderProgram, Precision, decoder_names, load_decoder
from edgewise.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    ModelError,
    OpUnsupported,
    ShapeError,
)
from edgewise.model.decoding import AffineExit, Gate, KvCache, LanguageExits
from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
Load = Callable[..., DecoderProgram]
EVERY = decoder_names()
FULL = tuple(name for name, precision in EVERY if precision == "fp32")
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
DEPTH = 4
EXITS = (1, 2)  # and the whole depth: groups of one, one and two layers
LAST = 3
# Of the largest magnitude. Against the library: float32's 6e-8 over a few hundred sums. Against
# itself: rows that are computed together may be summed in another order, and where activations are
# quantised by row, a sum's last bit may turn into a step of 1/127.
EXACT = 1e-5
ITSELF: dict[Precision, float] = {"fp32": 1e-5, "int8": 2e-2, "int4": 2e-2}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 160, 20)]


@pytest.fixture(scope="module")
def library(language: Any) -> Callable[..., Any]:
    """A family's model in transformers; each is made once."""
    return functools.cache(language.transformers_model)


@pytest.fixture(scope="module")
def model(language: Any, library: Callable[..., Any]) -> Callable[..., LanguageModel]:
    """The same as our record."""
    return functools.cache(lambda family="llama": language.language_model(library(family)))


@pytest.fixture(scope="module")
def exits(model: Callable[..., LanguageModel]) -> LanguageExits:
    """Random heads for the Llama: an affine map and a gate after one layer, a short list."""
    rng = np.random.default_rng(1)
    width = model().architecture.hidden_size
    weight = rng.normal(0, 0.2, (width, width)).astype(np.float32)
    bias, gate = rng.normal(0, 1, (2, width)).astype(np.float32)
    return LanguageExits(
        model="tiny",
        digest=model().digest,
        affine={1: AffineExit(layer=1, weight=weight, bias=bias, temperature=2.0)},
        gates={1: Gate(layer=1, weight=gate * 0.1, bias=0.25)},
        shortlist=np.array([7, 3, 101, 0, 158]),
    )


@pytest.fixture(scope="module")
def load(model: Callable[..., LanguageModel], exits: LanguageExits) -> Load:
    """Each program is loaded once; they are shared, which is what they promise to bear."""

    @functools.cache
    def make(backend: str, precision: Precision = "fp32", family: str = "llama") -> DecoderProgram:
        return load_decoder(
            model(family),
            backend,
            precision=precision,
            exit_layers=EXITS,
            exits=exits if family == "llama" else None,
        )

    return make


@pytest.fixture(params=EVERY, ids="-".join)
def program(request: pytest.FixtureRequest, load: Load) -> DecoderProgram:
    return load(*request.param)


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest, load: Load) -> DecoderProgram:
    return load(request.param)


def close(found: Float32, wanted: Float32, share: float) -> None:
    """Within a share of the largest magnitude."""
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * float(np.abs(wanted).max()))


def same(program: DecoderProgram, found: Float32, wanted: Float32) -> None:
    close(found, wanted, ITSELF[program.precision])


def run(
    program: DecoderProgram, tokens: Sequence[int], cache: KvCache, *, stop: int = LAST
) -> Float32:
    """Run tokens from the embedding on, at the end of the text, and count them."""
    states = program.embed(tokens)
    states = program.run_layers(states, cache, start=0, stop=stop, first=cache.length)
    cache.length += len(tokens)
    return states


def one_by_one(
    program: DecoderProgram, tokens: Sequence[int], cache: KvCache, *, stop: int = LAST
) -> Float32:
    return np.concatenate([run(program, [t], cache, stop=stop) for t in tokens])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", FULL)
def test_every_layer_computes_what_transformers_does(
    backend: str, family: str, model: Any, library: Any, language: Any
) -> None:
    program = load_decoder(model(family), backend, exit_layers=range(1, DEPTH))
    expected = language.reference(library(family), TOKENS)
    prefill = cached = program.embed(TOKENS)
    whole, stepped = program.new_cache(len(TOKENS)), program.new_cache(len(TOKENS))

    close(prefill, expected.states[0], 0.0)
    for k in range(DEPTH):
        prefill = program.run_layers(prefill, whole, start=k, stop=k + 1, first=0)
        cached = np.concatenate(
            [
                program.run_layers(cached[i : i + 1], stepped, start=k, stop=k + 1, first=i)
                for i in range(len(TOKENS))
            ]
        )
        close(prefill, expected.states[k + 1], EXACT)
        close(cached, expected.states[k + 1], EXACT)
    close(program.logits(prefill, position=DEPTH), expected.logits, EXACT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", FULL)
def test_greedy_tokens_are_those_of_transformers_generate(
    backend: str, family: str, load: Load, library: Any, language: Any
) -> None:
    program = load(backend, "fp32", family)
    expected = language.generated(library(family), TOKENS[:5], 16)
    cache = program.new_cache(21)
    states = run(program, TOKENS[:5], cache)
    found = [int(program.logits(states[-1:], position=LAST).argmax())]
    while len(found) < 16:
        states = run(program, found[-1:], cache)
        found.append(int(program.logits(states, position=LAST).argmax()))

    assert found == expected


def test_weights_of_fewer_bits_still_follow_the_model(program: DecoderProgram, load: Load) -> None:
    reference = load("torch-eager:cpu")
    tokens = TOKENS
    found = run(program, tokens, program.new_cache(20)).astype(np.float64)
    expected = run(reference, tokens, reference.new_cache(20)).astype(np.float64)

    cosine = np.sum(found * expected) / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine > {"fp32": 1 - 1e-9, "int8": 0.99, "int4": 0.9}[program.precision]
    # A graph has constants of its own, and they show where a model is tiny.
    assert 0 < program.weight_bytes <= 1.02 * reference.weight_bytes


def test_chunks_of_a_prompt_equal_one_pass(program: DecoderProgram) -> None:
    whole = run(program, TOKENS, program.new_cache(20))
    cache = program.new_cache(24)
    chunks = [run(program, TOKENS[i:j], cache) for i, j in [(0, 7), (7, 8), (8, 17), (17, 20)]]

    same(program, np.concatenate(chunks), whole)


def test_drafts_verified_at_once_equal_one_by_one(program: DecoderProgram) -> None:
    prompt, drafts = TOKENS[:9], TOKENS[9:14]
    serial, verified = program.new_cache(20), program.new_cache(20)
    run(program, prompt, serial)
    run(program, prompt, verified)
    expected = one_by_one(program, drafts, serial)

    early = one_by_one(program, drafts, verified, stop=1)
    rest = program.run_layers(early, verified, start=1, stop=LAST, first=9)

    same(program, rest, expected)
    np.testing.assert_array_equal(serial.present, verified.present)
    same(program, verified.keys, serial.keys)
    same(program, run(program, TOKENS[14:15], verified), run(program, TOKENS[14:15], serial))


def test_a_full_pass_after_deferred_tokens_equals_the_reference(program: DecoderProgram) -> None:
    """Tokens that left at other exits wait with their states; the backlog runs before the next."""
    expected = one_by_one(program, TOKENS[:8], program.new_cache(8))
    cache = program.new_cache(8)
    run(program, TOKENS[:3], cache)
    shallow = run(program, TOKENS[3:4], cache, stop=1)
    deeper = run(program, TOKENS[4:5], cache, stop=1)
    assert cache.present[0, :5].all()
    assert not cache.present[1:, 3:5].any()

    backlog = np.concatenate([shallow, deeper])
    caught_up = program.run_layers(backlog, cache, start=1, stop=LAST, first=3)
    last = run(program, TOKENS[5:8], cache)

    same(program, np.concatenate([caught_up, last]), expected[3:])
    assert cache.present.all()


def test_every_layer_has_one_length_after_any_exits(program: DecoderProgram) -> None:
    rng = np.random.default_rng(3)
    cache = program.new_cache(20)
    for i, token in enumerate(TOKENS):
        position = int(rng.integers(1, LAST + 1))
        states = run(program, [token], cache, stop=position)
        program.fill(states, cache, start=position, first=i)

        assert cache.length == i + 1
        assert cache.present[:, : i + 1].all()
        assert not cache.present[:, i + 1 :].any()


def test_an_absent_cell_is_not_attended_to(program: DecoderProgram) -> None:
    """Whatever it holds; a present one is."""
    plain, garbage = program.new_cache(20), program.new_cache(20)
    for cache in (plain, garbage):
        run(program, TOKENS[:4], cache)
        run(program, TOKENS[4:6], cache, stop=1)  # absent from the second layer on
        run(program, TOKENS[6:8], cache, stop=2)
    garbage.keys[1:, :, 4:6] = 50.0
    garbage.values[1:, :, 4:6] = -1e4
    garbage.keys[2:, :, 6:8] = 50.0
    garbage.values[2:, :, 6:8] = 1e4

    for tokens in (TOKENS[8:9], TOKENS[9:13]):
        expected = run(program, tokens, plain)
        same(program, run(program, tokens, garbage), expected)
    plain.present[:, 4:8] = True
    seen = run(program, TOKENS[13:14], plain)
    assert np.abs(seen - run(program, TOKENS[13:14], garbage)).max() > 0.01


def test_masked_layers_compute_what_numpy_does(full: DecoderProgram) -> None:
    rng = np.random.default_rng(8)
    cache = full.new_cache(16)
    run(full, TOKENS[:12], cache)
    cache.present[:, :12] = rng.random((DEPTH, 12)) < 0.6
    cache.present[0, :12] = True
    cells = replace_cells(cache)
    states = full.embed(TOKENS[12:15])

    found = full.run_layers(states, cache, start=0, stop=LAST, first=12)

    close(found, numpy_forward(full.model, states, *cells, first=12), EXACT)


def replace_cells(cache: KvCache) -> tuple[Float32, Float32, npt.NDArray[np.bool_]]:
    return cache.keys.copy(), cache.values.copy(), cache.present.copy()


def numpy_forward(
    model: LanguageModel,
    x: Float32,
    keys: Float32,
    values: Float32,
    present: npt.NDArray[np.bool_],
    *,
    first: int,
) -> Float32:
    """A Llama in float64, row by row and head by head, as its paper has it."""
    a, w = model.architecture, model.weights
    group = a.num_attention_heads // a.num_key_value_heads
    place = np.arange(first, first + len(x))[:, None]
    angle = place / a.rope_theta ** (np.arange(0, a.head_dim, 2) / a.head_dim)
    turn = np.exp(1j * angle)[:, None]

    def norm(v: Any, name: str) -> Any:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + a.rms_norm_eps) * w[name + ".weight"]

    def rotate(v: Any) -> Any:
        half = a.head_dim // 2
        z = (v[..., :half] + 1j * v[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    y = x.astype(np.float64)
    for i in range(a.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(y, at + "input_layernorm")
        q, k, v = (
            (h @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(len(x), -1, a.head_dim)
            for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        out = np.zeros_like(q)
        for m in range(len(x)):
            for head in range(a.num_attention_heads):
                old = present[i, :first]
                ks = np.vstack([keys[i, head // group, :first][old], k[: m + 1, head // group]])
                vs = np.vstack([values[i, head // group, :first][old], v[: m + 1, head // group]])
                share = np.exp(ks @ q[m, head] / np.sqrt(a.head_dim))
                out[m, head] = share @ vs / share.sum()
        y = y + out.reshape(len(x), -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(y, at + "post_attention_layernorm")
        gate = h @ w[at + "mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (h @ w[at + "mlp.up_proj.weight"].T)
        y = y + inner @ w[at + "mlp.down_proj.weight"].T
    return np.asarray(y, dtype=np.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", FULL)
def test_filling_writes_what_a_full_run_would_if_the_skipped_layers_changed_nothing(
    backend: str, family: str, model: Any
) -> None:
    real = model(family)
    idle = ("o_proj.weight", "down_proj.weight")
    weights = {n: w * np.float32(not n.endswith(idle)) for n, w in real.weights.items()}
    program = load_decoder(replace(real, weights=weights), backend, exit_layers=EXITS)
    expected, cache = program.new_cache(20), program.new_cache(20)
    run(program, TOKENS, expected)

    states = run(program, TOKENS[:9], cache, stop=1)
    program.fill(states, cache, start=1, first=0)
    for i, token in enumerate(TOKENS[9:], start=9):
        states = run(program, [token], cache, stop=2)
        program.fill(states, cache, start=2, first=i)

    close(cache.keys, expected.keys, EXACT)
    close(cache.values, expected.values, EXACT)
    assert cache.present.all()


def test_filling_the_next_layer_is_exact(program: DecoderProgram) -> None:
    ran, filled = program.new_cache(20), program.new_cache(20)
    for cache in (ran, filled):
        states = run(program, TOKENS, cache, stop=1)
    program.run_layers(states, ran, start=1, stop=2, first=0)
    program.fill(states, filled, start=1, first=0)

    same(program, filled.keys[:2], ran.keys[:2])
    same(program, filled.values[:2], ran.values[:2])


def test_filling_after_the_last_layer_changes_nothing(program: DecoderProgram) -> None:
    cache = program.new_cache(8)
    states = run(program, TOKENS[:4], cache)
    before = replace_cells(cache)
    program.fill(states, cache, start=LAST, first=0)

    for found, wanted in zip(replace_cells(cache), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_cropped_text_goes_on_as_if_the_rest_had_never_been(program: DecoderProgram) -> None:
    fresh, cropped = program.new_cache(20), program.new_cache(20)
    run(program, TOKENS[:6], fresh)
    run(program, TOKENS[:6], cropped)
    run(program, TOKENS[10:], cropped)
    cropped.crop(6)

    for tokens in (TOKENS[6:7], TOKENS[7:12]):
        same(program, run(program, tokens, cropped), run(program, tokens, fresh))
    np.testing.assert_array_equal(cropped.present, fresh.present)


def test_eight_threads_at_mixed_depths_equal_the_serial_output(program: DecoderProgram) -> None:
    def request(seed: int) -> Float32:
        rng = np.random.default_rng(seed)
        tokens = [int(t) for t in rng.integers(0, 160, 10)]
        cache = program.new_cache(10)
        found = [run(program, tokens[:5], cache)[-1:]]
        for token in tokens[5:]:
            position = int(rng.integers(1, LAST + 1))
            states = run(program, [token], cache, stop=position)
            if seed % 2:
                program.fill(states, cache, start=position, first=cache.length - 1)
            found += [states, program.logits(states, position=position)[:, :64]]
        return np.concatenate(found)

    serial = [request(seed) for seed in range(10)]
    with ThreadPoolExecutor(8) as pool:
        threaded = list(pool.map(request, range(10)))

    for found, wanted in zip(threaded, serial, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_error_leaves_cells_absent_and_changes_no_later_call(
    program: DecoderProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = program.new_cache(20), program.new_cache(20)
    run(program, TOKENS[:6], cache)
    run(program, TOKENS[:6], other)
    expected = run(program, TOKENS[6:8], other)
    compute = program._run_layers

    def breaks(hidden: Float32, cells: KvCache, *, start: int, stop: int, first: int) -> Float32:
        compute(hidden, cells, start=start, stop=stop - 1, first=first)
        raise RuntimeError("the runtime fell over")

    with monkeypatch.context() as patched:
        patched.setattr(program, "_run_layers", breaks)
        with pytest.raises(BackendError, match="fell over"):
            run(program, TOKENS[9:12], cache)

    assert cache.length == 6
    assert cache.present[:, :6].all()
    assert not cache.present[:, 6:].any()
    same(program, run(program, TOKENS[6:8], cache), expected)
    with monkeypatch.context() as patched:  # cells that were present are half written now
        patched.setattr(program, "_fill", breaks)
        with pytest.raises(BackendError):
            program.fill(expected, cache, start=1, first=6)
        patched.setattr(program, "_run_layers", breaks)
        with pytest.raises(BackendError, match="fell over"):
            program.run_layers(expected, cache, start=1, stop=LAST, first=3)
    absent = [3, 4, 6, 7]
    assert cache.present[0, :8].all()
    assert not cache.present[1:, absent].any()
    assert cache.present[1:, [0, 1, 2, 5]].all()


def test_heads_are_norm_map_and_matrix(program: DecoderProgram, exits: LanguageExits) -> None:
    states = run(program, TOKENS[:5], program.new_cache(8), stop=1)
    head = program.model.weights["lm_head.weight"]
    normed = program.normed(states)
    affine = exits.affine[1]
    mapped = normed @ affine.weight.T + affine.bias
    short = exits.shortlist
    assert short is not None
    others = np.setdiff1d(np.arange(160), short)

    def near(found: Float32, wanted: Any) -> None:
        share = {"fp32": EXACT, "int8": 5e-2, "int4": 0.3}[program.precision]
        close(found, wanted, share)

    near(program.logits(states, position=1, kind="raw"), normed @ head.T)
    near(program.logits(states, position=1), mapped @ head.T)
    near(program.logits(states, position=2), normed @ head.T)  # no map was fitted there
    listed = program.logits(states, position=1, kind="shortlist")
    near(listed[:, short], mapped @ head[short].T)
    assert np.isneginf(listed[:, others]).all()
    for kind in ("raw", "affine", "shortlist"):
        near(program.logits(states, position=LAST, kind=kind), normed @ head.T)


def test_a_gate_reads_the_last_state_and_is_unknown_where_none_was_fitted(
    program: DecoderProgram, exits: LanguageExits
) -> None:
    states = run(program, TOKENS[:5], program.new_cache(8), stop=1)
    gate = exits.gates[1]
    score = float(program.normed(states)[-1] @ gate.weight) + gate.bias

    assert program.gate(states, position=1) == pytest.approx(1 / (1 + np.exp(-score)), rel=1e-5)
    assert program.gate(states, position=2) is None
    assert program.gate(states, position=LAST) is None


def test_inputs_are_only_read_and_results_are_kept(program: DecoderProgram) -> None:
    cache = program.new_cache(20)
    states = program.embed(TOKENS[:4])
    states.flags.writeable = False
    first = program.run_layers(states, cache, start=0, stop=1, first=0)
    answers = program.logits(first, position=1)
    kept = first.copy(), answers.copy()
    for i in range(4, 8):
        states = program.embed(TOKENS[i : i + 4])
        program.logits(program.run_layers(states, cache, start=0, stop=1, first=i), position=1)

    np.testing.assert_array_equal(first, kept[0])
    np.testing.assert_array_equal(answers, kept[1])
    embedded = program.embed(TOKENS[:1])
    embedded[:] = 0  # a fresh array: the model's row stays
    assert np.abs(program.embed(TOKENS[:1])).max() > 0


def test_a_text_may_fill_its_cache_and_no_more(program: DecoderProgram) -> None:
    cache = program.new_cache(6)
    run(program, TOKENS[:5], cache)
    with pytest.raises(ConfigError, match="cells"):
        run(program, TOKENS[5:7], cache)
    assert not cache.present[:, 5:].any()
    run(program, TOKENS[5:6], cache)
    with pytest.raises(ConfigError, match="cells"):
        run(program, TOKENS[6:7], cache)
    with pytest.raises(ConfigError, match="cells"):
        program.fill(program.embed(TOKENS[:1]), cache, start=1, first=-1)
    with pytest.raises(ConfigError, match="at most 96 tokens"):
        program.new_cache(97)


@pytest.mark.parametrize(
    "tokens", [[160], [3, -1], [], [1.5], [[1, 2]]], ids=["size", "negative", "none", "real", "2d"]
)
def test_what_is_no_token_is_refused(program: DecoderProgram, tokens: Any) -> None:
    with pytest.raises(ShapeError, match="token ids"):
        program.embed(tokens)


def test_states_positions_and_caches_that_do_not_fit_are_refused(program: DecoderProgram) -> None:
    cache, states = program.new_cache(8), program.embed(TOKENS[:2])
    wrong: list[Any] = [states[0], states[:, :-1], states[:0], states.astype(np.float64), [[0.0]]]
    for hidden in wrong:
        with pytest.raises(ShapeError, match="states"):
            program.run_layers(hidden, cache, start=0, stop=1, first=0)
        with pytest.raises(ShapeError, match="states"):
            program.logits(hidden, position=1)
    for start, stop in [(0, 0), (2, 1), (-1, 1), (0, LAST + 1)]:
        with pytest.raises(ConfigError, match="positions"):
            program.run_layers(states, cache, start=start, stop=stop, first=0)
    for position in (0, -1, LAST + 1):
        with pytest.raises(ConfigError, match="position"):
            program.logits(states, position=position)
        with pytest.raises(ConfigError, match="position"):
            program.gate(states, position=position)
    with pytest.raises(ConfigError, match="position"):
        program.fill(states, cache, start=LAST + 1, first=0)
    unknown: Any = "bold"
    with pytest.raises(ConfigError, match="bold"):
        program.logits(states, position=1, kind=unknown)
    foreign = KvCache(layers=DEPTH, kv_heads=1, head_dim=24, capacity=8)
    with pytest.raises(ConfigError, match="another model"):
        program.run_layers(states, foreign, start=0, stop=1, first=0)
    assert not cache.present.any()


@pytest.mark.parametrize("backend", FULL)
def test_exits_that_do_not_fit_are_refused(backend: str, model: Any, exits: Any) -> None:
    for layers in ([0], [-1], [DEPTH + 1], [1, 1], [True]):
        with pytest.raises(ConfigError, match="exits after 1 to 4 layers"):
            load_decoder(model(), backend, exit_layers=layers)
    with pytest.raises(ModelError, match="fitted for"):
        load_decoder(model(), backend, exits=replace(exits, digest="other"))
    with pytest.raises(ConfigError, match="thread"):
        load_decoder(model(), backend, threads=0)
    weights = {n: w for n, w in model().weights.items() if "3.mlp.up" not in n}
    with pytest.raises(ModelError, match=r"layers\.3\.mlp\.up_proj"):
        load_decoder(replace(model(), weights=weights), backend)


def test_a_short_list_that_was_not_fitted_is_refused(model: Any) -> None:
    program = load_decoder(model(), exit_layers=[1])
    states = program.embed(TOKENS[:1])
    with pytest.raises(ConfigError, match="short list"):
        program.logits(states, position=1, kind="shortlist")


def test_a_backend_or_precision_that_does_not_exist_is_refused(model: Any) -> None:
    with pytest.raises(BackendUnavailable, match="tensorrt"):
        load_decoder(model(), "tensorrt:gpu")
    with pytest.raises(OpUnsupported, match="int4"):
        load_decoder(model(), "torch", precision="int4")
    encoder = replace(model().architecture, model_type="modernbert")
    with pytest.raises(ModelError, match="does not generate text"):
        load_decoder(replace(model(), architecture=encoder))

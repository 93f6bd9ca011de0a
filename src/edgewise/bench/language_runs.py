"""Full-depth decoding by every runtime and its peers, in turns, beside the bandwidth limit."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from edgewise.backends.decoder import load_decoder
from edgewise.backends.decoder.layers import head_weight
from edgewise.backends.decoder.quantise import BITS, BLOCK
from edgewise.bench.language_peers import (
    ChildPeer,
    TransformersPeer,
    Turn,
    build_transformers,
    open_economize,
    open_llama,
)
from edgewise.errors import BackendUnavailable, EdgeError
from edgewise.predict import CostTable
from edgewise.profiles.statistics import quantile_interval
from edgewise.profiling.collection import no_collection
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.costs import RowCosts

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, Precision
    from edgewise.model.language import LanguageModel

Say = Callable[[str], None]
What = Literal["token", "head"]

TRANSFORMERS = "transformers generate"
LLAMA = "llama.cpp Q4_1"
RUNTIMES: tuple[tuple[str, Precision], ...] = (
    ("torch-eager:cpu", "fp32"),
    ("torch:cpu", "fp32"),
    ("onnxruntime:CPU", "fp32"),
    ("onnxruntime:CPU", "int8"),
    ("onnxruntime:CPU", "int4"),
)
_READ_BYTES = 256 << 20  # far beyond any cache
_REST_S = 0.01  # until the threads of the one before are asleep
_HEAD_CALLS = 5


class Decodes(Protocol):
    """Continues its prompt on demand."""

    def decode(self, count: int) -> Turn:
        """Begin with the prompt again and add some tokens after the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something that is timed in turns.

    Attributes:
        name: Of it.
        seconds: Runs a turn; seconds for each unit.
        what: A token at full depth, or the head alone.
        weight_bytes: What a unit reads of the weights; ``None`` unknown.
    """

    name: str
    seconds: Callable[[], float]
    what: What = "token"
    weight_bytes: int | None = None


class SessionDecodes:
    """Our session at full depth, as a user asks it.

    Args:
        decoder: Of a model without a tokenizer, so that no text ends early.
        prompt: Token ids.
    """

    def __init__(self, decoder: DecoderProgram, prompt: Sequence[int]) -> None:
        costs = CostTable.from_costs(
            [1.0] * len(decoder.exit_layers), [1.0] * len(decoder.exit_layers)
        )
        self._session = LanguageSession(
            decoder,
            LanguageCosts.same(costs),
            policy="full_depth",
            rows=RowCosts.proportional(1.0, 1.0),
        )
        self._prompt = list(prompt)

    def decode(self, count: int) -> Turn:
        """Begin with the prompt again and add some tokens after the first."""
        stamps, ids = [], []
        for token in self._session.generate(self._prompt, max_tokens=count + 1):
            stamps.append(time.perf_counter())
            ids.append(token.id)
        return Turn(tpot_s=(stamps[-1] - stamps[0]) / max(1, len(stamps) - 1), ids=tuple(ids))


def reader(threads: int, *, size_bytes: int = _READ_BYTES) -> Callable[[], float]:
    """Reads memory as fast as torch can, by a sum and by a product; seconds per byte of the faster.

    Args:
        threads: Of torch, whose number is set for each turn.
        size_bytes: Of the array; it stays allocated.
    """
    import torch

    from edgewise.backends.threads import set_torch_threads

    array = torch.ones(size_bytes // 4).view(-1, 1024)
    vector = torch.ones(1024)

    def seconds_per_byte() -> float:
        set_torch_threads(threads)
        taken = []
        calls: tuple[Callable[[], Any], ...] = (lambda: torch.sum(array), lambda: array @ vector)
        for call in calls:
            began_s = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began_s)
        return min(taken) / size_bytes

    return seconds_per_byte


def in_turns(
    contenders: Sequence[Contender], *, rounds: int, say: Say = lambda _: None
) -> dict[str, list[float]]:
    """Time contenders in turns, forwards and backwards, so that a disturbance falls on all alike.

    Args:
        contenders: The first round of each is thrown away.
        rounds: That count.
        say: Told how far it is.

    Returns:
        Seconds of each round, by name; without those that failed.

    Raises:
        BackendError: One failed.
    """
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    with no_collection():
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}")
            for contender in contenders if number % 2 else reversed(contenders):
                time.sleep(_REST_S)
                seconds = contender.seconds()
                if number:
                    samples[contender.name].append(seconds)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of ratios of neighbouring turns, with its 95 % interval.

    Attributes:
        ratio: One over the other.
        low: ``None`` for fewer than six rounds.
        high: The same.
        rounds: How many.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Of two contenders' rounds.

    Example:
        >>> ratio_of([2.0, 3.0, 4.0], [1.0, 2.0, 2.0])
        Ratio(ratio=2.0, low=None, high=None, rounds=3)
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    interval = quantile_interval(ratios, 0.5)
    low, high = (x if np.isfinite(x) else None for x in (interval.low, interval.high))
    return Ratio(ratio=statistics.median(ratios), low=low, high=high, rounds=len(ratios))


def speed_figures(  # noqa: PLR0913 - a comparison's whole circumstances
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    threads: int,
    rounds: int,
    tokens: int,
    notes: list[str],
    runtimes: Sequence[tuple[str, Precision]] = RUNTIMES,
    open_peer: Callable[..., ChildPeer] = open_llama,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Every runtime and width at full depth, transformers and llama.cpp, with so many threads.

    Args:
        model: Of which one full copy is kept beside the arrays it came with.
        prompt: Token ids that every turn begins with.
        threads: Of each call.
        rounds: Turns of each.
        tokens: Of each turn.
        notes: Told what could not be run.
        runtimes: Ours.
        open_peer: Starts llama.cpp.
        say: Told what is done.

    Returns:
        Rows, and the two ratios of the issue; ``None`` where one of the two is missing.
    """
    silent = dataclasses.replace(model, tokenizer=None)
    with ExitStack() as stack:
        contenders: list[Contender] = []
        ids: dict[str, tuple[int, ...]] = {}

        def add(name: str, decodes: Decodes, weight_bytes: int | None) -> None:
            def seconds() -> float:
                turn = decodes.decode(tokens)
                ids.setdefault(name, turn.ids)
                return turn.tpot_s

            contenders.append(Contender(name=name, seconds=seconds, weight_bytes=weight_bytes))

        read = reader(threads)
        contenders.append(Contender(name="read", seconds=read))
        library = _opened(TRANSFORMERS, lambda: build_transformers(model), notes)
        if library is not None:
            add(TRANSFORMERS, _Threaded(TransformersPeer(library, prompt), threads), None)
        for backend, precision in runtimes:
            name = f"{backend} {precision}"
            say(f"loading {name}, {threads} threads")
            decoder = _opened(
                name,
                functools.partial(
                    load_decoder, silent, backend, threads=threads, precision=precision
                ),
                notes,
            )
            if decoder is None:
                continue
            add(name, SessionDecodes(decoder, prompt), decoder.weight_bytes)
            head = _head_contender(name, decoder)
            contenders.append(head)
        say("starting llama.cpp")
        peer = _opened(LLAMA, lambda: open_peer(prompt, threads=threads), notes)
        if peer is not None:
            stack.callback(peer.close)
            add(LLAMA, peer, None)
            notes.append(f"{LLAMA}: {peer.version}, {threads} threads, in its own process")
        samples = in_turns(contenders, rounds=rounds, say=say)
    speed = statistics.median(1 / s for s in samples["read"])
    rows = [_row(c, samples, threads) for c in contenders if c.name != "read"]
    return {
        "rows": rows,
        "read_bytes_per_s": speed,
        "torch_over_transformers": _figure(samples, "torch:cpu fp32", TRANSFORMERS),
        "int4_over_llama": _figure(samples, "onnxruntime:CPU int4", LLAMA),
        "tokens_equal_transformers": ids["torch:cpu fp32"] == ids[TRANSFORMERS]
        if {"torch:cpu fp32", TRANSFORMERS} <= ids.keys()
        else None,
    }


class _Threaded:
    """Sets torch's threads before each turn: another program may have left its own number."""

    def __init__(self, decodes: Decodes, threads: int) -> None:
        self._decodes, self._threads = decodes, threads

    def decode(self, count: int) -> Turn:
        from edgewise.backends.threads import set_torch_threads

        set_torch_threads(self._threads)
        return self._decodes.decode(count)


def _opened(name: str, make: Callable[[], Any], notes: list[str]) -> Any:
    """What was made; ``None``, and a note with the reason, where it cannot be."""
    try:
        return make()
    except EdgeError as error:
        said = f"{name}: {error.message}"
        notes.append(f"{said}; {error.help}" if error.help else said)
        return None


def _head_contender(name: str, decoder: DecoderProgram) -> Contender:
    last = len(decoder.exit_layers)
    hidden = decoder.embed([0])

    def seconds() -> float:
        decoder.logits(hidden, position=last)
        began_s = time.perf_counter()
        for _ in range(_HEAD_CALLS):
            decoder.logits(hidden, position=last)
        return (time.perf_counter() - began_s) / _HEAD_CALLS

    return Contender(
        name=f"{name}, head", seconds=seconds, what="head", weight_bytes=_head_bytes(decoder)
    )


def _head_bytes(decoder: DecoderProgram) -> int:
    """Of the head at full depth, which has 8 bits where the layers have 4."""
    weights = int(head_weight(decoder.model).size)
    if decoder.precision == "fp32":
        return 4 * weights
    return weights * BITS["int8"] // 8 + 4 * weights // BLOCK  # a scale for each block


def _row(
    contender: Contender, samples: Mapping[str, Sequence[float]], threads: int
) -> dict[str, Any]:
    taken = samples[contender.name]
    interval = quantile_interval(taken, 0.5)
    size = contender.weight_bytes
    over = None
    if size is not None:
        over = statistics.median(
            s / (size * r) for s, r in zip(taken, samples["read"], strict=True)
        )
    return {
        "name": contender.name,
        "what": contender.what,
        "threads": threads,
        "median_s": statistics.median(taken),
        "low_s": max(interval.low, min(taken)),
        "high_s": min(interval.high, max(taken)),
        "weight_bytes": size,
        "over_bandwidth_limit": over,
    }


def _figure(samples: Mapping[str, Sequence[float]], of: str, over: str) -> dict[str, Any] | None:
    if of not in samples or over not in samples:
        return None
    return dataclasses.asdict(ratio_of(samples[of], samples[over]))


# --- drafting peers --------------------------------------------------------------------------


def drafting_figures(  # noqa: PLR0913 - a comparison's whole circumstances
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    layers: Sequence[int],
    rounds: int,
    tokens: int,
    notes: list[str],
    open_peer: Callable[..., ChildPeer] = open_economize,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Peers that draft with a part of the model, beside what they verify with; one thread.

    Args:
        model: Of whose folder other processes load a copy of their own.
        prompt: Token ids.
        layers: After which transformers' ``assistant_early_exit`` drafts; the peers take the first.
        rounds: Turns of each.
        tokens: Of each turn.
        notes: Told what could not be run.
        open_peer: Starts economize.
        say: Told what is done.

    Returns:
        Rows: ``tokens_equal`` says whether a peer's text is that of plain greedy decoding.

    Raises:
        BackendUnavailable: transformers is not installed.
    """
    ids: dict[str, tuple[int, ...]] = {}
    plain = _Threaded(TransformersPeer(build_transformers(model), prompt), 1)
    found: list[tuple[str, Decodes]] = [(TRANSFORMERS, plain)]
    # A model of its own, as drafting changes the model and an error leaves it so.
    drafting = build_transformers(model)
    for layer in layers:
        peer = TransformersPeer(drafting, prompt, assistant_early_exit=layer)
        found.append((f"{TRANSFORMERS}, assistant_early_exit={layer}", _Threaded(peer, 1)))
    with ExitStack() as stack:
        for technique in ("early_exit", "layer_skip"):
            name = f"economize {technique}"
            say(f"starting {name}")
            child = _opened(
                name,
                functools.partial(_economize, open_peer, model, prompt, technique, layers[0]),
                notes,
            )
            if child is not None:
                stack.callback(child.close)
                found.append((name, child))
        contenders = []
        for name, decodes in found:

            def seconds(name: str = name, decodes: Decodes = decodes) -> float:
                turn = decodes.decode(tokens)
                ids.setdefault(name, turn.ids[:tokens])
                return turn.tpot_s

            contenders.append(Contender(name=name, seconds=seconds))
        samples = in_turns(contenders, rounds=rounds, say=say)
    rows = []
    for name, _ in found:
        ratio = ratio_of(samples[name], samples[TRANSFORMERS])
        rows.append(
            {
                "name": name,
                "median_s": statistics.median(samples[name]),
                "over_greedy": ratio.ratio,
                "tokens_equal": ids[name] == ids[TRANSFORMERS],
            }
        )
    return {"rows": rows}


def _economize(
    open_peer: Callable[..., ChildPeer],
    model: LanguageModel,
    prompt: Sequence[int],
    technique: str,
    layer: int,
) -> ChildPeer:
    if model.folder is None:
        raise BackendUnavailable("the model has no folder that another program could load")
    return open_peer(model.folder, prompt, threads=1, technique=technique, layer=layer)

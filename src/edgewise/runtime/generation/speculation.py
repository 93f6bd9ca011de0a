"""Self-speculation: an exit drafts, the layers behind it verify, nothing is computed twice.

The layers up to the exit run once for every token, drafted or not; their states at the exit are
kept, and verification runs only the layers behind it, for all drafts in one call. What was refused
is cropped from the cache, so that a cycle leaves behind what full depth would have. Drafts that
cost no layer, such as the text's own repetitions, are verified in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ShapeError
from edgewise.scores import softmax

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.model.decoding import KvCache

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
# Logits [M, V] to the probabilities that a token is drawn from, each row summing to one.
Distribution = Callable[[Float32], Float64]


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a token is chosen.

    Attributes:
        distribution: Probabilities to draw from; ``None`` takes the most likely token.
        rng: Chance; needed with a distribution.
    """

    distribution: Distribution | None = None
    rng: np.random.Generator | None = None

    def __post_init__(self) -> None:
        if self.distribution is not None and self.rng is None:
            raise ConfigError("expected a random generator with a distribution, found none")

    @classmethod
    def at_temperature(cls, temperature: float, rng: np.random.Generator) -> Drawing:
        """Draw from the softmax of logits divided by a temperature above 0."""
        if not temperature > 0:
            raise ConfigError(f"expected a temperature above 0, found {temperature}")
        return cls(lambda logits: softmax(logits, temperature=temperature), rng)

    def choose(self, logits: Float32) -> int:
        """One token from logits [V]."""
        if self.distribution is None:
            return int(logits.argmax())
        return self.draw(self.distribution(logits[None])[0])

    def draw(self, weights: Float64) -> int:
        """One token with chances proportional to weights [V]."""
        assert self.rng is not None  # noqa: S101 - checked when made
        below = np.cumsum(weights)
        place = np.searchsorted(below, self.rng.random() * below[-1], side="right")
        # Rounding may lead beyond the last token that has any chance.
        return int(min(place, np.flatnonzero(weights)[-1]))


GREEDY = Drawing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What one round of drafting and verifying gave.

    Attributes:
        tokens: Verified, in order; at least one, cut behind the first that ends the answer.
        drafted: How many were drafted.
        accepted: How many of them were accepted, before anything was cut.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


def speculate(  # noqa: PLR0913 - each is one knob of a cycle
    program: DecoderProgram,
    cache: KvCache,
    token: int,
    *,
    position: int,
    drafts: int,
    kind: HeadKind = "affine",
    drawing: Drawing = GREEDY,
    stop_ids: Collection[int] = frozenset(),
    sure: float = 0.0,
    recompute: bool = False,
) -> Cycle:
    """Draft tokens at an exit, verify them at full depth, and keep those that full depth says.

    Args:
        program: The model.
        cache: Of this request, holding everything before ``token`` at full depth. Afterwards it
            holds everything before the last of the tokens returned; whatever fails on the way, it
            holds what it held.
        token: The text's last, which has run through no layer yet.
        position: Of the exit that drafts, before the last.
        drafts: d, at most; fewer where the cache has no room. 0 is one token at full depth.
        kind: Head that drafts.
        drawing: Greedy, or what to draw from; the same for drafts and at full depth.
        stop_ids: Tokens that end the answer: nothing is drafted behind one.
        sure: Draft no further once the exit's calibrated chance of its answer is below this; that
            answer is not verified. 0 always goes on. Greedy only: with sampling a draft that was
            dropped for being unlikely would bend the distribution.
        recompute: Verify from the embedding, as if the early layers had not run: what
            implementations do that share weights only. The tokens are the same.

    Returns:
        Greedy: the tokens that full depth would have chosen one at a time. Sampled: tokens
        distributed as if drawn at full depth.

    Raises:
        ConfigError: The exit is not before the last, a negative number of drafts, sampling with
            ``sure``, or no room for one more token.
        BackendError: The runtime failed.

    Source:
        Elhoushi et al., LayerSkip (2024), section 4.3 for the reuse of early layers' states; for
        sampling Leviathan, Kalman and Matias (2023), algorithm 1.
    """
    if drafts < 0 or not 1 <= position < len(program.exit_layers):
        raise ConfigError(
            f"expected at least 0 drafts at an exit's position, 1 to"
            f" {len(program.exit_layers) - 1}, found {drafts} at {position}"
        )
    if sure > 0 and drawing.distribution is not None:
        raise ConfigError("drafting as long as the exit is sure is for greedy answers only")
    _check_room(cache)
    with all_or_nothing(cache):
        draft = _draft(
            program,
            cache,
            token,
            position=position,
            most=min(drafts, cache.left - 1),
            kind=kind,
            drawing=drawing,
            stop_ids=stop_ids,
            sure=sure,
        )
        states, start = draft.states, position
        if recompute:
            states, start = program.embed([token, *draft.tokens]), 0
        return _verify(program, cache, draft, states, start=start, drawing=drawing, ends=stop_ids)


def verify(  # noqa: PLR0913 - as speculate
    program: DecoderProgram,
    cache: KvCache,
    token: int,
    drafts: Sequence[int],
    *,
    drawing: Drawing = GREEDY,
    stop_ids: Collection[int] = frozenset(),
) -> Cycle:
    """Verify drafts that came from elsewhere in one pass through all layers.

    With sampling a draft counts as drawn from a distribution that has no other token.

    Args:
        program: The model.
        cache: As for `speculate`.
        token: As there.
        drafts: What may follow; cut where the cache has no room, and behind a token that ends the
            answer.
        drawing: How tokens are drawn at full depth.
        stop_ids: Tokens that end the answer.

    Returns:
        As `speculate`.

    Raises:
        ConfigError: No room for one more token.
        BackendError: The runtime failed.
    """
    _check_room(cache)
    tokens = list(drafts[: cache.left - 1])
    ends = next((i for i, t in enumerate(tokens) if t in stop_ids), len(tokens))
    tokens = tokens[: ends + 1]
    states = program.embed([token, *tokens])
    draft = _Draft(tokens, states, [None] * len(tokens))
    with all_or_nothing(cache):
        return _verify(program, cache, draft, states, start=0, drawing=drawing, ends=stop_ids)


def probe(  # noqa: PLR0913 - as speculate
    program: DecoderProgram,
    cache: KvCache,
    token: int,
    *,
    position: int,
    kind: HeadKind = "affine",
    drawing: Drawing = GREEDY,
) -> tuple[Cycle, float]:
    """One token at full depth, and whether an exit on its way would have drafted it.

    Costs the exit's head and nothing else.

    Args:
        program: The model.
        cache: As for `speculate`.
        token: As there.
        position: Of the exit, before the last.
        kind: Head that would draft.
        drawing: As there.

    Returns:
        The token, and the chance that its draft would have been accepted: greedy, 0 or 1.

    Raises:
        ConfigError: No room for one more token.
        BackendError: The runtime failed.
    """
    _check_room(cache)
    with all_or_nothing(cache):
        states = program.embed([token])
        first, last = cache.length, len(program.exit_layers)
        states = program.run_layers(states, cache, start=0, stop=position, first=first)
        early = program.logits(states, position=position, kind=kind)
        states = program.run_layers(states, cache, start=position, stop=last, first=first)
        full = program.logits(states, position=last)
        if drawing.distribution is None:
            found = int(full[0].argmax())
            chance = float(early[0].argmax() == found)
        else:
            early = early / np.float32(exit_temperature(program, position, kind))
            p, q = (_chances(drawing.distribution, each)[0] for each in (full, early))
            found, chance = drawing.draw(p), float(np.minimum(p, q).sum())
        cache.length = first + 1
    return Cycle(tokens=(found,), drafted=0, accepted=0), chance


def _check_room(cache: KvCache) -> None:
    if cache.left < 1:
        raise ConfigError(
            f"the cache of {cache.capacity} tokens is full", help="ask for a larger cache"
        )


@contextmanager
def all_or_nothing(cache: KvCache) -> Iterator[None]:
    """Leave a cache as it was found if what is done to it fails or is interrupted."""
    length = cache.length
    try:
        yield
    except BaseException:
        cache.length = length
        cache.present[:, length:] = False
        raise


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    tokens: list[int]
    states: Float32  # [d + 1, H] at the exit: of the token before the drafts, and of each
    # q, each [V]; ``None`` for a draft that was not drawn, the only one it could have been.
    chances: list[Float64 | None]


def _verify(  # noqa: PLR0913 - as speculate
    program: DecoderProgram,
    cache: KvCache,
    draft: _Draft,
    states: Float32,
    *,
    start: int,
    drawing: Drawing,
    ends: Collection[int],
) -> Cycle:
    """Run the rest of the layers for all drafts and keep what full depth bears out."""
    first, last = cache.length, len(program.exit_layers)
    states = program.run_layers(states, cache, start=start, stop=last, first=first)
    tokens, accepted = _accept(draft, program.logits(states, position=last), drawing)
    end = next((i for i, t in enumerate(tokens) if t in ends), len(tokens))
    kept = tuple(tokens[: end + 1])
    cache.length = first + len(states)
    cache.crop(first + len(kept))
    return Cycle(tokens=kept, drafted=len(draft.tokens), accepted=accepted)


def _draft(  # noqa: PLR0913 - as speculate
    program: DecoderProgram,
    cache: KvCache,
    token: int,
    *,
    position: int,
    most: int,
    kind: HeadKind,
    drawing: Drawing,
    stop_ids: Collection[int],
    sure: float,
) -> _Draft:
    first = cache.length
    temperature = exit_temperature(program, position, kind)
    states: list[Float32] = []
    tokens: list[int] = []
    chances: list[Float64 | None] = []
    while True:
        newest = program.embed([tokens[-1] if tokens else token])
        place = first + len(tokens)
        state = program.run_layers(newest, cache, start=0, stop=position, first=place)
        states.append(state)
        if len(tokens) == most or (tokens and tokens[-1] in stop_ids):
            return _Draft(tokens, np.concatenate(states), chances)
        logits = program.logits(state, position=position, kind=kind) / np.float32(temperature)
        if drawing.distribution is None:
            if sure > 0 and softmax(logits[0]).max() < sure:
                return _Draft(tokens, np.concatenate(states), chances)
            tokens.append(int(logits[0].argmax()))
        else:
            drawn_from = _chances(drawing.distribution, logits)[0]
            chances.append(drawn_from)
            tokens.append(drawing.draw(drawn_from))


def exit_temperature(program: DecoderProgram, position: int, kind: HeadKind = "affine") -> float:
    """What an exit's logits are divided by to be read as probabilities; 1 where none was fitted."""
    if program.exits is None or kind == "raw":
        return 1.0
    fitted = program.exits.affine.get(program.layers_at(position))
    return 1.0 if fitted is None else fitted.temperature


def _accept(draft: _Draft, logits: Float32, drawing: Drawing) -> tuple[list[int], int]:
    """The longest prefix that full depth bears out and one token more; and how long it is."""
    if drawing.distribution is None:
        wanted = logits.argmax(axis=1).tolist()
        agree = (d == w for d, w in zip(draft.tokens, wanted, strict=False))
        accepted = next((i for i, a in enumerate(agree) if not a), len(draft.tokens))
        return [*draft.tokens[:accepted], int(wanted[accepted])], accepted
    assert drawing.rng is not None  # noqa: S101 - checked when made
    chances = _chances(drawing.distribution, logits)
    for i, (token, q, p) in enumerate(zip(draft.tokens, draft.chances, chances, strict=False)):
        # Accept with min(1, p / q); the token was drawn from q, which is therefore above 0.
        if drawing.rng.random() * (1.0 if q is None else q[token]) >= p[token]:
            rest = p.copy() if q is None else np.maximum(p - q, 0.0)
            if q is None:
                rest[token] = 0.0
            # Where p = q but for rounding nothing is left, and p is as right.
            return [*draft.tokens[:i], drawing.draw(rest if rest.any() else p)], i
    return [*draft.tokens, drawing.draw(chances[len(draft.tokens)])], len(draft.tokens)


def _chances(distribution: Distribution, logits: Float32) -> Float64:
    chances = distribution(logits)
    if chances.shape != logits.shape:
        raise ShapeError(f"expected probabilities {logits.shape}, found {chances.shape}")
    return chances

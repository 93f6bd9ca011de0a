"""A real decoder on a simulated device: texts are computed, time is that of another model there.

Layers, heads and cache fills really run on the wrapped decoder, so that tokens are real; the clock
moves by what the simulated device takes in its present state for the published shapes of the model
that the decoder stands for. An exit after k of the decoder's layers stands for the same share of
that model's layers.

What is priced, by the device's own law: launches and memory traffic once per call, arithmetic for
each row, so that several rows never cost less than the larger of arithmetic and traffic. Filling
the cache behind an exit is one call for all deeper layers: a norm, their stacked K and V
projections, a rotation and a write. A fitted map is one product more than a raw head. What reads a
state without a head, such as a gate or SpecEE's look at four candidates, costs a norm, the map and
a small network. What a policy itself takes to decide is not priced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.base import DecoderProgram
from edgewise.bench.language_play import Text, Way
from edgewise.bench.simulation import static_costs
from edgewise.device.simulated import SimulatedDevice, UnitWork, run_campaign
from edgewise.errors import ConfigError
from edgewise.predict.state_samples import StateSamples
from edgewise.runtime.generation.costs import LanguageCosts, RowCosts
from edgewise.runtime.generation.pace import Pace

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import HeadKind
    from edgewise.clock import Clock
    from edgewise.device.simulated import DeviceModel
    from edgewise.model.decoding import AffineExit, KvCache
    from edgewise.runtime.generation.session import LanguageSession

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# A call's name and whose luck it meets.
Call = tuple[str, int]

STANDS_FOR = "llama-3.2-1b"
TOKENS_PER_TEXT = 4096  # luck of a text's tokens: no text is longer

_HIDDEN, _KEYS = 2048, 512  # LLaMA 3.2-1B: width of a state, and of keys or values
_WEIGHT_BYTES = 2
# As operators of the shipped work: norm 6, product 1, rotation 5, write 2.
_FILL_LAUNCHES, _MAP_LAUNCHES = 14, 1
_LOOK_LAUNCHES = 6 + 1 + 1 + 4  # norm, map, candidates' rows, softmax and network
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)
_PROFILE_ROUNDS = 60


def stands_for(exit_layers: Sequence[int], *, layers: int) -> tuple[int, ...]:
    """After how many layers of the other model each exit lies, by its share of the depth.

    Args:
        exit_layers: Of the decoder; the last is its depth.
        layers: Of the other model.

    Raises:
        ConfigError: Two exits stand for the same one, or one for none.

    Example:
        >>> stands_for((2, 12, 24, 30), layers=16)
        (1, 6, 13, 16)
    """
    depth = exit_layers[-1]
    found = tuple(round(layers * k / depth) for k in exit_layers)
    if found[0] < 1 or len(set(found)) < len(found):
        raise ConfigError(
            f"expected exits that stand for different ones of {layers}, found {list(exit_layers)}"
            f" of {depth} for {list(found)}",
            help="choose_exits leaves out those that cannot be told apart",
        )
    return found


def choose_exits(fitted: Iterable[int], *, depth: int, layers: int) -> tuple[int, ...]:
    """Of the exits that are there, for each layer of the other model the nearest, and the depth.

    Example:
        >>> choose_exits((1, 2, 3, 6, 9, 12, 18, 24, 27, 29), depth=30, layers=16)
        (2, 3, 6, 9, 12, 18, 24, 27, 29, 30)
    """
    nearest: dict[int, int] = {}
    for k in sorted({k for k in fitted if k < depth}):
        place = round(layers * k / depth)
        if not 1 <= place < layers:
            continue
        off = abs(layers * k / depth - place)
        best = nearest.get(place)
        if best is None or off < abs(layers * best / depth - place):
            nearest[place] = k
    return (*sorted(nearest.values()), depth)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWork:
    """What a decoder's calls ask of a device.

    Attributes:
        stages: [P], the groups of layers between exits.
        head: The whole vocabulary from a state.
        mapped_head: The same behind a fitted map.
        short_head: The short list alone behind a fitted map.
        fills: [P - 1], keys and values of all layers behind each exit but the last.
        look: A state read without a head.
    """

    stages: tuple[UnitWork, ...]
    head: UnitWork
    mapped_head: UnitWork
    short_head: UnitWork
    fills: tuple[UnitWork, ...]
    look: UnitWork

    @classmethod
    def of(
        cls, work: Sequence[UnitWork], places: Sequence[int], *, short_share: float = 1.0
    ) -> DecoderWork:
        """Of a model's layers and heads, grouped between exits.

        Args:
            work: Every layer and then every head, as `load_work` gives a language model's.
            places: After how many layers each exit lies, rising; the last is all of them.
            short_share: Of the vocabulary that the short list is.
        """
        layers = [unit for unit in work if unit.name.startswith("stage:")]
        if not places or places[-1] != len(layers):
            raise ConfigError(f"expected {len(layers)} layers at the end, found {list(places)}")
        starts = (0, *places[:-1])
        mapping = _product("map", _HIDDEN, _HIDDEN, launches=_MAP_LAUNCHES)
        head = work[-1]
        short = dataclasses.replace(
            head,
            flops=short_share * head.flops,
            traffic_bytes=short_share * head.traffic_bytes,
        )
        return cls(
            stages=tuple(
                _together(f"stage:{p}", layers[a:b])
                for p, (a, b) in enumerate(zip(starts, places, strict=True))
            ),
            head=dataclasses.replace(head, name="head"),
            mapped_head=_together("mapped_head", [head, mapping]),
            short_head=_together("short_head", [short, mapping]),
            fills=tuple(
                _product(
                    f"fill:{p}", _HIDDEN, 2 * _KEYS * (places[-1] - k), launches=_FILL_LAUNCHES
                )
                for p, k in enumerate(places[:-1])
            ),
            look=dataclasses.replace(mapping, name="look", launches=_LOOK_LAUNCHES),
        )

    @property
    def calls(self) -> tuple[UnitWork, ...]:
        """Every call that is priced, by name and rows."""
        heads = (self.head, self.mapped_head, self.short_head)
        several = (*self.stages, *heads, *self.fills, self.look)
        return tuple(of_rows(unit, rows) for unit in several for rows in _ROWS)

    def of_token(self, head: HeadKind, *, fills: bool) -> tuple[UnitWork, ...]:
        """Stages and heads of one token as a session's costs count them.

        Args:
            head: What answers at exits before the last; each of them has a fitted map.
            fills: Whether a head includes filling the cache behind it.
        """
        early = {"raw": self.head, "affine": self.mapped_head, "shortlist": self.short_head}[head]
        heads = [[early, fill] if fills else [early] for fill in self.fills]
        every = [*heads, [self.head]]
        return (*self.stages, *(_together(f"head:{p}", each) for p, each in enumerate(every)))

    def full_depth_s(self, model: DeviceModel, states: Float64) -> Float64:
        """[N], seconds of a token at full depth in states [N, 5], noise left out."""
        return np.asarray(model.costs_s((*self.stages, self.head), states).sum(axis=1))


def of_rows(unit: UnitWork, rows: int) -> UnitWork:
    """The same call for several rows."""
    return dataclasses.replace(unit, name=call_name(unit.name, rows), flops=rows * unit.flops)


def call_name(unit: str, rows: int) -> str:
    """What a call for so many rows is priced as: the next larger number that is known.

    Example:
        >>> call_name("stage:0", 5), call_name("stage:0", 33)
        ('stage:0 x5', 'stage:0 x64')
    """
    priced = next((r for r in _ROWS if r >= rows), None)
    if priced is None:
        raise ConfigError(f"expected at most {_ROWS[-1]} rows in one pass, found {rows}")
    return f"{unit} x{priced}"


def _product(name: str, inputs: int, outputs: int, *, launches: int) -> UnitWork:
    weights = inputs * outputs
    return UnitWork(
        name=name,
        kind="token",
        launches=launches,
        flops=2.0 * weights,
        traffic_bytes=float(_WEIGHT_BYTES * weights),
    )


def _together(name: str, units: Sequence[UnitWork]) -> UnitWork:
    return UnitWork(
        name=name,
        kind=units[0].kind,
        launches=sum(u.launches for u in units),
        flops=sum(u.flops for u in units),
        traffic_bytes=sum(u.traffic_bytes for u in units),
    )


def profiled_costs(
    model: DeviceModel, work: DecoderWork, *, head: HeadKind
) -> tuple[LanguageCosts, RowCosts]:
    """What a profile at the highest clocks says, simulated; no text length changes it."""
    top = np.array([[1.0, 1.0, 1.0, 0.0, 0.0]])

    def table(*, fills: bool) -> StateSamples:
        units = work.of_token(head, fills=fills)
        return token_samples(model, units, seed=0, states=top, repeats=_PROFILE_ROUNDS)

    filled, alone = table(fills=True), table(fills=False)
    layers = {
        r: float(model.costs_s([of_rows(u, r) for u in work.stages], top).sum()) for r in _ROWS
    }
    heads = {r: float(model.costs_s([of_rows(work.head, r)], top).sum()) for r in _ROWS[:8]}
    return LanguageCosts(
        propagate=static_costs(filled.seconds[0], names=filled.units),
        mask=static_costs(alone.seconds[0], names=alone.units),
    ), RowCosts(layers_s=layers, head_s=heads)


def token_samples(
    model: DeviceModel,
    units: Sequence[UnitWork],
    *,
    seed: int,
    states: Float64,
    repeats: int = 3,
) -> StateSamples:
    """Records of a token's stages and heads in constant states, simulated."""
    found = run_campaign(model, units, seed=seed, states=states, repeats=repeats)
    return StateSamples.simulated(found, with_energy=False)


class SimulatedDecoder(DecoderProgram):
    """Computes with a decoder and takes the time of another model on a simulated device.

    Args:
        decoder: Computes; shared, not changed.
        device: With the `DecoderWork.calls` of the other model.
        clock: Moves by what calls cost.

    Attributes:
        text: Number of the text that runs: with a token's place in it, it decides a call's luck, so
            that all ways meet the same.
        calls: What ran, in order.
    """

    def __init__(self, decoder: DecoderProgram, device: SimulatedDevice, clock: Clock) -> None:
        super().__init__(
            decoder.model,
            backend=decoder.backend,
            threads=decoder.threads,
            precision=decoder.precision,
            exit_layers=decoder.exit_layers,
            exits=decoder.exits,
        )
        self.weight_bytes = decoder.weight_bytes
        self._decoder, self._device, self._clock = decoder, device, clock
        self.text = 0
        self.calls: list[Call] = []
        self._place = 0

    def normed(self, hidden: Float32) -> Float32:
        """The last norm, priced as the look that follows it."""
        self._take("look", 1)
        return self._decoder.normed(hidden)

    def _run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        found = self._decoder.run_layers(hidden, cache, start=start, stop=stop, first=first)
        self._place = first
        for p in range(start, stop):
            self._take(f"stage:{p}", len(hidden))
        return found

    def _fill(self, hidden: Float32, cache: KvCache, *, layer: int, first: int) -> None:
        position = self.exit_layers.index(layer) + 1
        self._decoder.fill(hidden, cache, start=position, first=first)
        self._take(f"fill:{position - 1}", len(hidden))

    def _logits(self, hidden: Float32, *, affine: AffineExit | None, shortlist: bool) -> Float32:
        if affine is None:  # whatever the position, the model's own norm and head
            if shortlist:
                raise ConfigError("expected a fitted map before a short list, found none")
            found = self._decoder.logits(hidden, position=len(self.exit_layers))
            self._take("head", len(hidden))
            return found
        position = self.exit_layers.index(affine.layer) + 1
        if shortlist:
            assert self.exits is not None  # noqa: S101 - the base class has checked
            assert self.exits.shortlist is not None  # noqa: S101 - as above
            every = self._decoder.logits(hidden, position=position, kind="shortlist")
            self._take("short_head", len(hidden))
            return np.asarray(every[:, self.exits.shortlist])
        found = self._decoder.logits(hidden, position=position)
        self._take("mapped_head", len(hidden))
        return found

    def _take(self, unit: str, rows: int) -> None:
        name, now_s = call_name(unit, rows), self._clock.now_s()
        request = self.text * TOKENS_PER_TEXT + self._place
        self.calls.append((name, request))
        self._clock.sleep_s(self._device.cost_s(name, now_s, request=request))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A text that does not depend on the clock, and what ran for it.

    Attributes:
        text: As it came.
        calls: For each token what ran since the one before it.
    """

    text: Text
    calls: tuple[tuple[Call, ...], ...]


def play_recorded(
    session: LanguageSession,
    decoder: SimulatedDecoder,
    prompt: Sequence[int],
    way: Way,
    *,
    max_tokens: int,
) -> Recorded:
    """Let a way that knows no deadline continue a prompt, and keep what it called."""
    decoder.calls.clear()
    tokens, calls = [], []
    generation = session.generate(
        list(prompt), max_tokens=max_tokens, kv=way.kv, stepper=way.stepper
    )
    with generation:
        for token in generation:
            tokens.append(token)
            calls.append(tuple(decoder.calls))
            decoder.calls.clear()
        text = Text(prompt=tuple(prompt), tokens=tuple(tokens), summary=generation.summary)
    return Recorded(text=text, calls=tuple(calls))


def retime(recorded: Recorded, device: SimulatedDevice, clock: Clock, *, budget_s: float) -> Text:
    """The same text on another device or trace: its calls run again, its tokens stay."""
    pace, since_s = Pace(budget_s), clock.now_s()
    tokens = []
    for token, calls in zip(recorded.text.tokens, recorded.calls, strict=True):
        for name, request in calls:
            clock.sleep_s(device.cost_s(name, clock.now_s(), request=request))
        at_s, met = clock.now_s(), None
        if token.index:
            met = pace.add(at_s)
        else:
            pace.begin(at_s)
        tokens.append(
            dataclasses.replace(token, budget_s=budget_s, observed_s=at_s - since_s, met=met)
        )
        since_s = at_s
    summary = dataclasses.replace(recorded.text.summary, tpot_budget_s=budget_s)
    return Text(prompt=recorded.text.prompt, tokens=tuple(tokens), summary=summary)

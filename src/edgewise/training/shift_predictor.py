"""Train the small networks that say from a few candidates' probabilities whether to leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.base import DecoderProgram, HeadKind
from edgewise.backends.decoder.layers import head_weight
from edgewise.errors import ConfigError, DataError
from edgewise.exits.shift import (
    CANDIDATES,
    ShiftPredictor,
    covering_layers,
    shift_features,
    top_candidates,
)
from edgewise.frontends.torch_module import import_torch

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_HELD_OUT = 0.2
_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftSettings:
    """How the networks are trained.

    Attributes:
        hidden: Width of the hidden layer; the published one is 512.
        steps: Of Adam, each on all samples.
        learning_rate: Of Adam.
        share: Of all early leavings that the fixed set of layers must cover.
        seed: Of the first weights.
    """

    hidden: int = 64
    steps: int = 300
    learning_rate: float = 1e-2
    share: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.hidden, self.steps) < 1 or not self.learning_rate > 0:
            raise ConfigError(
                f"expected a width, steps and a rate above 0, found {self.hidden}, {self.steps} and"
                f" {self.learning_rate}"
            )
        if not 0 < self.share <= 1:
            raise ConfigError(f"expected a share above 0 to 1, found {self.share}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShiftSamples:
    """Candidates' logits on text.

    Attributes:
        draft_layer: The exit that named the candidates.
        layers: At which they were looked at, P of them, rising.
        logits: [P, N, K].
        answer: [N], which candidate is the full depth's answer; -1 where none is.
    """

    draft_layer: int
    layers: tuple[int, ...]
    logits: Float32
    answer: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftScore:
    """One layer's network on samples that it was not trained on.

    Attributes:
        layer: How many layers have run.
        base: Share of tokens whose best candidate is right here.
        proposed: Share for which it proposes to leave.
        precision: Share of these that are right; ``None`` where it proposes none.
    """

    layer: int
    base: float
    proposed: float
    precision: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedShift:
    """The predictor and how well it does.

    Attributes:
        predictor: All layers' networks and the fixed set of layers.
        scores: By layer.
        exits: Where held-out tokens would have left, by layer; the rest ran to the end.
        tokens: How many were held out.
    """

    predictor: ShiftPredictor
    scores: tuple[ShiftScore, ...]
    exits: dict[int, int]
    tokens: int


def collect_shift_samples(
    program: DecoderProgram,
    windows: Sequence[Int64],
    *,
    position: int,
    kind: HeadKind = "affine",
    candidates: int = CANDIDATES,
) -> ShiftSamples:
    """Run text through the model and keep the candidates' logits at every exit behind the draft's.

    Args:
        program: Its exits are where one may leave.
        windows: Token ids, each [M].
        position: Of the exit that names the candidates.
        kind: Its head.
        candidates: K.

    Raises:
        ConfigError: There is no exit between the draft's and the last.
        DataError: No text.
    """
    last = len(program.exit_layers)
    if not 1 <= position < last - 1:
        raise ConfigError(
            f"expected a draft exit with another between it and the last, found position {position}"
            f" of {last}"
        )
    if not windows:
        raise DataError("expected text to learn from, found none")
    between = range(position + 1, last)
    logits: list[list[Float32]] = [[] for _ in between]
    answers = []
    for window in windows:
        cache = program.new_cache(len(window))
        state = program.run_layers(program.embed(window), cache, start=0, stop=position, first=0)
        drafted = program.logits(state, position=position, kind=kind)
        chosen = np.stack([top_candidates(row, candidates) for row in drafted])  # [M, K]
        for place, p in enumerate(between):
            state = program.run_layers(state, cache, start=p - 1, stop=p, first=0)
            logits[place].append(_candidate_logits(program, state, chosen, position=p))
        state = program.run_layers(state, cache, start=last - 1, stop=last, first=0)
        full = program.logits(state, position=last).argmax(axis=1)
        found = chosen == full[:, None]
        answers.append(np.where(found.any(axis=1), found.argmax(axis=1), -1))
    return ShiftSamples(
        draft_layer=program.layers_at(position),
        layers=tuple(program.layers_at(p) for p in between),
        logits=np.stack([np.concatenate(rows) for rows in logits]),
        answer=np.concatenate(answers).astype(np.int64),
    )


def _candidate_logits(
    program: DecoderProgram, states: Float32, chosen: Int64, *, position: int
) -> Float32:
    """[M, K] from states [M, H] and each token's candidates [M, K]."""
    read = program.normed(states)
    exits = program.exits
    affine = None if exits is None else exits.affine.get(program.layers_at(position))
    if affine is not None:
        read = read @ affine.weight.T + affine.bias
    rows = head_weight(program.model)[chosen]  # [M, K, H]
    return np.asarray(np.einsum("mkh,mh->mk", rows, read), dtype=np.float32)


def fit_shift_predictor(
    samples: ShiftSamples, *, settings: ShiftSettings | None = None
) -> FittedShift:
    """Train one network for each layer, twice.

    At first every layer counts as asked; where tokens would leave then gives the fixed set of
    layers. Shifts are then taken from the last layer of that set, as they will be when it runs.

    Args:
        samples: The last fifth is held out.
        settings: How.

    Raises:
        DataError: Too few samples.
        BackendUnavailable: torch is not installed.
    """
    settings = settings or ShiftSettings()
    count = len(samples.answer)
    cut = count - max(1, round(_HELD_OUT * count))
    if cut < 2:
        raise DataError(f"expected at least 3 samples, found {count}", help="give more text")
    right = samples.logits.argmax(axis=2) == samples.answer  # [P, N]
    torch = import_torch()
    networks = _fit_all(torch, _features(samples, samples.layers), right, cut, settings)
    chances = _chances(networks, _features(samples, samples.layers), samples.layers)
    scheduled = covering_layers(_leavings(chances[:, :cut], samples.layers), share=settings.share)
    scheduled = scheduled or samples.layers[-1:]  # where none leaves: the surest
    features = _features(samples, scheduled)
    networks = _fit_all(torch, features, right, cut, settings)
    predictor = _predictor(networks, samples, scheduled)
    held = _chances(networks, features[:, cut:], samples.layers)
    asked = [samples.layers.index(k) for k in scheduled]
    return FittedShift(
        predictor=predictor,
        scores=tuple(
            _score(layer, c, r)
            for layer, c, r in zip(samples.layers, held, right[:, cut:], strict=True)
        ),
        exits=_leavings(held[asked], scheduled),
        tokens=count - cut,
    )


def _features(samples: ShiftSamples, active: Sequence[int]) -> Float32:
    """[P, N, 3 K], shifts taken from the nearest active layer before each."""
    found = []
    q_of: dict[int, Float32] = {}
    for layer, logits in zip(samples.layers, samples.logits, strict=True):
        before = max((k for k in active if k < layer), default=None)
        features, q_of[layer] = shift_features(logits, None if before is None else q_of[before])
        found.append(features)
    return np.stack(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    first: Float32
    first_bias: Float32
    second: Float32
    second_bias: float


def _fit_all(
    torch: Any, features: Float32, right: Bool, cut: int, settings: ShiftSettings
) -> list[_Network]:
    return [_fit(torch, f[:cut], r[:cut], settings) for f, r in zip(features, right, strict=True)]


def _fit(torch: Any, features: Float32, right: Bool, settings: ShiftSettings) -> _Network:
    mean, spread = features.mean(axis=0), features.std(axis=0) + 1e-6
    x = torch.from_numpy(((features - mean) / spread).astype(np.float32))
    y = torch.from_numpy(right.astype(np.float32))
    chance = torch.Generator().manual_seed(settings.seed)
    width = features.shape[1]
    first = torch.randn(width, settings.hidden, generator=chance) / width**0.5
    second = torch.randn(settings.hidden, generator=chance) / settings.hidden**0.5
    weights = [first, torch.zeros(settings.hidden), second, torch.zeros(())]
    for weight in weights:
        weight.requires_grad_()
    optimiser = torch.optim.Adam(weights, lr=settings.learning_rate)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    for _ in range(settings.steps):
        optimiser.zero_grad()
        hidden = torch.relu(x @ weights[0] + weights[1])
        loss_of(hidden @ weights[2] + weights[3], y).backward()
        optimiser.step()
    first, first_bias, second, second_bias = (w.detach().numpy() for w in weights)
    folded = first / spread[:, None]
    return _Network(
        first=folded.astype(np.float32),
        first_bias=(first_bias - mean @ folded).astype(np.float32),
        second=second.astype(np.float32),
        second_bias=float(second_bias),
    )


def _chances(networks: Sequence[_Network], features: Float32, layers: Sequence[int]) -> Float32:
    """[P, N]."""
    found = np.empty(features.shape[:2], dtype=np.float32)
    for place, _ in enumerate(layers):
        n = networks[place]
        hidden = np.maximum(features[place] @ n.first + n.first_bias, 0.0)
        found[place] = 1.0 / (1.0 + np.exp(-np.clip(hidden @ n.second + n.second_bias, -60, 60)))
    return found


def _leavings(chances: Float32, layers: Sequence[int]) -> dict[int, int]:
    """At which layer each token is first proposed to leave, counted."""
    proposes = chances > _THRESHOLD
    first = proposes.argmax(axis=0)[proposes.any(axis=0)]
    return {layer: int((first == place).sum()) for place, layer in enumerate(layers)}


def _score(layer: int, chances: Float32, right: Bool) -> ShiftScore:
    proposes = chances > _THRESHOLD
    return ShiftScore(
        layer=layer,
        base=float(right.mean()),
        proposed=float(proposes.mean()),
        precision=float(right[proposes].mean()) if proposes.any() else None,
    )


def _predictor(
    networks: Sequence[_Network], samples: ShiftSamples, scheduled: tuple[int, ...]
) -> ShiftPredictor:
    pairs = list(zip(samples.layers, networks, strict=True))
    return ShiftPredictor(
        first={k: n.first for k, n in pairs},
        first_bias={k: n.first_bias for k, n in pairs},
        second={k: n.second for k, n in pairs},
        second_bias={k: n.second_bias for k, n in pairs},
        draft_layer=samples.draft_layer,
        scheduled=scheduled,
    )

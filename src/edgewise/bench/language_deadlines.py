"""Ways of decoding under budgets, calm and beside a co-runner: deadlines kept, and what it cost."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.api import language_costs_of
from edgewise.backends.decoder import load_decoder
from edgewise.bench.background import Load
from edgewise.bench.language_play import (
    Text,
    TextJudgement,
    Way,
    as_json,
    judge,
    play,
    score,
    with_budget,
)
from edgewise.errors import EdgeError
from edgewise.runtime.generation import LanguageSession
from edgewise.runtime.generation.baselines import BASELINES, make_baseline
from edgewise.training.shift_predictor import collect_shift_samples, fit_shift_predictor

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind, Precision
    from edgewise.exits.shift import ShiftPredictor
    from edgewise.model.decoding import LanguageExits
    from edgewise.model.language import LanguageModel

Int64 = npt.NDArray[np.int64]
Say = Callable[[str], None]

SHARES = (1.0, 0.75, 0.5)
STATES = ("calm", "co-runner")
CO_RUNNER = "memory"
FULL = "full-depth"
# A point of DSR is what some hundred tokens can tell.
_EQUAL = 0.01
_WANTED = (3, 6, 12, 18, 24, 27, 29)
_ENOUGH = 4
_TARGET_DSR = 0.99  # the router's aim; what is reached scatters around it
_OURS = "edgewise"
_WHOLE = f"{_OURS}, whole head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineSettings:
    """What is run.

    Attributes:
        backend: Of the decoder.
        precision: Of its weights.
        threads: Of each call.
        max_tokens: Of each text.
        training_s: Time for reading text that the shift predictor learns from, seconds.
        time_cap_s: No further prompt begins after so long, seconds.
    """

    backend: str = "onnxruntime:CPU"
    precision: Precision = "int4"
    threads: int = 1
    max_tokens: int = 64
    training_s: float = 40.0
    time_cap_s: float = 330.0


@dataclass(slots=True, kw_only=True)
class Arena:
    """A loaded decoder with sessions of both kinds of head, and what ways need.

    Attributes:
        decoder: Whose tokens are timed.
        reader: In full precision: judges texts.
        sessions: By kind of head; the usual one, which answers where nothing is said, first.
        predictor: For the ways that leave by probability shifts; ``None`` where there is none.
        full_s: Median of a token at full depth, calm, seconds.
        judged: What the reader said of each text.
    """

    decoder: DecoderProgram
    reader: DecoderProgram
    sessions: dict[str, LanguageSession]
    predictor: ShiftPredictor | None = None
    full_s: float = 0.0
    judged: dict[tuple[tuple[int, ...], tuple[int, ...]], TextJudgement] = field(
        default_factory=dict
    )

    @property
    def usual(self) -> str:
        """The head that answers where nothing is said."""
        return next(iter(self.sessions))

    @property
    def session(self) -> LanguageSession:
        """With the usual head."""
        return self.sessions[self.usual]

    def judgement(self, text: Text) -> TextJudgement:
        """What the reader says; the same text is read once."""
        key = (text.prompt, text.ids)
        if key not in self.judged:
            self.judged[key] = judge(self.reader, text)
        return self.judged[key]


def deadline_figures(  # noqa: PLR0913 - a comparison's whole circumstances
    model: LanguageModel,
    exits: LanguageExits,
    prompts: Sequence[Sequence[int]],
    training: Sequence[Int64],
    *,
    settings: DeadlineSettings,
    notes: list[str],
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """All ways under three budgets, calm and beside a co-runner, prompt by prompt in turns.

    Args:
        model: To decode.
        exits: Fitted for it.
        prompts: Token ids, none of them fitted on.
        training: Windows that the shift predictor learns from.
        settings: What is run.
        notes: Told what could not be run.
        say: Told what is done.

    Raises:
        BackendUnavailable: The backend is not installed.
    """
    arena = open_arena(model, exits, settings, say=say)
    say("training the shift predictor")
    arena.predictor = train_predictor(arena.decoder, training, settings=settings, notes=notes)
    with frozen_objects():
        say("full depth, calm")
        arena.full_s = calm_full_depth_s(arena, prompts, max_tokens=settings.max_tokens)
        budgets = {share: share * arena.full_s for share in SHARES}
        texts, done = play_all(arena, prompts, budgets, settings=settings, notes=notes, say=say)
    say("reading the texts")
    rows = score_all(arena, texts, budgets, reference=[t.ids for t in texts[STATES[0], FULL, None]])
    middle = len(prompts[0]) + settings.max_tokens // 2
    floors = calm_floors_s(arena, texts)
    return {
        "name": f"{settings.backend} {settings.precision}",
        "threads": settings.threads,
        "exit_layers": list(arena.decoder.exit_layers),
        "prompts": done,
        "tokens_each": settings.max_tokens,
        "co_runner": CO_RUNNER,
        "target_dsr": _TARGET_DSR,
        "calm_full_depth_s": arena.full_s,
        "predicted_full_depth_s": arena.session.full_depth_s(after=middle),
        "floor_s": floors,
        "floors": [
            {
                "budget_s": b,
                "share": share,
                **{f"floor_over_budget, {h}": f / b for h, f in floors.items()},
            }
            for share, b in budgets.items()
        ],
        "rows": rows,
        "equal_dsr": at_equal_dsr(rows),
    }


def open_arena(
    model: LanguageModel, exits: LanguageExits, settings: DeadlineSettings, *, say: Say
) -> Arena:
    """Load decoder and reader, and measure what tokens cost, in these minutes."""
    silent = dataclasses.replace(model, tokenizer=None)
    say(f"loading {settings.backend} {settings.precision}")
    decoder = load_decoder(
        silent,
        settings.backend,
        threads=settings.threads,
        precision=settings.precision,
        exit_layers=deadline_layers(exits),
        exits=exits,
    )
    reader = decoder
    if (decoder.backend, decoder.precision) != ("torch:cpu", "fp32"):
        reader = load_decoder(silent, "torch:cpu", threads=settings.threads)
    sessions = {}
    heads: tuple[HeadKind, ...] = (decoder.exit_head(), "affine")
    for head in dict.fromkeys(heads):
        say(f"measuring tokens, {head} heads")
        sessions[str(head)] = open_session(decoder, head=head)
    return Arena(decoder=decoder, reader=reader, sessions=sessions)


def deadline_layers(exits: LanguageExits) -> list[int]:
    """After which layers one may leave: some are early, so that tight budgets can be kept."""
    wanted = [k for k in _WANTED if k in exits.affine]
    return wanted if len(wanted) >= _ENOUGH else sorted(exits.affine)


def open_session(decoder: DecoderProgram, *, head: HeadKind = "affine") -> LanguageSession:
    """A session whose costs are measured now, not those of another day."""
    with tempfile.TemporaryDirectory() as folder:
        costs = language_costs_of(decoder, head=head, store=Path(folder) / "profiles.sqlite")
    session = LanguageSession(decoder, costs, head=head, target_dsr=_TARGET_DSR)
    session.warm_up()
    return session


def train_predictor(
    decoder: DecoderProgram,
    windows: Sequence[Int64],
    *,
    settings: DeadlineSettings,
    notes: list[str],
) -> ShiftPredictor | None:
    """Learn from as much text as time allows, a quarter of the way drafting; ``None`` if not."""
    until_s = time.perf_counter() + settings.training_s
    position = max(1, (len(decoder.exit_layers) - 1) // 2)
    found: list[Any] = []
    try:
        for window in windows:
            found.append(
                collect_shift_samples(
                    decoder, [window], position=position, kind=decoder.exit_head()
                )
            )
            if time.perf_counter() > until_s:
                break
        if not found:
            return None
        samples = dataclasses.replace(
            found[0],
            logits=np.concatenate([s.logits for s in found], axis=1),
            answer=np.concatenate([s.answer for s in found]),
        )
        fitted = fit_shift_predictor(samples)
    except EdgeError as error:
        notes.append(f"shift predictor: {error.message}")
        return None
    notes.append(
        f"shift predictor: drafts after {samples.draft_layer} layers, asked after"
        f" {', '.join(map(str, samples.layers))}, learnt from {len(samples.answer)} tokens"
    )
    return fitted.predictor


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """What was loaded is not searched for garbage again: that takes as long as a token."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def calm_full_depth_s(arena: Arena, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> float:
    """Median time per token at full depth, seconds."""
    way = Way(name=FULL, stepper=make_baseline(FULL))
    taken = [
        token.observed_s
        for prompt in prompts[:2]
        for token in play(arena.session, prompt, way, budget_s=None, max_tokens=max_tokens).tokens[
            1:
        ]
    ]
    return float(np.median(taken))


def calm_floors_s(arena: Arena, texts: Played) -> dict[str, float]:
    """By kind of head: median of a token at its soonest exit, and what tokens took beside."""
    return {
        head: statistics.median(
            text.summary.floor_s
            for (state, name, _), own in texts.items()
            if (state, name) == (STATES[0], _OURS if head == arena.usual else _WHOLE)
            for text in own
        )
        for head in arena.sessions
    }


# --- ways ------------------------------------------------------------------------------------


def blind_ways(arena: Arena, *, max_tokens: int) -> list[Way]:
    """Those that know no deadline."""
    layers = arena.decoder.exit_layers
    draft = layers[max(1, (len(layers) - 1) // 2) - 1]
    ways = [
        Way(name=FULL, stepper=make_baseline(FULL)),
        Way(name="calm", stepper=make_baseline("calm", tokens=max_tokens)),
        Way(name="layerskip", stepper=make_baseline("layerskip", layer=draft)),
    ]
    if arena.predictor is not None:
        ways.append(Way(name="specee", stepper=make_baseline("specee", predictor=arena.predictor)))
    return ways


def budget_ways(arena: Arena, budget_s: float, *, length: int) -> list[tuple[str, Way]]:
    """Those that do, each with the head of its session.

    Args:
        arena: Loaded.
        budget_s: Of a token.
        length: Of the text in the middle.
    """
    layer = deepest_that_fits(arena.session, budget_s, length=length)
    usual = arena.usual
    ways = [
        (usual, Way(name="fixed-exit", stepper=make_baseline("fixed-exit", layer=layer))),
        (usual, Way(name="layer-wise", stepper=make_baseline("layer-wise"))),
        (usual, Way(name=_OURS)),
        (usual, Way(name=f"{_OURS}, defer", kv="defer")),
        (usual, Way(name=f"{_OURS}, window 8", window=8)),
    ]
    for name in BASELINES:
        if not name.startswith(f"{_OURS}+") or (name.endswith("psf") and arena.predictor is None):
            continue
        options = {"predictor": arena.predictor} if name.endswith("psf") else {}
        ways.append((usual, Way(name=name, stepper=make_baseline(name, **options))))
    if usual != "affine":
        ways.append(("affine", Way(name=_WHOLE)))
    return ways


def deepest_that_fits(session: LanguageSession, budget_s: float, *, length: int) -> int:
    """The deepest exit whose static cost fits a budget; the soonest where none does."""
    table = session.costs.propagate
    costs_s = [
        table.remaining_s(0, k) * session.costs.factor(length) for k in range(table.num_exits)
    ]
    fits = [k for k, cost_s in enumerate(costs_s) if cost_s <= budget_s]
    chosen = max(fits) if fits else int(np.argmin(costs_s))
    return session.decoder.exit_layers[chosen]


Played = dict[tuple[str, str, float | None], list[Text]]
"""By state, way, and share of the full depth's time: ``None`` where it knows no deadline."""


def play_all(  # noqa: PLR0913 - a comparison's whole circumstances
    arena: Arena,
    prompts: Sequence[Sequence[int]],
    budgets_s: Mapping[float, float],
    *,
    settings: DeadlineSettings,
    notes: list[str],
    say: Say = lambda _: None,
) -> tuple[Played, int]:
    """Every way continues every prompt in every state, as far as time allows; and how many did."""
    began_s, most = time.perf_counter(), settings.max_tokens
    texts: Played = {}
    refused: dict[str, str] = {}
    done = 0
    for number, prompt in enumerate(prompts):
        if number and (time.perf_counter() - began_s) * (number + 1) / number > settings.time_cap_s:
            notes.append(f"time was up after {number} of {len(prompts)} prompts")
            break
        middle = len(prompt) + most // 2
        for state in STATES:
            plays: list[tuple[str, Way, float | None]] = [
                ("affine", way, None) for way in blind_ways(arena, max_tokens=most)
            ]
            for share, budget_s in budgets_s.items():
                ways = budget_ways(arena, budget_s, length=middle)
                plays += [(head, way, share) for head, way in ways]
            with Load(CO_RUNNER) if state != STATES[0] else contextlib.nullcontext():
                for head, way, of in plays:
                    if way.name in refused:
                        continue
                    say(f"prompt {number + 1} of {len(prompts)}, {state}, {way.name}")
                    limit_s = None if of is None else budgets_s[of]
                    try:
                        text = play(
                            arena.sessions[head], prompt, way, budget_s=limit_s, max_tokens=most
                        )
                    except EdgeError as error:
                        refused[way.name] = error.message
                        continue
                    texts.setdefault((state, way.name, of), []).append(text)
        done = number + 1
    notes += [f"{name}: {why}" for name, why in refused.items()]
    return {k: t for k, t in texts.items() if k[1] not in refused}, done


def score_all(
    arena: Arena,
    texts: Played,
    budgets_s: Mapping[float, float],
    *,
    reference: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """A row for each state, budget and way."""
    rows = []
    for state in STATES:
        for share, budget_s in budgets_s.items():
            for (where, name, known), own in texts.items():
                if where != state or known not in {None, share}:
                    continue
                under = own if known is not None else [with_budget(t, budget_s) for t in own]
                row = score(
                    under,
                    reference,
                    name=name,
                    decoder=arena.reader,
                    depth=arena.decoder.depth,
                    judged=[arena.judgement(t) for t in own],
                )
                rows.append({"state": state, "share": share} | as_json(row))
    return rows


def at_equal_dsr(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each of our ways beside the baselines that keep as many deadlines, less a point.

    Args:
        rows: As `score_all` gives them.

    Returns:
        For each state, budget and way of ours: who keeps as many, and whose relative accuracy is
        higher.

    Example:
        >>> common = {"state": "calm", "share": 1.0}
        >>> rows = [{**common, "name": "edgewise", "dsr": 0.99, "relative_accuracy": 0.5},
        ...         {**common, "name": "calm", "dsr": 0.985, "relative_accuracy": 0.6},
        ...         {**common, "name": "full-depth", "dsr": 0.4, "relative_accuracy": 1.0}]
        >>> found, = at_equal_dsr(rows)
        >>> found["rivals"], found["better"]
        (['calm'], ['calm'])
    """
    found = []
    for row in rows:
        if not row["name"].startswith(_OURS) or row["dsr"] is None:
            continue
        rivals = [
            r
            for r in rows
            if (r["state"], r["share"]) == (row["state"], row["share"])
            and not r["name"].startswith(_OURS)
            and r["dsr"] >= row["dsr"] - _EQUAL
        ]
        better = [r["name"] for r in rivals if r["relative_accuracy"] > row["relative_accuracy"]]
        found.append(
            {
                "state": row["state"],
                "share": row["share"],
                "name": row["name"],
                "dsr": row["dsr"],
                "relative_accuracy": row["relative_accuracy"],
                "rivals": [r["name"] for r in rivals],
                "better": better,
            }
        )
    return found

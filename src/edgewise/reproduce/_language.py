"""What the claims about language models share: a real decoder, simulated devices, ways to decode.

Texts are made by the real decoder, whole sessions of it; only time is simulated, for the layers of
the paper's model. See `edgewise.bench.simulated_decoder`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.base import load_decoder
from edgewise.bench.language_play import (
    LanguageRow,
    Text,
    TextJudgement,
    Way,
    judge,
    play,
    score,
)
from edgewise.bench.simulated_decoder import (
    STANDS_FOR,
    TOKENS_PER_TEXT,
    DecoderWork,
    Recorded,
    SimulatedDecoder,
    call_name,
    choose_exits,
    play_recorded,
    profiled_costs,
    retime,
    stands_for,
    token_samples,
)
from edgewise.bench.simulation import MONITOR_PERIOD_S
from edgewise.device.simulated import (
    SimulatedClock,
    SimulatedDevice,
    StepTrace,
    down_up,
    full_factorial,
    load_device,
    load_work,
    static_max,
)
from edgewise.errors import ConfigError
from edgewise.frontends.language import load_language_model
from edgewise.frontends.language.exits_file import find_exits
from edgewise.predict.fitting import fit_kind
from edgewise.report.chart import Chart, Series
from edgewise.reproduce._simulated import DEVICES, PREDICTOR, TITLES, Clocks
from edgewise.reproduce.registry import Figure, Setup, Verdict
from edgewise.runtime.generation.baselines import make_baseline
from edgewise.runtime.generation.drafters import draft_costs
from edgewise.runtime.generation.drafting import expected_speed_up
from edgewise.runtime.generation.program import agreement_at
from edgewise.runtime.generation.session import LanguageSession
from edgewise.runtime.repricing import Repricer
from edgewise.training.language_text import cut_windows, load_text
from edgewise.training.shift_predictor import (
    ShiftSettings,
    collect_shift_samples,
    fit_shift_predictor,
)
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.exits.shift import ShiftPredictor
    from edgewise.model.language import LanguageModel
    from edgewise.predict.fitted import FittedPredictor
    from edgewise.runtime.generation.costs import LanguageCosts, RowCosts

Int64 = npt.NDArray[np.int64]

MODEL = "smollm2-135m"
STATIC_DEADLINE_S, DVFS_DEADLINE_S = 0.070, 0.118
_LAYERS = 16
_CLOCKS_SAID: Mapping[Clocks, str] = {"static": "highest clocks", "dvfs": "down-up DVFS"}
_WINDOW = 256  # as `edgewise fit-exits` cuts text: its last tenth was not fitted on
_PROMPT_TOKENS = 32
_SHIFT_WINDOW = 128
_FIT_STATES = 600
_MOST_DRAFTS = 7
# A token outlasts several states of the clocks, and what is asked of it is 0.97.
_TARGET = 0.99
_DRAFT_DEPTH = 0.4  # where candidates of the probability shifts are named
# Debian's package jargon-text.
_INSTALLED_TEXT = Path("/usr/share/doc/jargon-text/jargon.txt.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageWay:
    """A way of decoding as it is compared.

    Attributes:
        name: In tables.
        policy: Of its session.
        options: The policy's own.
        stepper: The baseline's name; ``None`` for the session's router.
        head: What answers at exits.
        kv: What a token that leaves early leaves behind.
        reads_state: Whether its session is told what units cost in each state of the device.
        timeless: Whether it knows no deadline and no state, so that its texts are the same on all
            devices.
    """

    name: str
    policy: str = "edgewise"
    options: Mapping[str, Any] = field(default_factory=dict)
    stepper: str | None = None
    head: HeadKind = "affine"
    kv: Any = "propagate"
    reads_state: bool = False
    timeless: bool = False


def _uniexit(name: str, stepper: str | None = None, margin: str = "fallback") -> LanguageWay:
    return LanguageWay(
        name=name, policy="uniexit", options={"margin": margin}, stepper=stepper, reads_state=True
    )


def _edgewise(name: str, stepper: str | None = None, head: HeadKind = "shortlist") -> LanguageWay:
    return LanguageWay(
        name=name, options={"target_dsr": _TARGET}, stepper=stepper, head=head, reads_state=True
    )


FULL_DEPTH, NO_FALLBACK = "full depth", "uniexit without fallback"


def ways(clocks: Clocks) -> dict[str, LanguageWay]:
    """All that are compared, by name.

    Args:
        clocks: Where time is short a short list answers early exits for edgewise; at the highest
            clocks, with full depth's time, there is no need for it. The other head has its row.
    """
    short = clocks == "dvfs"
    head: HeadKind = "shortlist" if short else "affine"
    rows = (
        LanguageWay(name=FULL_DEPTH, stepper="full-depth", timeless=True),
        LanguageWay(name="fixed exit", stepper="fixed-exit", timeless=True),
        LanguageWay(name="layer-wise", stepper="layer-wise"),
        LanguageWay(name="calm", stepper="calm", timeless=True),
        LanguageWay(name="layerskip", stepper="layerskip", timeless=True),
        LanguageWay(name="specee", stepper="specee", timeless=True),
        _uniexit("uniexit"),
        *((_uniexit(NO_FALLBACK, margin="none"),) if short else ()),
        _uniexit("uniexit + speculation", "edgewise+speculation"),
        _uniexit("uniexit + psf", "edgewise+psf"),
        _edgewise("edgewise", head=head),
        _edgewise(
            "edgewise, whole head" if short else "edgewise, short list",
            head="affine" if short else "shortlist",
        ),
        _edgewise("edgewise + speculation", "edgewise+speculation", head=head),
        _edgewise("edgewise + psf", "edgewise+psf", head=head),
    )
    return {way.name: way for way in rows}


OURS = ("edgewise", "edgewise + speculation", "edgewise + psf")


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageCase:
    """A real decoder, text it was not fitted on, and what was learnt from other text.

    Attributes:
        decoder: Computes.
        prompts: Token ids; the first warms up what learns as it goes, and is not counted.
        max_tokens: Of each answer.
        shift: Reads probability shifts.
        notes: What a reader must know of them.
        recorded: Texts that no clock changes, made so far; by way and settings.
        judged: Texts read at full depth so far.
    """

    decoder: DecoderProgram
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    shift: ShiftPredictor
    notes: tuple[str, ...] = ()
    recorded: dict[str, list[Recorded]] = field(default_factory=dict)
    judged: dict[tuple[int, ...], TextJudgement] = field(default_factory=dict)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """After how many of the paper's layers each exit stands."""
        return stands_for(self.decoder.exit_layers, layers=_LAYERS)

    @cached_property
    def work(self) -> DecoderWork:
        """What its calls ask of a device."""
        exits = self.decoder.exits
        short = None if exits is None else exits.shortlist
        vocabulary = self.decoder.model.architecture.vocab_size
        share = 1.0 if short is None else len(short) / vocabulary
        return DecoderWork.of(load_work(STANDS_FOR), self.places, short_share=share)

    def judge(self, text: Text) -> TextJudgement:
        """Let the decoder read a text at full depth; each text once."""
        key = (*text.prompt, -1, *text.ids)
        if key not in self.judged:
            self.judged[key] = judge(self.decoder, text)
        return self.judged[key]


def open_case(setup: Setup) -> LanguageCase:
    """Load the decoder and text, and train what reads probability shifts.

    Args:
        setup: ``models``: one; ``data``: a text file; ``limit``: prompts; ``backend``, ``threads``.

    Raises:
        ConfigError: No such model, no fitted exits, or no text.
        BackendUnavailable: No runtime for language models.
        DataError: The text cannot be read or is too short.
    """
    decoder, held_in, prompts, text_name = _open(setup, warm_up=1)
    setup.say("training what reads probability shifts")
    shift, shift_note = train_shift(decoder, held_in[: 2 if setup.quick else 8])
    return LanguageCase(
        decoder=decoder,
        prompts=prompts,
        max_tokens=16 if setup.quick else 64,
        shift=shift,
        notes=(
            (
                f"texts: {len(prompts) - 1} prompts of {_PROMPT_TOKENS} tokens of the last tenth of"
                f" {text_name}, which no exit was fitted on, after one that warms up and is not"
                f" counted; computed by {decoder.model.name} on"
                f" {decoder.backend}, {decoder.precision}; full depth there is the reference"
            ),
            shift_note,
        ),
    )


def open_decoder(setup: Setup) -> tuple[DecoderProgram, tuple[tuple[int, ...], ...], str]:
    """The decoder alone, prompts, and what text they are of; arguments and errors as `open_case`.

    None of the prompts is there to warm anything up.
    """
    decoder, _, prompts, text_name = _open(setup, warm_up=0)
    return decoder, prompts, text_name


def _open(
    setup: Setup, *, warm_up: int
) -> tuple[DecoderProgram, list[Int64], tuple[tuple[int, ...], ...], str]:
    name = setup.models[0] if setup.models else MODEL
    setup.say(f"loading {name}")
    model = load_language_model(name)
    count = warm_up + (setup.limit or (2 if setup.quick else 6))
    # Text first: a missing file is found before a model is laid out.
    held_in, prompts, text_name = _texts(model, setup.data, count=count)
    return load_with_exits(model, name, setup), held_in, prompts, text_name


def load_with_exits(model: LanguageModel, name: str, setup: Setup) -> DecoderProgram:
    """Load a decoder with the fitted exits that stand for different layers of the paper's model.

    Raises:
        ConfigError: Too few exits are fitted.
        BackendUnavailable: No runtime for language models.
    """
    fitted = find_exits(model.digest)
    depth = model.architecture.num_hidden_layers
    layers = choose_exits(() if fitted is None else fitted.affine, depth=depth, layers=_LAYERS)
    if len(layers) < 4:
        wished = sorted({max(2, round(depth * k / _LAYERS)) for k in (1, 3, 5, 6, 10, 13, 14, 15)})
        raise ConfigError(
            f"expected at least three fitted exits of {model.name!r}, found {len(layers) - 1}",
            help=f"edgewise fit-exits {name} --layers {','.join(map(str, wished))} --text FILE",
        )
    # In full precision several rows answer as one does, which verified texts rely on.
    return load_decoder(
        model,
        "torch:cpu" if setup.backend == "auto" else setup.backend,
        threads=setup.threads,
        exit_layers=layers[:-1],
        exits=fitted,
    )


def _texts(
    model: LanguageModel, data: str | None, *, count: int
) -> tuple[list[Int64], tuple[tuple[int, ...], ...], str]:
    """Windows to learn from, and prompts of the last tenth, evenly spread."""
    path = _INSTALLED_TEXT if data is None else Path(data)
    if data is None and not path.is_file():
        raise ConfigError(
            "which text? none is installed",
            help="--data FILE with plain text, or install Debian's jargon-text",
        )
    if model.tokenizer is None:
        raise ConfigError(f"model {model.name!r} has no tokenizer", help="give a folder with one")
    (windows,) = cut_windows([load_text(path, model.tokenizer)], window=_WINDOW)
    cut = len(windows) - (len(windows) + 9) // 10
    if cut < 1:
        raise ConfigError(f"{path}: expected at least two windows of {_WINDOW} tokens")
    held_out = windows[cut:]
    chosen = [held_out[i * len(held_out) // count] for i in range(min(count, len(held_out)))]
    prompts = tuple(tuple(int(t) for t in w[:_PROMPT_TOKENS]) for w in chosen)
    step = max(1, cut // 16)
    return [w[:_SHIFT_WINDOW] for w in windows[:cut:step]], prompts, path.name


def train_shift(
    decoder: DecoderProgram, windows: Sequence[Int64], *, settings: ShiftSettings | None = None
) -> tuple[ShiftPredictor, str]:
    """Train on text what says from candidates' probabilities whether to leave; and say on what."""
    depth = decoder.depth
    early = decoder.exit_layers[:-2]
    draft = min(early, key=lambda k: abs(k / depth - _DRAFT_DEPTH))
    samples = collect_shift_samples(decoder, windows, position=early.index(draft) + 1)
    fitted = fit_shift_predictor(samples, settings=settings)
    return fitted.predictor, (
        f"probability shifts: candidates of the exit after {draft} layers, networks trained on"
        f" {len(samples.answer)} tokens of the same text's first nine tenths"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Board:
    """A simulated device, its clocks' trace, and a deadline.

    Attributes:
        name: Of the device.
        clocks: What they do.
        budget_s: Per token, seconds.
        seed: Of noise and of when the first state is read.
    """

    name: str
    clocks: Clocks
    budget_s: float
    seed: int = 0

    @cached_property
    def trace(self) -> StepTrace:
        """Of the clocks."""
        levels = load_device(self.name).clocks
        return down_up(levels) if self.clocks == "dvfs" else static_max(levels)

    @property
    def title(self) -> str:
        """For people."""
        return TITLES[self.name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What a session is told in advance on one device, for one kind of head."""

    costs: LanguageCosts
    rows: RowCosts
    predictor: FittedPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedText:
    """A text, and for each token after the first whether any exit could have been in time."""

    text: Text
    feasible: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRow:
    """One way on one board.

    Attributes:
        row: Over all tokens after the first.
        feasible_ratio: Share of them that the first exit could have answered in time.
        dsr: Share in time of those; ``None`` where there is none.
    """

    row: LanguageRow
    feasible_ratio: float
    dsr: float | None

    @classmethod
    def of(cls, row: LanguageRow, played: Sequence[PlayedText]) -> BoardRow:
        """Count the feasible tokens."""
        pairs = [
            (could, token.met)
            for each in played
            for could, token in zip(each.feasible, each.text.tokens[1:], strict=True)
        ]
        met = [bool(m) for could, m in pairs if could]
        return cls(
            row=row,
            feasible_ratio=len(met) / len(pairs) if pairs else 0.0,
            dsr=sum(met) / len(met) if met else None,
        )

    @property
    def dsr_all(self) -> float:
        """Share in time of all tokens after the first."""
        return self.row.dsr or 0.0


def soonest_s(
    device: SimulatedDevice, text: Text, head: str, *, start_s: float, number: int
) -> list[float]:
    """For each token after the first what its first exit would have taken, seconds.

    Args:
        device: Knows each call's luck.
        text: Of one way: a token starts when the one before it came.
        head: Name of the call that answers.
        start_s: When the text began.
        number: Of the text.
    """
    found, at_s = [], start_s
    for token in text.tokens:
        if token.index:
            request = number * TOKENS_PER_TEXT + len(text.prompt) + token.index - 1
            stage_s = device.cost_s(call_name("stage:0", 1), at_s, request=request)
            head_s = device.cost_s(call_name(head, 1), at_s + stage_s, request=request)
            found.append(stage_s + head_s)
        at_s += token.observed_s
    return found


class LanguagePlayer:
    """Plays ways on one board; what is known of a device in advance is made once.

    Args:
        case: Whose texts.
        board: Where.
    """

    def __init__(self, case: LanguageCase, board: Board) -> None:
        self.case, self.board = case, board
        self._model = load_device(board.name)
        self._known: dict[str, _Known] = {}

    def known(self, head: HeadKind) -> _Known:
        """Costs at the highest clocks, and what predicts them in other states."""
        if head not in self._known:
            work, model, seed = self.case.work, self._model, self.board.seed
            costs, rows = profiled_costs(model, work, head=head)
            states = full_factorial(model)
            drawn = np.random.default_rng([seed, 1]).choice(len(states), _FIT_STATES, replace=False)
            samples = token_samples(
                model, work.of_token(head, fills=True), seed=seed, states=states[drawn]
            )
            predictor = fit_kind(PREDICTOR, samples)
            self._known[head] = _Known(costs=costs, rows=rows, predictor=predictor)
        return self._known[head]

    def full_depth_s(self) -> float:
        """A token at full depth at the highest clocks, noise left out, seconds."""
        top = np.array([[1.0, 1.0, 1.0, 0.0, 0.0]])
        return float(self.case.work.full_depth_s(self._model, top)[0])

    def mean_full_depth_s(self, *, tokens: int = 100) -> float:
        """The same on the board's trace: mean of tokens that start one after another."""
        units = [call_name(u.name, 1) for u in (*self.case.work.stages, self.case.work.head)]
        device = SimulatedDevice(
            self._model, self.board.trace, self.case.work.calls, seed=self.board.seed
        )
        at_s = 0.0
        for n in range(tokens):
            for unit in units:
                at_s += device.cost_s(unit, at_s, request=n)
        return at_s / tokens

    def play(self, way: LanguageWay) -> list[PlayedText]:
        """Let a way continue every prompt, one after another in a world of its own."""
        clock = SimulatedClock()
        device = SimulatedDevice(
            self._model, self.board.trace, self.case.work.calls, seed=self.board.seed
        )
        decoder = SimulatedDecoder(self.case.decoder, device, clock)
        options = self.stepper_options(way)
        made = Way(
            name=way.name,
            kv=way.kv,
            stepper=None if way.stepper is None else make_baseline(way.stepper, **options),
        )
        if way.timeless:
            key = repr((way.name, way.head, {k: v for k, v in options.items() if k != "predictor"}))
            if key not in self.case.recorded:
                session = self._session(way, decoder, SimulatedClock(), device)
                self.case.recorded[key] = self._record(session, decoder, made)
        else:
            session = self._session(way, decoder, clock, device)
        budget_s, most, found = self.board.budget_s, self.case.max_tokens, []
        for decoder.text, prompt in enumerate(self.case.prompts):
            start_s = clock.now_s()
            if way.timeless:
                known = self.case.recorded[key][decoder.text]
                text = retime(known, device, clock, budget_s=budget_s)
            else:
                text = play(session, prompt, made, budget_s=budget_s, max_tokens=most)
            # An exit's head, whatever answers last in this way.
            name = "short_head" if way.head == "shortlist" else "mapped_head"
            floors = soonest_s(device, text, name, start_s=start_s, number=decoder.text)
            found.append(PlayedText(text=text, feasible=tuple(f <= budget_s for f in floors)))
        return found[1:]

    def _record(
        self, session: LanguageSession, decoder: SimulatedDecoder, made: Way
    ) -> list[Recorded]:
        most, found = self.case.max_tokens, []
        for decoder.text, prompt in enumerate(self.case.prompts):
            found.append(play_recorded(session, decoder, prompt, made, max_tokens=most))
        return found

    def _session(
        self,
        way: LanguageWay,
        decoder: SimulatedDecoder,
        clock: SimulatedClock,
        device: SimulatedDevice,
    ) -> LanguageSession:
        known, options = self.known(way.head), dict(way.options)
        if options.get("margin") == "fallback":
            # The paper's base margin: a percentile of the predictor's errors in other states.
            options["base_ratio"] = known.predictor.upper_ratio.tolist()
        session = LanguageSession(
            decoder,
            known.costs,
            policy=way.policy,
            head=way.head,
            rows=known.rows,
            clock=clock,
            **options,
        )
        if way.reads_state:
            tell = Repricer(known.predictor, [session]).on_state
            tell(device.state(0.0))
            clock.sleep_s(np.random.default_rng([self.board.seed, 4]).uniform(0, MONITOR_PERIOD_S))
            clock.every(MONITOR_PERIOD_S, lambda at_s: tell(device.state(at_s)))
        return session

    def stepper_options(self, way: LanguageWay) -> dict[str, Any]:
        """Arguments of a way's stepper, those of rivals chosen by the profile."""
        if way.stepper == "fixed-exit":
            return {"layer": self._static_exit()}
        if way.stepper == "layerskip":
            layer, drafts = self._best_drafting(way.head)
            return {"layer": layer, "drafts": drafts}
        if way.stepper == "calm":
            return {"tokens": self.case.max_tokens}
        if way.stepper in {"specee", "edgewise+psf"}:
            return {"predictor": self.case.shift}
        return {}

    def _static_exit(self) -> int:
        """The deepest exit that fits the deadline by the profile, or the first."""
        table = self.known("affine").costs.propagate
        fits = [k for k in range(table.num_exits) if table.remaining_s(0, k) <= self.board.budget_s]
        return self.case.decoder.exit_layers[max(fits, default=0)]

    def _best_drafting(self, head: HeadKind) -> tuple[int, int]:
        """Where and how much to draft: what promises most tokens a second by the profile."""
        known, decoder = self.known(head), self.case.decoder
        best, found = 0.0, (decoder.exit_layers[0], 1)
        for position, layer in enumerate(decoder.exit_layers[:-1], start=1):
            costs = draft_costs(known.costs.table("verify"), known.rows, position)
            chance = agreement_at(decoder, layer) or 0.0
            for drafts in range(1, _MOST_DRAFTS + 1):
                speed_up = expected_speed_up(chance, drafts, costs)
                if speed_up > best:
                    best, found = speed_up, (layer, drafts)
        return found

    def compare(
        self, chosen: Iterable[LanguageWay], say: Callable[[str], None] = lambda _: None
    ) -> dict[str, BoardRow]:
        """Play each way and score it against full depth.

        Args:
            chosen: Full depth among them or not.
            say: Told what is going on.
        """
        reference = [played.text.ids for played in self.play(ways(self.board.clocks)[FULL_DEPTH])]
        rows = {}
        for way in chosen:
            say(f"{self.board.title}, {self.board.clocks} clocks: {way.name}")
            played = self.play(way)
            texts = [each.text for each in played]
            row = score(
                texts,
                reference,
                name=way.name,
                decoder=self.case.decoder,
                depth=self.case.decoder.depth,
                judged=[self.case.judge(text) for text in texts],
            )
            rows[way.name] = BoardRow.of(row, played)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class OnBoards:
    """All ways on each board, as a reproduction shows them.

    Attributes:
        figures: Full depth's time, then each way's rows.
        verdicts: Of each board.
        charts: One for each.
        details: All rows, by device.
    """

    figures: list[Figure] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def play_on_boards(  # noqa: PLR0913 - a claim's whole circumstances
    case: LanguageCase,
    setup: Setup,
    *,
    clocks: Clocks,
    budget_s: float,
    full_depth: Callable[[LanguagePlayer], Figure],
    judge: Callable[[str, Mapping[str, BoardRow]], list[Verdict]],
    paper_dsr: Mapping[tuple[str, str], float] | None = None,
) -> OnBoards:
    """Play all ways of a case on each board.

    Args:
        case: Whose texts.
        setup: ``quick``: one board; ``seed``.
        clocks: What they do.
        budget_s: Per token.
        full_depth: What full depth takes, as a figure.
        judge: Makes verdicts of a board's title and rows.
        paper_dsr: By device and way, percent.
    """
    found = OnBoards()
    for device in DEVICES[:1] if setup.quick else DEVICES:
        board = Board(name=device, clocks=clocks, budget_s=budget_s, seed=setup.seed)
        player = LanguagePlayer(case, board)
        found.figures.append(full_depth(player))
        rows = player.compare(ways(clocks).values(), setup.say)
        for name, row in rows.items():
            paper = (paper_dsr or {}).get((device, name))
            found.figures.extend(row_figures(f"{board.title}, {name}", row, paper_dsr=paper))
        found.verdicts.extend(judge(board.title, rows))
        found.charts.append(bars(f"{board.title}, {_CLOCKS_SAID[clocks]}", rows))
        found.details[device] = as_json(rows)
    return found


def row_figures(title: str, found: BoardRow, *, paper_dsr: float | None = None) -> list[Figure]:
    """Deadlines, accuracy and depth of one way."""
    row = found.row
    same = (
        "all texts the same"
        if row.first_divergence is None
        else f"first difference at token {row.first_divergence:.0f}"
    )
    of = "" if found.dsr is None else f"{100 * found.dsr:.1f} % of the "
    notes = f"{of}{100 * found.feasible_ratio:.1f} % that some exit could have answered in time"
    return [
        _percent(
            f"{title}: tokens in time",
            row.dsr,
            paper=paper_dsr,
            note=f"{notes}; p99 {format_duration(row.tpot_p99_s)}",
        ),
        _percent(f"{title}: relative accuracy", row.relative_accuracy, note=same),
        _percent(
            f"{title}: agrees after the same text",
            row.agreement,
            note=f"perplexity {row.perplexity:.1f}",
        ),
        _percent(f"{title}: mean depth", row.mean_depth_ratio),
    ]


def _percent(
    name: str, value: float | None, *, paper: float | None = None, note: str = ""
) -> Figure:
    return Figure(
        name=name,
        unit="%",
        paper=paper,
        ours=None if value is None else 100 * value,
        provenance="simulated",
        note=note,
    )


def bars(title: str, rows: Mapping[str, BoardRow]) -> Chart:
    """Deadlines kept, relative accuracy, agreement and depth of all ways."""
    fields = (
        ("in time", "dsr"),
        ("relative accuracy", "relative_accuracy"),
        ("agreement", "agreement"),
        ("mean depth", "mean_depth_ratio"),
    )
    return Chart(
        title=title,
        x_label="",
        y_label="%",
        kind="bars",
        provenance="simulated",
        y_range=(0.0, 105.0),
        series=tuple(
            Series(
                name=label,
                x=list(rows),
                y=[None if (v := getattr(r.row, name)) is None else 100 * v for r in rows.values()],
            )
            for label, name in fields
        ),
    )


def setting(case: LanguageCase, **more: str) -> dict[str, str]:
    """What every simulated claim about language models says of itself."""
    pairs = zip(case.decoder.exit_layers, case.places, strict=True)
    exits = ", ".join(f"{k} as {place}" for k, place in pairs)
    return {
        "ours": (
            f"{case.decoder.model.name} really computes {len(case.prompts) - 1} texts of"
            f" {case.max_tokens} tokens for every way; time is that of LLaMA 3.2-1B's shapes on"
            " simulated devices, in a world of its own for each way: same clocks and noise"
        ),
        "exits": (
            f"after so many of {case.decoder.depth} layers, standing for so many of {_LAYERS}:"
            f" {exits}; heads behind fitted affine maps for all ways"
        ),
        "prices": (
            "launches and traffic once per call, arithmetic per row, so that rows in one pass cost"
            " at least the larger of the two; what deciding itself takes is not priced"
        ),
        **more,
    }


def as_json(rows: Mapping[str, BoardRow]) -> dict[str, dict[str, Any]]:
    """All rows as plain types."""
    return {name: dataclasses.asdict(row) for name, row in rows.items()}


NOTES = (
    (
        "Figures are those of LLaMA 3.2-1B's times and SmolLM2's texts: what an exit is worth is a"
        " smaller model's."
    ),
    (
        "fixed exit is LayerSkip's early exit without verification, at the deepest layer that fits"
        " by the profile; layerskip verifies. Labels of the paper's bars are read as LayerSkip,"
        " LayerSkip with self-speculation, SpecEE, and UniExit alone, with SS and with PSF."
    ),
    (
        "A cycle of drafts gives its tokens at once: the first has waited for all of it, and each"
        " token has its own deadline, so that drafts pay only where a cycle fits one."
    ),
)


def accuracy_verdict(title: str, rows: Mapping[str, BoardRow], *, least: float) -> Verdict:
    """Whether, of ways that keep enough deadlines, none has more of full depth's text than ours.

    Args:
        title: Of the board.
        rows: Of all ways.
        least: Share of tokens that must be in time.
    """
    kept = {name: row.row.relative_accuracy for name, row in rows.items() if row.dsr_all >= least}
    claim = f"{title}: of ways that keep {100 * least:.0f} %, none is more accurate than edgewise's"
    ours = {name: accuracy for name, accuracy in kept.items() if name in OURS}
    if not ours:
        return Verdict(claim=claim, holds=False, detail="none of edgewise's keeps as many")
    rivals = {name: accuracy for name, accuracy in kept.items() if not name.startswith("edgewise")}
    best = max(ours, key=ours.__getitem__)
    text = f"{best} {100 * ours[best]:.1f} %"
    if not rivals:
        return Verdict(claim=claim, holds=True, detail=f"{text}; no rival keeps as many")
    rival = max(rivals, key=rivals.__getitem__)
    return Verdict(
        claim=claim,
        holds=rivals[rival] <= ours[best],
        detail=f"{text} against {100 * rivals[rival]:.1f} % of {rival}",
    )

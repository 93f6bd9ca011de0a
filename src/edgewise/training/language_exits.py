"""The whole job: a language model and text in, exits that answer and know when to, out.

Three passes over different text: sums for the affine maps, then temperatures and gates on windows
that the maps have not seen, then scores on text that nothing was fitted on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder import DecoderProgram, load_decoder
from edgewise.errors import ConfigError, DataError
from edgewise.model.decoding import AffineExit, Gate, LanguageExits
from edgewise.model.language import LanguageModel
from edgewise.training.language_affine import GramSums
from edgewise.training.language_gate import fit_gate
from edgewise.training.language_scores import (
    AGREES,
    GATE,
    ExitScore,
    best_temperature,
    perplexity,
    record_answers,
    score_exit,
    temperature_losses,
)
from edgewise.training.language_text import TokenText, cut_windows, spread
from edgewise.training.progress import OnProgress, Progress, ignore_progress
from edgewise.training.work import WorkDirectory

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

TEMPERATURES: Final = tuple(float(t) for t in np.geomspace(0.25, 4.0, 13))
_CALIBRATE_EVERY = 5  # of the windows to fit on, one in so many is kept for calibration
_MOST_CALIBRATED = 64  # windows: the gates' fit holds all of one layer's states in memory
_TEMPERATURE_ROWS = 4  # one token in so many is enough for a single number
_SUMS = "sums.safetensors"
# The first is for tight budgets alone: it says little more than which word follows which.
_DEPTHS = (0.2, 0.4, 0.6, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitExitsSettings:
    """How exits are fitted.

    Attributes:
        layers: How many layers have run at each, 1 to L - 1.
        tokens: To fit on, calibration included.
        held_out_tokens: To score on.
        window: Tokens of each pass through the model.
        shortlist: Length of the short list; 0 for none.
        ridge: Strength of the penalty, as a share of an input's variance.
        threads: Of every computation; with one, the same run gives the same bits.
        backend: Runs the model.
        save_every: Windows between two saves.
    """

    layers: tuple[int, ...]
    tokens: int = 57_000
    held_out_tokens: int = 8192
    window: int = 256
    shortlist: int = 8192
    ridge: float = 1e-4
    threads: int = 1
    backend: str = "torch:cpu"
    save_every: int = 8

    def __post_init__(self) -> None:
        least = min(self.tokens, self.held_out_tokens, self.window - 1, self.save_every)
        if least < 1 or self.shortlist < 0 or not self.ridge > 0:
            raise ConfigError(
                f"expected tokens, a window above 1, a ridge above 0 and a short list, found"
                f" {self.tokens} and {self.held_out_tokens} tokens, a window of {self.window}, a"
                f" ridge of {self.ridge} and a short list of {self.shortlist}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """All exits on one held-out text, or on all of them.

    Attributes:
        text: Its name; ``"all"`` for all together.
        tokens: How many were scored.
        perplexity: Of full depth.
        coverage: Share of the full depth's answers that are on the short list; ``None`` without.
        exits: One by one.
    """

    text: str
    tokens: int
    perplexity: float | None
    coverage: float | None
    exits: tuple[ExitScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedExits:
    """Exits and the account of them.

    Attributes:
        exits: Ready to be saved; their notes hold the scores.
        fit_tokens: That the maps were fitted on.
        calibration_tokens: That temperatures and gates were fitted on.
        asked_tokens: What the settings asked for; more than both where the text was too short.
        scores: On all held-out text first, then on each.
        gate_flops: Work of one gate, for one token.
        head_flops: Work of the affine map and the whole head, for one token.
        shortlist_flops: The same with the short list; ``None`` without.
    """

    exits: LanguageExits
    fit_tokens: int
    calibration_tokens: int
    asked_tokens: int
    scores: tuple[TextScore, ...]
    gate_flops: float
    head_flops: float
    shortlist_flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Windows:
    """Which window serves what; none serves twice."""

    fit: tuple[Int64, ...]
    calibrate: tuple[Int64, ...]
    held_out: tuple[Int64, ...]
    held_out_names: tuple[str, ...]
    counts: Int64  # of each token id in all text that may be fitted on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """What all three passes share."""

    model: LanguageModel
    windows: _Windows
    settings: FitExitsSettings
    work: WorkDirectory
    on_progress: OnProgress

    def load(self, exits: LanguageExits | None) -> DecoderProgram:
        s = self.settings
        return load_decoder(
            self.model, s.backend, threads=s.threads, exit_layers=s.layers, exits=exits
        )


def default_exit_layers(depth: int) -> tuple[int, ...]:
    """Where exits are fitted unless told otherwise: mostly later layers, up to the last but one.

    Example:
        >>> default_exit_layers(30), default_exit_layers(2)
        ((6, 12, 18, 24, 27, 29), (1,))
    """
    chosen = {round(share * depth) for share in _DEPTHS} | {depth - 1}
    return tuple(sorted(k for k in chosen if 1 <= k < depth))


def fit_language_exits(  # noqa: PLR0913 - what is fitted on what, and how
    model: LanguageModel,
    texts: Sequence[TokenText],
    *,
    settings: FitExitsSettings,
    work: WorkDirectory,
    held_out: Sequence[TokenText] = (),
    on_progress: OnProgress = ignore_progress,
) -> FittedExits:
    """Fit affine exits, temperatures, gates and a short list, and score them.

    Can be stopped at any moment, even by kill -9: the same call goes on where it was and gives the
    same bits. Memory does not grow with the text.

    Args:
        model: To fit exits for.
        texts: To fit on.
        settings: Layers, tokens and so on.
        work: Where finished work is kept.
        held_out: To score on; without any the last tenth of each text is held out.
        on_progress: Told after each window.

    Raises:
        ConfigError: A layer is not one to leave after, or the directory holds another job.
        DataError: There is too little text, or a held-out text is among those to fit on.
        ModelError: The model's states are not finite numbers.
        BackendError: The runtime failed, or is not there.
        CheckpointError: The work that was kept is damaged.
        EdgeError: The disk is full.
    """
    depth = model.architecture.num_hidden_layers
    check_affine_layers(settings.layers, depth=depth)
    settings = replace(
        settings,
        layers=tuple(sorted(settings.layers)),
        window=min(settings.window, model.context_length),
    )
    windows = _choose(texts, held_out, settings, vocabulary=model.architecture.vocab_size)
    job = _Job(model=model, windows=windows, settings=settings, work=work, on_progress=on_progress)
    result_of = {
        "command": "fit-exits",
        "digest": model.digest,
        **{k: v for k, v in asdict(settings).items() if k != "save_every"},
        "windows": _hash([*windows.fit, *windows.calibrate, *windows.held_out, windows.counts]),
    }
    with work.claim(result_of):
        affine = _fit_affine(job)
        shortlist = short_list(windows.counts, model, size=settings.shortlist)
        exits = LanguageExits(
            model=model.name,
            digest=model.digest,
            affine=affine,
            shortlist=shortlist,
            fitted_on=_described(texts, windows, settings),
        )
        # A new program: heads are laid out when it is loaded.
        program = job.load(exits)
        exits = _calibrate(job, program, exits)
        table = _evaluate(job, program, exits)
    by_layer = {e.layer: e.agreement for e in table[0].exits}
    architecture = model.architecture
    width, size = architecture.hidden_size, architecture.vocab_size
    fitted = FittedExits(
        exits=exits,
        fit_tokens=len(windows.fit) * settings.window,
        calibration_tokens=len(windows.calibrate) * settings.window,
        asked_tokens=settings.tokens,
        scores=table,
        gate_flops=2.0 * width,
        head_flops=2.0 * width * (width + size),
        shortlist_flops=None if shortlist is None else 2.0 * width * (width + len(shortlist)),
    )
    notes = {k: v for k, v in asdict(fitted).items() if k != "exits"}
    notes["settings"] = asdict(settings)
    affine = {k: replace(e, agreement=by_layer[k]) for k, e in exits.affine.items()}
    return replace(fitted, exits=replace(exits, affine=affine, notes=notes))


def check_affine_layers(layers: Sequence[int], *, depth: int) -> None:
    """Check after which layers exits are to be fitted.

    Raises:
        ConfigError: None, one that is not 1 to L - 1, or one twice.
    """
    wrong = [k for k in layers if isinstance(k, bool) or not 1 <= k < depth]
    if wrong or not layers or len(set(layers)) != len(layers):
        raise ConfigError(
            f"expected exits after 1 to {depth - 1} layers, each once, found {list(layers)}",
            help="the whole depth needs no fitted exit",
        )


def short_list(counts: Int64, model: LanguageModel, *, size: int) -> Int64 | None:
    """The most frequent tokens, most frequent first, with all that end an answer.

    Args:
        counts: How often each token id stands in the text.
        model: Its tokenizer names the tokens that end an answer.
        size: How many; 0 for no list. A list of at least the vocabulary is none either.

    Returns:
        Token ids. Among equals the lower id is first: byte-pair vocabularies are in the order in
        which their merges were frequent.
    """
    if not size or size >= len(counts):
        return None
    order = np.lexsort((np.arange(len(counts)), -counts))
    needed = sorted(model.tokenizer.stop_ids) if model.tokenizer is not None else []
    kept = order[:size]
    missing = [t for t in needed if t < len(counts) and t not in kept]
    return np.concatenate([kept[: size - len(missing)], np.asarray(missing, dtype=np.int64)])


def _choose(
    texts: Sequence[TokenText],
    held_out: Sequence[TokenText],
    settings: FitExitsSettings,
    *,
    vocabulary: int,
) -> _Windows:
    names = [t.name for t in held_out or texts]
    to_fit = cut_windows(texts, window=settings.window)
    to_score = cut_windows(held_out, window=settings.window)
    if not held_out:
        cuts = [len(w) - (len(w) + 9) // 10 for w in to_fit]
        to_score = [w[cut:] for w, cut in zip(to_fit, cuts, strict=True)]
        to_fit = [w[:cut] for w, cut in zip(to_fit, cuts, strict=True)]
    to_score = _unseen(to_score, to_fit if not held_out else [[t.tokens] for t in texts])
    wanted = max(2, settings.tokens // settings.window)
    chosen = _interleave(to_fit, wanted)
    scored = _interleave(to_score, max(1, settings.held_out_tokens // settings.window))
    if len(chosen) < 2 or not scored:
        found = sum(len(t.tokens) for t in texts), sum(len(t.tokens) for t in held_out)
        raise DataError(
            f"expected at least two windows of {settings.window} tokens to fit on and one to score"
            f" on, found {found[0]} tokens" + (f" and {found[1]} held out" if held_out else ""),
            help="give more text",
        )
    counts = np.zeros(vocabulary, dtype=np.int64)
    for each in to_fit:
        for window in each:
            counts += np.bincount(window, minlength=vocabulary)[:vocabulary]
    every, step = range(len(chosen)), max(_CALIBRATE_EVERY, -(-len(chosen) // _MOST_CALIBRATED))
    kept = {i for i in every if i % step == step - 1} or {len(chosen) - 1}
    return _Windows(
        fit=tuple(chosen[i][1] for i in every if i not in kept),
        calibrate=tuple(chosen[i][1] for i in every if i in kept),
        held_out=tuple(window for _, window in scored),
        held_out_names=tuple(names[i] for i, _ in scored),
        counts=counts,
    )


def _unseen(
    windows: Sequence[Sequence[Int64]], fitted_on: Sequence[Sequence[Int64]]
) -> list[list[Int64]]:
    """Windows whose middle does not stand anywhere in the text to fit on.

    Raises:
        DataError: All do.
    """
    seen = [np.concatenate(own).tobytes() for own in fitted_on if own]

    def fresh(window: Int64) -> bool:
        middle = len(window) // 2
        part = window[max(0, middle - 16) : middle + 16].tobytes()
        return not any(part in own for own in seen)

    found = [[w for w in each if fresh(w)] for each in windows]
    if any(windows) and not any(found):
        raise DataError(
            "all of the held-out text is in the text to fit on", help="hold out other text"
        )
    return found


def _interleave(windows: Sequence[Sequence[Int64]], wanted: int) -> list[tuple[int, Int64]]:
    """Windows from all texts in turn, with the text's number."""
    chosen = spread([len(w) for w in windows], wanted)
    order = sorted(
        ((place + 0.5) / len(picks), i, j)
        for i, picks in enumerate(chosen)
        for place, j in enumerate(picks)
    )
    return [(i, windows[i][j]) for _, i, j in order]


def _fit_affine(job: _Job) -> dict[int, AffineExit]:
    settings, windows = job.settings, job.windows
    sums = GramSums(settings.layers, width=job.model.architecture.hidden_size)
    if job.work.has(_SUMS):
        sums.restore(job.work.load(_SUMS))
    total = len(windows.fit)
    job.on_progress(Progress(phase="fit", done=sums.windows, total=total))
    if sums.windows < total:
        program = job.load(None)
        for done in range(sums.windows + 1, total + 1):
            hidden = _states(program, windows.fit[done - 1])
            normed = [program.normed(h) for h in hidden]
            sums.add(dict(zip(settings.layers, normed, strict=False)), normed[-1])
            if done % settings.save_every == 0 or done == total:
                job.work.save(_SUMS, sums.to_arrays())
            job.on_progress(Progress(phase="fit", done=done, total=total))
    return {k: sums.solve(k, ridge=settings.ridge) for k in settings.layers}


def _calibrate(job: _Job, program: DecoderProgram, exits: LanguageExits) -> LanguageExits:
    """Temperatures and gates."""
    layers, work = job.settings.layers, job.work

    def piece(window: Int64) -> dict[str, npt.NDArray[Any]]:
        hidden = _states(program, window)
        answers = program.logits(hidden[-1], position=len(hidden)).argmax(axis=1)
        found: dict[str, npt.NDArray[Any]] = {}
        for position, layer in enumerate(layers, start=1):
            state = hidden[position - 1]
            logits = program.logits(state, position=position)
            some = slice(None, None, _TEMPERATURE_ROWS)
            found[f"agrees.{layer}"] = logits.argmax(axis=1) == answers
            found[f"losses.{layer}"] = temperature_losses(logits[some], answers[some], TEMPERATURES)
            found[f"states.{layer}"] = program.normed(state)
        return found

    names = _pieces(job, "calibrate", job.windows.calibrate, piece)
    affine: dict[int, AffineExit] = {}
    gates: dict[int, Gate] = {}
    for layer in layers:
        losses = np.sum([work.load_one(n, f"losses.{layer}") for n in names], axis=0)
        agrees = np.concatenate([work.load_one(n, f"agrees.{layer}") for n in names])
        states = np.concatenate([work.load_one(n, f"states.{layer}") for n in names])
        temperature = best_temperature(TEMPERATURES, losses)
        affine[layer] = replace(exits.affine[layer], temperature=temperature)
        gates[layer] = fit_gate(layer, states, agrees)
    return replace(exits, affine=affine, gates=gates)


def _evaluate(job: _Job, program: DecoderProgram, exits: LanguageExits) -> tuple[TextScore, ...]:
    layers, windows = job.settings.layers, job.windows

    def piece(window: Int64) -> dict[str, npt.NDArray[Any]]:
        hidden = _states(program, window)
        logits = program.logits(hidden[-1], position=len(hidden))
        answers, following, listed = logits.argmax(axis=1), window[1:], exits.shortlist
        full = record_answers(
            logits, answers=answers, following=following, temperature=1.0, listed=None
        )
        records = {"full": full}
        if listed is not None:
            full[AGREES] = np.isin(answers, listed)  # whether the short list can agree
        for position, layer in enumerate(layers, start=1):
            state = hidden[position - 1]
            record = record_answers(
                program.logits(state, position=position),
                answers=answers,
                following=following,
                temperature=exits.affine[layer].temperature,
                listed=listed,
            )
            gate = exits.gates[layer]
            values = program.normed(state) @ gate.weight + np.float32(gate.bias)
            record[GATE] = 0.5 * (1 + np.tanh(values / 2))
            records[str(layer)] = record
        return records

    names = _pieces(job, "evaluate", windows.held_out, piece)
    pieces = [job.work.load(name) for name in names]
    texts = sorted(set(windows.held_out_names))
    groups = {"all": range(len(pieces))} | (
        {t: [i for i, n in enumerate(windows.held_out_names) if n == t] for t in texts}
        if len(texts) > 1
        else {}
    )
    found = []
    for text, members in groups.items():
        joined = {
            key: np.concatenate([pieces[i][key] for i in members], axis=1) for key in pieces[0]
        }
        full = joined["full"]
        found.append(
            TextScore(
                text=text,
                tokens=full.shape[1],
                perplexity=perplexity(full[3]),
                coverage=None if exits.shortlist is None else float(full[AGREES].mean()),
                exits=tuple(
                    score_exit(
                        layer,
                        joined[str(layer)],
                        temperature=exits.affine[layer].temperature,
                        shortlist=exits.shortlist is not None,
                        gate=True,
                    )
                    for layer in layers
                ),
            )
        )
    return tuple(found)


def _pieces(
    job: _Job,
    phase: str,
    windows: Sequence[Int64],
    piece: Callable[[Int64], Mapping[str, npt.NDArray[Any]]],
) -> list[str]:
    """Make and keep what each window gives, unless it is kept already; the names."""
    names = [f"{phase}-{i:05d}.safetensors" for i in range(len(windows))]
    left = [i for i, name in enumerate(names) if not job.work.has(name)]
    done = len(names) - len(left)
    job.on_progress(Progress(phase=phase, done=done, total=len(names)))
    for i in left:
        job.work.save(names[i], piece(windows[i]))
        done += 1
        job.on_progress(Progress(phase=phase, done=done, total=len(names)))
    return names


def _states(program: DecoderProgram, window: Int64) -> list[Float32]:
    """States [M, H] at each exit and at full depth, before the last norm."""
    cache, state, found = program.new_cache(len(window)), program.embed(window), []
    for position in range(len(program.exit_layers)):
        state = program.run_layers(state, cache, start=position, stop=position + 1, first=0)
        found.append(state)
    return found


def _hash(arrays: Sequence[Int64]) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


def _described(texts: Sequence[TokenText], windows: _Windows, settings: FitExitsSettings) -> str:
    names = ", ".join(t.name for t in texts)
    tokens = len(windows.fit) * settings.window
    calibration = len(windows.calibrate) * settings.window
    return f"{names}: {tokens} tokens, {calibration} more for temperatures and gates"

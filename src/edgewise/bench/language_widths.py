"""What few bits and early exits leave of the full depth's answers, on text that was held out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder import load_decoder
from edgewise.bench.language_quality import token_losses
from edgewise.errors import ConfigError
from edgewise.training.language_text import TokenText, cut_windows, load_text, spread

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, Precision
    from edgewise.model.decoding import LanguageExits
    from edgewise.model.language import LanguageModel

Int64 = npt.NDArray[np.int64]
Say = Callable[[str], None]
Windows = Mapping[str, Sequence[Int64]]

TEXTS = "EDGEWISE_TEXTS"
WINDOW = 256
_USUAL = (Path("/usr/share/doc/jargon-text/jargon.txt.gz"),)  # of Debian's package jargon-text
_HEAD_ROWS = 64
WIDTHS: tuple[tuple[str, Precision], ...] = (
    ("onnxruntime:CPU", "fp32"),
    ("onnxruntime:CPU", "int8"),
    ("onnxruntime:CPU", "int4"),
)


def find_texts(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Text files: those that the environment names, or those of Debian's package.

    Args:
        environment: Names files in ``EDGEWISE_TEXTS``, separated as in ``PATH``.
    """
    named = [Path(p) for p in environment.get(TEXTS, "").split(os.pathsep) if p]
    return named or [path for path in _USUAL if path.is_file()]


def read_texts(paths: Sequence[Path], model: LanguageModel) -> list[TokenText]:
    """Read files as tokens.

    Args:
        paths: Of the files.
        model: Whose tokenizer reads them.

    Raises:
        ConfigError: No file, or the model has no tokenizer.
        DataError: A file cannot be read.
    """
    if not paths:
        raise ConfigError(
            "no text is here to measure quality on",
            help=f"export {TEXTS}=FILE:FILE, or install the Debian package jargon-text",
        )
    if model.tokenizer is None:
        raise ConfigError(f"model {model.name!r} has no tokenizer")
    return [load_text(path, model.tokenizer) for path in paths]


def split_texts(
    texts: Sequence[TokenText], *, window: int = WINDOW
) -> tuple[dict[str, list[Int64]], dict[str, list[Int64]]]:
    """Windows of each text, as fitting exits splits them: first nine tenths, and the last tenth."""
    every = cut_windows(texts, window=window)
    cuts = [len(w) - (len(w) + 9) // 10 for w in every]
    names = [t.name for t in texts]
    return (
        {n: w[:cut] for n, w, cut in zip(names, every, cuts, strict=True)},
        {n: w[cut:] for n, w, cut in zip(names, every, cuts, strict=True)},
    )


def choose(windows: Windows, count: int) -> dict[str, list[Int64]]:
    """So many windows of each text, evenly spaced."""
    return {name: [w[i] for i in spread([len(w)], count)[0]] for name, w in windows.items()}


def width_figures(
    model: LanguageModel,
    windows: Windows,
    *,
    threads: int,
    widths: Sequence[tuple[str, Precision]] = WIDTHS,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Each width beside torch in full precision: the same text, read in windows.

    Args:
        model: Of which one copy more is kept.
        windows: Held out, by text.
        threads: Of each call.
        widths: Runtimes and precisions.
        say: Told what is done.
    """
    reference = load_decoder(model, "torch:cpu", threads=threads)
    say("full precision")
    answers, losses = _read(reference, windows)
    del reference
    rows = [_width_row("torch:cpu fp32", answers, answers, losses)]
    for backend, precision in widths:
        say(f"{backend} {precision}")
        decoder = load_decoder(model, backend, threads=threads, precision=precision)
        found, lost = _read(decoder, windows)
        del decoder
        rows.append(_width_row(f"{backend} {precision}", answers, found, lost))
    return {"rows": rows, "tokens": {n: sum(map(len, w)) for n, w in windows.items()}}


def exit_figures(  # noqa: PLR0913 - what is compared on what
    model: LanguageModel,
    exits: LanguageExits,
    windows: Windows,
    *,
    layers: Sequence[int],
    threads: int,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Affine and raw heads at some layers beside full depth, and what the exits' file says.

    Args:
        model: Of which one copy more is kept.
        exits: Fitted for it.
        windows: Held out, by text.
        layers: Of those that were fitted.
        threads: Of each call.
        say: Told what is done.

    Raises:
        ConfigError: None of the layers was fitted.
    """
    layers = [k for k in layers if k in exits.affine]
    if not layers:
        raise ConfigError(
            f"exits were fitted after {', '.join(map(str, sorted(exits.affine)))} layers only",
            help="edgewise fit-exits MODEL --text FILE",
        )
    decoder = load_decoder(model, "torch:cpu", threads=threads, exit_layers=layers, exits=exits)
    kinds: tuple[Any, ...] = ("affine", "raw")
    if exits.shortlist is not None:
        kinds = (*kinds, "shortlist")
    rows = []
    for text, own in windows.items():
        agrees: dict[tuple[int, str], list[npt.NDArray[np.bool_]]] = {}
        for number, window in enumerate(own):
            say(f"exits on {text}, {number + 1} of {len(own)}")
            states = _states(decoder, window)
            full = _answers(decoder, states[-1], position=len(states), kind="raw")
            for position, layer in enumerate(layers, 1):
                for kind in kinds:
                    found = _answers(decoder, states[position - 1], position=position, kind=kind)
                    agrees.setdefault((layer, kind), []).append(found == full)
        for layer in layers:
            row: dict[str, Any] = {"text": text, "layer": layer}
            row |= {kind: float(np.concatenate(agrees[layer, kind]).mean()) for kind in kinds}
            rows.append(row | {"affine_as_fitted": _as_fitted(exits, text, layer)})
    return {
        "rows": rows,
        "as_fitted": {k: exits.affine[k].agreement for k in layers},
        "fitted_on": exits.fitted_on,
    }


def _as_fitted(exits: LanguageExits, text: str, layer: int) -> float | None:
    """Agreement on a text as the file says; ``None`` where it was not scored on that text."""
    for score in exits.notes.get("scores", ()):
        if score["text"] == text:
            return next((e["agreement"] for e in score["exits"] if e["layer"] == layer), None)
    return None


def _states(decoder: DecoderProgram, window: Int64) -> list[Any]:
    """At each exit."""
    cache = decoder.new_cache(len(window))
    states = [decoder.embed(window)]
    for position in range(len(decoder.exit_layers)):
        states.append(
            decoder.run_layers(states[-1], cache, start=position, stop=position + 1, first=0)
        )
    return states[1:]


def _answers(decoder: DecoderProgram, states: Any, *, position: int, kind: Any) -> Int64:
    parts = [
        decoder.logits(states[i : i + _HEAD_ROWS], position=position, kind=kind).argmax(axis=1)
        for i in range(0, len(states), _HEAD_ROWS)
    ]
    return np.concatenate(parts)


def _read(
    decoder: DecoderProgram, windows: Windows
) -> tuple[dict[str, Int64], dict[str, npt.NDArray[np.float64]]]:
    """Answers at every place, and the loss of the token that followed, by text."""
    last = len(decoder.exit_layers)
    answers, losses = {}, {}
    for text, own in windows.items():
        said, lost = [], []
        for window in own:
            state = _states(decoder, window)[-1]
            for i in range(0, len(window), _HEAD_ROWS):
                logits = decoder.logits(state[i : i + _HEAD_ROWS], position=last)
                said.append(logits.argmax(axis=1))
                following = window[i + 1 : i + 1 + len(logits)]
                lost.append(token_losses(logits[: len(following)], following))
        answers[text], losses[text] = np.concatenate(said), np.concatenate(lost)
    return answers, losses


def _width_row(
    name: str,
    answers: Mapping[str, Int64],
    found: Mapping[str, Int64],
    losses: Mapping[str, npt.NDArray[np.float64]],
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    for text in answers:
        row[f"agreement, {text}"] = float((found[text] == answers[text]).mean())
        row[f"perplexity, {text}"] = math.exp(float(losses[text].mean()))
    return row

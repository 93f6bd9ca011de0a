"""What exits answered on text, token by token, and the table that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise import scores
from edgewise.training.language_gate import area_under_curve

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

THRESHOLDS = (0.5, 0.8)
GATE_THRESHOLDS = (0.5, 0.8, 0.9)
# Columns of a record of one exit's answers.
AGREES, CONFIDENCE, PLAIN, LOSS, LISTED, GATE = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """What a threshold on a score lets through.

    Attributes:
        threshold: The score must be above it.
        share: Of all tokens.
        agreement: Of those, with full depth; ``None`` where it lets none through.
    """

    threshold: float
    share: float
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateScore:
    """How well a gate foretells that its exit agrees.

    Attributes:
        auc: Area under the ROC curve, 0.5 for a guess; ``None`` where all tokens are alike.
        ece: Expected calibration error.
        above: At each threshold.
    """

    auc: float | None
    ece: float
    above: tuple[Above, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitScore:
    """One exit on text that nothing was fitted on.

    Attributes:
        layer: How many layers have run.
        tokens: How many were scored.
        agreement: Share whose top answer is the full depth's.
        perplexity: Of the next token, at temperature 1; ``None`` without a next token.
        temperature: That makes the top answer's probability the chance to agree.
        ece_before: Expected calibration error of that chance at temperature 1.
        ece: The same at the fitted temperature.
        confident: Agreement where the confidence is above a threshold.
        confident_before: The same at temperature 1.
        shortlist_agreement: Share for which the short list's top answer is the full depth's;
            ``None`` without a short list.
        gate: Of the gate; ``None`` without one.
    """

    layer: int
    tokens: int
    agreement: float
    perplexity: float | None
    temperature: float
    ece_before: float
    ece: float
    confident: tuple[Above, ...]
    confident_before: tuple[Above, ...]
    shortlist_agreement: float | None
    gate: GateScore | None


def score_exit(
    layer: int, records: Float32, *, temperature: float, shortlist: bool, gate: bool
) -> ExitScore:
    """Summarise one exit.

    Args:
        layer: How many layers have run.
        records: [6, N], the columns of :func:`record_answers` and the gate's chance.
        temperature: At which ``CONFIDENCE`` was taken.
        shortlist: There is a short list.
        gate: There is a gate.
    """
    agrees = records[AGREES] > 0
    confidence, plain = records[CONFIDENCE], records[PLAIN]
    chance = records[GATE].astype(np.float64)
    return ExitScore(
        layer=layer,
        tokens=len(agrees),
        agreement=float(agrees.mean()),
        perplexity=perplexity(records[LOSS]),
        temperature=temperature,
        ece_before=scores.expected_calibration_error(plain, agrees),
        ece=scores.expected_calibration_error(confidence, agrees),
        confident=_above(confidence, agrees, THRESHOLDS),
        confident_before=_above(plain, agrees, THRESHOLDS),
        shortlist_agreement=float(records[LISTED].mean()) if shortlist else None,
        gate=GateScore(
            auc=area_under_curve(chance, agrees),
            ece=scores.expected_calibration_error(chance, agrees),
            above=_above(chance, agrees, GATE_THRESHOLDS),
        )
        if gate
        else None,
    )


def record_answers(
    logits: Float32, *, answers: Int64, following: Int64, temperature: float, listed: Int64 | None
) -> Float32:
    """What one exit answered.

    Args:
        logits: [M, V].
        answers: [M], the full depth's top answers.
        following: [M - 1], the tokens that did follow.
        temperature: Of the exit.
        listed: Columns of the short list.

    Returns:
        [6, M]: whether it agrees, its confidence at the temperature and at 1, -log p of the token
        that followed (NaN for the last), whether the short list's answer agrees, and a free row.
    """
    rows = np.arange(len(logits))
    record = np.full((6, len(logits)), np.nan, dtype=np.float32)
    top = logits.argmax(axis=1)
    best = logits[rows, top]
    record[AGREES] = top == answers
    shifted = logits - best[:, None]
    total = np.exp(shifted).sum(axis=1, dtype=np.float64)
    record[PLAIN] = 1 / total
    record[LOSS, :-1] = (np.log(total)[:-1] - shifted[rows[:-1], following]).astype(np.float32)
    cooled = np.exp(shifted / np.float32(temperature)).sum(axis=1, dtype=np.float64)
    record[CONFIDENCE] = 1 / cooled
    if listed is not None:
        record[LISTED] = listed[logits[:, listed].argmax(axis=1)] == answers
    return record


def temperature_losses(logits: Float32, labels: Int64, temperatures: Sequence[float]) -> Float64:
    """Sum of -log p(label) at each temperature: [M, V] and [M] to [T]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    own = shifted[np.arange(len(labels)), labels].astype(np.float64)
    return np.asarray(
        [
            (np.log(np.exp(shifted / np.float32(t)).sum(axis=1, dtype=np.float64)) - own / t).sum()
            for t in temperatures
        ]
    )


def best_temperature(temperatures: Sequence[float], losses: Float64) -> float:
    """Where the loss is least: the vertex of the parabola through the three lowest points.

    Args:
        temperatures: Rising, evenly spaced in their logarithm.
        losses: At each.

    Returns:
        Within the temperatures' range.
    """
    k = int(np.argmin(losses))
    if k in {0, len(losses) - 1}:
        return float(temperatures[k])
    left, middle, right = losses[k - 1 : k + 2]
    bend = left - 2 * middle + right
    offset = 0.0 if bend <= 0 else 0.5 * (left - right) / bend
    step = np.log(temperatures[1] / temperatures[0])
    return float(temperatures[k] * np.exp(offset * step))


def perplexity(losses: Float32) -> float | None:
    """Exponential of the mean loss, without tokens that nothing followed; ``None`` for none."""
    known = losses[np.isfinite(losses)]
    return float(np.exp(known.mean(dtype=np.float64))) if len(known) else None


def _above(
    values: npt.NDArray[np.floating], agrees: npt.NDArray[np.bool_], thresholds: Sequence[float]
) -> tuple[Above, ...]:
    found = []
    for threshold in thresholds:
        chosen = values > threshold
        found.append(
            Above(
                threshold=threshold,
                share=float(chosen.mean()),
                agreement=float(agrees[chosen].mean()) if chosen.any() else None,
            )
        )
    return tuple(found)

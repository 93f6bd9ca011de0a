"""EENet's exit scheduler: scores of answers, an assignment to exits, and thresholds for a budget.

Fitted on validation logits in plain numpy, in about a second. A scorer says how likely an exit's
answer is right; an assignment net says which exit a sample should leave at, so that the mean cost
meets the budget; its mean assignment gives the share of samples to leave at each exit, and the
shares give the thresholds on the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.exits.thresholds import Float64, first_exits, thresholds_for_shares
from edgewise.scores import softmax

_RATE = 0.05
_PERIOD = 10  # epochs of one net before it is the other's turn
_WEIGHT_DECAY = 1e-3
_MOST_SAMPLES = 1000  # for the nets; thresholds see all


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """One linear score for each exit.

    Attributes:
        classes: [E, C], weights of class probabilities.
        facts: [E, 2 + E], weights of the largest probability, the normalised entropy and the scores
            of earlier exits; those of this exit and later ones are zero.
        bias: [E].
    """

    classes: Float64
    facts: Float64
    bias: Float64

    def score(self, exit_index: int, probabilities: Float64, earlier: Sequence[float]) -> float:
        """How likely an answer is right, 0 to 1.

        Args:
            exit_index: Where.
            probabilities: [C].
            earlier: Scores of the exits before, in order.
        """
        facts = self.facts[exit_index]
        total = float(probabilities @ self.classes[exit_index]) + float(self.bias[exit_index])
        total += float(facts[0]) * float(probabilities.max())
        total += float(facts[1]) * float(_entropy(probabilities))
        total += sum(float(facts[2 + j]) * s for j, s in enumerate(earlier))
        return 1.0 / (1.0 + math.exp(-min(max(total, -60.0), 60.0)))

    def scores(self, probabilities: Float64) -> Float64:
        """[E, N]: scores of samples at each exit, from probabilities [E, N, C]."""
        facts = _facts(probabilities)
        for k in range(len(facts)):
            _fill(self, k, probabilities, facts)
        return facts[0, :, 2:].T.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What was fitted.

    Attributes:
        scorer: Scores answers.
        thresholds: [E], the score at which a sample leaves; minus infinity at the last exit.
        shares: [E], share of validation samples meant to leave at each exit.
        mean_s: Mean cost on the samples it was fitted on, seconds.
    """

    scorer: Scorer
    thresholds: tuple[float, ...]
    shares: tuple[float, ...]
    mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossWeights:
    """Of the assignment's loss; see `fit_schedule`."""

    alpha_ce: float
    alpha_cost: float
    beta: float


def fit_schedule(  # noqa: PLR0913 - the method's own parameters
    logits: npt.NDArray[np.floating],
    labels: npt.NDArray[np.integer],
    cost_s: Float64,
    *,
    budget_s: float,
    temperatures: Sequence[float],
    epochs: int = 100,
    seed: int = 0,
    alpha_ce: float = 1.0,
    alpha_cost: float = 10.0,
    beta: float = 1.0,
) -> Schedule:
    """Fit scorers and assignment in turns, then take thresholds that keep the mean cost.

    Args:
        logits: [E, N, C] of validation samples; the nets are fitted on about a thousand.
        labels: [N].
        cost_s: [E], what it takes to answer at each exit, all heads on the way counted.
        budget_s: Mean cost to meet. Below that of the first exit everybody leaves there.
        temperatures: [E].
        epochs: Of each net.
        seed: Of the first weights.
        alpha_ce: Weight of the assignment's divergence from the scores.
        alpha_cost: Weight of the relative deviation of the mean cost from the budget.
        beta: Power to which scores are raised before they are compared with the assignment.

    Source:
        Ilhan et al., EENet: Adaptive Deep Neural Networks with Early Exits (WACV 2024). Written
        from the paper: its code has no licence. Departures: a sigmoid instead of clipping, so that
        gradients do not vanish; full batches with Adam; and the mean assignment is tilted by cost
        until the thresholds keep the budget on validation data, where the paper hopes for it.
    """
    probabilities = np.stack(
        [softmax(z, temperature=t) for z, t in zip(logits, temperatures, strict=True)]
    )
    some = slice(None, None, -(-labels.size // _MOST_SAMPLES))
    correct = (logits[:, some].argmax(axis=2) == labels[some]).astype(float)  # [E, N]
    scorers = _ScorerFit(probabilities[:, some])
    assignment = _AssignmentFit(len(cost_s), np.random.default_rng(seed))
    weights = _LossWeights(alpha_ce=alpha_ce, alpha_cost=alpha_cost, beta=beta)
    shares = np.full(correct.shape, 1.0 / len(cost_s))
    for done in range(0, epochs, _PERIOD):
        for _ in range(min(_PERIOD, epochs - done)):
            scorers.step(correct, shares)
        facts = scorers.facts()
        for _ in range(min(_PERIOD, epochs - done)):
            shares = assignment.step(facts, correct, cost_s / budget_s, weights)
    scores = scorers.scorer.scores(probabilities)
    kept, thresholds, mean_s = keep_budget(shares.mean(axis=1), scores, cost_s, budget_s=budget_s)
    return Schedule(
        scorer=scorers.scorer,
        thresholds=tuple(float(t) for t in thresholds),
        shares=tuple(float(s) for s in kept),
        mean_s=mean_s,
    )


def keep_budget(
    shares: Float64, scores: Float64, cost_s: Float64, *, budget_s: float
) -> tuple[Float64, Float64, float]:
    """Tilt shares towards cheaper or dearer exits until the thresholds spend just the budget.

    Args:
        shares: [E], summing to 1.
        scores: [E, N].
        cost_s: [E].
        budget_s: Mean cost that is not exceeded, unless even the first exit costs more.

    Returns:
        The tilted shares, their thresholds, and the mean cost of the samples.
    """
    relative = (cost_s - cost_s.min()) / max(float(np.ptp(cost_s)), 1e-12)
    logs = np.log(np.maximum(shares, 1e-6))

    def spend(tilt: float) -> tuple[Float64, Float64, float]:
        powers = logs - tilt * relative
        tilted = np.exp(powers - powers.max())
        tilted /= tilted.sum()
        thresholds = thresholds_for_shares(scores, tilted)
        return tilted, thresholds, float(cost_s[first_exits(scores, thresholds)].mean())

    everybody_leaves = np.zeros(len(shares))
    everybody_leaves[0] = 1.0
    low, high = -40.0, 40.0
    best = (
        everybody_leaves,
        np.full(len(shares), -np.inf),
        float(cost_s[0]),
    )
    for _ in range(50):
        middle = (low + high) / 2
        found = spend(middle)
        if found[2] > budget_s:
            low = middle
            continue
        high = middle
        if best[2] > budget_s or found[2] >= best[2]:
            best = found
    return best


def _entropy(probabilities: Float64) -> Float64:
    """Normalised entropy over the last axis."""
    safe = np.where(probabilities > 0, probabilities, 1.0)
    total = -(probabilities * np.log(safe)).sum(axis=-1)
    return np.asarray(total / math.log(max(probabilities.shape[-1], 2)))


def _facts(probabilities: Float64) -> Float64:
    """[E, N, 2 + E]: largest probability, entropy, and room for the scores of all exits."""
    num_exits, num_samples, _ = probabilities.shape
    facts = np.zeros((num_exits, num_samples, 2 + num_exits))
    facts[:, :, 0] = probabilities.max(axis=2)
    facts[:, :, 1] = _entropy(probabilities)
    return facts


def _fill(scorer: Scorer, k: int, probabilities: Float64, facts: Float64) -> None:
    """Write the scores of exit k where all exits read them; later ones weigh nothing."""
    total = probabilities[k] @ scorer.classes[k] + facts[k] @ scorer.facts[k] + scorer.bias[k]
    facts[:, :, 2 + k] = _sigmoid(total)


def _sigmoid(values: Float64) -> Float64:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(values, -60.0, 60.0))))


class _Adam:
    """Moves arrays against their gradients.

    Source:
        Kingma and Ba, Adam: A Method for Stochastic Optimization (ICLR 2015), algorithm 1.
    """

    def __init__(self, arrays: Sequence[Float64]) -> None:
        self._arrays = arrays
        self._mean = [np.zeros_like(a) for a in arrays]
        self._square = [np.zeros_like(a) for a in arrays]
        self._count = 0

    def step(self, gradients: Sequence[Float64]) -> None:
        self._count += 1
        for i, gradient in enumerate(gradients):
            self._mean[i] += 0.1 * (gradient - self._mean[i])
            self._square[i] += 0.001 * (gradient * gradient - self._square[i])
            scale = np.sqrt(self._square[i] / (1 - 0.999**self._count)) + 1e-8
            self._arrays[i][...] -= _RATE * self._mean[i] / (1 - 0.9**self._count) / scale


class _ScorerFit:
    """Weighted logistic regressions, one for each exit; earlier scores are taken as given.

    All exits move at once, each on the scores that the earlier ones had a step before.
    """

    def __init__(self, probabilities: Float64) -> None:
        num_exits, _, num_classes = probabilities.shape
        self._probabilities = probabilities
        self._facts = _facts(probabilities)
        # Exit k reads the facts and the scores of exits before it.
        self._mask = np.tri(num_exits, 2 + num_exits, 1)
        self.scorer = Scorer(
            classes=np.zeros((num_exits, num_classes)),
            facts=np.zeros((num_exits, 2 + num_exits)),
            bias=np.zeros(num_exits),
        )
        self._adam = _Adam([self.scorer.classes, self.scorer.facts, self.scorer.bias])

    def facts(self) -> Float64:
        """[E, N, 2 + E], with the present scores."""
        self._facts[:, :, 2:] = self.scorer.scores(self._probabilities).T
        return self._facts

    def step(self, correct: Float64, shares: Float64) -> None:
        """One step down the cross-entropy, each sample weighted by its share at the exit."""
        scorer = self.scorer
        total = (
            (self._probabilities @ scorer.classes[:, :, None])[:, :, 0]
            + (self._facts @ scorer.facts[:, :, None])[:, :, 0]
            + scorer.bias[:, None]
        )
        scores = _sigmoid(total)  # [E, N]
        error = (shares * (scores - correct) / correct.shape[1])[:, None, :]
        classes = (error @ self._probabilities)[:, 0]
        weights = (error @ self._facts)[:, 0] * self._mask
        self._facts[:, :, 2:] = scores.T
        decay = _WEIGHT_DECAY / len(weights)
        self._adam.step([classes + decay * scorer.classes, weights, error.sum(axis=(1, 2))])


class _AssignmentFit:
    """A small net for each exit that sees what is known there; a softmax over exits joins them."""

    def __init__(self, num_exits: int, rng: np.random.Generator) -> None:
        inputs = 2 + num_exits
        hidden = inputs
        # Exit k sees its own score too.
        self._mask = np.tri(num_exits, inputs, 2)[:, :, None]
        self._first = rng.normal(0.0, 1.0 / math.sqrt(inputs), (num_exits, inputs, hidden))
        self._first *= self._mask
        self._bias = np.zeros((num_exits, 1, hidden))
        self._second = rng.normal(0.0, 0.1 / math.sqrt(hidden), (num_exits, hidden, 1))
        self._level = np.zeros((num_exits, 1, 1))
        self._adam = _Adam([self._first, self._bias, self._second, self._level])

    def step(
        self, facts: Float64, correct: Float64, cost_ratio: Float64, weights: _LossWeights
    ) -> Float64:
        """One step down the loss; returns the assignment before it, [E, N]."""
        num_samples = correct.shape[1]
        scores = np.clip(facts[0, :, 2:].T, 1e-6, 1 - 1e-6)  # [E, N]
        hidden = _sigmoid(facts @ self._first + self._bias)  # [E, N, H]
        powers = (hidden @ self._second + self._level)[:, :, 0]
        powers = np.exp(powers - powers.max(axis=0))
        shares = powers / powers.sum(axis=0)
        loss = -(correct * np.log(scores) + (1 - correct) * np.log(1 - scores))
        wanted = scores**weights.beta
        wanted /= wanted.sum(axis=0)
        spent = float((cost_ratio[:, None] * shares).sum() / num_samples)
        slope = loss + weights.alpha_ce * (np.log(np.maximum(shares, 1e-12)) - np.log(wanted))
        slope += weights.alpha_cost * np.sign(spent - 1.0) * cost_ratio[:, None]
        slope /= num_samples
        back = (shares * (slope - (shares * slope).sum(axis=0)))[:, :, None]  # [E, N, 1]
        inner = back * self._second.transpose(0, 2, 1) * hidden * (1.0 - hidden)
        self._adam.step(
            [
                (facts.transpose(0, 2, 1) @ inner) * self._mask,
                inner.sum(axis=1, keepdims=True),
                hidden.transpose(0, 2, 1) @ back,
                back.sum(axis=1, keepdims=True),
            ]
        )
        return np.asarray(shares)

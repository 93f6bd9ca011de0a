"""What joint training minimises: a weighted sum over exits, and what keeps deeper exits better.

Exits are numbered from 1 here, as in the formulas: 1..K are intermediate, the last is the final
one. Arrays hold all E = K + 1 of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from edgewise.errors import ConfigError, ShapeError, nearest_names
from edgewise.frontends.torch_module import import_torch

Weighting = Literal["equal", "weighted", "branchynet", "eenet"]
_WORDS: dict[str, dict[str, Any]] = {
    "equal": {"weighting": "equal"},
    "weighted": {"weighting": "weighted"},
    "wel": {"weighting": "weighted"},  # the paper's abbreviation
    "branchynet": {"weighting": "branchynet"},
    "eenet": {"weighting": "eenet"},
    "mean": {"averaged": True},
    "mono": {"monotonicity": 0.1},
    "distil": {"distillation": 0.01},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitLoss:
    """A loss over all exits; every part can be combined with every other.

    ``equal``       1 for each exit
    ``weighted``    w0 + alpha (k - 1) for exit k, 1 for the final one
    ``branchynet``  1 for the first exit, 0.3 for every later one
    ``eenet``       (j + 1) / (E (E + 1)) for exits j = 0..E-1: they sum to one half

    Attributes:
        weighting: How much each exit's cross-entropy counts.
        averaged: Whether the weights are divided by their sum: the loss is then of one exit's size,
            the steps are as many times smaller, and the penalties count for more beside it.
        w0: Weight of the first exit under ``weighted``.
        alpha: How much each further exit adds under ``weighted``.
        monotonicity: λ of the penalty on a true-class probability that falls from an exit to the
            next; 0 for none.
        mono_with_final: Whether the step from the last intermediate exit to the final one counts
            too. The paper's sum ends before it, although its router may take that step.
        distillation: Weight of the divergence of each exit from the final one; 0 for none.
        distil_temperature: Divides the logits there.
        distil_from: Share of the training after which it sets in.

    Source:
        UniExit (arXiv:2611.09159), equations 7 to 10, for ``weighted`` and the penalty;
        Teerapittayanon et al., BranchyNet (2016), for ``branchynet``, its numbers from memory;
        Ilhan et al., EENet (arXiv:2301.07099), for ``eenet`` and late distillation.

    Example:
        >>> ExitLoss(weighting="weighted").exit_weights(4)
        (0.5, 0.7, 0.9, 1.0)
    """

    weighting: Weighting = "equal"
    averaged: bool = False
    w0: float = 0.5
    alpha: float = 0.2
    monotonicity: float = 0.0
    mono_with_final: bool = True
    distillation: float = 0.0
    distil_temperature: float = 3.0
    distil_from: float = 0.75

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ConfigError(
                f"unknown weighting of exits {self.weighting!r}",
                help=nearest_names(self.weighting, get_args(Weighting)),
            )
        for name in ("w0", "alpha", "monotonicity", "distillation"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"expected {name} of zero or more, found {value}")
        if not (math.isfinite(self.distil_temperature) and self.distil_temperature > 0):
            raise ConfigError(
                f"expected a distillation temperature above zero, found {self.distil_temperature}"
            )
        if not 0 <= self.distil_from <= 1:
            raise ConfigError(
                f"expected distillation to set in between 0 and 1, found {self.distil_from}"
            )

    @classmethod
    def parse(cls, text: str) -> ExitLoss:
        """Read words joined by ``+``: a weighting, ``mean``, ``mono``, ``distil``.

        Raises:
            ConfigError: An unknown word, or two weightings.

        Example:
            >>> ExitLoss.parse("weighted+mono").monotonicity
            0.1
        """
        settings: dict[str, Any] = {}
        for word in text.split("+"):
            part = _WORDS.get(word.strip())
            if part is None:
                raise ConfigError(
                    f"unknown part {word.strip()!r} of the loss {text!r}",
                    help=nearest_names(word.strip(), _WORDS),
                )
            if not part.keys().isdisjoint(settings):
                raise ConfigError(
                    f"the loss {text!r} sets its {next(iter(part))} twice",
                    help="name one of equal, weighted, branchynet, eenet; add mean, mono or distil",
                )
            settings |= part
        return cls(**settings)

    def exit_weights(self, num_exits: int) -> tuple[float, ...]:
        """Weight of each exit's cross-entropy, the final one last, [E]."""
        weights = self._own_weights(num_exits)
        whole = sum(weights) if self.averaged else 1.0
        return tuple(w / whole for w in weights)

    def _own_weights(self, num_exits: int) -> tuple[float, ...]:
        if self.weighting == "weighted":
            inner = [round(self.w0 + self.alpha * k, 12) for k in range(num_exits - 1)]
            return (*inner, 1.0)
        if self.weighting == "branchynet":
            return (1.0, *[0.3] * (num_exits - 1))
        if self.weighting == "eenet":
            return tuple((j + 1) / (num_exits * (num_exits + 1)) for j in range(num_exits))
        return (1.0,) * num_exits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """A loss and its parts, torch tensors.

    Attributes:
        total: What is minimised, a scalar.
        cross_entropy: Of each exit, [E], unweighted.
        monotonicity: Before its factor λ, a scalar.
        distillation: Before its factor, a scalar; zero while it has not set in.
    """

    total: Any
    cross_entropy: Any
    monotonicity: Any
    distillation: Any


def exit_loss(logits: Any, labels: Any, loss: ExitLoss, *, progress: float = 0.0) -> LossTerms:
    """Compute the loss of a batch; every part is a mean over its samples.

    Args:
        logits: [E, B, C], the final exit last.
        labels: [B], class indices.
        loss: What counts.
        progress: Share of the training that is done: distillation sets in late.

    Raises:
        ShapeError: The arrays do not fit each other.
    """
    if logits.ndim != 3 or labels.shape != logits.shape[1:2]:
        raise ShapeError(
            f"expected logits [E, B, C] and labels [B], found {list(logits.shape)} and"
            f" {list(labels.shape)}"
        )
    functional = import_torch().nn.functional
    logp = functional.log_softmax(logits, dim=-1)  # [E, B, C]
    of_truth = logp.gather(2, labels.expand(len(logits), -1).unsqueeze(2)).squeeze(2)  # [E, B]
    cross_entropy = -of_truth.mean(dim=1)  # [E]
    weights = cross_entropy.new_tensor(loss.exit_weights(len(logits)))
    total = (weights * cross_entropy).sum()
    nothing = total.new_zeros(())
    mono = distil = nothing
    if loss.monotonicity > 0:
        p = of_truth if loss.mono_with_final else of_truth[:-1]
        p = p.exp()
        mono = (p[:-1] - p[1:]).relu().sum(dim=0).mean()
        total = total + loss.monotonicity * mono
    if loss.distillation > 0 and progress >= loss.distil_from:
        softened = functional.log_softmax(logits / loss.distil_temperature, dim=-1)
        teacher = softened[-1].detach()
        distil = (teacher.exp() * (teacher - softened[:-1])).sum(dim=2).mean(dim=1).sum()
        total = total + loss.distillation * distil
    return LossTerms(
        total=total, cross_entropy=cross_entropy, monotonicity=mono, distillation=distil
    )

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edgewise.errors import ConfigError, ShapeError
from edgewise.training.losses import ExitLoss, exit_loss

# Two classes and logits that are logarithms, so every probability is a fraction: three exits give
# the right class 3/4, 1/2 and 9/10 for the first sample, 1/4, 1/2 and 1/5 for the second.
RIGHT = np.array([[3 / 4, 1 / 4], [1 / 2, 1 / 2], [9 / 10, 1 / 5]])  # [E, B]
LABELS = torch.tensor([0, 1])


def _logits(right: np.ndarray) -> torch.Tensor:
    p = np.stack([right, 1 - right], axis=2)  # [E, B, C]
    p[:, 1:] = p[:, 1:, ::-1]  # the second sample has the other class
    return torch.from_numpy(np.log(p)).requires_grad_()


CROSS_ENTROPY = [
    (math.log(4 / 3) + math.log(4)) / 2,
    math.log(2),
    (math.log(10 / 9) + math.log(5)) / 2,
]


def test_the_cross_entropy_of_each_exit_is_what_the_formula_says() -> None:
    terms = exit_loss(_logits(RIGHT), LABELS, ExitLoss())

    assert terms.cross_entropy.tolist() == pytest.approx(CROSS_ENTROPY, rel=1e-6)
    assert terms.total.item() == pytest.approx(sum(CROSS_ENTROPY), rel=1e-6)


def test_the_weighted_loss_counts_deeper_exits_more_and_the_final_one_once() -> None:
    terms = exit_loss(_logits(RIGHT), LABELS, ExitLoss(weighting="weighted"))

    expected = 0.5 * CROSS_ENTROPY[0] + 0.7 * CROSS_ENTROPY[1] + CROSS_ENTROPY[2]
    assert terms.total.item() == pytest.approx(expected, rel=1e-6)


def test_the_penalty_adds_what_the_right_class_loses_between_neighbours() -> None:
    # First sample: 3/4 → 1/2 loses 1/4. Second: 1/2 → 1/5 loses 3/10. Mean over two samples.
    terms = exit_loss(_logits(RIGHT), LABELS, ExitLoss(monotonicity=0.1))
    without_final = exit_loss(
        _logits(RIGHT), LABELS, ExitLoss(monotonicity=0.1, mono_with_final=False)
    )

    assert terms.monotonicity.item() == pytest.approx((0.25 + 0.3) / 2)
    assert terms.total.item() == pytest.approx(sum(CROSS_ENTROPY) + 0.1 * 0.275)
    assert without_final.monotonicity.item() == pytest.approx(0.125)


def test_the_penalty_and_its_gradient_vanish_where_confidence_never_falls() -> None:
    logits = _logits(np.array([[0.1, 0.2], [0.1, 0.5], [0.7, 0.6]]))
    terms = exit_loss(logits, LABELS, ExitLoss(monotonicity=0.1))
    (gradient,) = torch.autograd.grad(terms.monotonicity, logits)

    assert terms.monotonicity.item() == 0
    assert not gradient.any()


def test_the_penalty_pushes_the_earlier_exit_down_and_the_later_one_up() -> None:
    logits = _logits(np.array([[0.9], [0.3]]))
    terms = exit_loss(logits, LABELS[:1], ExitLoss(monotonicity=1.0))
    (gradient,) = torch.autograd.grad(terms.monotonicity, logits)

    assert gradient[0, 0, 0] > 0
    assert gradient[1, 0, 0] < 0


def test_distillation_sets_in_late_and_teaches_all_but_the_final_exit() -> None:
    loss = ExitLoss.parse("eenet+distil")
    logits = _logits(RIGHT)
    early = exit_loss(logits, LABELS, loss, progress=0.74)
    late = exit_loss(logits, LABELS, loss, progress=0.75)
    (gradient,) = torch.autograd.grad(late.distillation, logits)

    def softened(p: float) -> np.ndarray:
        powers = np.array([p, 1 - p]) ** (1 / 3)
        return np.asarray(powers / powers.sum())

    def divergence(teacher: float, exit_: float) -> float:
        t, e = softened(teacher), softened(exit_)
        return float((t * np.log(t / e)).sum())

    expected = sum(divergence(RIGHT[2, n], RIGHT[k, n]) for k in range(2) for n in range(2)) / 2
    assert early.distillation.item() == 0
    assert late.distillation.item() == pytest.approx(expected, rel=1e-6)
    assert late.total.item() == pytest.approx(early.total.item() + 0.01 * expected, rel=1e-6)
    assert not gradient[-1].any()
    assert gradient[:-1].any()


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("equal", (1.0, 1.0, 1.0, 1.0)),
        ("wel", (0.5, 0.7, 0.9, 1.0)),
        ("branchynet", (1.0, 0.3, 0.3, 0.3)),
        ("eenet", (1 / 20, 2 / 20, 3 / 20, 4 / 20)),
        ("equal+mean", (0.25, 0.25, 0.25, 0.25)),
        ("wel+mean", (0.5 / 3.1, 0.7 / 3.1, 0.9 / 3.1, 1.0 / 3.1)),
    ],
)
def test_each_weighting_gives_each_exit_its_weight(text: str, weights: tuple[float, ...]) -> None:
    assert ExitLoss.parse(text).exit_weights(4) == pytest.approx(weights)


def test_parts_combine_freely() -> None:
    assert ExitLoss.parse("wel+mono+distil") == ExitLoss(
        weighting="weighted", monotonicity=0.1, distillation=0.01
    )
    assert ExitLoss.parse("mono") == ExitLoss(monotonicity=0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("weighed", "did you mean 'weighted'", id="a typing error"),
        pytest.param("equal+eenet", "sets its weighting twice", id="two weightings"),
        pytest.param("", "unknown part ''", id="nothing"),
    ],
)
def test_a_loss_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ExitLoss.parse(text)


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1.0}, {"distil_from": 2.0}, {"distil_temperature": 0.0}, {"w0": math.nan}]
)
def test_a_loss_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ExitLoss(**wrong)  # type: ignore[arg-type]


def test_labels_that_do_not_fit_the_logits_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"found \[3, 2, 2\] and \[3\]"):
        exit_loss(_logits(RIGHT), torch.tensor([0, 1, 0]), ExitLoss())

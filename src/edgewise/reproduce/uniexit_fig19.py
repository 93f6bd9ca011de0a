"""UniExit, Figure 19: how often the right class loses confidence from an exit to a later one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.exits.anytime import drop_shares, exit_probabilities, product_anytime
from edgewise.reproduce._joint_runs import (
    LOSSES,
    SAID,
    Protocol,
    TrainedRun,
    paired,
    trained_runs,
)
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Share of samples whose right class loses confidence on the way down"

THRESHOLDS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5)
# Both losses as sums, as printed in the paper, and as means.
_PAIRS = (("both", "equal"), ("both-mean", "mean"))
_SHOWN = ("equal", "both", "mean", "both-mean", "product")


def run(setup: Setup) -> Reproduction:
    """Read the runs of `uniexit-table8`, and make those that are missing.

    Args:
        setup: As for `uniexit-table8`.
    """
    protocol = Protocol.of(setup)
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    details: dict[str, object] = {}
    runs = trained_runs(setup)
    for net, by_method in runs.items():
        dropped = shares(by_method)
        figures += describe(net, dropped)
        verdicts += [judge(net, dropped, ours=ours, against=base) for ours, base in _PAIRS]
        details[net] = {m: s.mean(axis=0).tolist() for m, s in dropped.items()}
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 19 and section 7.5",
        setting={
            "paper": "ResNet-50 and MobileNetV2 on CIFAR-100 and ImageNet, BranchyNet's training"
            " against UniExit's; bars without numbers",
            "ours": f"{', '.join(runs)} on {protocol.describe()}; temperature 1",
        },
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(
            (
                "A sample counts where the largest drop of its right class's probability, from any"
                " exit to any later one, exceeds the threshold."
            ),
            "The runs are those of uniexit-table8; Equal stands for BranchyNet's training.",
        ),
        details=details,
    )


def shares(by_method: list[list[TrainedRun]]) -> dict[str, npt.NDArray[np.float64]]:
    """By method, product anytime on Equal included: [seeds, thresholds]."""
    found = {
        m: np.stack([drop_shares(exit_probabilities(r.logits), r.labels, THRESHOLDS) for r in runs])
        for m, runs in zip(LOSSES, by_method, strict=True)
    }
    found["product"] = np.stack(
        [
            drop_shares(product_anytime(r.logits), r.labels, THRESHOLDS)
            for r in by_method[list(LOSSES).index("equal")]
        ]
    )
    return found


def describe(net: str, dropped: dict[str, npt.NDArray[np.float64]]) -> list[Figure]:
    """Each shown method at each threshold."""
    figures = []
    for k, threshold in enumerate(THRESHOLDS):
        for method in _SHOWN:
            mean, low, high = paired(100 * dropped[method][:, k])
            figures.append(
                Figure(
                    name=f"{net}, {SAID[method]}: drop above {threshold:g}",
                    unit="% of samples",
                    ours=mean,
                    low=None if low is None else max(low, 0.0),
                    high=high,
                    provenance="measured",
                )
            )
    return figures


def judge(
    net: str, dropped: dict[str, npt.NDArray[np.float64]], *, ours: str, against: str
) -> Verdict:
    """Whether a method lowers the share at every threshold."""
    claim = f"{net}: {SAID[ours]} has fewer drops than {SAID[against]} at each threshold"
    found = [
        paired(100 * (dropped[ours][:, k] - dropped[against][:, k])) for k in range(len(THRESHOLDS))
    ]
    wrong = [f"{t:g}" for t, (d, _, _) in zip(THRESHOLDS, found, strict=True) if d >= 0]
    detail = ", ".join(f"{d:+.2f}" for d, _, _ in found) + " points"
    if found[0][1] is None:
        return Verdict(claim=claim, holds=None, detail=f"{detail}; one seed has no interval")
    if wrong:
        return Verdict(claim=claim, holds=False, detail=f"not at {', '.join(wrong)}: {detail}")
    return Verdict(claim=claim, holds=True, detail=detail)

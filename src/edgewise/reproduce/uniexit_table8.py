"""UniExit, Table 8: do weighted exits and the monotonicity penalty make exits more accurate?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.exits.anytime import caching_anytime, product_anytime
from edgewise.reproduce._joint_runs import (
    LOSSES,
    SAID,
    Protocol,
    TrainedRun,
    exit_accuracies,
    paired,
    seconds_of,
    trained_runs,
)
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Accuracy over exits of joint training: equal weights, WEL, Mono, both, and no training"

_FREE = ("product", "caching")
_PAIRS = (("both", "equal"), ("both-mean", "mean"))
# CIFAR-100 and ImageNet. The copy of the table at hand has its columns mixed up: the two single
# losses cannot be told apart, so each row stands as a pair.
_PAPER = {
    "small_resnet": {"equal": (76.19, 74.35), "both": (80.26, 75.85)},
    "small_mobilenet": {"equal": (71.67, 68.90), "both": (72.59, 69.68)},
}
_PAPER_SINGLE = {
    "small_resnet": ((78.64, 77.52), (75.12, 74.86)),
    "small_mobilenet": ((72.18, 71.96), (69.31, 69.17)),
}
_PAPER_NET = {"small_resnet": "ResNet-50", "small_mobilenet": "MobileNetV2"}


def run(setup: Setup) -> Reproduction:
    """Train and compare; hours of one core, resumed where it was stopped.

    Args:
        setup: ``models`` limits it to one of the nets, so that two commands can share the work;
            ``data``, ``seeds`` and ``limit`` (test images) replace the claim's own.
    """
    protocol = Protocol.of(setup)
    runs = trained_runs(setup)
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    notes: list[str] = []
    details: dict[str, object] = {}
    for net, by_method in runs.items():
        by_exit = accuracies(by_method)
        over_exits = {m: a.mean(axis=1) for m, a in by_exit.items()}  # [seeds]
        figures += describe(net, over_exits)
        verdicts += [judge(net, over_exits, ours=a, against=b) for a, b in _PAIRS]
        notes += free_wins(net, over_exits)
        details[net] = {
            "accuracy_by_exit": {m: a.mean(axis=0).tolist() for m, a in by_exit.items()},
            "accuracy_by_seed": {m: a.tolist() for m, a in over_exits.items()},
            "training_s": [round(s, 1) for s in seconds_of(by_method)],
        }
        low, high = _PAPER_SINGLE[net]
        notes.append(
            f"The paper's WEL and Mono alone on {_PAPER_NET[net]}: {low[0]} and {low[1]} on"
            f" CIFAR-100, {high[0]} and {high[1]} on ImageNet; which is which cannot be told from"
            " the copy of its table that was read."
        )
    notes.append(
        "Whether the paper's losses are sums or means over exits is not said: both are here. A sum"
        " of nine takes steps nine times as long."
    )
    notes.append(
        "The paper's sum over neighbouring exits ends before the final one; here that last step is"
        " penalised too, since a router may take it."
    )
    notes.append(
        "The paper's numbers are of other networks and data: compare the differences' signs."
    )
    return Reproduction(
        title=TITLE,
        source="UniExit, Table 8 and sections 4.3 and 7.5",
        setting={
            "paper": "ResNet-50 and MobileNetV2 on CIFAR-100 and ImageNet; which exits its"
            " accuracies are of is not said",
            "ours": f"{', '.join(runs)} on {protocol.describe()}",
        },
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
        details=details,
    )


def accuracies(by_method: list[list[TrainedRun]]) -> dict[str, npt.NDArray[np.float64]]:
    """By method, the training-free ones included: [seeds, E]."""
    found = {
        m: np.stack([exit_accuracies(r.logits, r.labels) for r in runs])
        for m, runs in zip(LOSSES, by_method, strict=True)
    }
    equal = by_method[list(LOSSES).index("equal")]
    for method, combine in (("product", product_anytime), ("caching", caching_anytime)):
        found[method] = np.stack([exit_accuracies(combine(r.logits), r.labels) for r in equal])
    return found


def describe(net: str, over_exits: dict[str, npt.NDArray[np.float64]]) -> list[Figure]:
    """Each method's mean over exits, and its difference from Equal on the same seeds."""
    figures = []
    for method, values in over_exits.items():
        mean, low, high = paired(100 * values)
        paper = _PAPER[net].get(method)
        figures.append(
            Figure(
                name=f"{net}, {SAID[method]}: mean accuracy over exits",
                unit="%",
                paper=paper[0] if paper else None,
                ours=mean,
                low=low,
                high=high,
                provenance="measured",
                note=f"paper: {_PAPER_NET[net]} on CIFAR-100; ImageNet {paper[1]}" if paper else "",
            )
        )
        if method == "equal":
            continue
        against = "mean" if method == "both-mean" else "equal"
        gain, low, high = paired(100 * (values - over_exits[against]))
        equal = _PAPER[net]["equal"]
        figures.append(
            Figure(
                name=f"{net}, {SAID[method]} over {SAID[against]}",
                unit="points",
                paper=round(paper[0] - equal[0], 2) if paper else None,
                ours=gain,
                low=low,
                high=high,
                provenance="measured",
                note=f"paper: ImageNet {paper[1] - equal[1]:+.2f}" if paper else "",
            )
        )
    return figures


def judge(
    net: str,
    over_exits: dict[str, npt.NDArray[np.float64]],
    *,
    ours: str = "both",
    against: str = "equal",
) -> Verdict:
    """Whether both losses together are at least as good as neither."""
    claim = f"{net}: {SAID[ours]} is at least as accurate as {SAID[against]}, mean over exits"
    gain, low, high = paired(100 * (over_exits[ours] - over_exits[against]))
    if low is None or high is None:
        return Verdict(
            claim=claim, holds=None, detail=f"{gain:+.2f} points; one seed has no interval"
        )
    detail = f"{gain:+.2f} points, 95 % interval over seeds {low:+.2f} to {high:+.2f}"
    if gain >= 0:
        return Verdict(claim=claim, holds=True, detail=detail)
    if high >= 0:
        return Verdict(claim=claim, holds=None, detail=f"{detail}: they cannot be told apart")
    return Verdict(claim=claim, holds=False, detail=detail)


def free_wins(net: str, over_exits: dict[str, npt.NDArray[np.float64]]) -> list[str]:
    """Say where a combination of exits that needs no training beats the trained losses."""
    best = max(("wel", "mono", "both", "both-mean"), key=lambda m: float(over_exits[m].mean()))
    found = []
    for method in _FREE:
        gain, low, high = paired(100 * (over_exits[method] - over_exits[best]))
        if gain > 0:
            interval = "" if low is None else f" (95 % interval {low:+.2f} to {high:+.2f})"
            found.append(
                f"{net}: {SAID[method]}, which needs no training, beats the best trained loss,"
                f" {SAID[best]}, by {gain:.2f} points{interval}."
            )
    return found or [f"{net}: no training-free method beats the best trained loss, {SAID[best]}."]

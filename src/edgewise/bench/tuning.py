"""Gives each rival its best setting for a deadline, by validation data and profiled times."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgewise.exits import LOOK, REJECT, Policy, PolicyInputs, make_policy

_MOST_SAMPLES = 200
_RATIOS = (0.4, 0.55, 0.7, 0.85, 1.0)
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)


def candidate_options(name: str, *, num_exits: int, budget_s: float) -> list[Mapping[str, Any]]:
    """Settings of a policy worth trying for a deadline.

    Args:
        name: A policy's file.
        num_exits: E.
        budget_s: The deadline from arrival, seconds. A policy that plans for a mean may do best
            with a smaller mean than that, since half of its requests take longer.

    Returns:
        At least one; a policy that plans for deadlines or learns itself has only its defaults.
    """
    if name == "pabee":
        return [{"patience": p} for p in range(1, max(2, num_exits))]
    if name == "branchynet":
        return [{"threshold": t} for t in _SHARES]
    if name == "fastbert":
        return [{"speed": s} for s in _SHARES]
    module = importlib.import_module(f"edgewise.exits.policies.{name}")
    if "budget_s" in inspect.signature(module.make).parameters:
        return [{"budget_s": r * budget_s} for r in _RATIOS]
    return [{}]


def make_tuned(
    name: str, inputs: PolicyInputs, *, budget_s: float, fixed: Mapping[str, Any] | None = None
) -> Policy:
    """Make a policy with the setting that answers most validation samples rightly and in time.

    Args:
        name: A policy's file.
        inputs: What it may know.
        budget_s: The deadline from arrival, seconds.
        fixed: Options that are not tuned; with any of them nothing else is.

    Raises:
        ConfigError: It cannot be made.
    """
    if fixed:
        return make_policy(name, inputs, **fixed)
    options = candidate_options(name, num_exits=inputs.num_exits, budget_s=budget_s)
    made = [make_policy(name, inputs, **each) for each in options]
    if len(made) == 1 or inputs.validation is None:
        return made[-1]
    worth = [right_in_time(policy, inputs, budget_s=budget_s) for policy in made]
    return made[int(np.argmax(worth))]


def right_in_time(policy: Policy, inputs: PolicyInputs, *, budget_s: float) -> float:
    """Share of validation samples answered rightly by a deadline, if units take what they took.

    Args:
        policy: To try; it is asked as for requests, and told nothing afterwards.
        inputs: Costs and validation logits. Times are the profile's rounds in turn, or its medians
            where it has no rounds.
        budget_s: Seconds.
    """
    validation = inputs.validation
    assert validation is not None  # noqa: S101 - its caller's promise
    step = -(-validation.labels.size // _MOST_SAMPLES)
    rounds_s = _rounds_s(inputs)
    chosen = range(0, validation.labels.size, step)
    right = 0
    for turn, n in enumerate(chosen):
        times_s = rounds_s[turn % len(rounds_s)]
        exit_index, took_s = _play(policy, validation.logits[:, n], times_s, budget_s=budget_s)
        right += took_s <= budget_s and bool(validation.correct[exit_index, n])
    return right / max(1, len(chosen))


def _rounds_s(inputs: PolicyInputs) -> Sequence[np.ndarray[Any, np.dtype[np.float64]]]:
    """Seconds of stage 0, head 0, stage 1, …, one row for each round."""
    costs = inputs.costs
    if len(costs.samples) and costs.samples.shape[1] == 2 * costs.num_exits:
        return list(costs.samples)
    return [np.stack([costs.stage_s, costs.head_s], axis=1).ravel()]


def _play(
    policy: Policy,
    logits: np.ndarray[Any, np.dtype[np.floating]],
    times_s: np.ndarray[Any, np.dtype[np.float64]],
    *,
    budget_s: float,
) -> tuple[int, float]:
    """The exit that answers and when; asked as the executor asks."""
    request, now_s, position, last = policy.begin(), 0.0, 0, len(logits)
    action = request.decide(0, 0.0, 0.0, budget_s)
    if action == REJECT:
        return 0, float("inf")
    while True:
        if action > position:
            now_s += float(times_s[2 * position : 2 * action : 2].sum())
            position = action
            action = request.decide(position, now_s, 0.0, budget_s)
            continue
        now_s += float(times_s[2 * position - 1])
        row = logits[position - 1][None].astype(np.float32)
        if action != LOOK or request.accept(position - 1, row) or position == last:
            return position - 1, now_s
        action = position + 1

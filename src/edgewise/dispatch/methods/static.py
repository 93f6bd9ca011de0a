"""Baseline: one backend for all operators, so that nothing ever switches."""

from __future__ import annotations

import numpy as np

from edgewise.dispatch.problem import Assignment, Objective, Problem
from edgewise.dispatch.search import Decision, decided
from edgewise.errors import ConfigError, Infeasible, nearest_names


def find(problem: Problem, objective: Objective, *, backend: str | None = None) -> Decision:
    """Choose the single backend that is best for the objective, or take the one that is named.

    Args:
        problem: Costs.
        objective: What is made small.
        backend: Its name; the best by default.

    Raises:
        ConfigError: The problem has no such backend.
        Infeasible: It cannot run all operators, or none can; ``closest`` is the `Decision` that
            gives what it cannot run to the fastest other.
    """
    if backend is not None and backend not in problem.backends:
        raise ConfigError(
            f"no backend {backend!r} to choose from", help=nearest_names(backend, problem.backends)
        )
    names = problem.backends if backend is None else (backend,)
    runs = np.isfinite(problem.op_s)
    able = [name for name in names if runs[:, problem.backends.index(name)].all()]
    if not able:
        raise _unable(problem, objective, names)
    found = [
        decided(problem, _all_on(problem, name), method=f"static:{name}", objective=objective)
        for name in able
    ]
    return min(found, key=lambda decision: decision.totals.of(objective))


def _all_on(problem: Problem, name: str) -> Assignment:
    number = problem.backends.index(name)
    return Assignment(backend=np.full(problem.num_operators, number, dtype=np.int64))


def _unable(problem: Problem, objective: Objective, names: tuple[str, ...]) -> Infeasible:
    runs = np.isfinite(problem.op_s)
    most = max(names, key=lambda name: runs[:, problem.backends.index(name)].sum())
    number = problem.backends.index(most)
    missing = np.flatnonzero(~runs[:, number])
    backend = np.where(runs[:, number], number, problem.op_s.argmin(axis=1))
    return Infeasible(
        f"{most!r} cannot run {len(missing)} of {problem.num_operators} operators, the first is"
        f" {problem.names[missing[0]]!r} ({problem.shapes[missing[0]].key})",
        closest=decided(
            problem, Assignment(backend=backend), method=f"static:{most}", objective=objective
        ),
        help="choose another backend, or a method that mixes them",
    )

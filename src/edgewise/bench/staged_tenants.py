"""Tenants whose models have exits: their costs, and what leaving early leaves of a suffix's work.

How much work is left depends on how long requests wait, which depends on the plan, which depends on
the work: `with_exits` goes round until the plan stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.api import costs_of
from edgewise.backends import load_program
from edgewise.errors import ConfigError, Infeasible
from edgewise.frontends.checkpoint import is_checkpoint, load_model, shipped_names
from edgewise.placement.plan import Placement
from edgewise.placement.problem import Problem
from edgewise.placement.workload import Workload, WorkloadTenant
from edgewise.predict import CostTable
from edgewise.profiles.partition import PartitionProfile, thread_column
from edgewise.runtime.tenants.staged import StagedCuttable, suffix_work

Float64 = npt.NDArray[np.float64]
Search = Callable[[Workload], tuple[Problem, Placement]]

BACKEND = "onnxruntime:CPU"
_ROUNDS = 4  # of planning; the plan mostly stays after one or two
_DEVICE_CASES, _CORE_CASES = 5, 3  # quantiles of the waits


def is_staged(name_or_path: str | Path) -> bool:
    """Whether it is a model with exits: a shipped one by its name, or a checkpoint's folder."""
    if isinstance(name_or_path, str) and name_or_path in shipped_names():
        return True
    return is_checkpoint(Path(name_or_path))


def open_with_exits(
    tenant: WorkloadTenant,
    *,
    store: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
) -> StagedCuttable:
    """Load a tenant's model to be left early, with its costs: stored ones, or measured now.

    Args:
        tenant: Of a workload, with ``exits``.
        store: Where costs are kept; the user's by default.
        on_progress: Told how a measurement goes.

    Raises:
        ConfigError: The model has no exits.
        CheckpointError: It cannot be read.
        BackendError: ONNX Runtime is missing, or refuses a stage.
    """
    named = tenant.model or tenant.model_name
    if not is_staged(named):
        raise ConfigError(
            f"tenant {tenant.name!r} asks for exits, and its model {str(named)!r} has none",
            help=f"name one with exits ({', '.join(shipped_names())}, or a folder that `edgewise"
            " prepare` made), or take `exits = true` out",
        )
    model = load_model(named)
    program = load_program(model, BACKEND, threads=1)
    table = costs_of(program, store=store, on_progress=on_progress)
    return StagedCuttable(model, thread_costs(table, tenant.profile), backend=BACKEND)


def thread_costs(table: CostTable, profile: PartitionProfile) -> Callable[[int], CostTable]:
    """Take costs with one thread to other numbers, in proportion to the whole model's time.

    Args:
        table: With one thread.
        profile: Says how the whole model's time falls with threads.
    """

    def costs(threads: int) -> CostTable:
        ratio = float(profile.cpu_s[0, thread_column(profile, threads)] / profile.cpu_s[0, 0])
        if ratio == 1:
            return table
        return dataclasses.replace(
            table,
            stage_s=table.stage_s * ratio,
            head_s=table.head_s * ratio,
            segment_s={units: time_s * ratio for units, time_s in table.segment_s.items()},
            samples=table.samples * ratio,
            medians=table.medians * ratio,
        )

    return costs


def suffixes_of(
    workload: Workload,
    models: Mapping[str, StagedCuttable],
    problem: Problem | None = None,
    plan: Placement | None = None,
) -> dict[str, tuple[Float64, Float64]]:
    """Say by tenant what leaving early leaves of each suffix's work in the profile, and its C_s².

    Args:
        workload: Its tenants' budgets and profiles.
        models: Of the tenants with exits.
        problem: What the plan was made for.
        plan: Under which requests wait; by default nothing is gone before a suffix begins.
    """
    found = {}
    for i, tenant in enumerate(workload.tenants):
        model = models.get(tenant.name)
        if model is None:
            continue
        assert tenant.budget_s is not None  # noqa: S101 - the workload was checked
        costs = model.costs_for(1)
        spent_s = None if plan is None or problem is None else _spent_s(problem, plan, i)
        ratio, cv2 = suffix_work(
            model.model, costs, budget_s=tenant.budget_s, spent_s=spent_s, samples=1
        )
        # Of the stages one by one, as they run here, against the profile's one piece.
        last = model.last
        whole_s = np.array([costs.remaining_s(p, last - 1) for p in range(last)])
        ratio[:last] *= whole_s / tenant.profile.cpu_s[:last, 0]
        found[tenant.name] = ratio, cv2
    return found


def with_exits(
    workload: Workload, models: Mapping[str, StagedCuttable], search: Search
) -> Workload:
    """Plan until the work that is counted is what the plan's waits leave, and keep that.

    Args:
        workload: What is planned for.
        models: Of the tenants with exits.
        search: Plans for a workload.

    Returns:
        The workload with its suffixes. Where no plan keeps up, with those of the last that did,
        or of no wait at all.
    """
    if not models:
        return workload
    workload = dataclasses.replace(workload, suffixes=suffixes_of(workload, models))
    before = None
    for _ in range(_ROUNDS):
        try:
            problem, plan = search(workload)
        except Infeasible:
            break
        if plan.shares == before:
            break
        before = plan.shares
        found = suffixes_of(workload, models, problem, plan)
        workload = dataclasses.replace(workload, suffixes=found)
    return workload


def _spent_s(problem: Problem, plan: Placement, i: int) -> Float64:
    """Time gone before each suffix of tenant i begins, for equally likely waits, [P + 1, N].

    The waits are those of the plan at its own place, taken to hold at every other; that of the
    cores only with the plan's cores.
    """
    said = plan.predicted[i]
    places = len(problem.tenants[i].profile.cuts)
    device_s = _quantiles_s(said.accelerator_wait_s, plan.accelerator_busy, _DEVICE_CASES)
    core_s = _quantiles_s(said.cpu_wait_s, said.cpu_busy, _CORE_CASES)
    service_s = problem.service_s[i, :places] + said.miss * problem.load_s[i, :places]
    on_device = (np.arange(places) > 0)[:, None, None]
    waits = on_device * device_s[:, None] + core_s  # [P + 1, N, M]
    return np.asarray(service_s[:, None] + waits.reshape(places, -1))


def _quantiles_s(mean_s: float, busy: float, cases: int) -> Float64:
    """A wait that is 0 with probability 1 - ρ and else exponential, at equal steps."""
    if not (math.isfinite(mean_s) and mean_s > 0 and 0 < busy < 1):
        return np.zeros(cases)
    late = 1 - (np.arange(cases) + 0.5) / cases
    return np.where(late < busy, -mean_s / busy * np.log(np.minimum(late / busy, 1.0)), 0.0)

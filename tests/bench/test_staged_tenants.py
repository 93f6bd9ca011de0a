from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.bench.staged_tenants import (
    _quantiles_s,
    is_staged,
    open_with_exits,
    suffixes_of,
    thread_costs,
    with_exits,
)
from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError, Infeasible
from edgewise.frontends.outline import outline_model
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem
from edgewise.placement.search import plan
from edgewise.placement.workload import Rate, Workload, WorkloadTenant
from edgewise.predict import CostTable
from edgewise.profiles.partition import PartitionProfile
from edgewise.runtime.tenants.staged import StagedCuttable

STAGES = 4
COSTS = CostTable.from_costs([10e-3] * STAGES, [1e-3] * STAGES)
DEVICE = Accelerator(
    name="toy", sram_bytes=1 << 20, in_bytes_per_s=1e9, out_bytes_per_s=1e9, fixed_s=1e-3
)


def profile_of(*, slower: float = 1.0) -> PartitionProfile:
    left_s = [COSTS.remaining_s(p, STAGES - 1) for p in range(STAGES)]
    one = slower * np.array([*left_s, 0.0])
    return PartitionProfile(
        model_id="outline",
        cuts=("x", "a", "b", "c", "y"),
        depth_ratio=np.linspace(0, 1, STAGES + 1),
        prefix_bytes=np.linspace(0, 4e6, STAGES + 1),
        boundary_bytes=np.full(STAGES + 1, 1e3),
        accelerator_s=np.linspace(0, 4e-3, STAGES + 1),
        threads=(1, 2),
        cpu_s=np.stack([one, 0.6 * one], axis=1),
    )


def workload_of(budget_s: float, *, rate_per_s: float = 10.0, slower: float = 1.0) -> Workload:
    usual: dict[str, Any] = {"model": None, "profile": profile_of(slower=slower)}
    return Workload(
        name="w",
        tenants=(
            WorkloadTenant(
                name="early", rate=Rate(per_s=rate_per_s), budget_s=budget_s, exits=True, **usual
            ),
            WorkloadTenant(name="plain", rate=Rate(per_s=2.0), **usual),
        ),
        accelerator=DEVICE,
        cores=2,
    )


@pytest.fixture(name="models", scope="module")
def _models() -> dict[str, StagedCuttable]:
    return {"early": StagedCuttable(outline_model(STAGES), COSTS)}


def search(workload: Workload) -> tuple[Problem, Placement]:
    problem = workload.problem()
    return problem, plan(problem, "greedy")


def test_ample_time_leaves_all_the_work_and_short_time_less(
    models: dict[str, StagedCuttable],
) -> None:
    ample = suffixes_of(workload_of(1.0), models)
    short = suffixes_of(workload_of(25e-3), models)

    assert set(ample) == {"early"}
    np.testing.assert_allclose(ample["early"][0], 1.0)
    assert short["early"][0][0] == pytest.approx(21 / 41)  # two of four stages and a head
    assert short["early"][0][-1] == 1.0


def test_work_is_counted_against_the_profile_also_where_that_was_measured_elsewhere(
    models: dict[str, StagedCuttable],
) -> None:
    found = suffixes_of(workload_of(1.0, slower=2.0), models)

    np.testing.assert_allclose(found["early"][0][:-1], 0.5)  # this machine is twice as fast


def test_a_plan_with_waits_counts_less_work_than_one_without(
    models: dict[str, StagedCuttable],
) -> None:
    workload = workload_of(60e-3, rate_per_s=15.0)
    problem = workload.problem()
    placement = make_placement(problem, [0, 0], [1, 1], method="test")
    calm = suffixes_of(workload, models)["early"]
    waiting = suffixes_of(workload, models, problem, placement)["early"]

    assert placement.predicted[0].cpu_wait_s > 10e-3
    assert waiting[0][0] < 0.9 * calm[0][0]
    assert waiting[1][0] > 0  # some wait and leave early, others need not


def test_the_planner_uses_what_the_workload_was_told(models: dict[str, StagedCuttable]) -> None:
    plain = workload_of(25e-3)
    told = with_exits(plain, models, search)
    before, after = plain.problem(), told.problem()

    assert told.suffixes.keys() == {"early"}
    assert after.cpu_s[0, 0, 1] < before.cpu_s[0, 0, 1]
    np.testing.assert_array_equal(after.cpu_s[1], before.cpu_s[1])
    assert with_exits(plain, {}, search) is plain


def test_a_workload_that_no_plan_keeps_up_with_counts_exits_without_waits(
    models: dict[str, StagedCuttable],
) -> None:
    def fail(_: Workload) -> tuple[Problem, Placement]:
        raise Infeasible("nothing keeps up")

    workload = workload_of(25e-3)
    told = with_exits(workload, models, fail)

    np.testing.assert_array_equal(
        told.suffixes["early"][0], suffixes_of(workload, models)["early"][0]
    )


def test_quantiles_of_a_wait_have_its_mean_and_its_chance_of_none() -> None:
    found = _quantiles_s(4e-3, 0.4, 4000)

    assert found.mean() == pytest.approx(4e-3, rel=0.01)
    assert (found == 0).mean() == pytest.approx(0.6, abs=1e-3)
    assert not _quantiles_s(float("inf"), 0.9, 3).any()  # an unstable queue has no quantiles


def test_costs_with_more_threads_fall_as_the_whole_model_does() -> None:
    costs = thread_costs(COSTS, profile_of())

    assert costs(1) is COSTS
    assert costs(2).remaining_s(1, 3) == pytest.approx(0.6 * COSTS.remaining_s(1, 3))
    assert costs(2).segment_s[0, 1] == pytest.approx(6e-3)


def test_a_model_without_exits_is_refused_with_those_that_have_some(tmp_path: Path) -> None:
    tenant = replace(workload_of(1.0).tenants[0], model_name="mobilenet_v2")

    assert is_staged("fashion-lite0")
    assert not is_staged("mobilenet_v2")
    assert not is_staged(tmp_path)
    with pytest.raises(ConfigError, match="'mobilenet_v2' has none") as caught:
        open_with_exits(tenant)
    assert "fashion-lite0" in (caught.value.help or "")

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgewise.bench.placement_runs import tenants_of
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem
from edgewise.reproduce import _placement as common
from edgewise.reproduce import _played as played
from edgewise.reproduce import swapless_fig6 as claim
from edgewise.reproduce.registry import Reproduction, Setup, run_claim

SETUP = Setup(quick=True, limit=40)


@pytest.fixture(name="found", scope="module")
def run_quickly(small_zoo: Path) -> Reproduction:
    assert small_zoo.is_dir()
    return run_claim("swapless-fig6", SETUP)


def test_every_tenant_of_every_quick_mix_is_compared(found: Reproduction) -> None:
    rows = found.details["rows"]
    quick = [mix for mix in claim._MIXES if mix.quick]

    assert [row["tenant"] for row in rows] == [net for mix in quick for net in mix.nets]
    assert all(row["observed_s"] > 0 for row in rows)
    assert len(found.verdicts) == 4
    skewed = next(f for f in found.figures if f.name == "MAPE at 90:10")
    assert skewed.ours is None
    assert skewed.note == "not played in a quick run"


def test_models_compiled_together_never_reload(found: Reproduction) -> None:
    rows = [r for r in found.details["rows"] if r["label"] == claim._MIXES[0].label]
    assert [row["observed_miss"] for row in rows] == [0.0, 0.0]
    assert found.verdicts[2].holds is True


def test_the_papers_column_has_only_what_its_text_says(found: Reproduction) -> None:
    shares = {f.name: f.paper for f in found.figures if "share that reloads" in f.name}
    assert sorted(v for v in shares.values() if v is not None) == [0, 0, 50, 50]


@pytest.mark.parametrize("mix", claim._MIXES, ids=lambda mix: mix.label)
def test_rates_load_the_accelerator_as_the_mix_says(small_zoo: Path, mix: claim._Mix) -> None:
    assert small_zoo.is_dir()
    models = played.models(SETUP)
    found = [replace(models.get("squeezenet", places=3), name=name) for name in mix.nets]
    rates = claim._rates(found, mix, common.device())
    problem, plan = claim._plan(Problem.of(tenants_of(found, rates), common.device(), cores=2), mix)
    whole = plan
    if mix.plan == "best":
        whole = make_placement(problem, problem.last.tolist(), [0] * len(found), method="test")

    assert whole.accelerator_busy == pytest.approx(mix.busy, rel=1e-6)
    if mix.shares is not None:
        assert rates / rates.sum() == pytest.approx(np.array(mix.shares))

from __future__ import annotations

import dataclasses
import math

import pytest

from edgewise.profiles.operator_tables import load_operator_table
from edgewise.profiles.operators import OperatorShape, OperatorTable
from edgewise.profiling.jetson_operators import (
    BACKENDS,
    CUDA,
    ORIN_NANO,
    ORT,
    TORCH,
    fitting,
    jetson_like_table,
    latency_s,
)

LARGE = OperatorShape(kind="linear", m=128, k=2048, n=8192)
SMALL = OperatorShape(kind="linear", m=128, k=576, n=576)
PLAIN = dataclasses.replace(ORIN_NANO, small_sigma=0.0, large_sigma=0.0, power_sigma=0.0)


@pytest.fixture(name="table", scope="module")
def made_here() -> OperatorTable:
    return jetson_like_table()


def test_the_table_that_ships_is_the_one_that_is_made(table: OperatorTable) -> None:
    shipped = load_operator_table("jetson-like")

    assert shipped == table


def test_every_shape_of_both_counts_has_a_cost_and_an_energy_everywhere(
    table: OperatorTable,
) -> None:
    assert table.provenance == "simulated"
    assert table.backends() == BACKENDS
    assert not table.excluded()
    assert len(table.costs) == 3 * len(table.shapes())
    # The clean count has 235 to 248 groups by how they are told apart; phantoms come on top.
    assert len(table.shapes()) > 235
    assert all((c.energy.energy_j or 0) > 0 for c in table.costs.values())
    assert len(table.switches) == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_is_above_its_peak_or_its_bandwidth(backend: str) -> None:
    peak = ORIN_NANO.gpu_peak_flops if backend == CUDA else ORIN_NANO.cpu_peak_flops

    for shape in (LARGE, SMALL):
        seconds = latency_s(ORIN_NANO, shape, backend, cuda="resident")
        assert shape.flops / seconds < peak
        assert shape.weight_bytes / seconds < ORIN_NANO.dram_bytes_per_s


def test_a_resident_gpu_is_held_by_the_roofline_alone() -> None:
    seconds = latency_s(ORIN_NANO, LARGE, CUDA, cuda="resident")

    rate = ORIN_NANO.gpu_peak_flops * ORIN_NANO.gpu_efficiency
    rate *= LARGE.m / (LARGE.m + ORIN_NANO.gpu_half_rows)
    launched = ORIN_NANO.gpu_launch_s + ORIN_NANO.gpu_wait_s
    assert seconds == pytest.approx(launched + LARGE.flops / rate)
    assert seconds < latency_s(ORIN_NANO, LARGE, TORCH) / 10


def test_moving_large_weights_takes_their_bytes_over_the_rate() -> None:
    moved, resident = (latency_s(ORIN_NANO, LARGE, CUDA, cuda=c) for c in ("moved", "resident"))

    assert moved - resident == pytest.approx(
        LARGE.weight_bytes / ORIN_NANO.upload_bytes_per_s, rel=0.02
    )


def test_torch_packs_its_weights_in_each_call_of_several_rows() -> None:
    one, two = (OperatorShape(kind="linear", m=m, k=2048, n=8192) for m in (1, 2))
    alike = dataclasses.replace(ORIN_NANO, torch_efficiency=ORIN_NANO.ort_efficiency)

    def behind(shape: OperatorShape) -> float:
        return latency_s(alike, shape, TORCH) - latency_s(alike, shape, ORT)

    assert abs(behind(one)) < 1e-4
    assert behind(two) > 1e-3


def test_half_of_weights_fits_at_the_size_of_the_caches() -> None:
    assert fitting(ORIN_NANO, ORIN_NANO.cache_bytes) == 0.5
    assert fitting(ORIN_NANO, 0) == 1.0


def test_deviations_depend_on_the_seed_and_on_nothing_else(table: OperatorTable) -> None:
    again, plain = jetson_like_table(seed=1), jetson_like_table(PLAIN)

    shape = next(s for s in table.shapes() if s.kind == "linear")
    ours, other, exact = (t.cost(shape, TORCH).latency for t in (table, again, plain))
    assert ours is not None
    assert other is not None
    assert exact is not None
    assert ours.median_s != other.median_s
    assert exact.median_s == pytest.approx(latency_s(ORIN_NANO, shape, TORCH))
    logs = [
        math.log(cost.latency.median_s / latency_s(ORIN_NANO, cost.shape, cost.backend))
        for cost in table.costs.values()
        if cost.latency is not None and fitting(ORIN_NANO, cost.shape.weight_bytes) > 0.99
    ]
    spread = math.sqrt(sum(x * x for x in logs) / len(logs))
    assert spread == pytest.approx(ORIN_NANO.small_sigma, rel=0.2)

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ProfileError
from edgewise.profiles.operators import (
    ALL_KINDS,
    AttentionShape,
    Correctness,
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    SwitchCost,
    parse_shape,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

POLICY = ThreadPolicy(threads=1)
LATENCY = LatencySummary(
    mean_s=2e-5, median_s=2e-5, std_s=1e-6, min_s=1e-5, max_s=3e-5, p90_s=3e-5, p95_s=3e-5,
    p99_s=3e-5, median_low_s=1.9e-5, median_high_s=2.1e-5, calls=500, samples=500,
)  # fmt: skip

attentions = st.builds(
    AttentionShape,
    heads=st.integers(1, 64),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    past=st.integers(0, 4096),
    qk_norm=st.sampled_from(["", "head", "full"]),
    post_norm=st.booleans(),
)
shapes = st.sampled_from(ALL_KINDS).flatmap(
    lambda kind: st.builds(
        OperatorShape,
        kind=st.just(kind),
        m=st.integers(0, 2048),
        k=st.integers(1, 10_000),
        n=st.integers(1, 200_000),
        bias=st.booleans(),
        function=st.sampled_from(["", "silu", "gelu-packed", "rmsnorm"]),
        attention=attentions if kind in {"layer", "attention", "rope"} else st.none(),
    )
)


def _shape(kind: str, m: int = 3, k: int = 8, n: int = 12, **fields: Any) -> OperatorShape:
    return OperatorShape(kind=kind, m=m, k=k, n=n, **fields)  # type: ignore[arg-type]


def _cost(
    shape: OperatorShape, backend: str = "torch:cpu", *, passed: bool = True, failed: bool = False
) -> OperatorCost:
    return OperatorCost(
        shape=shape,
        backend=backend,
        latency=None if failed else LATENCY,
        correctness=Correctness(
            passed=passed, max_abs=0.0, mean_abs=0.0, max_rel=0.0, rtol=1e-4, atol=1e-5
        ),
        energy=Energy(),
        thread_policy=POLICY,
        reason="it refused" if failed else "",
    )


def _table(*costs: OperatorCost, switches: tuple[SwitchCost, ...] = ()) -> Any:
    return table_of(
        costs,
        switches,
        name="t",
        device_id="d",
        device={},
        thread_policy=POLICY,
        provenance="measured",
    )


@given(shapes)
def test_a_shape_is_read_back_from_its_key(shape: OperatorShape) -> None:
    assert parse_shape(shape.key) == shape


@given(shapes, shapes)
def test_two_shapes_are_equal_exactly_when_their_keys_are(
    one: OperatorShape, other: OperatorShape
) -> None:
    assert (one == other) == (one.key == other.key)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "linear",
        "linear m=1 k=2",
        "conv m=1 k=2 n=3",
        "linear m=one k=2 n=3",
        "linear m=-1 k=2 n=3",
        "linear m=1 k=0 n=3",
        "layer m=1 k=2 n=3",
        "linear m=1 k=2 n=3 heads=2/1x4",
        "attention m=1 k=2 n=3 heads=2/1 past=0",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ProfileError, match="no key"):
        parse_shape(key)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="linear"):
        _shape("lineer")


def test_operations_and_weights_are_those_of_the_arrays_that_numpy_multiplies() -> None:
    m, k, n = 3, 8, 12
    x = np.ones((m, k))
    gate, up, down = np.ones((n, k)), np.ones((n, k)), np.ones((k, n))
    multiplied = [x @ gate.T, x @ up.T, np.ones((m, n)) @ down.T]
    flops = sum(2 * y.size * inner for y, inner in zip(multiplied, (k, k, n), strict=True))
    mlp = _shape("mlp", function="silu-gated")

    assert mlp.flops == flops
    assert mlp.weight_bytes == 4 * (gate.size + up.size + down.size)
    assert mlp.output_bytes == 4 * multiplied[-1].size
    assert _shape("linear", bias=True).weight_bytes == 4 * (gate.size + n)
    assert _shape("norm_linear").weight_bytes == 4 * (gate.size + k)
    assert _shape("norm_mlp").weight_bytes == mlp.weight_bytes + 4 * k
    assert _shape("rmsnorm", k=8, n=8).weight_bytes == 4 * 8
    assert _shape("layernorm", k=8, n=8, bias=True).weight_bytes == 4 * 16


def test_a_layer_hands_on_its_keys_and_values_too() -> None:
    attention = AttentionShape(heads=4, kv_heads=2, head_dim=2)
    layer = _shape("layer", attention=attention)
    q, kv = 8, 4

    assert layer.output_bytes == 4 * 3 * (8 + 2 * kv)
    assert layer.flops == 2 * 3 * (8 * (2 * q + 2 * kv) + 3 * 8 * 12)


def test_what_has_no_matrix_has_no_operations() -> None:
    assert {_shape(kind).flops for kind in ("rmsnorm", "activation", "add", "embedding")} == {0}


@pytest.mark.parametrize(
    ("kind", "segment", "fixed"),
    [("linear", False, False), ("mlp", True, False), ("add", False, True)],
)
def test_every_kind_is_an_operator_a_segment_or_fixed(
    kind: str, *, segment: bool, fixed: bool
) -> None:
    assert (_shape(kind).is_segment, _shape(kind).is_fixed) == (segment, fixed)


def test_rows_that_failed_or_are_wrong_are_excluded_and_kept() -> None:
    good, wrong, failed = (_shape("linear", m=m) for m in (1, 2, 3))
    table = _table(
        _cost(good), _cost(wrong, "b:x", passed=False), _cost(failed, "c:x", failed=True)
    )

    assert table.backends() == ("torch:cpu",)
    assert [c.shape for c in table.excluded()] == [wrong, failed]
    assert table.shapes() == (good, wrong, failed)


def test_a_missing_row_names_the_nearest_shape() -> None:
    table = _table(_cost(_shape("linear", m=16)))

    with pytest.raises(ProfileError, match="linear m=16 k=8 n=12"):
        table.cost(_shape("linear", m=17), "torch:cpu")


def test_staying_on_a_backend_costs_nothing_and_an_unmeasured_switch_is_refused() -> None:
    table = _table(_cost(_shape("linear")))

    assert table.switch("a:x", "a:x").at_s(1e6) == 0.0
    with pytest.raises(ProfileError, match="switch cost"):
        table.switch("a:x", "b:x")


def test_a_switch_is_affine_and_never_below_zero() -> None:
    switch = SwitchCost(source="a:x", target="b:x", fixed_s=1e-5, per_byte_s=1e-10)

    assert switch.at_s(1e5) == pytest.approx(2e-5)
    assert switch.at_j(1e5) is None
    assert dataclasses.replace(switch, fixed_s=-1.0).at_s(0) == 0.0
    assert dataclasses.replace(switch, fixed_j=1e-3).at_j(10) == pytest.approx(1e-3)


def test_a_table_cannot_be_changed() -> None:
    table = _table(_cost(_shape("linear")))

    with pytest.raises(TypeError):
        table.costs[_shape("mlp"), "x"] = None

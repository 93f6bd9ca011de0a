from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.backends.base import buddy_segments, check_close, empty_aligned
from edgewise.errors import BackendError

SIZES = st.integers(1, 70)


@settings(deadline=None)
@given(SIZES)
def test_buddy_segments_hold_every_single_stage_and_the_whole(num: int) -> None:
    found = set(buddy_segments(num))

    assert {(k, k + 1) for k in range(num)} <= found
    assert (0, num) in found


@settings(deadline=None)
@given(SIZES)
def test_buddy_segments_nest_or_are_apart(num: int) -> None:
    found = buddy_segments(num)

    for a, b in found:
        for c, d in found:
            apart = b <= c or d <= a
            nested = (a <= c and d <= b) or (c <= a and b <= d)
            assert apart or nested


@settings(deadline=None)
@given(SIZES)
def test_each_longer_buddy_segment_is_two_halves_that_differ_by_one_at_most(num: int) -> None:
    found = set(buddy_segments(num))

    for a, b in found:
        if b - a > 1:
            halves = [m for m in range(a + 1, b) if (a, m) in found and (m, b) in found]
            assert any(abs((m - a) - (b - m)) <= 1 for m in halves)


@settings(deadline=None)
@given(SIZES)
def test_buddy_segments_hold_each_weight_log2_times_at_most(num: int) -> None:
    stages = sum(stop - start for start, stop in buddy_segments(num))

    assert stages <= num * (math.ceil(math.log2(num)) + 1)
    assert len(buddy_segments(num)) == 2 * num - 1


@settings(deadline=None)
@given(SIZES, st.data())
def test_from_any_position_to_any_later_one_few_buddy_segments_lead(
    num: int, data: st.DataObject
) -> None:
    found = set(buddy_segments(num))
    start = data.draw(st.integers(0, num - 1))
    stop = data.draw(st.integers(start + 1, num))

    steps, position = 0, start
    while position < stop:
        position = max(b for a, b in found if a == position and b <= stop)
        steps += 1

    assert steps <= 2 * math.ceil(math.log2(num)) + 1


def test_an_aligned_array_can_be_shared_by_any_runtime() -> None:
    for shape in [(1,), (3, 5), (1, 3, 17, 17), (2, 0)]:
        array = empty_aligned(shape)
        assert array.shape == shape
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0 or not array.size


def close(found: object, expected: object) -> float:
    return check_close(
        np.array(found, np.float32), np.array(expected, np.float32), what="stage 0", backend="here"
    )


def test_the_comparison_allows_a_ten_thousandth_of_each_value() -> None:
    assert close([1.00009, 2.0], [1.0, 2.0]) <= 1.0
    with pytest.raises(BackendError, match="stage 0"):
        close([1.0002, 1.0], [1.0, 1.0])


def test_the_comparison_is_relative_to_the_scale_of_the_tensor() -> None:
    assert close([1e-25, 1e-30 + 9e-31], [1e-25, 1e-30]) <= 1.0
    assert close([1e-3, 100.0], [0.0, 100.0]) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(BackendError, match="tolerance"):
        close([2e-25, 1e-30], [1e-25, 1e-30])


def test_the_comparison_refuses_what_is_not_finite() -> None:
    for found, expected in [
        ([np.nan], [1.0]),
        ([np.inf], [1.0]),
        ([1.0], [np.nan]),
        ([np.inf], [np.inf]),
    ]:
        with pytest.raises(BackendError, match="wrongly"):
            close(found, expected)


def test_the_comparison_refuses_another_shape_even_if_it_could_be_stretched() -> None:
    with pytest.raises(BackendError, match="shape"):
        close([[1.0, 1.0]], [1.0, 1.0])


def test_zeros_equal_zeros() -> None:
    assert close([0.0, 0.0], [0.0, 0.0]) == 0.0

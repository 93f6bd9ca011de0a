from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.units import check_budget_s, format_bytes, format_duration, parse_duration_s


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("15 ms", 0.015),
        ("15ms", 0.015),
        ("  1.5 s  ", 1.5),
        (".5 s", 0.5),
        ("2. s", 2.0),
        ("250 us", 250e-6),
        ("250 µs", 250e-6),
        ("250 μs", 250e-6),  # the Greek letter, where the line above has the micro sign
        ("40 ns", 40e-9),
        ("2 min", 120.0),
        ("1e-3 s", 1e-3),
        ("+3 ms", 3e-3),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(duration_s, rel=1e-12)


def test_a_number_without_a_unit_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match="'15' has no unit") as caught:
        parse_duration_s("15")
    assert caught.value.help == "write '15 ms' or '15 s'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("15 mS", "unknown unit 'mS'"),
        ("15 hours", "unknown unit 'hours'"),
        ("", "such as '15 ms'"),
        ("soon", "such as '15 ms'"),
        ("1,5 s", "such as '15 ms'"),
        ("1 2 s", "such as '15 ms'"),
        ("ms", "such as '15 ms'"),
        ("nan s", "such as '15 ms'"),
        ("inf s", "such as '15 ms'"),
        ("0x10 s", "such as '15 ms'"),
        ("15 ms please", "such as '15 ms'"),
        ("0 ms", "above zero, found '0 ms'"),
        ("-3 ms", "above zero, found '-3 ms'"),
        ("1e999 s", "finite"),
        ("1e-999 s", "above zero"),
    ],
)
def test_what_is_no_duration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration_s(text)
    assert message in caught.value.message
    assert caught.value.help


@pytest.mark.parametrize("budget_s", [1, 0.015, 1e-9, 1e9])
def test_a_finite_time_above_zero_is_a_budget(budget_s: float) -> None:
    found = check_budget_s(budget_s)

    assert found == budget_s
    assert isinstance(found, float)


@pytest.mark.parametrize("budget_s", [0, -0.0, -1, math.nan, math.inf, -math.inf])
def test_another_number_is_no_budget(budget_s: float) -> None:
    with pytest.raises(ConfigError, match="finite time above zero"):
        check_budget_s(budget_s)


@pytest.mark.parametrize("budget_s", [True, False, "15", None, [0.1]], ids=repr)
def test_something_else_is_no_budget_either(budget_s: object) -> None:
    with pytest.raises(ConfigError, match="expected a budget in seconds, found"):
        check_budget_s(budget_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (90.0, "90 s"),
        (1.0, "1 s"),
        (0.01234, "12.3 ms"),
        (1e-3, "1 ms"),
        (2e-6, "2 µs"),
        (4e-8, "40 ns"),
        (-0.002, "-2 ms"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_durations_are_written_with_a_fitting_unit(duration_s: float | None, text: str) -> None:
    assert format_duration(duration_s) == text


@settings(deadline=None)  # the machine may be busy
@given(st.floats(1e-9, 1e4))
def test_what_is_written_can_be_read_again(duration_s: float) -> None:
    # Three digits are shown.
    assert parse_duration_s(format_duration(duration_s)) == pytest.approx(duration_s, rel=5.1e-3)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3 MiB"),
        (5 * 2**30, "5 GiB"),
        (2**43, "8192 GiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size_bytes: float | None, text: str) -> None:
    assert format_bytes(size_bytes) == text

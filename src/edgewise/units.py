"""Quantities as people write them, to and from SI base units."""

from __future__ import annotations

import math
import re

from edgewise.errors import ConfigError

_TIME_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Zµμ]*)\s*")


def parse_duration_s(text: str) -> float:
    """Read a positive duration with its unit, for example ``"15 ms"``.

    Args:
        text: A number and one of ns, us, µs, ms, s, min.

    Returns:
        Seconds, greater than zero and finite.

    Raises:
        ConfigError: No unit, an unknown unit, not a number, or not greater than zero.

    Example:
        >>> parse_duration_s("15 ms")
        0.015
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"expected a duration such as '15 ms', found {text!r}",
            help="write a number and a unit: ns, us, ms, s or min",
        )
    number, unit = match.groups()
    if not unit:
        raise ConfigError(
            f"the duration {text!r} has no unit", help=f"write '{number} ms' or '{number} s'"
        )
    if unit not in _TIME_UNITS_S:
        raise ConfigError(
            f"unknown unit {unit!r} in the duration {text!r}", help="use ns, us, ms, s or min"
        )
    return check_budget_s(float(number) * _TIME_UNITS_S[unit], said=text)


def check_budget_s(budget_s: float, *, said: str | None = None) -> float:
    """Return a latency budget that is a finite number of seconds above zero.

    Args:
        budget_s: Seconds.
        said: What the user wrote, for the message; the number itself by default.

    Raises:
        ConfigError: The budget is zero, negative, NaN, infinite or not a number.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float):
        raise ConfigError(
            f"expected a budget in seconds, found {budget_s!r} of type {type(budget_s).__name__}",
            help="pass a number of seconds, for example budget_s=0.015",
        )
    if not math.isfinite(budget_s) or budget_s <= 0:
        raise ConfigError(
            f"a latency budget must be a finite time above zero, found {said or budget_s!r}",
            help="give the time the answer may take, for example '15 ms' (budget_s=0.015)",
        )
    return float(budget_s)


def format_duration(duration_s: float | None) -> str:
    """Write a duration for people, three significant digits and a fitting unit.

    Example:
        >>> format_duration(0.01234), format_duration(None), format_duration(2e-6)
        ('12.3 ms', '–', '2 µs')
    """
    if duration_s is None:
        return "–"
    if not math.isfinite(duration_s):
        return str(duration_s)
    size = abs(duration_s)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= scale:
            return f"{duration_s / scale:.3g} {unit}"
    return f"{duration_s / 1e-9:.3g} ns" if size else "0 s"


def format_bytes(size_bytes: float | None) -> str:
    """Write a size for people in binary units.

    Example:
        >>> format_bytes(1536), format_bytes(None)
        ('1.5 KiB', '–')
    """
    if size_bytes is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"

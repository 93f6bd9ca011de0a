from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.clock import VirtualClock
from edgewise.device import load_between, other_load, read_cpu_counters
from edgewise.device.load import CpuCounters

Plant = Callable[[Mapping[str, str]], Path]


def counters(
    *, user: int = 0, idle: int = 0, iowait: int = 0, steal: int = 0, own: int = 0
) -> dict[str, str]:
    return {
        "proc/stat": f"cpu  {user} 0 0 {idle} {iowait} 0 0 {steal} 0 0\ncpu0 1 0\ncpu1 1 0\n",
        # The name of a process may hold anything.
        "proc/self/stat": f"42 (a) b (c) S {' 0' * 10} {own} 0 0 0 20 0 1\n",
    }


class _MachineThatWorks(VirtualClock):
    """While it sleeps, the machine's counters move on."""

    def __init__(self, wake: Callable[[], object]) -> None:
        super().__init__()
        self._wake = wake

    def sleep_s(self, duration_s: float) -> None:
        super().sleep_s(duration_s)
        self._wake()


def test_own_work_is_not_other_load(plant: Plant) -> None:
    root = plant(counters(user=100, idle=1000, own=50))
    clock = _MachineThatWorks(lambda: plant(counters(user=150, idle=1040, steal=10, own=80)))

    load = other_load(0.5, root=root, clock=clock)

    assert load.other_ratio == pytest.approx(20 / 100)
    assert load.own_ratio == pytest.approx(30 / 100)
    assert load.steal_ratio == pytest.approx(10 / 100)
    assert load.other_cores == pytest.approx(0.4)
    assert load.window_s == 0.5


def test_a_window_in_which_no_tick_passes_is_unknown(plant: Plant) -> None:
    root = plant(counters(user=100, idle=1000))

    load = other_load(0.001, root=root, clock=VirtualClock())

    assert load.other_ratio is None
    assert "too short" in load.reason


def test_counters_that_step_back_never_give_a_negative_load(plant: Plant) -> None:
    before = read_cpu_counters(plant(counters(user=100, idle=1000, iowait=50)))
    after = read_cpu_counters(plant(counters(user=90, idle=1200, iowait=20)))

    assert load_between(before, after, window_s=1.0).other_ratio == 0.0


@pytest.mark.parametrize("text", ["", "<unknown>\n", "cpu  a b c d\n", "cpu  1 2\n"])
def test_an_unreadable_table_is_unknown_with_the_reason(plant: Plant, text: str) -> None:
    root = plant({**counters(), "proc/stat": text})

    load = other_load(0.5, root=root, clock=VirtualClock())

    assert load.other_ratio is None
    assert "/proc/stat" in load.reason


@given(
    own=st.integers(0, 1000),
    other=st.integers(0, 1000),
    steal=st.integers(0, 1000),
    idle=st.integers(1, 1000),
)
def test_shares_add_up_to_what_was_not_idle(own: int, other: int, steal: int, idle: int) -> None:
    start = CpuCounters(busy_ticks=7, steal_ticks=5, total_ticks=30, own_ticks=3, cores=4)
    total = own + other + steal + idle
    end = CpuCounters(
        busy_ticks=7 + own + other,
        steal_ticks=5 + steal,
        total_ticks=30 + total,
        own_ticks=3 + own,
        cores=4,
    )

    load = load_between(start, end, window_s=1.0)

    assert load.other_ratio is not None
    assert load.own_ratio is not None
    assert load.steal_ratio is not None
    shares = load.other_ratio + load.own_ratio + load.steal_ratio
    assert shares == pytest.approx(1 - idle / total)

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device import read_clocks, read_frequencies_hz, timer_quality

Plant = Callable[[Mapping[str, str]], Path]

CPUS = "sys/devices/system/cpu"


def test_frequencies_are_read_in_hertz(plant: Plant) -> None:
    root = plant(
        {
            f"{CPUS}/present": "0-1\n",
            f"{CPUS}/online": "0-1\n",
            f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "1907200\n",
            f"{CPUS}/cpu0/cpufreq/cpuinfo_max_freq": "2265600\n",
            f"{CPUS}/cpu0/cpufreq/scaling_governor": "schedutil\n",
            f"{CPUS}/cpu1/cpufreq/scaling_cur_freq": "115200\n",
        }
    )

    clocks = read_clocks(root)

    assert read_frequencies_hz(root) == {0: 1907200e3, 1: 115200e3}
    assert (clocks[0].max_hz, clocks[0].governor, clocks[0].quality) == (
        2265600e3,
        "schedutil",
        "ok",
    )
    assert clocks[1].max_hz is None


def test_a_virtual_machine_without_cpufreq_says_why_it_knows_no_frequency(plant: Plant) -> None:
    root = plant({f"{CPUS}/present": "0-1\n", f"{CPUS}/online": "0-1\n"})

    clocks = read_clocks(root)

    assert read_frequencies_hz(root) == {}
    assert {each.quality for each in clocks.values()} == {"unsupported"}
    assert "cpufreq" in clocks[0].reason


def test_an_offline_core_is_masked(plant: Plant) -> None:
    root = plant({f"{CPUS}/present": "0-2\n", f"{CPUS}/online": "0,2\n"})

    assert read_clocks(root)[1].quality == "masked"


@pytest.mark.parametrize(
    "text",
    ["<unknown>\n", "-1\n", "", "0\n", "18446744073709551615\n", "\0"],
    ids=["a word", "negative", "empty", "zero", "largest number", "only NUL"],
)
def test_garbage_is_unknown_and_never_zero(plant: Plant, text: str) -> None:
    root = plant({f"{CPUS}/present": "0\n", f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": text})

    clock = read_clocks(root)[0]

    assert clock.current_hz is None
    assert clock.quality == "unsupported"
    assert clock.reason


def test_a_frequency_that_may_not_be_read_is_denied(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant({f"{CPUS}/present": "0\n", f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "1000\n"})
    (root / CPUS / "cpu0/cpufreq/scaling_cur_freq").chmod(0)
    as_somebody()

    assert read_clocks(root)[0].quality == "denied"


def test_an_unreadable_directory_does_not_raise(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant({f"{CPUS}/present": "0\n", f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "1000\n"})
    (root / CPUS / "cpu0").chmod(0)
    as_somebody()

    assert read_clocks(root)[0].current_hz is None


def test_a_machine_that_lists_no_cpu_has_no_clocks(plant: Plant) -> None:
    assert read_clocks(plant({})) == {}


def test_the_timer_of_this_machine_has_a_step_above_zero() -> None:
    timer = timer_quality()

    assert timer.step_s > 0
    assert timer.resolution_s > 0

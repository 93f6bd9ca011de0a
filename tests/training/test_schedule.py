from __future__ import annotations

import pytest

from edgewise.errors import ConfigError
from edgewise.training.schedule import Schedule


def test_the_papers_cifar_schedule_falls_at_half_and_at_three_quarters() -> None:
    rates = [Schedule().ratio(e, 200) for e in (0, 99.9, 100, 149.9, 150, 199)]

    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_papers_imagenet_schedule_falls_every_thirty_epochs() -> None:
    rates = [Schedule(kind="every").ratio(e, 90) for e in (0, 29.9, 30, 60, 89)]

    assert rates == pytest.approx([1, 1, 0.1, 0.01, 0.01])


def test_one_cycle_rises_to_the_highest_rate_and_ends_at_zero() -> None:
    schedule = Schedule(kind="one-cycle")

    assert schedule.ratio(0, 10) == pytest.approx(0.04)
    assert schedule.ratio(3, 10) == pytest.approx(1)
    assert schedule.ratio(10, 10) == pytest.approx(0, abs=1e-12)


def test_a_cosine_is_halfway_at_half() -> None:
    assert Schedule(kind="cosine").ratio(4, 8) == pytest.approx(0.5)


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        Schedule(kind="cosin")  # type: ignore[arg-type]


def test_steps_without_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one epoch apart"):
        Schedule(every_epochs=0)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.predict import HorizonMargins

Float64 = npt.NDArray[np.float64]
Units = Sequence[tuple[int, int]]

# Whole numbers: sums are exact, so both implementations see the same windows.
units_of = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), max_size=40)


def naive_ratios(
    units: Units, horizons: Sequence[float], level: float
) -> tuple[list[float], list[float], list[float]]:
    """By the definition: try every window from every start."""
    median, upper, worst = [], [], []
    for horizon in horizons:
        ratios = []
        for start in range(len(units)):
            for stop in range(start + 1, len(units) + 1):
                work = sum(p for p, _ in units[start:stop])
                if work >= horizon:
                    ratios.append(sum(o for _, o in units[start:stop]) / work)
                    break
        if not ratios:
            ratios = [sum(o for _, o in units) / sum(p for p, _ in units)]
        ratios.sort()
        median.append(ratios[len(ratios) // 2])
        upper.append(ratios[min(len(ratios), math.ceil((len(ratios) + 1) * level)) - 1])
        worst.append(ratios[-1])
    return (
        median,
        [max(upper[h:]) for h in range(len(horizons))],
        [max(worst[h:]) for h in range(len(horizons))],
    )


def filled(units: Units, *, level: float = 0.9, size: int = 512) -> HorizonMargins:
    margins = HorizonMargins([1.0, 3.0, 10.0], level=level, size=size)
    for predicted_s, observed_s in units:
        margins.add(predicted_s, observed_s)
    return margins


@settings(deadline=None)  # the machine may be busy
@given(units=units_of.filter(bool), level=st.sampled_from([0.5, 0.75, 0.9, 0.98, 0.999]))
def test_ratios_are_those_of_every_window_tried_one_by_one(units: Units, level: float) -> None:
    found = filled(units, level=level).ratios()

    for each, expected in zip(found, naive_ratios(units, [1, 3, 10], level), strict=True):
        assert each == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)  # the machine may be busy
@given(units=units_of.filter(bool), size=st.integers(1, 9))
def test_a_full_window_holds_the_latest_units_and_nothing_else(units: Units, size: int) -> None:
    found = filled(units, size=size)
    expected = filled(units[-size:])

    assert len(found) == min(size, len(units))
    for a, b in zip(found.ratios(), expected.ratios(), strict=True):
        assert a.tolist() == b.tolist()


@settings(deadline=None)  # the machine may be busy
@given(units=units_of, level=st.floats(0.5, 0.999))
def test_a_longer_horizon_never_has_a_wider_margin(units: Units, level: float) -> None:
    median, upper, worst = filled(units, level=level).ratios()

    assert (np.diff(upper) <= 0).all()
    assert (np.diff(worst) <= 0).all()
    assert (median <= upper).all()
    assert (upper <= worst).all()


def test_a_window_that_saw_nothing_believes_the_medians() -> None:
    for ratios in filled([]).ratios():
        assert ratios.tolist() == [1.0, 1.0, 1.0]


def test_a_disturbance_is_forgotten_once_the_window_has_moved_on() -> None:
    margins = filled([(1, 50)] * 8, size=8)
    assert margins.ratios()[1][0] == 50.0

    for _ in range(8):
        margins.add(1.0, 1.0)

    assert margins.ratios()[2].tolist() == [1.0, 1.0, 1.0]


def test_one_disturbed_unit_widens_short_horizons_more_than_long_ones() -> None:
    _, _, worst = filled([(1, 1)] * 20 + [(1, 10)] + [(1, 1)] * 20).ratios()

    assert worst.tolist() == [10.0, 4.0, 1.9]


@pytest.mark.parametrize(
    ("predicted_s", "observed_s"),
    [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_a_unit_without_a_finite_ratio_is_left_out(predicted_s: float, observed_s: float) -> None:
    margins = filled([(1, 2)])
    margins.add(predicted_s, observed_s)

    assert len(margins) == 1
    assert margins.ratios()[2][0] == 2.0


def test_a_horizon_that_vanishes_beside_the_work_still_takes_one_unit() -> None:
    margins = HorizonMargins([1e-30], size=4)
    for _ in range(4):
        margins.add(1.0, 3.0)

    assert margins.ratios()[1].tolist() == [3.0]


@pytest.mark.parametrize("level", [0.49, 1.0, math.nan, -1.0])
def test_a_level_outside_its_range_is_refused(level: float) -> None:
    with pytest.raises(ConfigError, match=r"margin level from 0\.5 up to 1"):
        HorizonMargins([1.0], level=level)


@pytest.mark.parametrize("horizons_s", [[], [0.0], [1.0, -1.0]], ids=["none", "zero", "negative"])
def test_horizons_must_be_amounts_of_work(horizons_s: list[float]) -> None:
    with pytest.raises(ConfigError, match="horizons above zero"):
        HorizonMargins(horizons_s)


def test_a_window_holds_at_least_one_unit() -> None:
    with pytest.raises(ConfigError, match="at least one unit"):
        HorizonMargins([1.0], size=0)


def independent(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield float(rng.lognormal(sigma=0.3))


def bursty(rng: np.random.Generator) -> Iterator[float]:
    """Calm for 200 units on average, then four times as slow for 50."""
    busy = False
    while True:
        if rng.random() < (1 / 50 if busy else 1 / 200):
            busy = not busy
        yield float(rng.lognormal(sigma=0.1)) * (4.0 if busy else 1.0)


@pytest.mark.parametrize("length", [1, 8], ids=["one unit", "eight units"])
@pytest.mark.parametrize(
    ("noise", "tolerance"),
    # 2000 draws of a share of 0.9 scatter by 0.007; bursts of 50 units leave some 30 of them.
    [(independent, 0.025), (bursty, 0.04)],
    ids=["independent", "bursty"],
)
def test_the_margin_covers_the_share_of_the_future_that_it_names(
    noise: Callable[[np.random.Generator], Iterator[float]], tolerance: float, length: int
) -> None:
    samples = noise(np.random.default_rng(3))
    margins = HorizonMargins([1.0, 8.0], level=0.9, size=512)
    for _ in range(512):
        margins.add(1.0, next(samples))
    covered = []
    for _ in range(16_000 // 8):
        bound = margins.ratios()[1][0 if length == 1 else 1]
        spent = [next(samples) for _ in range(8)]
        covered.append(np.mean(spent[:length]) <= bound)
        for each in spent:
            margins.add(1.0, each)

    assert np.mean(covered) == pytest.approx(0.9, abs=tolerance)


# Requests of units: share of the network, observed seconds, the network's prediction then.
aging_requests = st.lists(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 40), st.sampled_from([0.5, 1.0, 2.0, 4.0])),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=8,
)


def naive_aging_ratios(
    requests: Sequence[Sequence[tuple[int, int, float]]], horizon: float, level: float
) -> tuple[float, float, float]:
    """By the definition: each start, its prediction within its request, later ones at theirs."""
    units = [(r, *unit) for r, request in enumerate(requests) for unit in request]
    first = {r: request[0][2] for r, request in enumerate(requests)}
    ratios, longest = [], None
    for start, (own, _, _, whole) in enumerate(units):
        work = spent = 0.0
        for request, share, observed, _ in units[start:]:
            work += share * (whole if request == own else first[request])
            spent += observed
            if work >= horizon:
                ratios.append(spent / work)
                break
        if start == 0:
            longest = spent / work
    if not ratios:
        assert longest is not None
        ratios = [longest]
    ratios.sort()
    upper = ratios[min(len(ratios), math.ceil((len(ratios) + 1) * level)) - 1]
    return ratios[len(ratios) // 2], upper, ratios[-1]


@settings(deadline=None)
@given(requests=aging_requests, level=st.sampled_from([0.5, 0.9, 0.98]))
def test_a_window_is_judged_by_the_prediction_at_its_start(
    requests: Sequence[Sequence[tuple[int, int, float]]], level: float
) -> None:
    horizons = [1.0, 3.0, 10.0]
    margins = HorizonMargins(horizons, level=level)
    for request in requests:
        margins.begin_group()
        for share, observed_s, whole_s in request:
            margins.add(share * whole_s, observed_s, whole_s=whole_s)
    wholes = {whole for request in requests for _, _, whole in request}
    if len(wholes) == 1:
        return  # one prediction for all: the other tests' case
    found = np.array(margins.ratios())
    for h, horizon in enumerate(horizons):
        assert found[:, h] == pytest.approx(naive_aging_ratios(requests, horizon, level))


def test_a_prediction_that_grows_old_makes_longer_work_harder_to_foresee() -> None:
    margins = HorizonMargins([1.0, 4.0], level=0.9)
    for _ in range(20):
        margins.begin_group()
        for k in range(4):  # each stage is predicted rightly when it begins; the device slows down
            margins.add(1.0 + 0.1 * k, 1.0 + 0.1 * k, whole_s=4.0 + 0.4 * k)
    _, upper, _ = margins.ratios()
    assert upper[0] == pytest.approx(1.0)
    assert upper[1] == pytest.approx((1.0 + 1.1 + 1.2 + 1.3) / 4)


def test_only_windows_that_start_where_asked_count() -> None:
    margins = HorizonMargins([1.0], level=0.9)
    for _ in range(20):
        margins.add(1.0, 3.0, starts=False)
        margins.add(1.0, 2.0)
    assert [r[0] for r in margins.ratios()] == pytest.approx([2.0, 2.0, 2.0])


def test_only_states_of_about_the_present_speed_count_where_speeds_differ() -> None:
    margins = HorizonMargins([1.0], level=0.9, nearest=10)
    for _ in range(20):
        for whole_s, ratio in ((1.0, 3.0), (8.0, 1.5)):
            margins.begin_group()
            margins.add(1.0, ratio, whole_s=whole_s)
    at = {whole_s: margins.ratios(whole_s=whole_s)[1][0] for whole_s in (1.1, 7.0)}
    assert at == {1.1: pytest.approx(3.0), 7.0: pytest.approx(1.5)}
    assert margins.ratios()[2][0] == pytest.approx(3.0)

"""Measures what every unit costs in states of this machine that are brought about on purpose."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import probe_input
from edgewise.bench.background import Load
from edgewise.bench.quota import CpuQuota, QuotaUnavailable
from edgewise.clock import Clock, MonotonicClock
from edgewise.device.cores import usable_cores
from edgewise.device.monitor import Monitor
from edgewise.device.sensor import make_sensors
from edgewise.device.state import FEATURES, StateSource
from edgewise.errors import ConfigError, EdgeError
from edgewise.predict.state_samples import StateSamples

if TYPE_CHECKING:
    from edgewise.backends.base import Context, Program

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

QUOTAS = (1.0, 0.75, 0.5, 0.25)
# A predictor that is chosen by cross-validation needs more states than one that is given.
_MANY_QUOTAS = (1.0, 0.8, 0.6, 0.4, 0.25)
_QUOTA, _UTILISATION = "cpu.quota_ratio", "cpu.utilisation_ratio"

_log = logging.getLogger(__name__)


def measure_states(  # noqa: PLR0913 - a campaign's whole circumstances
    program: Program,
    *,
    quotas: Sequence[float] = QUOTAS,
    loads: Sequence[Sequence[Load]] = ((),),
    rounds: int = 5,
    passes: int = 8,
    settle_s: float = 0.25,
    clock: Clock | None = None,
    source: StateSource | None = None,
    quota: CpuQuota | None = None,
    seed: int = 0,
    say: Callable[[str], None] = _log.info,
) -> StateSamples:
    """Measure every stage and head in each pair of a CPU quota and a set of co-runners.

    All units run in turn, as in a request that looks at every exit. A quota makes a unit stand
    still now and then for many times its own length, so the median of single runs would hide it:
    each of the ``rounds`` samples of a unit is its mean over ``passes`` passes.

    Args:
        program: A loaded model.
        quotas: Shares of one core, in (0, 1]; 1 is no quota.
        loads: Sets of co-runners, an empty one for none. They are started and stopped here.
        rounds: Samples of each unit in each state.
        passes: Passes behind each sample.
        settle_s: How long a state lasts before it is measured, so that who reads it sees it whole.
        clock: Times the units; the machine's by default.
        source: Who reads the states. Where it does not know the quota or the utilisation, or there
            is none, what was imposed stands in, and ``say`` is told.
        quota: At work already; one is made where a quota below 1 asks for it.
        seed: Of the order of the states, which is drawn.
        say: Told what is going on.

    Returns:
        Units ``"stage:0"``, …, ``"head:0"``, …; all of `FEATURES`, NaN for what nobody knows.

    Raises:
        ConfigError: A number is out of range.
        QuotaUnavailable: A quota below 1 is not permitted here.
        EdgeError: A co-runner could not be started, or ended by itself.
    """
    if rounds < 1 or passes < 1 or not quotas or not loads:
        raise ConfigError("expected at least one round, pass, quota and set of co-runners")
    clock = clock or MonotonicClock()
    states = list(itertools.product(quotas, loads))
    num = program.model.num_exits
    features = np.full((len(states), len(FEATURES)), np.nan)
    seconds = np.full((len(states), rounds, 2 * num), np.nan)
    imposed: set[str] = set()
    start_s = clock.now_s()
    with contextlib.ExitStack() as stack:
        if quota is None and min(quotas) < 1.0:
            quota = stack.enter_context(CpuQuota())
        context = stack.enter_context(program.context())
        x = probe_input(program.model)
        _one_pass(context, x, num, clock)
        for turn, n in enumerate(np.random.default_rng(seed).permutation(len(states))):
            ratio, co_runners = states[n]
            names = " and ".join(load.label for load in co_runners) or "no co-runner"
            say(f"state {turn + 1} of {len(states)}: quota {ratio:.0%}, {names}")
            with _imposed(quota, ratio, co_runners):
                clock.sleep_s(settle_s)
                read: list[list[float]] = []
                for r in range(rounds):
                    times_s = [_one_pass(context, x, num, clock) for _ in range(passes)]
                    seconds[n, r] = np.mean(times_s, axis=0)
                    read.append(_features(source))
                _check_alive(co_runners)
            features[n] = _means(np.array(read))
            _fill_in(features[n], ratio, co_runners, imposed)
    for name in sorted(imposed):
        say(f"{name} is what was imposed, not what was read")
    return StateSamples(
        features=FEATURES,
        states=features,
        units=(*(f"stage:{k}" for k in range(num)), *(f"head:{k}" for k in range(num))),
        seconds=seconds,
        provenance="simulated" if program.backend == "null" else "measured",
        elapsed_s=clock.now_s() - start_s,
    )


def default_loads(cores: int) -> tuple[tuple[Load, ...], ...]:
    """Nobody; memory traffic with a periodic task; every core half busy."""
    return (
        (),
        (Load("map"), Load("audio")),
        (Load("cpu", duty_ratio=0.5, processes=cores),),
    )


def _many_loads(cores: int) -> tuple[tuple[Load, ...], ...]:
    """Enough of them to fit to, even where no quota is permitted."""
    half = ((Load("cpu", duty_ratio=0.5, processes=n),) for n in range(1, cores))
    whole = ((Load("cpu", processes=n),) for n in range(1, cores + 1))
    return (*default_loads(cores), *half, *whole)


def measure_this_machine(
    program: Program,
    *,
    rounds: int = 5,
    passes: int = 8,
    seed: int = 0,
    say: Callable[[str], None] = _log.info,
) -> StateSamples:
    """Measure in all the states that may be brought about here, watching the device meanwhile.

    Args:
        program: A loaded model.
        rounds: As for `measure_states`.
        passes: As for `measure_states`.
        seed: Of the order of the states.
        say: Told what is going on, and what is not permitted.

    Raises:
        EdgeError: As `measure_states`.
    """
    with contextlib.ExitStack() as stack:
        quota: CpuQuota | None = None
        try:
            quota = stack.enter_context(CpuQuota())
        except QuotaUnavailable as error:
            say(f"co-runners only, no CPU quota: {error.message}")
        monitor = stack.enter_context(Monitor(make_sensors()))
        return measure_states(
            program,
            quotas=_MANY_QUOTAS if quota is not None else (1.0,),
            loads=_many_loads(usable_cores().threads),
            rounds=rounds,
            passes=passes,
            source=monitor,
            quota=quota,
            seed=seed,
            say=say,
        )


@contextlib.contextmanager
def _imposed(quota: CpuQuota | None, ratio: float, loads: Sequence[Load]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for load in loads:
            stack.enter_context(load)
            if quota is not None:
                quota.exempt(load.pids)
        if quota is not None:
            stack.callback(quota.set_ratio, None)
            quota.set_ratio(ratio)
        yield


def _one_pass(context: Context, x: Float32, num: int, clock: Clock) -> list[float]:
    """Seconds of each stage, then of each head; every head runs after its stage."""
    context.set_boundary(0, x)
    stage_s, head_s = [], []
    for k in range(num):
        start_s = clock.now_s()
        context.run_segment(k, k + 1)
        middle_s = clock.now_s()
        context.run_head(k)
        stage_s.append(middle_s - start_s)
        head_s.append(clock.now_s() - middle_s)
    return stage_s + head_s


def _features(source: StateSource | None) -> list[float]:
    state = source.latest() if source is not None else None
    values = [state.value(name) if state is not None else None for name in FEATURES]
    return [np.nan if value is None else value for value in values]


def _means(read: Float64) -> Float64:
    """Mean of what was known, by column; NaN where nothing was."""
    known = np.isfinite(read)
    counts = known.sum(axis=0)
    sums = np.where(known, read, 0.0).sum(axis=0)
    means: Float64 = np.full(read.shape[1], np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _fill_in(row: Float64, ratio: float, loads: Sequence[Load], imposed: set[str]) -> None:
    cores = usable_cores().host or 1
    busy = sum(load.duty_ratio * load.processes for load in loads)
    for name, value in ((_QUOTA, ratio), (_UTILISATION, min(1.0, busy / cores))):
        at = FEATURES.index(name)
        if np.isnan(row[at]):
            row[at] = value
            imposed.add(name)


def _check_alive(loads: Sequence[Load]) -> None:
    for load in loads:
        if load.problem:
            raise EdgeError(
                f"the co-runner {load.label!r} died while it was needed: {load.problem}"
            )

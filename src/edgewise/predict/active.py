"""Which states to profile when profiling all of them takes hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.predict.kinds.physical import Terms
from edgewise.predict.kinds.physical import fit as fit_physical
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

CALIBRATION_SHARE = 0.25
_RIDGE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateChoice:
    """States to profile, as rows of the candidates; no row is in both.

    Attributes:
        fit: To fit on: they say most about the weights.
        calibrate: Drawn at random, so that bounds calibrated on them hold for all states.
    """

    fit: Rows
    calibrate: Rows

    @property
    def rows(self) -> Rows:
        """All of them."""
        return np.concatenate([self.fit, self.calibrate])


def choose_states(
    states: Float64, *, features: tuple[str, ...], count: int, seed: int = 0
) -> StateChoice:
    """Choose states: three quarters by design, one quarter at random to calibrate on.

    Args:
        states: [N, F], the candidates, finite.
        features: [F].
        count: How many to choose.
        seed: Of the draw.

    Raises:
        ConfigError: ``count`` is not between 2 and N.
    """
    if not 2 <= count <= len(states):
        raise ConfigError(f"expected 2 to {len(states)} states to choose, found {count}")
    rng = np.random.default_rng(seed)
    aside = max(1, round(CALIBRATION_SHARE * count))
    calibrate = np.sort(rng.permutation(len(states))[:aside])
    rest = np.setdiff1d(np.arange(len(states)), calibrate)
    fit = rest[d_optimal(states[rest], features=features, count=count - aside)]
    return StateChoice(fit=fit, calibrate=calibrate)


def d_optimal(
    states: Float64,
    *,
    features: tuple[str, ...],
    count: int,
    cost: Float64 | None = None,
    have: Rows | None = None,
) -> Rows:
    """Choose the states that tell most about the physical model's weights.

    Each next state is the one whose prediction is most uncertain given those before it, which
    is the greedy way to a large determinant of the information matrix.

    Args:
        states: [N, F], the candidates, finite.
        features: [F].
        count: How many to choose.
        cost: [N], expected cost in each state. The model is fitted to relative errors, so a state
            counts by its terms over its cost; without it, over the sum of its terms.
        have: Rows profiled already; they are not chosen again.

    Returns:
        [count], rows in the order chosen.

    Source:
        Fedorov, Theory of Optimal Experiments (1972); the update of the variances is the
        Sherman–Morrison formula.
    """
    have = np.zeros(0, dtype=np.int64) if have is None else have
    if count > len(states) - len(have):
        raise ConfigError(
            f"expected at most {len(states) - len(have)} states to choose, found {count}"
        )
    terms = Terms(features)(states)
    terms = terms / (terms.sum(axis=1) if cost is None else cost)[:, None]
    terms /= np.sqrt((terms**2).mean(axis=0))
    inverse = np.linalg.inv(_RIDGE * np.eye(terms.shape[1]) + terms[have].T @ terms[have])
    variance = np.einsum("np,pq,nq->n", terms, inverse, terms, optimize=True)
    variance[have] = -np.inf
    chosen: list[int] = []
    for _ in range(count):
        row = int(np.argmax(variance))
        chosen.append(row)
        along = inverse @ terms[row]
        spread = 1.0 + float(terms[row] @ along)
        inverse -= np.outer(along, along) / spread
        variance -= (terms @ along) ** 2 / spread
        variance[row] = -np.inf
    return np.array(chosen, dtype=np.int64)


def by_variance(  # noqa: PLR0913 - all named
    states: Float64,
    *,
    features: tuple[str, ...],
    measure: Callable[[Rows], StateSamples],
    count: int,
    rounds: int = 4,
    members: int = 8,
    seed: int = 0,
) -> StateSamples:
    """Profile in rounds, each time where an ensemble disagrees most.

    The first round is D-optimal; later ones take, at random, states in proportion to the relative
    variance of physical models fitted to bootstrap samples of what is known so far.

    Args:
        states: [N, F], the candidates, finite.
        features: [F].
        measure: Profiles the states of these rows.
        count: How many states in all.
        rounds: In how many rounds.
        members: Models in the ensemble.
        seed: Of all that is drawn.

    Returns:
        All that was measured.
    """
    rng = np.random.default_rng(seed)
    rows = d_optimal(
        states, features=features, count=max(count // rounds, len(Terms(features)) + 1)
    )
    samples = measure(rows)
    sizes = [len(part) for part in np.array_split(np.arange(count - len(rows)), rounds - 1)]
    for size in sizes:
        variance = _disagreement(samples, states, features, members=members, rng=rng)
        variance[rows] = 0.0
        drawn = rng.choice(len(states), size=size, replace=False, p=variance / variance.sum())
        rows = np.concatenate([rows, drawn])
        samples = join([samples, measure(drawn)])
    return samples


def join(parts: list[StateSamples]) -> StateSamples:
    """Samples of one device and model taken in turns; time spent is added where all know it."""
    first = parts[0]
    times = [part.elapsed_s for part in parts]
    joules = [part.joules for part in parts]
    return StateSamples(
        features=first.features,
        states=np.concatenate([part.states for part in parts]),
        units=first.units,
        seconds=np.concatenate([part.seconds for part in parts]),
        provenance=first.provenance,
        joules=None if any(j is None for j in joules) else np.concatenate(joules),  # type: ignore[arg-type]
        elapsed_s=None if None in times else sum(t for t in times if t is not None),
    )


def saved_s(samples: StateSamples, num_all: int) -> float | None:
    """Time that profiling only these states, and not all, has saved, seconds.

    Returns:
        ``None`` where it is not known how long these took.
    """
    if samples.elapsed_s is None:
        return None
    return samples.elapsed_s / samples.num_states * (num_all - samples.num_states)


def _disagreement(
    samples: StateSamples,
    states: Float64,
    features: tuple[str, ...],
    *,
    members: int,
    rng: np.random.Generator,
) -> Float64:
    """Relative variance over an ensemble, mean over units: [N]."""
    predictions = []
    for _ in range(members):
        model = fit_physical(
            samples.take(rng.integers(samples.num_states, size=samples.num_states))
        )
        columns = [features.index(name) for name in model.features]
        predictions.append(model.predict(states[:, columns]))
    stacked = np.stack(predictions)  # [M, N, U]
    relative: Float64 = (stacked.var(axis=0) / stacked.mean(axis=0) ** 2).mean(axis=1)
    return relative + 1e-12

"""Which kind of predictor is best here, found by cross-validation over states, and its bounds."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import ConfigError, ProfileError, nearest_names
from edgewise.predict.features import unit_groups, usable_features, whole_states
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.predictor import Predictor, fit_predictor, predictor_kinds
from edgewise.predict.state_samples import StateSamples
from edgewise.profiles.statistics import conformal_quantile
from edgewise.units import format_bytes, format_duration

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Options = Mapping[str, Mapping[str, Any]]

_ENERGY_STEPS = 1500
CALIBRATION_SHARE = 0.25
REFERENCE_KINDS = ("boosted",)  # cannot be kept in files, so never chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions were from every single observation in states not fitted to.

    Attributes:
        mae_s: Mean absolute error, seconds.
        mape_ratio: Mean absolute error over the observed cost.
        p95_ape_ratio: 95th percentile of the same.
        pinball_s: Mean pinball loss of the upper bound, seconds.
        coverage_ratio: Share of observations at or below the upper bound.
    """

    mae_s: float
    mape_ratio: float
    p95_ape_ratio: float
    pinball_s: float
    coverage_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindScore:
    """One kind under cross-validation.

    Attributes:
        kind: Its name.
        groups: Errors of ``"stage"`` and ``"head"`` units.
        pinball_s: Mean pinball loss over all units, of each fold, seconds.
        coverage_ratio: Over all units.
        num_bytes: Memory of one fit, bytes.
        fit_s: Mean time of one fit, seconds.
    """

    kind: str
    groups: Mapping[str, Errors]
    pinball_s: tuple[float, ...]
    coverage_ratio: float
    num_bytes: int
    fit_s: float

    @property
    def mean_pinball_s(self) -> float:
        """Mean over the folds, seconds."""
        return math.fsum(self.pinball_s) / len(self.pinball_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Kinds compared on the same folds.

    Attributes:
        scores: Of the kinds that could be fitted.
        skipped: Kinds that could not, each with the reason.
        features: What was read.
        left_out: Features that were not, each with the reason.
        level: Of the upper bound.
        num_states: How many states.
        num_folds: In how many folds.
    """

    scores: tuple[KindScore, ...]
    skipped: Mapping[str, str]
    features: tuple[str, ...]
    left_out: Mapping[str, str]
    level: float
    num_states: int
    num_folds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kind that was chosen, and why, in a sentence."""

    kind: str
    reason: str


def same_states(samples: StateSamples) -> Int64:
    """Number the states: rows that agree in all usable features to 0.01 are one state: [N]."""
    used, _ = usable_features(samples)
    states = samples.states[:, [samples.features.index(name) for name in used]]
    if not used:
        return np.arange(samples.num_states)
    numbers: Int64 = np.unique(np.round(states, 2), axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def assign_folds(samples: StateSamples, *, folds: int, seed: int) -> Int64:
    """Draw a fold for every row; rows of one state share it: [N]."""
    numbers = same_states(samples)
    order = np.random.default_rng(seed).permutation(numbers.max() + 1)
    fold: Int64 = order[numbers] % folds
    return fold


def states_needed(kind: str, features: tuple[str, ...], *, folds: int | None = None) -> int:
    """Fewest states for a fit with a calibration split, within folds if there are any."""
    if kind not in predictor_kinds():
        raise ConfigError(
            f"unknown kind of predictor {kind!r}", help=nearest_names(kind, predictor_kinds())
        )
    fewest: int = importlib.import_module(f"edgewise.predict.kinds.{kind}").states_needed(features)
    kept = (1 - CALIBRATION_SHARE) * (1.0 if folds is None else 1 - 1 / folds)
    # One more for the fold and for the calibration: neither may be empty.
    return max(math.ceil(fewest / kept), fewest + 1) + (folds is not None)


def split_off(
    samples: StateSamples, share: float, *, seed: int
) -> tuple[StateSamples, StateSamples]:
    """Set whole states aside.

    Returns:
        Those that stay and those set aside, drawn at random; neither is empty.

    Raises:
        ProfileError: There is only one state.
    """
    numbers = same_states(samples)
    count = int(numbers.max()) + 1
    if count < 2:
        raise ProfileError(
            "expected at least 2 different states, to fit on one and calibrate on the other; found"
            " 1",
            help="profile more states, or fit kind static",
        )
    aside = min(count - 1, max(1, round(share * count)))
    chosen = np.random.default_rng(seed).permutation(count)[:aside]
    inside = np.isin(numbers, chosen)
    return samples.take(np.flatnonzero(~inside)), samples.take(np.flatnonzero(inside))


def predicted_s(predictor: Predictor, samples: StateSamples) -> Float64:
    """Predictions in the states of samples: [N, U]."""
    columns = [samples.features.index(name) for name in predictor.features]
    return predictor.predict(samples.states[:, columns])


def upper_ratios(predictor: Predictor, calibration: StateSamples, level: float) -> Float64:
    """Split-conformal bound of each unit, as a ratio to its prediction: [U].

    A unit with too few observations takes the bound over all stages, or all heads.

    Source:
        `edgewise.profiles.statistics.conformal_quantile`. Repeats in one state are alike, so with
        few states the level is reached on average over calibrations rather than in each.

    Raises:
        ProfileError: Not even all units together have enough observations for the level.
    """
    ratios = calibration.seconds / predicted_s(predictor, calibration)[:, None, :]
    upper = np.empty(len(calibration.units))
    for where in unit_groups(calibration.units).values():
        pooled = _conformal(ratios[..., where], level)
        for unit in range(where.start, where.stop):
            own = _conformal(ratios[..., unit], level)
            upper[unit] = own if math.isfinite(own) else pooled
    if not np.isfinite(upper).all():
        fewest = math.ceil(round(level / (1 - level), 9))
        found = ", ".join(
            f"{int(np.isfinite(ratios[..., where]).sum())} of {group}s"
            for group, where in unit_groups(calibration.units).items()
        )
        raise ProfileError(
            f"an upper bound at level {level} needs at least {fewest} observations to calibrate on,"
            f" found {found} in {calibration.num_states} states",
            help="profile more states or repeats, or ask for a lower level",
        )
    return upper


def cross_validate(  # noqa: PLR0913 - all named
    samples: StateSamples,
    *,
    kinds: Sequence[str] | None = None,
    folds: int = 5,
    level: float = 0.95,
    seed: int = 0,
    options: Options | None = None,
    clock: Clock | None = None,
) -> Comparison:
    """Compare kinds on states that they were not fitted to.

    Each fold's training states are split once more, to calibrate the upper bound. No state is in
    two folds.

    Args:
        samples: What to fit to.
        kinds: Names; all by default.
        folds: At least 2.
        level: Of the upper bound.
        seed: Of folds, splits and fits.
        options: Options of a kind by its name.
        clock: Times the fits.

    Raises:
        ConfigError: No such kind, or the level or number of folds makes no sense.
        ProfileError: Too few states for every kind; the message has the number each needs.
    """
    if folds < 2 or not 0.5 <= level < 1:
        raise ConfigError(
            f"expected at least 2 folds and a level from 0.5 up to 1, found {folds} and {level}"
        )
    whole = whole_states(samples)
    features, left_out = usable_features(whole)
    kinds = predictor_kinds() if kinds is None else tuple(kinds)
    needed = {kind: states_needed(kind, features, folds=folds) for kind in kinds}
    have = 0 if not whole.num_states else int(same_states(whole).max()) + 1
    skipped = {
        kind: f"needs {count} states, found {have}"
        for kind, count in needed.items()
        if count > have
    }
    able = [kind for kind in kinds if kind not in skipped]
    if not able:
        raise ProfileError(
            f"too few states to fit: found {have} in which every unit was measured; needed are "
            + ", ".join(f"{count} for {kind}" for kind, count in sorted(needed.items())),
            help="profile more states",
        )
    fold_of = assign_folds(whole, folds=folds, seed=seed)
    clock = clock or MonotonicClock()
    scores = []
    for kind in able:
        try:
            scores.append(
                _score(
                    kind,
                    whole,
                    fold_of,
                    level=level,
                    seed=seed,
                    options=(options or {}).get(kind, {}),
                    clock=clock,
                )
            )
        except (ProfileError, ConfigError) as error:
            if len(kinds) == 1:
                raise
            skipped[kind] = error.message
    if not scores:
        raise ProfileError(
            "no kind of predictor could be fitted: "
            + "; ".join(f"{kind}: {reason}" for kind, reason in skipped.items()),
            help="profile more states",
        )
    return Comparison(
        scores=tuple(scores),
        skipped=skipped,
        features=features,
        left_out=left_out,
        level=level,
        num_states=whole.num_states,
        num_folds=folds,
    )


def choose(comparison: Comparison) -> Choice:
    """Choose the kind whose upper bound has the smallest pinball loss.

    A kind that is not worse by more than one standard error over the folds counts as equal, and of
    equal kinds the one with the least memory is taken.

    Raises:
        ProfileError: Only kinds for reference could be fitted.
    """
    able = [score for score in comparison.scores if score.kind not in REFERENCE_KINDS]
    if not able:
        raise ProfileError(
            "only kinds that are a reference could be fitted: "
            + ", ".join(score.kind for score in comparison.scores),
            help="fit kind auto",
        )
    able.sort(key=lambda score: score.mean_pinball_s)
    best = able[0]
    equal = [score for score in able if _as_good(score, best)]
    chosen = min(equal, key=lambda score: score.num_bytes)
    loss = f"pinball loss {format_duration(chosen.mean_pinball_s)} of the upper bound"
    if len(able) == 1:
        return Choice(kind=chosen.kind, reason=f"{chosen.kind} is the only one: {loss}")
    if len(equal) > 1:
        others = ", ".join(score.kind for score in equal if score is not chosen)
        return Choice(
            kind=chosen.kind,
            reason=f"{loss}, within one standard error of {others}, and fewest parameters"
            f" ({format_bytes(chosen.num_bytes)})",
        )
    less = 1 - chosen.mean_pinball_s / able[1].mean_pinball_s
    return Choice(kind=chosen.kind, reason=f"smallest {loss}, {less:.0%} below {able[1].kind}")


def fit_kind(  # noqa: PLR0913 - all named
    kind: str,
    samples: StateSamples,
    *,
    calibration: StateSamples | None = None,
    level: float = 0.95,
    seed: int = 0,
    coverage: float | None = None,
    facts: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> FittedPredictor:
    """Fit one kind, calibrate its upper bounds, and fit energy where there was a meter.

    Args:
        kind: Its name.
        samples: What to fit to.
        calibration: States as they occur in use, for the bounds; by default a quarter of
            ``samples``, which then are not fitted to.
        level: Of the bounds.
        seed: Of splits and fits.
        coverage: As cross-validation found it.
        facts: What to keep beside the predictor.
        options: The kind's own.

    Raises:
        ConfigError: No such kind or option.
        ProfileError: Too few states or observations.
    """
    whole = whole_states(samples)
    features, left_out = usable_features(whole)
    needed = states_needed(kind, features)
    if whole.num_states < needed:
        raise ProfileError(
            f"predictor {kind!r} needs at least {needed} states, found {whole.num_states}",
            help="profile more states; "
            + "; ".join(f"{k} needs {states_needed(k, features)}" for k in predictor_kinds()),
        )
    if calibration is None:
        whole, calibration = split_off(whole, CALIBRATION_SHARE, seed=seed)
    predictor = fit_predictor(kind, whole, seed=seed, **(options or {}))
    facts = {"num_states": whole.num_states, "seed": seed, **(facts or {})}
    energy, facts["energy"] = _fit_energy(
        predictor, whole, calibration, seed=seed, options=options or {}
    )
    return FittedPredictor(
        predictor=predictor,
        upper_ratio=upper_ratios(predictor, calibration, level),
        level=level,
        coverage=coverage,
        slowest=slowest_values(predictor, whole),
        left_out=left_out,
        provenance=samples.provenance,
        energy=energy,
        facts=facts,
    )


def _fit_energy(
    predictor: Predictor,
    samples: StateSamples,
    calibration: StateSamples,
    *,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[Predictor | None, str]:
    """By the same kind as time or by the network, whichever errs less where neither was fitted.

    Power rises with a clock while time falls with it, which no sum of terms in 1/f can say; where
    power hardly changes, the kind that suits time suits energy.
    """
    if samples.joules is None or calibration.joules is None:
        return None, "not predicted: there was no meter"
    in_joules = dataclasses.replace(samples, seconds=samples.joules, joules=None)
    kind, reason, tried = predictor.kind, "", list[tuple[float, Predictor]]()
    columns = [calibration.features.index(name) for name in predictor.features]
    for name, own in {"mlp": {"steps": _ENERGY_STEPS}, kind: options}.items():
        try:
            energy = fit_predictor(name, in_joules, seed=seed, **own)
        except ProfileError as error:
            reason = error.message
            continue
        if energy.features == predictor.features:
            predicted = energy.predict(calibration.states[:, columns])[:, None]
            error_ratio = np.abs(predicted / calibration.joules - 1)
            tried.append((float(np.nanmean(error_ratio)), energy))
    if not tried:
        return None, f"not predicted: {reason}"
    error_ratio_least, best = min(tried, key=lambda each: each[0])
    return best, f"predicted by {best.kind}, {error_ratio_least:.1%} off on held-out states"


def slowest_values(predictor: Predictor, samples: StateSamples) -> Float64:
    """The end of each feature's range at which all units together are slowest: [F].

    Each feature is moved alone, the others staying at their medians.
    """
    columns = [samples.features.index(name) for name in predictor.features]
    states = samples.states[:, columns]
    if not columns:
        return np.zeros(0)
    middle = np.median(states, axis=0)
    ends = np.stack([states.min(axis=0), states.max(axis=0)])  # [2, F]
    slowest = middle.copy()
    for k in range(len(columns)):
        tried = np.stack([middle, middle])
        tried[:, k] = ends[:, k]
        slowest[k] = ends[int(np.argmax(predictor.predict(tried).sum(axis=1))), k]
    return slowest


def evaluate(fitted: FittedPredictor, samples: StateSamples) -> dict[str, Errors]:
    """Errors in states that were not fitted to, of ``"stage"`` and ``"head"`` units."""
    predicted = predicted_s(fitted.predictor, samples)
    losses = _Losses(samples.seconds, predicted, fitted.upper_ratio, fitted.level)
    return {name: losses.of(where) for name, where in unit_groups(samples.units).items()}


def _score(  # noqa: PLR0913 - all named
    kind: str,
    samples: StateSamples,
    fold_of: Int64,
    *,
    level: float,
    seed: int,
    options: Mapping[str, Any],
    clock: Clock,
) -> KindScore:
    units = len(samples.units)
    predicted = np.empty((samples.num_states, units))
    upper = np.empty_like(predicted)
    fit_s, num_bytes = [], 0
    for fold in np.unique(fold_of):
        outside = samples.take(np.flatnonzero(fold_of != fold))
        inside = np.flatnonzero(fold_of == fold)
        train, calibration = split_off(outside, CALIBRATION_SHARE, seed=seed)
        began_s = clock.now_s()
        predictor = fit_predictor(kind, train, seed=seed, **options)
        fit_s.append(clock.now_s() - began_s)
        predicted[inside] = predicted_s(predictor, samples.take(inside))
        upper[inside] = upper_ratios(predictor, calibration, level)
        num_bytes = max(num_bytes, predictor.num_bytes)
    losses = _Losses(samples.seconds, predicted, upper, level)
    return KindScore(
        kind=kind,
        groups={name: losses.of(where) for name, where in unit_groups(samples.units).items()},
        pinball_s=tuple(
            float(np.nanmean(losses.pinball_s[fold_of == f])) for f in np.unique(fold_of)
        ),
        coverage_ratio=losses.of(slice(0, units)).coverage_ratio,
        num_bytes=num_bytes,
        fit_s=float(np.mean(fit_s)),
    )


class _Losses:
    """Losses of every observation [N, R, U]; NaN where there is none."""

    def __init__(self, observed: Float64, predicted: Float64, upper: Float64, level: float) -> None:
        bound = (predicted * upper)[:, None, :]
        over = observed - bound
        self.error_s = np.abs(observed - predicted[:, None, :])
        self.ratio = self.error_s / observed
        self.pinball_s = np.maximum(level * over, (level - 1) * over)
        self.covered = np.where(np.isnan(observed), np.nan, observed <= bound)

    def of(self, units: slice) -> Errors:
        return Errors(
            mae_s=float(np.nanmean(self.error_s[..., units])),
            mape_ratio=float(np.nanmean(self.ratio[..., units])),
            p95_ape_ratio=float(np.nanquantile(self.ratio[..., units], 0.95)),
            pinball_s=float(np.nanmean(self.pinball_s[..., units])),
            coverage_ratio=float(np.nanmean(self.covered[..., units])),
        )


def _conformal(ratios: Float64, level: float) -> float:
    values = ratios[np.isfinite(ratios)]
    return conformal_quantile(values, level) if values.size else math.inf


def _as_good(score: KindScore, best: KindScore) -> bool:
    """Whether the loss over the same folds is higher by no more than one standard error.

    Source:
        Breiman et al., Classification and Regression Trees (1984), section 3.4.3: the rule of one
        standard error; here of the paired differences.
    """
    more = np.subtract(score.pinball_s, best.pinball_s)
    error = more.std(ddof=1) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return bool(more.mean() <= error)

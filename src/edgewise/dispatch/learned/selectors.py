"""Classifiers that name a backend from an operator's shape: fitted, validated, chosen by regret."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.learned.rows import CATEGORIES, Context, Int64, Rows
from edgewise.dispatch.problem import Float64, Objective
from edgewise.errors import ConfigError, ProfileError, nearest_names

Grouping = Literal["shape", "matrix"]
GROUPINGS: tuple[Grouping, ...] = ("shape", "matrix")
SEED = 42  # the paper's
ESTIMATORS = 200
# Histogram gradient boosting has at least 20 rows in a leaf, and predicts a constant from fewer.
LEAST_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selector:
    """A fitted classifier.

    Attributes:
        classifier: Its name.
        objective: What it was taught to make small.
        transition: Whether it is told the backend before.
        backends: Names. [B].
        model: Of scikit-learn; ``None`` where one backend was best for every row.
        constant: Number of that backend, else of the one that is cheapest over all rows.
        seen: Features of what it was taught. [G, F].
        note: Why there is no model; empty where there is.
    """

    classifier: str
    objective: Objective
    transition: bool
    backends: tuple[str, ...]
    model: Any
    constant: int
    seen: Float64
    note: str = ""

    def probabilities(self, features: Float64) -> Float64:
        """Of each backend being the best.

        Args:
            features: [G, F] of contexts.

        Returns:
            [G, B], or [G, B before, B] with transitions; zero for a backend that was never best.
        """
        inputs = _inputs(features, len(self.backends), transition=self.transition)
        found = np.zeros((len(inputs), len(self.backends)))
        if self.model is None:
            found[:, self.constant] = 1.0
        else:
            with _one_thread():
                found[:, self.model.classes_] = self.model.predict_proba(inputs)
        count = len(self.backends)
        return found.reshape(-1, count, count) if self.transition else found

    def choose(self, features: Float64, allowed: Float64 | None = None) -> Int64:
        """The likeliest backend.

        Args:
            features: [G, F] of contexts.
            allowed: [G, B] costs; one that is infinite cannot run there. All can by default.

        Returns:
            [G], or [G, B before] with transitions.
        """
        return likeliest(self.probabilities(features), allowed)

    def outside(self, features: Float64) -> npt.NDArray[np.bool_]:
        """Which operators lie outside of what was taught; trees say nothing there.

        Returns:
            [G]: of a kind, function or phase that was not taught, or with a size beyond those that
            were taught of it.
        """
        found = np.ones(len(features), dtype=bool)
        for category in np.unique(self.seen[:, :CATEGORIES], axis=0):
            sizes = self.seen[(self.seen[:, :CATEGORIES] == category).all(axis=1), CATEGORIES:]
            alike = (features[:, :CATEGORIES] == category).all(axis=1)
            here = features[:, CATEGORIES:]
            within = (here >= sizes.min(axis=0)) & (here <= sizes.max(axis=0))
            found[alike & within.all(axis=1)] = False
        return found


def likeliest(probabilities: Float64, allowed: Float64 | None = None) -> Int64:
    """The backend with the most probability, of those that can run an operator.

    Args:
        probabilities: [G, B], or [G, B before, B].
        allowed: [G, B] costs; one that is infinite cannot run there. All can by default.
    """
    found = probabilities
    if allowed is not None:
        able = np.isfinite(allowed)
        found = np.where(able if found.ndim == able.ndim else able[:, None, :], found, -1.0)
    return np.asarray(found.argmax(axis=-1), dtype=np.int64)


def fit_selector(  # noqa: PLR0913 - each is one property of the training
    rows: Rows,
    *,
    objective: Objective,
    classifier: str,
    transition: bool = True,
    seed: int = SEED,
    estimators: int = ESTIMATORS,
) -> Selector:
    """Teach a classifier which backend is cheapest.

    Args:
        rows: Measured groups.
        objective: What is to be small.
        classifier: One of `classifier_names`.
        transition: Teach a choice for each backend that may have run before, its switch counted.
        seed: Of the classifier.
        estimators: Trees of the forests.

    Returns:
        A selector; a constant one, with a note, where one backend is the best for every row.

    Raises:
        ConfigError: Unknown classifier, or scikit-learn is not installed.
        ProfileError: Fewer than 40 rows, or the objective needs energy that is not known.
    """
    if classifier not in _CLASSIFIERS:
        raise ConfigError(
            f"unknown classifier {classifier!r}; {nearest_names(classifier, _CLASSIFIERS)}"
        )
    costs = rows.costs(objective, transition=transition)
    inputs = _inputs(rows.features, len(rows.backends), transition=transition)
    if len(inputs) < LEAST_ROWS:
        raise ProfileError(
            f"a selector needs at least {LEAST_ROWS} rows to learn from, found {len(inputs)}",
            help="measure more shapes; those that are measured are planned without a selector",
        )
    labels = costs.argmin(axis=-1).ravel()
    constant = best_single(rows, objective)
    note, model = "", None
    if len(set(labels.tolist())) == 1:
        constant = int(labels[0])
        note = f"{rows.backends[constant]} is the cheapest in all {len(labels)} rows"
    else:
        with _one_thread():
            model = _CLASSIFIERS[classifier](seed, estimators).fit(inputs, labels)
    return Selector(
        classifier=classifier,
        objective=objective,
        transition=transition,
        backends=rows.backends,
        model=model,
        constant=constant,
        seen=rows.features,
        note=note,
    )


def best_single(rows: Rows, objective: Objective) -> int:
    """The backend that is cheapest over all rows' traces, of those that run everything.

    Each model counts alike. EDP is of a model's whole trace.
    """
    totals = []
    for model in dict.fromkeys(rows.models):
        here = rows.take(np.array([m == model for m in rows.models]))
        counts = here.counts[:, None]
        seconds = (counts * here.op_s).sum(axis=0)
        joules = np.ones_like(seconds) if here.op_j is None else (counts * here.op_j).sum(axis=0)
        total = {"latency": seconds, "energy": joules, "edp": seconds * joules}[objective]
        totals.append(total / total.min())
    return int(np.mean(totals, axis=0).argmin())


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good choices are, over rows.

    Attributes:
        accuracy: Share of rows whose choice is the cheapest; equal costs count as such.
        mean_regret: Mean over rows of what the choice costs over the cheapest, less one.
        weighted_regret: What all choices cost over what the cheapest cost, less one.
        rows: How many.
    """

    accuracy: float
    mean_regret: float
    weighted_regret: float
    rows: int


def score(costs: Float64, chosen: Int64) -> Score:
    """Judge choices.

    Args:
        costs: [..., B].
        chosen: [...], numbers of backends.
    """
    best = costs.min(axis=-1)
    paid = np.take_along_axis(costs, chosen[..., None], axis=-1)[..., 0]
    return Score(
        accuracy=float((paid == best).mean()),
        mean_regret=float((paid / best - 1).mean()),
        weighted_regret=float(paid.sum() / best.sum() - 1),
        rows=best.size,
    )


def validate(  # noqa: PLR0913
    rows: Rows,
    *,
    objective: Objective,
    classifier: str,
    transition: bool = True,
    grouping: Grouping = "shape",
    folds: int = 5,
    seed: int = SEED,
    estimators: int = ESTIMATORS,
) -> Int64:
    """Choose for every row by a selector that did not see its group.

    Args:
        rows: Measured groups.
        objective: What is to be small.
        classifier: One of `classifier_names`.
        transition: As in `fit_selector`.
        grouping: ``"shape"`` as the paper: rows of one shape group stay together. ``"matrix"``
            keeps operators together that differ only in M, which a classifier else knows from
            their neighbours.
        folds: Of GroupKFold.
        seed: Of the classifier.
        estimators: Trees of the forests.

    Returns:
        [G], or [G, B before] with transitions.

    Raises:
        ProfileError: As `fit_selector`, or there are fewer groups than folds.
    """
    groups = _groups(rows.contexts, grouping)
    if len(set(groups)) < folds:
        raise ProfileError(
            f"{folds} folds need as many groups of shapes, found {len(set(groups))}",
            help="measure more shapes",
        )
    count = len(rows.backends)
    chosen = np.zeros((len(groups), count) if transition else len(groups), dtype=np.int64)
    for train, held in _group_folds(groups, folds):
        selector = fit_selector(
            rows.take(train),
            objective=objective,
            classifier=classifier,
            transition=transition,
            seed=seed,
            estimators=estimators,
        )
        chosen[held] = selector.choose(rows.features[held], rows.op_s[held])
    return chosen


def classifier_names() -> tuple[str, ...]:
    """Classifiers that can be selectors; the paper's four."""
    return tuple(_CLASSIFIERS)


def select_classifier(scores: Mapping[str, Score]) -> str:
    """The classifier with the least validation regret, by cost."""
    return min(scores, key=lambda name: scores[name].weighted_regret)


def _groups(contexts: Sequence[Context], grouping: Grouping) -> list[str]:
    if grouping == "shape":
        return [context.key for context in contexts]
    if grouping == "matrix":
        return [f"{c.shape.kind} k={c.shape.k} n={c.shape.n}" for c in contexts]
    raise ConfigError(f"unknown grouping {grouping!r}; {nearest_names(grouping, GROUPINGS)}")


def _group_folds(groups: Sequence[str], folds: int) -> Iterator[tuple[Int64, Int64]]:
    _need_sklearn()
    from sklearn.model_selection import GroupKFold

    yield from GroupKFold(n_splits=folds).split(np.zeros(len(groups)), groups=groups)


def _inputs(features: Float64, backends: int, *, transition: bool) -> Float64:
    """[G, F], or [G * B, F + B] with which backend ran before."""
    if not transition:
        return features
    before = np.tile(np.eye(backends), (len(features), 1))
    return np.hstack([np.repeat(features, backends, axis=0), before])


def _need_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "learned selectors need scikit-learn, which is not installed",
            help="pip install 'edgewise[data]'",
        ) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """OpenMP and BLAS of scikit-learn would fight the runtimes for the cores."""
    _need_sklearn()
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(limits=1):
        yield


def _extra_trees(seed: int, estimators: int) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(estimators, min_samples_leaf=1, random_state=seed, n_jobs=1)


def _random_forest(seed: int, estimators: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(estimators, min_samples_leaf=1, random_state=seed, n_jobs=1)


def _logistic(seed: int, estimators: int) -> Any:  # noqa: ARG001 - has no trees
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    linear = LogisticRegression(class_weight="balanced", max_iter=2000, random_state=seed)
    return make_pipeline(StandardScaler(), linear)


def _boosting(seed: int, estimators: int) -> Any:  # noqa: ARG001 - the paper gives it its defaults
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(random_state=seed)


_CLASSIFIERS: dict[str, Callable[[int, int], Any]] = {
    "extra-trees": _extra_trees,
    "random-forest": _random_forest,
    "logistic-regression": _logistic,
    "hist-gradient-boosting": _boosting,
}

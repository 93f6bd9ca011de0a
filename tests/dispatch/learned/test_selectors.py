from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgewise.dispatch.learned import selectors
from edgewise.dispatch.learned.rows import Rows, training_rows
from edgewise.dispatch.learned.selectors import (
    Score,
    best_single,
    classifier_names,
    fit_selector,
    score,
    select_classifier,
    validate,
)
from edgewise.errors import ConfigError, ProfileError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import OperatorTable

pytest.importorskip("sklearn")


@pytest.mark.parametrize("classifier", classifier_names())
def test_a_rule_in_the_sizes_is_learned(rows: Rows, classifier: str) -> None:
    selector = fit_selector(rows, objective="latency", classifier=classifier, estimators=10)
    chosen = selector.choose(rows.features)

    costs = rows.costs("latency", transition=True)
    assert chosen.shape == costs.shape[:2]
    found = score(costs, chosen)
    always = score(costs, np.full(chosen.shape, best_single(rows, "latency")))
    assert found.accuracy > 0.8
    assert found.weighted_regret < always.weighted_regret


def test_the_same_seed_gives_the_same_choices(rows: Rows) -> None:
    first, second = (
        validate(rows, objective="edp", classifier="extra-trees", estimators=5) for _ in range(2)
    )

    np.testing.assert_array_equal(first, second)


def test_one_best_backend_for_all_needs_no_classifier(
    models: tuple[Architecture, ...], table_with: Callable[..., OperatorTable]
) -> None:
    table = table_with(models, lambda _, backend: 1.0 if backend == "onnxruntime:CPU" else 2.0)
    rows = training_rows(models, table)
    selector = fit_selector(rows, objective="latency", classifier="logistic-regression")

    assert selector.model is None
    assert "onnxruntime:CPU is the cheapest in all" in selector.note
    assert (selector.choose(rows.features) == 2).all()


def test_a_backend_that_is_never_best_has_no_probability(
    models: tuple[Architecture, ...], table_with: Callable[..., OperatorTable]
) -> None:
    def seconds(shape: object, backend: str) -> float:
        short = getattr(shape, "m", 0) < 20
        return {"torch:cpu": 9.0, "torch:cuda": 1.0, "onnxruntime:CPU": 0.5 if short else 2.0}[
            backend
        ]

    rows = training_rows(models, table_with(models, seconds))
    selector = fit_selector(rows, objective="latency", classifier="extra-trees", estimators=5)
    found = selector.probabilities(rows.features)

    assert (found[..., 0] == 0).all()
    np.testing.assert_allclose(found.sum(axis=-1), 1.0)
    assert set(np.unique(selector.choose(rows.features))) == {1, 2}


def test_a_backend_that_cannot_run_an_operator_is_not_chosen(rows: Rows) -> None:
    selector = fit_selector(rows, objective="latency", classifier="extra-trees", estimators=5)
    allowed = np.where(np.arange(3) == 1, rows.op_s, np.inf)

    assert (selector.choose(rows.features, allowed) == 1).all()


def test_fewer_than_forty_rows_are_refused(rows: Rows) -> None:
    few = rows.take(np.arange(39))

    with pytest.raises(ProfileError, match="at least 40 rows to learn from, found 39"):
        fit_selector(few, objective="latency", classifier="extra-trees", transition=False)


def test_neighbours_in_m_stay_on_one_side_when_grouped_by_matrix(rows: Rows) -> None:
    groups = selectors._groups(rows.contexts, "matrix")
    for train, held in selectors._group_folds(groups, 5):
        assert not {groups[i] for i in train} & {groups[i] for i in held}
    matrices = {(c.shape.kind, c.shape.k, c.shape.n) for c in rows.contexts}

    assert len(set(groups)) == len(matrices) < len(rows.contexts)
    assert len(set(selectors._groups(rows.contexts, "shape"))) == len(rows.contexts)


def test_wrong_names_get_the_nearest(rows: Rows) -> None:
    with pytest.raises(ConfigError, match="extra-trees"):
        fit_selector(rows, objective="latency", classifier="extra-tree")
    with pytest.raises(ConfigError, match="unknown grouping"):
        validate(rows, objective="latency", classifier="extra-trees", grouping="rows")  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match="folds need as many"):
        validate(rows.take(np.arange(3)), objective="latency", classifier="extra-trees")


def test_scores_are_those_of_a_table_worked_by_hand() -> None:
    costs = np.array([[1.0, 2.0], [4.0, 3.0], [5.0, 5.0]])
    found = score(costs, np.array([1, 1, 1]))

    assert found.accuracy == pytest.approx(2 / 3)  # the tie counts as right
    assert found.mean_regret == pytest.approx((1.0 + 0 + 0) / 3)
    assert found.weighted_regret == pytest.approx(10 / 9 - 1)


def test_the_classifier_with_the_least_regret_by_cost_is_taken_whatever_its_accuracy() -> None:
    right = Score(accuracy=0.9, mean_regret=0.1, weighted_regret=0.2, rows=9)
    cheap = Score(accuracy=0.6, mean_regret=0.2, weighted_regret=0.1, rows=9)

    assert select_classifier({"right": right, "cheap": cheap}) == "cheap"


def test_what_lies_beyond_the_sizes_and_kinds_that_were_taught_is_known(rows: Rows) -> None:
    selector = fit_selector(rows, objective="latency", classifier="extra-trees", estimators=2)
    larger = rows.features[:1].copy()
    larger[0, -1] = rows.features[:, -1].max() + 1
    other = rows.features[:1].copy()
    other[0, :6] = [0, 0, 0, 1, 0, 0]  # a layer norm

    assert not selector.outside(rows.features).any()
    assert selector.outside(larger).all()
    assert selector.outside(other).all()

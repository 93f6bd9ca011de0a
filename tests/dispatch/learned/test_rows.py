from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from edgewise.dispatch.forward import Rule, group_key, paper_traces
from edgewise.dispatch.learned.rows import FEATURES, Rows, context_of, training_rows
from edgewise.errors import ProfileError
from edgewise.model.transformer import Architecture, architecture_names, load_architecture
from edgewise.profiles.operators import OperatorTable


@pytest.mark.parametrize(("rule", "groups"), [("paper", 278), ("clean", 248)])
def test_there_is_one_context_for_each_group_of_the_paper(rule: Rule, groups: int) -> None:
    pairs = {
        (group_key(architecture, trace, node), context_of(architecture, trace, node))
        for architecture in map(load_architecture, architecture_names())
        for trace in paper_traces(architecture, rule=rule)
        for node in trace.operators
    }

    assert len(pairs) == len({key for key, _ in pairs}) == groups
    assert len({context.key for _, context in pairs}) == groups


def test_rows_count_every_operator_once(models: tuple[Architecture, ...], rows: Rows) -> None:
    operators = sum(len(t.operators) for m in models for t in paper_traces(m))

    assert rows.counts.sum() == operators
    assert rows.features.shape == (len(rows.contexts), len(FEATURES))
    assert not rows.left_out


def test_the_target_counts_the_switch_from_each_backend_before(rows: Rows) -> None:
    local = rows.costs("latency", transition=False)
    after = rows.costs("latency", transition=True)

    same = np.arange(3)
    np.testing.assert_allclose(after[:, same, same], local)
    np.testing.assert_allclose(after[:, 0, 1], local[:, 1] + 1e-5)


def test_the_proxy_for_edp_multiplies_sums_with_the_switch_in_both(rows: Rows) -> None:
    assert rows.op_j is not None
    product = rows.costs("edp", transition=True)

    wanted = (rows.op_s[:, 1] + 1e-5) * (rows.op_j[:, 1] + 5e-5)
    np.testing.assert_allclose(product[:, 0, 1], wanted)


def test_without_a_meter_energy_is_refused_and_latency_is_not(
    models: tuple[Architecture, ...], table: OperatorTable
) -> None:
    key = next(iter(table.costs))
    unknown = dataclasses.replace(table.costs[key].energy, energy_j=None)
    costs = {**table.costs, key: dataclasses.replace(table.costs[key], energy=unknown)}
    found = training_rows(models, dataclasses.replace(table, costs=costs))

    assert found.costs("latency", transition=True).shape == (len(found.contexts), 3, 3)
    with pytest.raises(ProfileError, match="needs energy"):
        found.costs("edp", transition=False)


def test_groups_without_a_usable_cost_are_left_out_and_named(
    models: tuple[Architecture, ...], table: OperatorTable
) -> None:
    gone = table.shapes()[0]
    costs = {key: cost for key, cost in table.costs.items() if key[0] != gone}
    found = training_rows(models, dataclasses.replace(table, costs=costs))

    assert found.left_out
    assert all(key.startswith(gone.key) for key in found.left_out)
    with pytest.raises(ProfileError, match="usable cost of none"):
        training_rows(models, dataclasses.replace(table, costs={}), backends=("torch:cpu",))


def test_the_hash_follows_the_costs(
    rows: Rows, models: tuple[Architecture, ...], table_with: Callable[..., OperatorTable]
) -> None:
    again = training_rows(models, table_with(models, lambda _, b: float(len(b))))

    assert rows.digest() == rows.digest()
    assert rows.digest() != again.digest()

"""What the two claims on learned selectors share: tables, rows and replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from edgewise.dispatch.forward import RULES, Rule
from edgewise.dispatch.learned.rows import Rows, training_rows
from edgewise.dispatch.learned.selectors import ESTIMATORS, classifier_names
from edgewise.dispatch.learned.transfer import Case, case_of
from edgewise.dispatch.problem import OBJECTIVES, Objective
from edgewise.errors import ProfileError
from edgewise.model.transformer import Architecture, load_architecture
from edgewise.profiles.operator_tables import default_operator_table, load_operator_table
from edgewise.profiles.operators import OperatorTable
from edgewise.profiles.records import Provenance
from edgewise.reproduce import _dispatch as common
from edgewise.reproduce.registry import Setup

_QUICK_ESTIMATORS = 10
_QUICK_CLASSIFIERS = ("extra-trees", "logistic-regression")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learnable:
    """One table as selectors see it.

    Attributes:
        table: Its name.
        provenance: Of its costs.
        rule: How operators are counted: the paper's way where the table has all that takes.
        rows: Shape groups of the models whose shapes it has.
        cases: Replays of those models, by name.
        objectives: That its costs can judge.
    """

    table: str
    provenance: Provenance
    rule: Rule
    rows: Rows
    cases: Mapping[str, Case]
    objectives: tuple[Objective, ...]


def tables(setup: Setup) -> Iterator[Learnable]:
    """The simulated table, and the one that is measured here or ships.

    Args:
        setup: ``models`` by names of configurations that ship; all seven by default.

    Raises:
        ConfigError: There is no such model.
    """
    models = models_of(setup)
    yield learnable(load_operator_table(common.SIMULATED), models)
    yield learnable(default_operator_table(), models)


def models_of(setup: Setup) -> list[Architecture]:
    """The models that were asked for; the paper's seven by default."""
    return [load_architecture(name) for name in setup.models or common.MODELS]


def learnable(table: OperatorTable, models: list[Architecture]) -> Learnable:
    """The models that a table has all shapes of, by the paper's count if it has that of all."""
    found = {rule: _cases(table, models, rule) for rule in RULES}
    rule: Rule = "paper" if found["paper"].keys() == found["clean"].keys() else "clean"
    known = [model for model in models if model.name in found[rule]]
    rows = training_rows(known, table, rule=rule) if known else _no_rows(table)
    return Learnable(
        table=table.name,
        provenance=table.provenance,
        rule=rule,
        rows=rows,
        cases=found[rule],
        objectives=OBJECTIVES
        if rows.op_j is not None and rows.switch_j is not None
        else OBJECTIVES[:1],
    )


def _no_rows(table: OperatorTable) -> Rows:
    names = table.backends()
    return Rows(
        contexts=(),
        models=(),
        counts=np.zeros(0, dtype=np.int64),
        backends=names,
        op_s=np.zeros((0, len(names))),
        op_j=None,
        switch_s=np.zeros((0, len(names), len(names))),
        switch_j=None,
    )


def _cases(table: OperatorTable, models: list[Architecture], rule: Rule) -> dict[str, Case]:
    found = {}
    for model in models:
        try:
            found[model.name] = case_of(model, table, rule=rule)
        except ProfileError:  # not all was measured; `missing` says so
            continue
    return found


def missing(table: Learnable, wanted: int) -> str:
    """Why there is no figure of a table; empty where nothing is missing."""
    if len(table.cases) >= wanted:
        return ""
    return f"{table.table} has all shapes of {len(table.cases)} of the models; {wanted} are needed"


def effort(setup: Setup) -> tuple[tuple[str, ...], int]:
    """Classifiers, and trees of the forests."""
    if setup.quick:
        return _QUICK_CLASSIFIERS, _QUICK_ESTIMATORS
    return classifier_names(), ESTIMATORS


def made(found: list[Learnable]) -> str:
    """What our numbers are of, in words."""
    return "; ".join(
        f"{each.table}, {each.provenance}: {len(each.rows.contexts)} shape groups"
        f" ({each.rule} count) of {len(each.cases)} models on {', '.join(each.rows.backends)}"
        for each in found
    )

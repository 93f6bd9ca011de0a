"""Dispatch on the data flow of a transformer block, against scipy's solver of integer programs."""

from __future__ import annotations

from itertools import product
from typing import Literal

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.problem import HOME
from edgewise.dispatch.residency import solve_residency
from edgewise.dispatch.synthetic_table import random_table
from edgewise.dispatch.trace import Trace
from edgewise.model.transformer import architecture_of
from edgewise.profiles.operators import OperatorTable

Family = Literal["llama", "qwen3", "olmo2", "modernbert"]


def block(family: Family) -> Trace:
    """A model of one layer, its embedding and head included."""
    document = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "modernbert" else 2,
        "vocab_size": 128,
    }
    return trace_forward(architecture_of(document, name=family, where="test"), length=16)


Key = tuple[object, ...]


class Program:
    """An integer program with columns by name."""

    def __init__(self) -> None:
        self.number: dict[Key, int] = {}
        self.cost: list[float] = []
        self.most: list[float] = []
        self.rows: list[tuple[dict[Key, float], float, float]] = []

    def column(self, *key: object, price: float = 0.0, most: float = 1.0) -> None:
        self.number[key] = len(self.cost)
        self.cost.append(price)
        self.most.append(most)

    def least(self, terms: dict[Key, float], least: float, most: float = np.inf) -> None:
        self.rows.append((terms, least, most))

    def solve(self) -> float:
        matrix = lil_matrix((len(self.rows), len(self.cost)))
        for r, (terms, _, _) in enumerate(self.rows):
            for key, factor in terms.items():
                matrix[r, self.number[key]] = factor
        scale = 1e6  # microseconds, so that the solver's tolerances are far below any cost
        result = milp(
            scale * np.array(self.cost),
            constraints=LinearConstraint(
                matrix.tocsr(), [low for _, low, _ in self.rows], [high for *_, high in self.rows]
            ),
            integrality=np.ones(len(self.cost)),
            bounds=Bounds(0, np.array(self.most)),
            options={"mip_rel_gap": 0.0},
        )
        assert result.success
        return float(result.fun) / scale


def least_by_milp(trace: Trace, table: OperatorTable) -> float:  # noqa: C901 - equations in a row
    """Least latency: who runs each node, what is held where before it, and what it has copied.

    A node may have its inputs copied to where it runs, from where they are held, and nothing else.
    One more node, at home, reads the answer.
    """
    places = list(dict.fromkeys((HOME, *table.backends())))
    readers = [*(n.inputs for n in trace.nodes), (trace.nodes[-1].output,)]
    program = Program()
    for i, p in product(range(len(readers)), places):
        row = table.costs.get((trace.nodes[i].shape, p)) if i < len(trace.nodes) else None
        if row is not None and row.latency is not None:
            program.column("run", i, p, price=row.latency.median_s)
        else:
            program.column("run", i, p, most=float(i == len(trace.nodes) and p == HOME))
    for i, t, p in product(range(len(readers) + 1), range(len(trace.tensors)), places):
        program.column("held", i, t, p, most=float(i > 0 or (t == 0 and p == HOME)))
    for i, inputs in enumerate(readers):
        for t, s, p in product(inputs, places, places):
            if s != p:
                price = table.switch(s, p).at_s(trace.tensors[t].size_bytes)
                program.column("copy", i, t, s, p, price=price)
    for i, inputs in enumerate(readers):
        program.least({("run", i, p): 1.0 for p in places}, 1, 1)
        for t, p in product(range(len(trace.tensors)), places):
            made = i < len(trace.nodes) and trace.nodes[i].output == t
            copies: list[Key] = [("copy", i, t, s, p) for s in places if s != p and t in inputs]
            # Held afterwards only if held before, copied, or made there.
            program.least(
                {("held", i + 1, t, p): -1.0, ("held", i, t, p): 1.0}
                | dict.fromkeys(copies, 1.0)
                | ({("run", i, p): 1.0} if made else {}),
                0,
            )
            if t in inputs:
                program.least(
                    {("held", i, t, p): 1.0, ("run", i, p): -1.0} | dict.fromkeys(copies, 1.0), 0
                )
                program.least(dict.fromkeys(copies, -1.0) | {("run", i, p): 1.0}, 0)
                for copy in copies:
                    program.least({copy: -1.0, ("held", i, t, copy[3]): 1.0}, 0)
    return program.solve()


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "modernbert"])
def test_a_block_costs_what_an_integer_program_finds(family: Family) -> None:
    trace = block(family)
    table = random_table([trace], np.random.default_rng(7), switch_s=2e-6, spread=0.6)

    found = solve_residency(trace, table)

    assert found.copies  # else the comparison says nothing about copies
    assert found.cost == pytest.approx(least_by_milp(trace, table), rel=1e-6)

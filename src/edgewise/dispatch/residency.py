"""Dispatch on the real data flow: a switch costs what its tensors cost to copy, once each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgewise.dispatch.problem import HOME
from edgewise.dispatch.trace import Node, Trace
from edgewise.errors import ConfigError, ProfileError, nearest_names
from edgewise.profiles.operators import OperatorCost, OperatorShape, OperatorTable

AdditiveObjective = Literal["latency", "energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One tensor handed from one backend to another.

    Attributes:
        tensor: Name of the tensor.
        source: Backend that had it.
        target: Backend that needs it, and keeps it.
        size_bytes: How large it is.
        before: Number of the node that reads it first there; the number of nodes for the answer,
            which is handed back at the end.
        copy_s: What that costs, seconds.
    """

    tensor: str
    source: str
    target: str
    size_bytes: int
    before: int
    copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Who runs what, and what that costs when copies are counted by tensor.

    Attributes:
        backends: Of each operator whose backend is chosen, in order.
        objective: What was made small.
        cost: Its value: seconds or joules.
        latency_s: Operators, those that stay on torch, and copies.
        energy_j: The same; ``None`` where not known.
        copies: In the order they are made.
        copy_s: Their part of the latency.
        fixed_s: The part of operators that stay on torch.
        notes: What was not measured and counted as nothing.
    """

    backends: tuple[str, ...]
    objective: AdditiveObjective
    cost: float
    latency_s: float
    energy_j: float | None
    copies: tuple[Copy, ...]
    copy_s: float
    fixed_s: float
    notes: tuple[str, ...] = ()


def solve_residency(
    trace: Trace,
    table: OperatorTable,
    *,
    backends: Sequence[str] | None = None,
    objective: AdditiveObjective = "latency",
) -> Residency:
    """Find who should run what, exactly.

    A tensor is where it was made, and wherever it was copied to. An operator that needs it
    elsewhere pays the cheapest copy from a backend that holds it; the next one there reads it for
    nothing. Operators that are not dispatched run, and the answer is wanted, on torch.

    Args:
        trace: One forward pass.
        table: Measured costs.
        backends: Which may be used; all of the table's by default.
        objective: What to make small.

    Raises:
        ConfigError: A backend is not in the table.
        ProfileError: Costs are missing that it needs.

    Source:
        Dynamic programming over the operators in order; the state is where each tensor is held
        that is still to be read. The frontier of a transformer is at most the residual, a
        normalised input, q and k, so states are few; those that can be no part of an optimum are
        dropped: another state holds as much for less, or could copy everything anywhere and still
        be cheaper.
    """
    game = _Game(trace, table, backends, objective)
    frontier: dict[_State, tuple[float, int, _State]] = {game.start: (0.0, -1, ())}
    steps = [frontier]
    for number, node in enumerate(trace.nodes):
        following: dict[_State, tuple[float, int, _State]] = {}
        for state, (cost, _, _) in frontier.items():
            for place in game.choices[number]:
                price, after = game.play(number, node, state, place)
                total = cost + price
                if total < math.inf and (after not in following or total < following[after][0]):
                    following[after] = (total, place, state)
        frontier = game.pruned(number + 1, following)
        steps.append(frontier)
    final = min(frontier, key=lambda state: frontier[state][0] + game.hand_back(state))
    places = []
    for reached in reversed(steps[1:]):
        _, place, final = reached[final]
        places.append(place)
    chosen = [
        game.places[place]
        for node, place in zip(trace.nodes, reversed(places), strict=True)
        if node.supported
    ]
    return evaluate_residency(trace, table, chosen, objective=objective)


def evaluate_residency(
    trace: Trace,
    table: OperatorTable,
    assignment: Sequence[str],
    *,
    objective: AdditiveObjective = "latency",
) -> Residency:
    """Count what a choice costs on the real data flow.

    Args:
        trace: One forward pass.
        table: Measured costs.
        assignment: Backend of each operator whose backend is chosen, in order.
        objective: Which cost decides from where a tensor is copied, and is reported as ``cost``.

    Raises:
        ConfigError: Not one backend for each operator, or one that is not in the table.
        ProfileError: Costs are missing that it needs.
    """
    if len(assignment) != len(trace.operators):
        raise ConfigError(
            f"{trace.model}, {trace.what}: expected a backend for each of {len(trace.operators)}"
            f" operators, found {len(assignment)}"
        )
    game = _Game(trace, table, tuple(dict.fromkeys(assignment)), objective)
    names = iter(assignment)
    held: dict[int, list[str]] = {0: [HOME]}
    copies: list[Copy] = []
    seconds = fixed_s = 0.0
    joules: float | None = 0.0

    def fetch(tensor: int, target: str, before: int) -> None:
        nonlocal joules
        if target in held[tensor]:
            return
        size = trace.tensors[tensor].size_bytes
        source = min(held[tensor], key=lambda s: game.copy_cost(size, s, target))
        switch = table.switch(source, target)
        copies.append(
            Copy(
                tensor=trace.tensors[tensor].name,
                source=source,
                target=target,
                size_bytes=size,
                before=before,
                copy_s=switch.at_s(size),
            )
        )
        joules = _plus(joules, switch.at_j(size))
        held[tensor].append(target)

    for number, node in enumerate(trace.nodes):
        backend = next(names) if node.supported else HOME
        for tensor in node.inputs:
            fetch(tensor, backend, number)
        held[node.output] = [backend]
        row = table.costs.get((node.shape, backend))
        if row is None and not node.supported:
            continue
        if row is None or row.latency is None or not row.usable:
            raise _no_cost(table, node.shape, backend)
        seconds += row.latency.median_s
        fixed_s += 0.0 if node.supported else row.latency.median_s
        joules = _plus(joules, row.energy.energy_j)
    if trace.nodes:
        fetch(trace.nodes[-1].output, HOME, len(trace.nodes))
    copy_s = sum(copy.copy_s for copy in copies)
    latency_s = seconds + copy_s
    cost = latency_s if objective == "latency" else joules
    if cost is None:
        raise _no_energy(table)
    return Residency(
        backends=tuple(assignment),
        objective=objective,
        cost=cost,
        latency_s=latency_s,
        energy_j=joules,
        copies=tuple(copies),
        copy_s=copy_s,
        fixed_s=fixed_s,
        notes=game.notes,
    )


def _plus(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _no_cost(table: OperatorTable, shape: OperatorShape, backend: str) -> ProfileError:
    return ProfileError(
        f"table {table.name!r} has no usable cost of {shape.key!r} on {backend}",
        help="edgewise dispatch measure adds what is missing",
    )


def _no_energy(table: OperatorTable) -> ProfileError:
    return ProfileError(
        f"the objective 'energy' needs joules that table {table.name!r} does not have",
        help="measure where there is an energy meter, or take --objective latency",
    )


# For each tensor that will still be read, in the order of their numbers: a bit for each place that
# holds it.
_State = tuple[int, ...]


class _Game:
    """Costs and moves, with backends and tensors as numbers."""

    def __init__(
        self,
        trace: Trace,
        table: OperatorTable,
        backends: Sequence[str] | None,
        objective: AdditiveObjective,
    ) -> None:
        known = table.backends()
        names = tuple(backends) if backends is not None else known
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"table {table.name!r} has no backend {name!r}; {nearest_names(name, known)}"
                )
        if not names:
            raise ConfigError(f"table {table.name!r} has no backend with usable costs")
        self.trace, self.table, self.objective = trace, table, objective
        self.places = tuple(dict.fromkeys((HOME, *names)))  # HOME is number 0
        allowed = [self.places.index(name) for name in names]
        self.choices = [allowed if node.supported else [0] for node in trace.nodes]
        unknown = sorted(
            {
                node.shape.kind
                for node in trace.nodes
                if not node.supported and (node.shape, HOME) not in table.costs
            }
        )
        self.notes = (f"not measured, counted as nothing: {', '.join(unknown)}",) * bool(unknown)
        self._costs: dict[OperatorShape, list[float]] = {}
        self._reads: dict[int, tuple[list[list[float]], list[float]]] = {}
        self._set_lifetimes()
        self.start: _State = (1,) if self.live[0] else ()
        for name in names:
            table.switch(HOME, name), table.switch(name, HOME)  # refuses what is not measured

    def _set_lifetimes(self) -> None:
        """Which tensors will be read at or after each node; the answer to the end."""
        nodes = self.trace.nodes
        last = {t: number for number, node in enumerate(nodes) for t in node.inputs}
        born = {0: -1} | {node.output: number for number, node in enumerate(nodes)}
        if nodes:
            last[nodes[-1].output] = len(nodes)
        self.live = [
            sorted(t for t, end in last.items() if born[t] < number <= end)
            for number in range(len(nodes) + 1)
        ]
        self._moves = [self._layout(number, node) for number, node in enumerate(nodes)]

    def _layout(
        self, number: int, node: Node
    ) -> tuple[list[tuple[int, int]], Callable[[list[int]], _State]]:
        """Where a node's inputs stand in the state, and how the next state is made of it."""
        now, after = self.live[number], self.live[number + 1]
        inputs = [(now.index(t), t) for t in dict.fromkeys(node.inputs)]
        # The node's output is appended to the state before this is applied.
        picks = [len(now) if t == node.output else now.index(t) for t in after]
        return inputs, lambda held: tuple([held[i] for i in picks])

    def copy_cost(self, size_bytes: int, source: str, target: str) -> float:
        """Of one tensor, in the objective's unit."""
        switch = self.table.switch(source, target)
        if self.objective == "latency":
            return switch.at_s(size_bytes)
        joules = switch.at_j(size_bytes)
        if joules is None:
            raise _no_energy(self.table)
        return joules

    def costs(self, shape: OperatorShape) -> list[float]:
        """Of an operator at each place; infinite where it cannot run."""
        if shape not in self._costs:
            found = [
                self._value(self.table.costs.get((shape, name)), fixed=shape.is_fixed)
                for name in self.places
            ]
            if min(found) == math.inf:
                raise _no_cost(self.table, shape, f"any of {', '.join(self.places)}")
            self._costs[shape] = found
        return self._costs[shape]

    def _value(self, row: OperatorCost | None, *, fixed: bool) -> float:
        if row is None or row.latency is None or not row.usable:
            return 0.0 if fixed and row is None else math.inf
        if self.objective == "latency":
            return row.latency.median_s
        if row.energy.energy_j is None:
            raise _no_energy(self.table)
        return row.energy.energy_j

    def reads(self, size_bytes: int) -> tuple[list[list[float]], list[float]]:
        """Cheapest copy for each set of holders and each place, and to all places, [sets]."""
        if size_bytes not in self._reads:
            every = range(len(self.places))
            copy = [
                [self.copy_cost(size_bytes, self.places[s], self.places[p]) for p in every]
                for s in every
            ]
            one = [
                [min((copy[s][p] for s in every if held >> s & 1), default=math.inf) for p in every]
                for held in range(1 << len(self.places))
            ]
            self._reads[size_bytes] = one, [sum(row) for row in one]
        return self._reads[size_bytes]

    def play(self, number: int, node: Node, state: _State, place: int) -> tuple[float, _State]:
        """Cost of running a node at a place, and the state after it."""
        inputs, pick = self._moves[number]
        price = self.costs(node.shape)[place]
        held = [*state, 1 << place]
        for slot, tensor in inputs:
            if not held[slot] >> place & 1:
                size = self.trace.tensors[tensor].size_bytes
                price += self.reads(size)[0][held[slot]][place]
                held[slot] |= 1 << place
        return price, pick(held)

    def hand_back(self, state: _State) -> float:
        """Of copying the answer to torch."""
        if not state:
            return 0.0
        return self.reads(self.trace.tensors[self.live[-1][0]].size_bytes)[0][state[0]][0]

    def pruned(
        self, number: int, found: dict[_State, tuple[float, int, _State]]
    ) -> dict[_State, tuple[float, int, _State]]:
        """Drop states that can be no part of an optimum."""
        if not found:
            raise ProfileError(
                f"no backend of {', '.join(self.places)} can run what comes before node {number}",
                help="edgewise dispatch measure adds what is missing",
            )
        sizes = [self.trace.tensors[t].size_bytes for t in self.live[number]]
        # Whatever a state lacks, one copy of each tensor to each place makes up for it.
        everything = [self.reads(size)[1] for size in sizes]
        ceiling = min(
            cost + sum(full[held] for full, held in zip(everything, state, strict=True))
            for state, (cost, _, _) in found.items()
        )
        kept: dict[_State, tuple[float, int, _State]] = {}
        for state, entry in sorted(found.items(), key=lambda item: item[1][0]):
            if entry[0] > ceiling:
                break
            if not any(
                all(mine | more == more for mine, more in zip(state, better, strict=True))
                for better in kept
            ):
                kept[state] = entry
        return kept

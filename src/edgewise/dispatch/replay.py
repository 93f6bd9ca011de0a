"""Replay: what each way to choose would cost on measured tables, against the best single backend.

As in the paper, nothing is run: costs of operators and of switches are added along the trace. The
gain is counted for each model by itself and then averaged, so that no large model drowns the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.guard import log_deviation
from edgewise.dispatch.problem import (
    OBJECTIVES,
    Assignment,
    Objective,
    Problem,
    Totals,
    build_problem,
    totals,
)
from edgewise.dispatch.search import decide
from edgewise.dispatch.trace import Trace
from edgewise.errors import ProfileError
from edgewise.profiles.operators import OperatorCost, OperatorShape, OperatorTable
from edgewise.profiles.records import Provenance, ThreadPolicy

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

METHODS = ("static", "local", "greedy", "viterbi")
WITH_SEGMENTS = (*METHODS, "best")
DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """By which share something is less than under the best single backend.

    Attributes:
        ratio: 0.174 is 17.4 % less; negative is more.
        low: Lower end of its 95 % interval; ``None`` where costs have none.
        high: Upper end.
    """

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one method gives for one model and objective.

    Attributes:
        method: Its name.
        totals: Time, energy and switches over the whole trace.
        gain: Of the objective, over the best single backend.
        exact: Whether nothing can be better: proved by the method.
        operators: How many run on each backend.
        segments: How many segments replace operators.
    """

    method: str
    totals: Totals
    gain: Gain
    exact: bool
    operators: Mapping[str, int]
    segments: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model and objective.

    Attributes:
        model: Its name.
        objective: What was made small.
        instances: Operators of its trace.
        baseline: The best single backend; ``None`` where none can run all operators.
        statics: Every single backend that can run all operators, and what it gives.
        outcomes: By method.
    """

    model: str
    objective: Objective
    instances: int
    baseline: str | None
    statics: Mapping[str, Totals]
    outcomes: Mapping[str, Outcome]

    @property
    def greedy_gap(self) -> float | None:
        """By which share greedy is above the exact optimum; ``None`` without either."""
        if not {"greedy", "viterbi"} <= self.outcomes.keys():
            return None
        least = self.outcomes["viterbi"].totals.of(self.objective)
        return self.outcomes["greedy"].totals.of(self.objective) / least - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """All models and objectives on one table.

    Attributes:
        table: Its name.
        provenance: Of its costs.
        device_id: Fingerprint of its device.
        thread_policy: Threads that every backend had.
        state: Of the device then.
        backends: That could be chosen.
        segments: Whether segments could be.
        rows: Models by objectives.
        means: Mean gain over models, by objective and method.
        left_out: Objectives that could not be judged, with the reason.
        excluded: Costs of the table that no plan uses.
    """

    table: str
    provenance: Provenance
    device_id: str
    thread_policy: ThreadPolicy
    state: str
    backends: tuple[str, ...]
    segments: bool
    rows: tuple[Row, ...]
    means: Mapping[tuple[Objective, str], Gain]
    left_out: Mapping[Objective, str] = field(default_factory=dict)
    excluded: tuple[OperatorCost, ...] = ()

    def of(self, objective: Objective) -> tuple[Row, ...]:
        """Rows of an objective, in the order of the models."""
        return tuple(row for row in self.rows if row.objective == objective)

    def switches(self, objective: Objective, method: str) -> tuple[int, int, int]:
        """Switches of all models together: of backend, of device, of framework."""
        found = [row.outcomes[method].totals for row in self.of(objective)]
        return (
            sum(t.backend_switches for t in found),
            sum(t.device_switches for t in found),
            sum(t.framework_switches for t in found),
        )

    def fewer_switches(self, objective: Objective, method: str) -> float | None:
        """Share of operator-local's backend switches that a method avoids; ``None`` without any."""
        local = self.switches(objective, "local")[0]
        return 1 - self.switches(objective, method)[0] / local if local else None


def replay(  # noqa: PLR0913 - each is one choice of the user
    traces: Mapping[str, Sequence[Trace]],
    table: OperatorTable,
    *,
    objectives: Sequence[Objective] = OBJECTIVES,
    methods: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    segments: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
) -> Replay:
    """Decide each model's trace with each method, and count what it costs.

    Intervals say what the table's own intervals leave open: costs are drawn anew, once for all
    operators of one shape on one backend and for all models, while plans and the best single
    backend stay as they are. Plans are made on the same costs that they are judged by, so that
    gains of a few per cent lean to the high side; `edgewise.dispatch.guard` takes that off.

    Args:
        traces: Forward passes of each model.
        table: Costs.
        objectives: To decide for.
        methods: Of :func:`edgewise.dispatch.search.decide`; :data:`METHODS` by default, with
            segments ``best`` too, which alone may choose them.
        backends: That may be chosen; all of the table's by default.
        segments: Let them be chosen, where the table has them.
        draws: For intervals; none with 0.
        seed: Of the draws.

    Raises:
        ConfigError: No such method or backend, or no trace.
        ProfileError: The table lacks a cost, or no objective can be judged for want of energy.
    """
    names = tuple(backends) if backends is not None else table.backends()
    methods = methods or (WITH_SEGMENTS if segments else METHODS)
    chance = _Draws(table, names, draws=draws, seed=seed)
    rows: list[Row] = []
    spread: dict[tuple[Objective, str], list[Float64]] = {}
    left_out: dict[Objective, str] = {}
    for model, passes in traces.items():
        problem = build_problem(passes, table, backends=names, segments=segments)
        for objective in objectives:
            if objective != "latency" and not _has_energy(problem):
                left_out[objective] = "the table has no energy of every operator and switch"
                continue
            row, found = _row(model, problem, objective, methods, chance)
            rows.append(row)
            for method, ratios in found.items():
                spread.setdefault((objective, method), []).append(ratios)
    if not rows:
        raise ProfileError(
            f"table {table.name!r} does not know the energy of every operator and switch, which"
            f" {' and '.join(objectives)} need",
            help="measure where there is an energy meter, or take --objective latency",
        )
    means = {key: _mean_gain(rows, *key, spread.get(key, [])) for key in _judged(rows)}
    return Replay(
        table=table.name,
        provenance=table.provenance,
        device_id=table.device_id,
        thread_policy=table.thread_policy,
        state=table.state,
        backends=names,
        segments=segments,
        rows=tuple(rows),
        means=means,
        left_out=left_out,
        excluded=table.excluded(),
    )


def missing_shapes(
    traces: Sequence[Trace], table: OperatorTable, *, backends: Sequence[str] | None = None
) -> tuple[OperatorShape, ...]:
    """Shapes of a model's operators that no backend has a usable cost of.

    Args:
        traces: Forward passes of the model.
        table: Costs.
        backends: That may be chosen; all of the table's by default.
    """
    usable = {
        shape
        for (shape, name), cost in table.costs.items()
        if cost.usable and (backends is None or name in backends)
    }
    needed = dict.fromkeys(node.shape for trace in traces for node in trace.operators)
    return tuple(shape for shape in needed if shape not in usable)


def _has_energy(problem: Problem) -> bool:
    return all(x is not None for x in (problem.op_j, problem.switch_j, problem.gap_j))


def _row(
    model: str,
    problem: Problem,
    objective: Objective,
    methods: Sequence[str],
    chance: _Draws,
) -> tuple[Row, dict[str, Float64]]:
    singles = {}
    for b, name in enumerate(problem.backends):
        one = Assignment(backend=np.full(problem.num_operators, b, dtype=np.int64))
        if np.isfinite(problem.op_s[:, b]).all():
            singles[name] = (one, totals(problem, one))
    baseline = min(singles, key=lambda n: singles[n][1].of(objective)) if singles else None
    places = chance.places(problem)
    best = chance.value(problem, places, singles[baseline][0], objective) if baseline else None
    outcomes, ratios = {}, {}
    for method in methods:
        if method == "static" and baseline is None:
            continue
        made = decide(problem, objective=objective, method=method)
        value = made.totals.of(objective)
        gain = Gain(ratio=math.nan)
        if baseline is not None and best is not None:
            gain = Gain(ratio=1 - value / singles[baseline][1].of(objective))
            if chance.known:
                each = 1 - chance.value(problem, places, made.assignment, objective) / best
                gain = _with_interval(gain.ratio, each)
                ratios[method] = each
        counts = np.bincount(made.assignment.backend, minlength=len(problem.backends))
        outcomes[method] = Outcome(
            method=method,
            totals=made.totals,
            gain=gain,
            exact=made.exact,
            operators=dict(zip(problem.backends, counts.tolist(), strict=True)),
            segments=len(made.assignment.segments),
        )
    row = Row(
        model=model,
        objective=objective,
        instances=problem.num_operators,
        baseline=baseline,
        statics={name: total for name, (_, total) in singles.items()},
        outcomes=outcomes,
    )
    return row, ratios


def _judged(rows: Sequence[Row]) -> list[tuple[Objective, str]]:
    """Objective and method that every model has."""
    found: dict[tuple[Objective, str], int] = {}
    for row in rows:
        for method in row.outcomes:
            found[row.objective, method] = found.get((row.objective, method), 0) + 1
    models = len({row.model for row in rows})
    return [key for key, count in found.items() if count == models]


def _mean_gain(
    rows: Sequence[Row], objective: Objective, method: str, ratios: Sequence[Float64]
) -> Gain:
    here = [r.outcomes[method].gain.ratio for r in rows if r.objective == objective]
    mean = float(np.mean(here))
    return _with_interval(mean, np.mean(ratios, axis=0)) if ratios else Gain(ratio=mean)


def _with_interval(ratio: float, draws: Float64) -> Gain:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Gain(ratio=ratio, low=float(low), high=float(high))


class _Draws:
    """Costs as their intervals leave them open: factors with a lognormal law, one for each row."""

    def __init__(
        self, table: OperatorTable, backends: Sequence[str], *, draws: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shapes = {shape: i for i, shape in enumerate(table.shapes())}
        self.table = table
        sigma = np.zeros((2, len(self.shapes), len(backends)))  # seconds, joules
        for (shape, name), cost in table.costs.items():
            if name in backends and cost.usable and cost.latency is not None:
                at, e = (self.shapes[shape], backends.index(name)), cost.energy
                sigma[0][at] = log_deviation(cost.latency.median_low_s, cost.latency.median_high_s)
                sigma[1][at] = log_deviation(e.low_j, e.high_j)
        between = np.zeros((len(backends), len(backends)))
        for (source, target), switch in table.switches.items():
            if {source, target} <= set(backends):
                between[backends.index(source), backends.index(target)] = log_deviation(
                    *(switch.interval_s or (None, None))
                )
        self.known = bool(draws) and bool(sigma.any() or between.any())
        count = draws if self.known else 1
        self.cost = np.exp(sigma * rng.standard_normal((count, *sigma.shape)))  # [D, 2, S, B]
        self.switch = np.exp(between * rng.standard_normal((count, *between.shape)))  # [D, B, B]

    def places(self, problem: Problem) -> Int64:
        """Number of each operator's shape. [T]; empty where nothing is drawn."""
        if not self.known:
            return np.zeros(0, dtype=np.int64)
        return np.array([self.shapes[shape] for shape in problem.shapes], dtype=np.int64)

    def value(
        self, problem: Problem, places: Int64, assignment: Assignment, objective: Objective
    ) -> Float64:
        """An assignment's objective under each draw. [D]."""
        total = totals(problem, assignment)
        if not self.known:
            return np.array([total.of(objective)])
        seconds = self._total(problem, places, assignment, total.latency_s, joules=False)
        if objective == "latency":
            return seconds
        energy = self._total(problem, places, assignment, total.of("energy"), joules=True)
        return energy if objective == "energy" else seconds * energy

    def _total(
        self,
        problem: Problem,
        places: Int64,
        assignment: Assignment,
        total: float,
        *,
        joules: bool,
    ) -> Float64:
        ops = problem.op_j if joules else problem.op_s
        switches = problem.switch_j if joules else problem.switch_s
        assert ops is not None  # noqa: S101 - the objective is judged only where energy is known
        assert switches is not None  # noqa: S101
        spent = np.zeros(self.cost.shape[2:])  # [S, B]
        alone = np.ones(problem.num_operators, dtype=bool)
        for number in assignment.segments:
            segment = problem.segments[number]
            alone[segment.start : segment.stop] = False
            b = int(assignment.backend[segment.start])
            trace, candidate = segment.candidate
            for part in problem.traces[trace].candidates[candidate].parts:
                spent[self.shapes[part], b] += self._paid(part, problem.backends[b], joules=joules)
        steps = np.flatnonzero(alone)
        alone_on = assignment.backend[steps]
        np.add.at(spent, (places[steps], alone_on), ops[steps, alone_on])
        before, after = assignment.backend[:-1], assignment.backend[1:]
        passed = np.zeros(self.switch.shape[1:])  # [B, B]
        later = np.arange(1, problem.num_operators)
        np.add.at(passed, (before, after), switches[later, before, after])
        varied = (self.cost[:, int(joules)] - 1) * spent
        return np.asarray(
            total + varied.sum(axis=(1, 2)) + ((self.switch - 1) * passed).sum(axis=(1, 2))
        )

    def _paid(self, shape: OperatorShape, backend: str, *, joules: bool) -> float:
        cost = self.table.cost(shape, backend)
        assert cost.latency is not None  # noqa: S101 - a plan uses it
        return (cost.energy.energy_j or 0.0) if joules else cost.latency.median_s

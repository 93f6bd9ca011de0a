"""Selectors on a model that they were not taught: what they gain there, and when they abstain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgewise.dispatch.forward import Rule, paper_traces
from edgewise.dispatch.learned.compiled import compile_selector
from edgewise.dispatch.learned.rows import Context, Int64, Rows, context_of
from edgewise.dispatch.learned.selectors import (
    ESTIMATORS,
    SEED,
    Selector,
    best_single,
    classifier_names,
    fit_selector,
    score,
)
from edgewise.dispatch.problem import (
    Assignment,
    Float64,
    Objective,
    Problem,
    build_problem,
    totals,
)
from edgewise.dispatch.search import decide
from edgewise.errors import ProfileError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import OperatorTable

LEAST_MODELS = 3
TOLERATED_LOSS = 0.01  # by a single backend that is guessed from other models
LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
SHARES = (0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One model to replay.

    Attributes:
        name: Of the model.
        problem: Its traces with costs; never shown to a selector that is not taught this model.
        contexts: Of each operator, in order. [T].
    """

    name: str
    problem: Problem
    contexts: tuple[Context, ...]

    def value(self, backend: Int64, objective: Objective) -> float:
        """The objective of an assignment, [T], over the whole trace."""
        return totals(self.problem, Assignment(backend=backend)).of(objective)

    def single(self, backend: int) -> Int64:
        """One backend for everything. [T]."""
        return np.full(self.problem.num_operators, backend, dtype=np.int64)

    def gain(self, backend: Int64, objective: Objective) -> float:
        """Share that an assignment saves over the model's best single backend."""
        every = (self.single(b) for b in range(len(self.problem.backends)))
        best = min(self.value(one, objective) for one in every)
        return 1 - self.value(backend, objective) / best


def case_of(
    architecture: Architecture,
    table: OperatorTable,
    *,
    backends: Sequence[str] | None = None,
    rule: Rule = "clean",
) -> Case:
    """Trace a model at the paper's lengths, for replay.

    Raises:
        ProfileError: The table lacks a cost.
    """
    traces = paper_traces(architecture, rule=rule)
    return Case(
        name=architecture.name,
        problem=build_problem(traces, table, backends=backends),
        contexts=tuple(
            context_of(architecture, trace, node) for trace in traces for node in trace.operators
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model that was held out of the training.

    Attributes:
        name: Of the model.
        gain: Of the learned choices over its best single backend, always taken.
        static_gain: Of the single backend that is best for the others; negative or 0.
        regret: Of the learned choices over its rows, by cost.
    """

    name: str
    gain: float
    static_gain: float
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do with a model that was not taught.

    Attributes:
        learned_share: Share of its arithmetic whose backend the selector chooses; for the rest it
            abstains to one backend.
        probe: Measure the model's heaviest shapes first, to know which one.
        reason: Why, in words.
    """

    learned_share: float
    probe: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfer:
    """A selector with what is known of its use on models that it was not taught.

    Attributes:
        selector: Taught all models.
        taught: Their rows.
        fallback: Number of the single backend that is best for all of them.
        trials: Each model, held out of all the rest.
        level: Probability that the selector must give its choice, else it abstains; ``None`` where
            with no level all models would have gained over the fallback, and it always abstains.
        share: Of a model's arithmetic that is to be measured where a probe is asked for.
    """

    selector: Selector
    taught: Rows
    fallback: int
    trials: tuple[Trial, ...]
    level: float | None
    share: float

    def advise(self, unknown: Rows) -> Advice:
        """Say what to do with a model, from its shapes alone: its costs are not looked at."""
        sure = np.zeros((len(unknown.contexts), 1), dtype=bool)
        if self.level is not None:
            likely = self.selector.probabilities(unknown.features).max(axis=-1) >= self.level
            sure = likely & ~self.selector.outside(unknown.features)[:, None]
        part = float((work(unknown)[:, None] * sure).sum() / sure.shape[1])
        worst = min(self.trials, key=lambda trial: trial.static_gain)
        if self.level is None:
            why = "held out in turn, the models that were taught do not all gain"
        elif part == 0:
            why = "its sizes or kinds of operators are beyond those that were taught"
        else:
            why = f"the choice is sure for {part:.0%} of its arithmetic"
        probe = worst.static_gain < -TOLERATED_LOSS
        if probe:
            lost = f"{worst.name}, held out, loses {-worst.static_gain:.1%} with the others'"
            why = f"{why}; the best single backend varies: {lost}"
        return Advice(learned_share=part, probe=probe, reason=why)

    def assign(self, case: Case, *, fallback: int | None = None, guarded: bool = True) -> Int64:
        """Choose for a model that was not taught.

        Args:
            case: Its operators; their costs are not looked at.
            fallback: Number of the single backend; by default the best for the models taught.
            guarded: Abstain where the selector is not sure.
        """
        single = self.fallback if fallback is None else fallback
        if guarded and self.level is None:
            return case.single(single)
        level = (self.level or 0.0) if guarded else None
        return _walk(self.selector, self.taught, case, single, level)


def learn_transfer(  # noqa: PLR0913
    rows: Rows,
    cases: Mapping[str, Case],
    *,
    objective: Objective,
    classifiers: Sequence[str] = (),
    seed: int = SEED,
    estimators: int = ESTIMATORS,
    fitted: dict[tuple[object, ...], Selector] | None = None,
) -> Transfer:
    """Teach a selector, and find out by holding out each model when it can be trusted elsewhere.

    The classifier is the one with the least regret on models that were held out. The level is the
    lowest at which no model that was held out is worse off than with the fallback.

    Args:
        rows: Of the models to teach.
        cases: Their replays, by name.
        objective: What is to be small.
        classifiers: To choose from; all by default.
        seed: Of the classifiers.
        estimators: Trees of the forests.
        fitted: Selectors that were fitted before, by what they were taught; gets the new ones.

    Raises:
        ProfileError: Fewer than three models, or as `fit_selector`.
    """
    models = tuple(dict.fromkeys(rows.models))
    if len(models) < LEAST_MODELS:
        raise ProfileError(
            f"at least {LEAST_MODELS} models are needed to see how selectors do on one that they"
            f" were not taught, found {', '.join(models)}",
            help="measure more models",
        )
    known = {} if fitted is None else fitted

    def fit(chosen: Rows, classifier: str) -> Selector:
        key = (objective, classifier, tuple(sorted(set(chosen.models))))
        if key not in known:
            known[key] = fit_selector(
                chosen, objective=objective, classifier=classifier, seed=seed, estimators=estimators
            )
        return known[key]

    others = {name: without(rows, name) for name in models}
    regrets = {
        classifier: [_regret(fit(others[m], classifier), only(rows, m), objective) for m in models]
        for classifier in classifiers or classifier_names()
    }
    best = min(regrets, key=lambda classifier: float(np.mean(regrets[classifier])))
    statics = {name: best_single(others[name], objective) for name in models}

    def gain(name: str, level: float | None) -> float:
        walked = _walk(fit(others[name], best), others[name], cases[name], statics[name], level)
        return cases[name].gain(walked, objective)

    trials = tuple(
        Trial(
            name=name,
            gain=gain(name, None),
            static_gain=cases[name].gain(cases[name].single(statics[name]), objective),
            regret=regret,
        )
        for name, regret in zip(models, regrets[best], strict=True)
    )
    safe = (p for p in LEVELS if all(gain(t.name, p) >= t.static_gain for t in trials))
    return Transfer(
        selector=fit(rows, best),
        taught=rows,
        fallback=best_single(rows, objective),
        trials=trials,
        level=next(safe, None),
        share=_share(rows, cases, objective),
    )


def _regret(selector: Selector, held: Rows, objective: Objective) -> float:
    costs = held.costs(objective, transition=True)
    return score(costs, selector.choose(held.features, held.op_s)).weighted_regret


def _walk(selector: Selector, taught: Rows, case: Case, single: int, level: float | None) -> Int64:
    """Along a trace; without a level the selector never abstains."""
    table = compile_selector(
        selector,
        taught,
        contexts=tuple(dict.fromkeys(case.contexts)),
        fallback=selector.backends[single],
        least=level,
    )
    return table.follow(case.contexts, table.fallback)


def work(rows: Rows) -> Float64:
    """Share of each group in all arithmetic, [G]; what has no matrix counts by its elements."""
    flops = [max(c.shape.flops, c.shape.m * c.shape.n) for c in rows.contexts]
    found = rows.counts * np.array(flops, dtype=np.float64)
    return np.asarray(found / found.sum())


def only(rows: Rows, model: str) -> Rows:
    """One model's groups."""
    return rows.take(np.array([name == model for name in rows.models]))


def without(rows: Rows, model: str) -> Rows:
    """All groups but one model's."""
    return rows.take(np.array([name != model for name in rows.models]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """What a few measured shapes of a model say.

    Attributes:
        measured: How many, on every backend.
        single: Number of the backend that is cheapest for them.
        backend: The exact plan for them, with that backend for all other operators. [T].
    """

    measured: int
    single: int
    backend: Int64


def probe(here: Rows, case: Case, *, objective: Objective, share: float) -> Probe:
    """Measure a model's heaviest shapes, and plan with what they cost.

    Args:
        here: The model's rows; costs are looked at of the heaviest alone.
        case: Its replay; the same.
        objective: What is to be small.
        share: Of its arithmetic that is measured.
    """
    chosen = probed(here, share=share)
    single = best_single(here.take(chosen), objective)
    measured = {here.contexts[g] for g in chosen}
    known = np.array([context in measured for context in case.contexts])
    problem = case.problem
    # What was not measured stays on one backend, and counts nothing.
    pinned = np.where(np.arange(len(problem.backends)) == single, 0.0, np.inf)
    op_j = problem.op_j
    plan = decide(
        replace(
            problem,
            op_s=np.where(known[:, None], problem.op_s, pinned),
            op_j=None if op_j is None else np.where(known[:, None], op_j, pinned),
        ),
        objective=objective,
        method="viterbi",
    )
    return Probe(measured=len(chosen), single=single, backend=plan.assignment.backend)


def probed(rows: Rows, *, share: float) -> Int64:
    """The fewest groups with that share of the arithmetic, the heaviest first."""
    part = work(rows)
    order = np.argsort(-part, kind="stable")
    count = int(np.searchsorted(np.cumsum(part[order]), share * (1 - 1e-9))) + 1
    return np.asarray(order[:count], dtype=np.int64)


def _share(rows: Rows, cases: Mapping[str, Case], objective: Objective) -> float:
    """The least share that finds each model's best single backend, or one hardly worse."""

    def loss(model: str, share: float) -> float:
        here = only(rows, model)
        single = best_single(here.take(probed(here, share=share)), objective)
        return -cases[model].gain(cases[model].single(single), objective)

    models = set(rows.models)
    enough = (s for s in SHARES if max(loss(m, s) for m in models) <= TOLERATED_LOSS / 2)
    return next(enough, SHARES[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One model that took no part in anything but the replay.

    Attributes:
        model: Its name.
        classifier: Chosen by the others.
        gain: Of the learned choices, always taken, over its best single backend.
        static_gain: Of the single backend that is best for the others; negative or 0.
        guarded_gain: Of the learned choices with the guard.
        probed_gain: Of the plan made with the costs of a few shapes, and no selector.
        shapes: How many that are.
        advice: Of the guard.
    """

    model: str
    classifier: str
    gain: float
    static_gain: float
    guarded_gain: float
    probed_gain: float
    shapes: int
    advice: Advice


def leave_one_model_out(  # noqa: PLR0913
    rows: Rows,
    cases: Mapping[str, Case],
    *,
    objective: Objective,
    classifiers: Sequence[str] = (),
    seed: int = SEED,
    estimators: int = ESTIMATORS,
) -> tuple[HeldOut, ...]:
    """Hold out each model from the training, from the choice of classifier, and from the guard.

    Args:
        rows: Of all models.
        cases: Their replays, by name.
        objective: What is to be small.
        classifiers: To choose from; all by default.
        seed: Of the classifiers.
        estimators: Trees of the forests.

    Raises:
        ProfileError: Fewer than four models, or as `fit_selector`.
    """
    fitted: dict[tuple[object, ...], Selector] = {}
    found = []
    for name in dict.fromkeys(rows.models):
        learned = learn_transfer(
            without(rows, name),
            cases,
            objective=objective,
            classifiers=classifiers,
            seed=seed,
            estimators=estimators,
            fitted=fitted,
        )
        found.append(_held_out(learned, only(rows, name), cases[name], objective))
    return tuple(found)


def _held_out(learned: Transfer, here: Rows, case: Case, objective: Objective) -> HeldOut:
    advice = learned.advise(here)
    few = probe(here, case, objective=objective, share=learned.share)
    single = few.single if advice.probe else learned.fallback
    return HeldOut(
        model=case.name,
        classifier=learned.selector.classifier,
        gain=case.gain(learned.assign(case, guarded=False), objective),
        static_gain=case.gain(case.single(learned.fallback), objective),
        guarded_gain=case.gain(learned.assign(case, fallback=single), objective),
        probed_gain=case.gain(few.backend, objective),
        shapes=few.measured,
        advice=advice,
    )

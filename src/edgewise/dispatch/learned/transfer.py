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
LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
MEASURED_SHARE = 0.9
# A trial of a plan beside one backend: noise of one run, and how many of each.
TRIAL_NOISE_RATIO, TRIAL_RUNS = 0.05, 9


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

    def best(self, objective: Objective) -> int:
        """Number of the best single backend: what one run on each tells."""
        every = range(len(self.problem.backends))
        return min(every, key=lambda b: self.value(self.single(b), objective))

    def gain(self, backend: Int64, objective: Objective) -> float:
        """Share that an assignment saves over the model's best single backend."""
        best = self.value(self.single(self.best(objective)), objective)
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
        reason: Why, in words.
    """

    learned_share: float
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
    """

    selector: Selector
    taught: Rows
    fallback: int
    trials: tuple[Trial, ...]
    level: float | None

    def advise(self, unknown: Rows) -> Advice:
        """Say what to do with a model, from its shapes alone: its costs are not looked at."""
        sure = np.zeros((len(unknown.contexts), 1), dtype=bool)
        if self.level is not None:
            likely = self.selector.probabilities(unknown.features).max(axis=-1) >= self.level
            sure = likely & ~self.selector.outside(unknown.features)[:, None]
        part = float((work(unknown)[:, None] * sure).sum() / sure.shape[1])
        if self.level is None:
            why = "held out in turn, the models that were taught do not all gain"
        elif part == 0:
            why = "its sizes or kinds of operators are beyond those that were taught"
        else:
            why = f"the choice is sure for {part:.0%} of its arithmetic"
        return Advice(learned_share=part, reason=why)

    def assign(self, case: Case, *, fallback: int | None = None, guarded: bool = True) -> Int64:
        """Choose for a model that was not taught.

        Args:
            case: Its operators; their costs are not looked at.
            fallback: Number of the single backend; by default the best for the models taught, a
                guess that only a run of the model on each backend can replace.
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


def plan_measured(here: Rows, case: Case, *, objective: Objective, share: float) -> Int64:
    """Plan exactly with the costs of a model's heaviest shapes; the rest stays on one backend.

    Which one is best is known from one run of the whole model on each.

    Args:
        here: The model's rows.
        case: Its replay.
        objective: What is to be small.
        share: Of its arithmetic that is measured.

    Returns:
        Numbers of backends. [T].
    """
    chosen = heaviest(here, share=share)
    single = case.best(objective)
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
    return plan.assignment.backend


def survives_trial(
    case: Case, backend: Int64, objective: Objective, *, rng: np.random.Generator
) -> bool:
    """Run a plan and the best single backend in turns, and keep it only where that shows a gain.

    What learning from other models cannot know, a few runs of the model itself tell: the last word
    of the guard. Each run differs from the replay by noise, so a plan is kept only if it saves
    more than twice the standard error of the medians' difference.

    Args:
        case: The model's replay, which stands for running it.
        backend: The plan. [T].
        objective: What is to be small.
        rng: Of the noise.
    """
    best = case.value(case.single(case.best(objective)), objective)
    noise = rng.normal(0.0, TRIAL_NOISE_RATIO, size=(2, TRIAL_RUNS))
    plan, single = np.median(np.log([[case.value(backend, objective)], [best]]) + noise, axis=1)
    # Of a median of normal errors: sqrt(pi / 2) times that of a mean; of a difference, sqrt(2).
    error = TRIAL_NOISE_RATIO * np.sqrt(np.pi / TRIAL_RUNS)
    return bool(single - plan > 2 * error)


def heaviest(rows: Rows, *, share: float) -> Int64:
    """The fewest groups with that share of the arithmetic, the heaviest first."""
    part = work(rows)
    order = np.argsort(-part, kind="stable")
    count = int(np.searchsorted(np.cumsum(part[order]), share * (1 - 1e-9))) + 1
    return np.asarray(order[:count], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One model that took no part in anything but the replay.

    Attributes:
        model: Its name.
        classifier: Chosen by the others.
        gain: Of the learned choices, always taken, over its best single backend.
        static_gain: Of the single backend that is best for the others; negative or 0.
        alone_gain: With the guard, and nothing measured: it abstains to that single backend.
        guarded_gain: With the guard, and one run on each backend: it abstains to the best.
        tried_gain: The same, and dropped for that backend unless it survives a trial.
        measured_gain: Of the plan made with the costs of its heaviest shapes, and no selector.
        shapes: How many that are.
        of_shapes: How many it has.
        advice: Of the guard.
    """

    model: str
    classifier: str
    gain: float
    static_gain: float
    alone_gain: float
    guarded_gain: float
    tried_gain: float
    measured_gain: float
    shapes: int
    of_shapes: int
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
    found: list[HeldOut] = []
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
        rng = np.random.default_rng([seed, len(found)])
        found.append(_held_out(learned, only(rows, name), cases[name], objective, rng))
    return tuple(found)


def _held_out(
    learned: Transfer, here: Rows, case: Case, objective: Objective, rng: np.random.Generator
) -> HeldOut:
    planned = plan_measured(here, case, objective=objective, share=MEASURED_SHARE)
    guarded = learned.assign(case, fallback=case.best(objective))
    guarded_gain = case.gain(guarded, objective)
    kept = survives_trial(case, guarded, objective, rng=rng)
    return HeldOut(
        model=case.name,
        classifier=learned.selector.classifier,
        gain=case.gain(learned.assign(case, guarded=False), objective),
        static_gain=case.gain(case.single(learned.fallback), objective),
        alone_gain=case.gain(learned.assign(case), objective),
        guarded_gain=guarded_gain,
        tried_gain=guarded_gain if kept else 0.0,
        measured_gain=case.gain(planned, objective),
        shapes=len(heaviest(here, share=MEASURED_SHARE)),
        of_shapes=len(here.contexts),
        advice=learned.advise(here),
    )

"""Compares exit policies on one footing: same inputs, same program, interleaved, each at its best.

Every input goes to every policy at every budget, and the order rotates, so that what disturbs the
machine for a while disturbs all alike. A policy has an object of its own for each budget, with the
setting that did best for it on validation data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.energy import ReadEnergy
from edgewise.bench.tuning import make_tuned
from edgewise.errors import ConfigError, DataError, ShapeError, nearest_names
from edgewise.exits import Policy, PolicyInputs, policy_names
from edgewise.report.evaluation import Estimate, Evaluation, EvaluationRow
from edgewise.report.wording import HERO
from edgewise.runtime import Session

if TYPE_CHECKING:
    from pathlib import Path

    from edgewise.backends import Program
    from edgewise.clock import Clock
    from edgewise.model import StagedModel
    from edgewise.predict import CostTable
    from edgewise.runtime import Answer

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

BUDGETS = (0.25, 0.5, 0.75, 1.0)
# Compared under a name of their own: a policy's file and the options that make it another.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "msdnet_anytime": ("msdnet", {"mode": "anytime"}),
    "static_table_scaled": ("static_table", {"scale_factor": True}),
}
_NOT_COMPARED = frozenset({"fixed"})  # it needs to be told where
_RESAMPLES = 1000
_SHIPPED_SAMPLE = "fashion-mnist-sample"
_WARM_UP_INPUTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Inputs with their labels.

    Attributes:
        inputs: [N, ...], as the model takes them.
        labels: [N].
        source: Where they came from, for people.
    """

    inputs: Float32
    labels: npt.NDArray[np.integer]
    source: str


def compared_policies(chosen: str | Sequence[str] = "all") -> tuple[str, ...]:
    """Names of policies to compare.

    Args:
        chosen: ``"all"``, names separated by commas, or names.

    Raises:
        ConfigError: There is no such policy, or none was named.
    """
    known = sorted({*policy_names(), *VARIANTS} - _NOT_COMPARED)
    if chosen == "all":
        # The hero first: who reads a table from above sees what it is about.
        return tuple(sorted(known, key=lambda name: (name != HERO, name)))
    names = [n.strip() for n in chosen.split(",")] if isinstance(chosen, str) else list(chosen)
    names = list(dict.fromkeys(n for n in names if n))
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown policy {name!r}", help=nearest_names(name, ["all", *known]))
    if not names:
        raise ConfigError("no policy to compare", help=f"choose from all, {', '.join(known)}")
    return tuple(names)


def evaluate(  # noqa: PLR0913 - a comparison's whole circumstances
    program: Program,
    costs: CostTable,
    sample: Sample,
    *,
    policies: Sequence[str],
    budgets: Sequence[float] = BUDGETS,
    clock: Clock | None = None,
    read_energy: ReadEnergy | None = None,
    energy_note: str = "no meter was asked for",
    skip_unable: bool = False,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Evaluation:
    """Run the comparison.

    Args:
        program: A loaded model.
        costs: Of it.
        sample: What every policy is given.
        policies: Names, see `compared_policies`.
        budgets: As shares of the median of the whole network.
        clock: Tells time; the machine's by default.
        read_energy: Joules used since some instant; ``None`` without a meter.
        energy_note: What it counts, or why there is none.
        skip_unable: Leave out policies that cannot be made, with the reason, instead of raising.
        seed: Of the bootstrap.
        on_progress: Told the share done.

    Raises:
        ConfigError: A budget is not above zero, or a policy cannot be made.
        DataError: There are no inputs, or labels that no class has.
    """
    _check(program.model, sample, budgets)
    full_depth_s = costs.full_depth_s()
    sessions, skipped = _sessions(
        program,
        costs,
        policies=policies,
        budgets_s=[b * full_depth_s for b in budgets],
        clock=clock,
        skip_unable=skip_unable,
    )
    made = [name for name in policies if name not in skipped]
    if not made:
        raise ConfigError(
            f"no policy can be compared: {next(iter(skipped.values()), 'none was named')}"
        )
    sessions[made[0], 0].warm_up()
    log = _Log(program.model, sample.labels, shape=(len(made), len(budgets)))
    num = len(sample.inputs)
    turns = [(i, b) for b in range(len(budgets)) for i in range(len(made))]
    for n in range(-min(_WARM_UP_INPUTS, num), num):
        on_progress(max(0, n) / num)
        for turn in range(len(turns)):
            i, b = turns[(turn + n) % len(turns)]
            before_j = read_energy() if read_energy else float("nan")
            answer = sessions[made[i], b].run(
                sample.inputs[n][None], budget_s=budgets[b] * full_depth_s
            )
            after_j = read_energy() if read_energy else float("nan")
            if n >= 0:
                log.add(i, b, n, answer, after_j - before_j)
    on_progress(1.0)
    weights = np.random.default_rng(seed).multinomial(num, [1 / num] * num, _RESAMPLES)
    rows = [
        log.row(
            i,
            b,
            policy=sessions[name, b].policy,
            budget_ratio=budgets[b],
            budget_s=budgets[b] * full_depth_s,
            hero=made.index(HERO) if HERO in made else None,
            weights=weights,
        )
        for b in range(len(budgets))
        for i, name in enumerate(made)
    ]
    return Evaluation(
        model=program.model.name,
        backend=program.backend,
        threads=program.threads,
        data=f"{num} inputs: {sample.source}",
        full_depth_s=full_depth_s,
        provenance="simulated" if program.backend == "null" else "measured",
        rows=tuple(rows),
        skipped=skipped,
        energy_note=energy_note,
        notes=(
            "Every input went to every policy at every budget, in an order that rotates.",
            (
                "Policies with thresholds have those that answer most validation samples rightly"
                " and in time, going by the profile's own rounds."
            ),
            f"Intervals: {_RESAMPLES} bootstrap resamples of inputs; no width where all agreed.",
        ),
    )


def open_model(  # noqa: PLR0913 - one keyword per choice a user may make
    model: str | StagedModel,
    *,
    data: str | None,
    limit: int,
    backend: str = "auto",
    threads: int = 1,
    profile: str = "auto",
    store: Path | None = None,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> tuple[Program, CostTable, Sample]:
    """Load a model, its costs and labelled inputs for it.

    Args:
        model: A shipped name, a checkpoint, an ONNX file, or a staged model.
        data: A data set's name or path, its test split; the sample that comes with the shipped
            models where ``None``.
        limit: At most so many inputs.
        backend: ``runtime`` or ``runtime:device``, or ``"auto"``.
        threads: Of each call.
        profile: ``"auto"``, ``"stored"`` or an exported profile.
        store: Where profiles are kept; the user's store by default.
        seed: Decides which inputs a limit keeps.
        on_progress: Told the share of a measurement that is done.

    Raises:
        ConfigError: The model does not say how images become inputs.
        DataError: The data cannot be read, or has no labels.
        EdgeError: As `edgewise.load`.
    """
    from edgewise.api import best_backend, costs_of
    from edgewise.backends import load_program
    from edgewise.backends.registry import full_name
    from edgewise.data import Preprocess, load_dataset
    from edgewise.frontends.checkpoint import load_model

    staged = load_model(model) if isinstance(model, str) else model
    if staged.preprocess is None:
        raise ConfigError(
            f"model {staged.name!r} does not say how images become inputs",
            help="use a checkpoint made by `edgewise prepare`",
        )
    preprocess = Preprocess.from_json(staged.preprocess)
    if data is None:
        found = load_dataset(_SHIPPED_SAMPLE, split="test")
        found = found.take(limit, seed=seed) if limit < len(found) else found
    else:
        known = None if _is_named(data) else preprocess.size
        found = load_dataset(data, split="test", limit=limit, seed=seed, size=known)
    if found.labels is None:
        raise DataError(
            f"data set {found.name!r} has no labels, so answers cannot be judged",
            help="use images in one folder per class, or a .npz file with labels",
        )
    source = found.source
    if staged.class_names and found.class_names and staged.class_names != found.class_names:
        source += "; its class names are not the model's"
    name = best_backend() if backend == "auto" else full_name(backend)
    program = load_program(staged, name, threads=threads)
    costs = costs_of(
        program, profile=profile, store=store, on_progress=lambda p: on_progress(p.done_ratio)
    )
    return (
        program,
        costs,
        Sample(inputs=preprocess(found.images), labels=found.labels, source=source),
    )


def _is_named(data: str) -> bool:
    from edgewise.data import dataset_names

    return data in dataset_names()


def _check(model: StagedModel, sample: Sample, budgets: Sequence[float]) -> None:
    if not budgets or not all(0.0 < b < float("inf") for b in budgets):
        raise ConfigError(
            f"expected budgets above zero, found {list(budgets)!r}",
            help="as shares of the whole network's time: 0.25 is a quarter",
        )
    if len(set(budgets)) != len(budgets):
        raise ConfigError(f"expected each budget once, found {list(budgets)!r}")
    if not len(sample.inputs):
        raise DataError("there are no inputs to compare policies on")
    if sample.labels.shape != (len(sample.inputs),):
        raise ShapeError(
            f"expected one label for each of {len(sample.inputs)} inputs, found an array of shape"
            f" {sample.labels.shape}"
        )
    low, high = int(sample.labels.min()), int(sample.labels.max())
    if low < 0 or high >= model.num_classes:
        raise DataError(
            f"expected labels from 0 to {model.num_classes - 1}, the classes of {model.name!r};"
            f" found {low} to {high}",
            help="use the data that the model's heads were fitted on",
        )


def _sessions(  # noqa: PLR0913
    program: Program,
    costs: CostTable,
    *,
    policies: Sequence[str],
    budgets_s: Sequence[float],
    clock: Clock | None,
    skip_unable: bool,
) -> tuple[dict[tuple[str, int], Session], dict[str, str]]:
    inputs = PolicyInputs.of(program.model, costs, segments=program.segments)
    sessions: dict[tuple[str, int], Session] = {}
    skipped: dict[str, str] = {}
    for name in policies:
        try:
            for b, budget_s in enumerate(budgets_s):
                policy = make_for_budget(name, inputs, budget_s=budget_s)
                sessions[name, b] = Session(program, costs, policy=policy, clock=clock)
        except ConfigError as error:
            if not skip_unable:
                raise
            skipped[name] = error.message
    return sessions, skipped


def make_for_budget(name: str, inputs: PolicyInputs, *, budget_s: float) -> Policy:
    """Make a policy with its best setting for a budget.

    Args:
        name: A policy's name or a variant's.
        inputs: What it may know.
        budget_s: Seconds.

    Raises:
        ConfigError: It cannot be made.
    """
    file, options = VARIANTS.get(name, (name, {}))
    return make_tuned(file, inputs, budget_s=budget_s, fixed=options)


class _Log:
    """What happened to each input, by policy and budget."""

    def __init__(
        self, model: StagedModel, labels: npt.NDArray[np.integer], *, shape: tuple[int, int]
    ) -> None:
        self._labels = labels
        self._backbone_flops = model.flops or 1.0
        self._heads = [e.head.spec.flops if e.head else 0.0 for e in model.exits]
        self._stages = np.concatenate(([0.0], np.cumsum([s.flops for s in model.stages])))
        whole = (*shape, len(labels))
        self.met = np.zeros(whole)
        self.answered = np.zeros(whole)
        self.right = np.zeros(whole)
        self.depth = np.zeros(whole)
        self.flops = np.zeros(whole)
        self.latency_s = np.full(whole, np.nan)
        self.energy_j = np.full(whole, np.nan)

    def add(self, i: int, b: int, n: int, answer: Answer, energy_j: float) -> None:
        """Note one answer."""
        at = (i, b, n)
        self.energy_j[at] = energy_j
        if answer.exit_index is None:
            return
        self.met[at] = answer.met
        self.answered[at] = 1.0
        self.right[at] = answer.label == self._labels[n]
        self.depth[at] = answer.depth_ratio or 0.0
        self.flops[at] = sum(self._flops(s.unit) for s in answer.steps) / self._backbone_flops
        self.latency_s[at] = answer.observed_s

    def _flops(self, unit: str) -> float:
        kind, _, place = unit.partition(":")
        if kind == "head":
            return self._heads[int(place)]
        start, stop = map(int, place.split("-"))
        return float(self._stages[stop] - self._stages[start])

    def row(  # noqa: PLR0913 - what a row says beside its numbers
        self,
        i: int,
        b: int,
        *,
        policy: Policy,
        budget_ratio: float,
        budget_s: float,
        hero: int | None,
        weights: npt.NDArray[np.int64],
    ) -> EvaluationRow:
        """Sum one policy at one budget up."""
        in_time = self.right * self.met
        latency_s = self.latency_s[i, b][self.answered[i, b] > 0]
        p50_s, p99_s = (
            np.quantile(latency_s, [0.5, 0.99]).tolist() if latency_s.size else (None,) * 2
        )
        metered = np.isfinite(self.energy_j[i, b]).all()
        return EvaluationRow(
            policy=policy.name,
            budget_ratio=budget_ratio,
            budget_s=budget_s,
            requests=self.met.shape[2],
            dsr=bootstrap(self.met[i, b], weights),
            accuracy=bootstrap(self.right[i, b], weights, of=self.answered[i, b])
            if latency_s.size
            else None,
            accuracy_in_time=bootstrap(in_time[i, b], weights),
            mean_depth_ratio=bootstrap(self.depth[i, b], weights),
            flops_ratio=bootstrap(self.flops[i, b], weights),
            mean_s=float(latency_s.mean()) if latency_s.size else None,
            p50_s=p50_s,
            p99_s=p99_s,
            energy_j=bootstrap(self.energy_j[i, b], weights) if metered else None,
            edge_over=None
            if hero is None or hero == i
            else bootstrap(in_time[hero, b] - in_time[i, b], weights),
            is_bound=policy.hindsight,
        )


def bootstrap(
    values: Float64, weights: npt.NDArray[np.int64], *, of: Float64 | None = None
) -> Estimate:
    """Mean with the 95 % interval of its resamples.

    Args:
        values: [N].
        weights: [R, N], how often each input is in each resample.
        of: [N], ones where a value counts; all by default.

    Source:
        Efron, Bootstrap Methods: Another Look at the Jackknife (1979), percentile interval.
    """
    counts = np.ones(len(values)) if of is None else of
    sums, sizes = weights @ (values * counts), weights @ counts
    means = sums[sizes > 0] / sizes[sizes > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(
        value=float((values * counts).sum() / counts.sum()), low=float(low), high=float(high)
    )

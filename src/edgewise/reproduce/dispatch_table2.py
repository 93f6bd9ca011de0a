"""Transition-aware dispatch, Table II: selectors on a model that they were not taught, guarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from edgewise.dispatch.learned.transfer import LEAST_MODELS, HeldOut, leave_one_model_out
from edgewise.dispatch.problem import OBJECTIVES, Objective
from edgewise.report.chart import Chart, Series
from edgewise.report.dispatch import OBJECTIVE_NAMES
from edgewise.reproduce import _dispatch as common
from edgewise.reproduce import _dispatch_learned as learned
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Gains of learned selectors on a model held out of the training, with and without guard"

_PAPER: dict[tuple[str, Objective], float] = {
    ("smollm2-135m", "latency"): 31.66,
    ("smollm2-135m", "energy"): 26.97,
    ("smollm2-135m", "edp"): 49.75,
    ("modernbert-base", "latency"): -15.49,
    ("modernbert-base", "energy"): 2.61,
    ("modernbert-base", "edp"): -6.10,
}
_PAPER_BETTER: dict[Objective, int] = {"latency": 6, "energy": 7, "edp": 6}
_ALLOWED_LOSS = 0.01
# A model is held out, and the guard holds out each of the rest.
_LEAST = LEAST_MODELS + 1

Found = dict[Objective, tuple[HeldOut, ...]]


def run(setup: Setup) -> Reproduction:
    """Hold out each model from training, from the choice of classifier and from the guard.

    Args:
        setup: ``models`` to take part; ``quick`` takes two classifiers with few trees.
    """
    tables = list(learned.tables(setup))
    classifiers, estimators = learned.effort(setup)
    found: dict[str, Found] = {}
    for table in tables:
        found[table.table] = {}
        for objective in () if learned.missing(table, _LEAST) else table.objectives:
            setup.say(f"{table.table}: {OBJECTIVE_NAMES[objective]}")
            found[table.table][objective] = leave_one_model_out(
                table.rows,
                table.cases,
                objective=objective,
                classifiers=classifiers,
                estimators=estimators,
            )
    return Reproduction(
        title=TITLE,
        source=f"{common.SOURCE}, Table II",
        setting={"paper": common.ON_THE_BOARD, "ours": learned.made(tables)},
        figures=tuple(f for table in tables for f in _figures(table, found[table.table], setup)),
        verdicts=tuple(v for table in tables for v in _verdicts(table, found[table.table])),
        notes=(
            (
                "learned: the selector's choices, always taken. guarded: it abstains to one backend"
                " for operators beyond the sizes and kinds that it was taught, and where its"
                " probability is below a level at which none of the models that it was taught,"
                " held out in turn, was worse off than with one backend."
            ),
            (
                "Of a model that was never run its shapes are known, not its costs: which single"
                " backend is best for it is a guess from the other models. Where that guess"
                " fails for those, the guard asks for the costs of the model's heaviest shapes on"
                " each backend. few shapes measured: the exact plan with those costs, one backend"
                " for the rest, and no selector."
            ),
            (
                "Gains are over the best single backend of that model, as replayed. TinyLlama"
                " and OLMo2 share shapes: between them nothing is quite held out."
            ),
        ),
        charts=tuple(
            _chart(table, objective, rows)
            for table in tables
            for objective, rows in found[table.table].items()
        ),
        details={
            name: {o: [asdict(row) for row in rows] for o, rows in each.items()}
            for name, each in found.items()
        },
    )


def _figures(table: learned.Learnable, found: Found, setup: Setup) -> Iterator[Figure]:
    simulated = table.provenance == "simulated"
    where = "" if simulated else f" on {table.table}"
    if not found:
        yield Figure(
            name=f"held-out models{where}",
            unit="%",
            provenance=table.provenance,
            note=learned.missing(table, _LEAST),
        )
    for objective, rows in found.items():
        name = OBJECTIVE_NAMES[objective]
        paper = simulated and not setup.models
        yield Figure(
            name=f"{name}{where}: held-out models that gain, learned",
            unit="count",
            paper=_PAPER_BETTER[objective] if paper else None,
            ours=sum(row.gain > 0 for row in rows),
            provenance=table.provenance,
        )
        for row in rows:
            for what, theirs, ours, note in (
                ("learned", _PAPER.get((row.model, objective)), row.gain, row.classifier),
                ("guarded", None, row.guarded_gain, _note(row)),
                ("few shapes measured", None, row.probed_gain, f"{row.shapes} shapes"),
            ):
                yield Figure(
                    name=f"{name}, {row.model}{where}: {what}",
                    unit="%",
                    paper=theirs if paper else None,
                    ours=100 * ours,
                    provenance=table.provenance,
                    note=note,
                )


def _note(row: HeldOut) -> str:
    part = f"learned for {row.advice.learned_share:.0%} of its arithmetic"
    return f"{part}; {row.shapes} shapes measured" if row.advice.probe else part


def _verdicts(table: learned.Learnable, found: Found) -> Iterator[Verdict]:
    guarded = f"with the guard no model is below {-_ALLOWED_LOSS:.0%}, {table.table}"
    if not found:
        yield Verdict(claim=guarded, holds=None, detail=learned.missing(table, _LEAST))
        return
    worst = {o: min(rows, key=lambda row: row.guarded_gain) for o, rows in found.items()}
    yield Verdict(
        claim=guarded,
        holds=all(row.guarded_gain >= -_ALLOWED_LOSS for row in worst.values()),
        detail=_say(worst, {o: row.guarded_gain for o, row in worst.items()}),
    )
    plain = {o: min(rows, key=lambda row: row.gain) for o, rows in found.items()}
    yield Verdict(
        claim=f"the guard's worst is no worse than without it, {table.table}",
        holds=all(worst[o].guarded_gain >= min(0.0, plain[o].gain) for o in found),
        detail=f"without: {_say(plain, {o: row.gain for o, row in plain.items()})}",
    )
    few = [row for rows in found.values() for row in rows]
    means = [
        sum(values) / len(few)
        for values in zip(*((r.gain, r.probed_gain) for r in few), strict=True)
    ]
    yield Verdict(
        claim=f"measuring a few shapes is worth more than learning from others, {table.table}",
        holds=means[1] > means[0],
        detail=f"{100 * means[1]:.1f} % and {100 * means[0]:.1f} % on average;"
        f" {min(r.shapes for r in few)} to {max(r.shapes for r in few)} shapes",
    )
    if table.provenance == "simulated":
        better = {o: sum(row.gain > 0 for row in rows) for o, rows in found.items()}
        yield Verdict(
            claim="simulated: unguarded, most models gain, as in the paper",
            holds=all(2 * count > len(found[o]) for o, count in better.items())
            and set(better) == set(OBJECTIVES),
            detail=", ".join(f"{OBJECTIVE_NAMES[o]} {n}" for o, n in better.items())
            + f" of {len(next(iter(found.values())))}",
        )


def _say(rows: Mapping[Objective, HeldOut], gains: Mapping[Objective, float]) -> str:
    return ", ".join(
        f"{OBJECTIVE_NAMES[o]} {100 * gains[o]:+.2f} % ({row.model})" for o, row in rows.items()
    )


def _chart(table: learned.Learnable, objective: Objective, rows: tuple[HeldOut, ...]) -> Chart:
    names = [row.model for row in rows]
    drawn: dict[str, list[float | None]] = {
        "learned": [100 * row.gain for row in rows],
        "guarded": [100 * row.guarded_gain for row in rows],
        "few shapes measured": [100 * row.probed_gain for row in rows],
    }
    if table.provenance == "simulated":
        drawn["paper, learned"] = [_PAPER.get((name, objective)) for name in names]
    return Chart(
        title=f"{OBJECTIVE_NAMES[objective]}, {table.table}",
        x_label="",
        y_label="gain over the best single backend, %",
        series=tuple(Series(name=name, x=names, y=y) for name, y in drawn.items()),
        provenance=table.provenance + (" and paper" if table.provenance == "simulated" else ""),
        kind="bars",
    )

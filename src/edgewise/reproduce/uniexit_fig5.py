"""UniExit, Figure 5: all policies on a calm machine, the deadline being the full-depth latency."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgewise.bench.energy import package_energy
from edgewise.bench.evaluate import compared_policies, evaluate, open_model
from edgewise.errors import ConfigError
from edgewise.report.evaluation import Estimate, Evaluation, EvaluationRow, best_rows
from edgewise.report.wording import HERO, say_policy
from edgewise.reproduce.registry import Figure, Provenance, Reproduction, Setup, Verdict

TITLE = "Static state: deadlines met and accuracy of all policies at the full-depth latency"

_LEAST_DSR = 0.98
_INPUTS, _QUICK_INPUTS = 500, 60
# The paper draws bars without numbers; its text says "approaching 100 %" of UniExit alone.
_PAPER_DSR = 100.0


def run(setup: Setup) -> Reproduction:
    """Compare on each net.

    Args:
        setup: ``models`` are the nets (two in the paper); ``data`` and ``limit`` the inputs.

    Raises:
        ConfigError: No model was named and none is shipped.
    """
    from edgewise.frontends.checkpoint import shipped_names

    names = setup.models or shipped_names()
    if not names:
        raise ConfigError(
            "which nets? none is shipped with this installation",
            help="edgewise reproduce uniexit-fig5 --model A --model B --data fashion-mnist",
        )
    limit = setup.limit or (_QUICK_INPUTS if setup.quick else _INPUTS)
    read_energy, energy_note = package_energy()
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    details: dict[str, Any] = {}
    notes = [f"energy: {energy_note}"]
    for name in names:
        setup.say(f"{name}: loading and measuring")
        program, costs, sample = open_model(
            name,
            data=setup.data,
            limit=limit,
            backend=setup.backend,
            threads=setup.threads,
            store=setup.store,
        )
        setup.say(f"{name}: comparing")
        found = evaluate(
            program,
            costs,
            sample,
            policies=compared_policies(),
            budgets=(1.0,),
            read_energy=read_energy,
            energy_note=energy_note,
            skip_unable=True,
        )
        figures += _figures(found)
        verdicts.append(judge(found))
        details[found.model] = asdict(found)
        notes += [f"{found.model}: {p} left out: {why}" for p, why in found.skipped.items()]
    notes.append("E3 is left out: it has no public description to build from.")
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 5 and section 7.2",
        setting={
            "paper": "ResNet-50 and MobileNetV2 on CIFAR-100 and ImageNet, Jetson Orin Nano and"
            " Xavier NX, locked clocks, deadline 15 ms; bars without numbers",
            "ours": f"{', '.join(details)}; this machine, not locked; deadline the median of the"
            f" whole network; {limit} inputs",
        },
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
        details=details,
    )


def judge(found: Evaluation, *, hero: str = HERO) -> Verdict:
    """Whether the hero is the most accurate among policies that meet the deadline.

    A policy that the hero is a part of is no rival: ``edgewise_saving`` is that router too.
    """
    claim = f"{found.model}: {say_policy(hero)} is the most accurate policy with DSR ≥ {_LEAST_DSR}"
    rows = {row.policy: row for row in found.rows}
    if hero not in rows:
        return Verdict(claim=claim, holds=None, detail="it was not compared")
    mine = rows[hero]
    if mine.dsr.value < _LEAST_DSR:
        return Verdict(claim=claim, holds=False, detail=f"its own DSR is {_share(mine.dsr)}")
    others = [
        row
        for row in best_rows(found.rows, least_dsr=_LEAST_DSR)
        if not row.policy.startswith(hero)
    ]
    if not others:
        return Verdict(claim=claim, holds=True, detail="no other policy meets the deadlines")
    other = others[0]
    text = f"{_share(mine.accuracy)} against {_share(other.accuracy)} of {say_policy(other.policy)}"
    if _value(mine) >= _value(other):
        return Verdict(claim=claim, holds=True, detail=text)
    inside = other.edge_over is not None and other.edge_over.high >= 0.0
    return Verdict(
        claim=claim,
        holds=inside,
        detail=text + ("; the difference is inside its interval" if inside else ""),
    )


def _figures(found: Evaluation) -> list[Figure]:
    figures = []
    provenance: Provenance = "simulated" if found.provenance == "simulated" else "measured"
    for row in found.rows:
        shown = say_policy(row.policy) + (" (bound)" if row.is_bound else "")
        for what, estimate, paper in (
            ("deadlines met", row.dsr, _PAPER_DSR if row.policy == HERO else None),
            ("right", row.accuracy, None),
        ):
            figures.append(
                Figure(
                    name=f"{found.model}, {shown}: {what}",
                    unit="%",
                    paper=paper,
                    ours=None if estimate is None else 100 * estimate.value,
                    low=None if estimate is None else 100 * estimate.low,
                    high=None if estimate is None else 100 * estimate.high,
                    provenance=provenance,
                    note="“approaching 100 %”" if paper else "",
                )
            )
    return figures


def _value(row: EvaluationRow) -> float:
    return row.accuracy.value if row.accuracy else 0.0


def _share(found: Estimate | None) -> str:
    if found is None:
        return "–"
    return f"{100 * found.value:.1f} % [{100 * found.low:.1f}–{100 * found.high:.1f}]"

"""Transition-aware dispatch, Figure 4: against choosing for each operator alone."""

from __future__ import annotations

from collections.abc import Iterator

from edgewise.dispatch.replay import Replay
from edgewise.report.dispatch import OBJECTIVE_NAMES, gain_charts, switch_charts
from edgewise.reproduce import _dispatch as common
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Operator-local, greedy and exact dispatch: gains, and how often they switch"

_FEWER = 0.15
_PAPER_MOST = {"device": 19.7, "framework": 17.6}  # "up to", per cent


def run(setup: Setup) -> Reproduction:
    """Replay seven models with three ways to choose, on the Jetson-like and a measured table.

    Args:
        setup: As `edgewise.reproduce._dispatch.replays` takes it.
    """
    found = common.replays(setup)
    tables = [found.simulated, *([found.measured] if found.measured is not None else [])]
    whole = len(found.simulated.of("latency")) == len(common.MODELS)
    figures = [f for each in tables for f in _figures(each, paper=whole and each is tables[0])]
    return Reproduction(
        title=TITLE,
        source=f"{common.SOURCE}, Figure 4",
        setting={"paper": common.ON_THE_BOARD, "ours": common.made(found)},
        figures=tuple(figures),
        verdicts=tuple(v for each in tables for v in (common.in_order(each), _calmer(each))),
        notes=(
            (
                "exact: Viterbi's algorithm for latency and energy; for EDP of the whole"
                " trace the corners of the convex hull. The paper has no such column."
            ),
            (
                "fewer switches: over all models together, against operator-local; greedy's gap:"
                " the largest over models, above the exact optimum."
            ),
        ),
        charts=(
            *gain_charts(tables, methods=("local", "greedy", "viterbi")),
            *switch_charts(tables, methods=("greedy", "viterbi")),
        ),
        details={
            each.table: {
                f"{row.model}, {row.objective}": {
                    method: {
                        "gain_ratio": o.gain.ratio,
                        "backend_switches": o.totals.backend_switches,
                        "device_switches": o.totals.device_switches,
                        "framework_switches": o.totals.framework_switches,
                    }
                    for method, o in row.outcomes.items()
                }
                for row in each.rows
            }
            for each in tables
        },
    )


def _figures(found: Replay, *, paper: bool) -> Iterator[Figure]:
    here = "" if paper else f" on {found.table}"
    for objective in common.objectives_of(found):
        name = OBJECTIVE_NAMES[objective]
        for method, said, theirs in (
            ("local", "operator-local", common.PAPER_LOCAL[objective]),
            ("greedy", "greedy", common.PAPER_GREEDY[objective]),
            ("viterbi", "exact", None),
        ):
            value = theirs if paper else None
            yield common.gain(found, objective, method, f"{name}: {said}{here}", paper=value)
        for method, said in (("greedy", "greedy"), ("viterbi", "exact")):
            fewer = found.fewer_switches(objective, method)
            yield Figure(
                name=f"{name}: fewer switches, {said}{here}",
                unit="%",
                paper=common.PAPER_FEWER[objective] if paper and method == "greedy" else None,
                ours=None if fewer is None else 100 * fewer,
                provenance=found.provenance,
                note="" if fewer is not None else "operator-local never switches",
            )
        gaps = [row.greedy_gap for row in found.of(objective)]
        yield Figure(
            name=f"{name}: greedy's gap{here}",
            unit="%",
            ours=100 * max(g for g in gaps if g is not None),
            provenance=found.provenance,
        )
    for kind, number in (("device", 1), ("framework", 2)):
        yield _most_avoided(found, kind, number, here=here, paper=paper)


def _most_avoided(found: Replay, kind: str, number: int, *, here: str, paper: bool) -> Figure:
    """The largest cut of one kind of switch over objectives, by greedy."""
    cuts = []
    for objective in common.objectives_of(found):
        local = found.switches(objective, "local")[number]
        if local:
            cuts.append(100 * (1 - found.switches(objective, "greedy")[number] / local))
    return Figure(
        name=f"fewer {kind} switches, greedy, at most{here}",
        unit="%",
        paper=_PAPER_MOST[kind] if paper else None,
        ours=max(cuts) if cuts else None,
        provenance=found.provenance,
        note="" if cuts else f"there are no {kind} switches",
    )


def _calmer(found: Replay) -> Verdict:
    cuts = {o: found.fewer_switches(o, "viterbi") for o in common.objectives_of(found)}
    known = [cut for cut in cuts.values() if cut is not None]
    return Verdict(
        claim=f"the exact plan switches at least {_FEWER:.0%} less than operator-local,"
        f" {found.table}",
        holds=min(known) >= _FEWER if known else None,
        detail=", ".join(
            f"{OBJECTIVE_NAMES[o]} {100 * cut:.1f} %" for o, cut in cuts.items() if cut is not None
        )
        or "operator-local never switches",
    )

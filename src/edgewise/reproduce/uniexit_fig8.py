"""UniExit, Figure 8: language models under dynamic DVFS."""

from __future__ import annotations

from collections.abc import Mapping

from edgewise.reproduce import _language as lm
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict
from edgewise.units import format_duration

TITLE = "Language models under dynamic DVFS: static ways lose deadlines, edgewise keeps them"

_DSR = 0.97
# Table 7 has the numbers of two bars on WikiText-103: with fallback and without.
_PAPER = {
    ("jetson-orin-nano", "uniexit"): 97.41,
    ("jetson-xavier-nx", "uniexit"): 96.46,
    ("jetson-orin-nano", lm.NO_FALLBACK): 92.82,
    ("jetson-xavier-nx", lm.NO_FALLBACK): 90.72,
}
_STATIC = (lm.FULL_DEPTH, "fixed exit", "layerskip", "specee")


def run(setup: Setup) -> Reproduction:
    """Play all ways on each device.

    Args:
        setup: ``models``, ``data``: see `open_case`; ``limit``: texts; ``quick``: one device.
    """
    return reproduce(lm.open_case(setup), setup)


def reproduce(case: lm.LanguageCase, setup: Setup) -> Reproduction:
    """Play all ways of a case on each device."""
    found = lm.play_on_boards(
        case,
        setup,
        clocks="dvfs",
        budget_s=lm.DVFS_DEADLINE_S,
        full_depth=_full_depth,
        judge=judge,
        paper_dsr=_PAPER,
    )
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 8 and section 7.2; two of its bars from Table 7",
        setting=lm.setting(
            case,
            paper=(
                "LLaMA 3.2-1B in BF16 on WikiText-103, 64 tokens, boards on a down-up trace of all"
                " clocks; bars without numbers"
            ),
            deadline=f"{format_duration(lm.DVFS_DEADLINE_S)} between two tokens, the paper's",
            state=(
                "uniexit and edgewise are told predicted costs every 10 ms; the others have a"
                " profile at the highest clocks. edgewise's early exits answer from a short list"
                " of frequent tokens, unless the whole head is named"
            ),
        ),
        figures=tuple(found.figures),
        verdicts=tuple(found.verdicts),
        notes=(*case.notes, *lm.NOTES),
        charts=tuple(found.charts),
        details=found.details,
    )


def _full_depth(player: lm.LanguagePlayer) -> Figure:
    return Figure(
        name=f"{player.board.title}: full depth, mean over the trace",
        unit="s",
        paper=lm.DVFS_DEADLINE_S,
        ours=player.mean_full_depth_s(),
        provenance="simulated",
        note="tokens started one after another; the paper's is the deadline here",
    )


def judge(title: str, rows: Mapping[str, lm.BoardRow]) -> list[Verdict]:
    """What must hold on one device."""
    ours = {name: rows[name] for name in lm.OURS}
    least = min(ours, key=lambda name: ours[name].dsr_all)
    best = max(_STATIC, key=lambda name: rows[name].dsr_all)
    with_, without = rows["uniexit"], rows[lm.NO_FALLBACK]
    return [
        Verdict(
            claim=f"{title}: edgewise and both its variants keep at least {100 * _DSR:.0f} %",
            holds=ours[least].dsr_all >= _DSR,
            detail=", ".join(f"{name} {100 * row.dsr_all:.1f} %" for name, row in ours.items()),
        ),
        Verdict(
            claim=f"{title}: every way that goes by the static profile keeps fewer",
            holds=rows[best].dsr_all < ours[least].dsr_all,
            detail=f"best of them {best} with {100 * rows[best].dsr_all:.1f} %",
        ),
        Verdict(
            claim=f"{title}: the fallback keeps more than no margin",
            holds=with_.dsr_all > without.dsr_all,
            detail=f"{100 * with_.dsr_all:.1f} % against {100 * without.dsr_all:.1f} %",
        ),
        lm.accuracy_verdict(title, rows, least=_DSR),
    ]

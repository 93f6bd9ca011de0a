"""UniExit, Figure 6: language models at the highest clocks, the deadline full depth's latency."""

from __future__ import annotations

from collections.abc import Mapping

from edgewise.reproduce import _language as lm
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict
from edgewise.units import format_duration

TITLE = "Language models at fixed clocks: deadlines kept and accuracy"

_DSR = 0.98


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
        clocks="static",
        budget_s=lm.STATIC_DEADLINE_S,
        full_depth=_full_depth,
        judge=judge,
    )
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 6 and sections 7.1 and 7.2",
        setting=lm.setting(
            case,
            paper=(
                "LLaMA 3.2-1B in BF16 on WikiText-103, 64 tokens, boards at their highest clocks;"
                " bars without numbers"
            ),
            deadline=f"{format_duration(lm.STATIC_DEADLINE_S)} between two tokens, the paper's",
        ),
        figures=tuple(found.figures),
        verdicts=tuple(found.verdicts),
        notes=(*case.notes, *lm.NOTES),
        charts=tuple(found.charts),
        details=found.details,
    )


def _full_depth(player: lm.LanguagePlayer) -> Figure:
    return Figure(
        name=f"{player.board.title}: full depth, the deadline",
        unit="s",
        paper=lm.STATIC_DEADLINE_S,
        ours=player.full_depth_s(),
        provenance="simulated",
        note="without noise; the paper's is the deadline here",
    )


def judge(title: str, rows: Mapping[str, lm.BoardRow]) -> list[Verdict]:
    """What must hold on one device."""
    ours = {name: rows[name] for name in lm.OURS}
    least = min(ours, key=lambda name: ours[name].dsr_all)
    rivals = ("layerskip", "specee")
    best = max(rivals, key=lambda name: rows[name].dsr_all)
    uniexit = rows["uniexit"]
    return [
        Verdict(
            claim=f"{title}: edgewise and both its variants keep at least {100 * _DSR:.0f} %",
            holds=ours[least].dsr_all >= _DSR,
            detail=f"least {least}: {100 * ours[least].dsr_all:.1f} %",
        ),
        lm.accuracy_verdict(title, rows, least=_DSR),
        Verdict(
            claim=f"{title}: uniexit keeps more than layerskip and specee",
            holds=uniexit.dsr_all > rows[best].dsr_all,
            detail=(
                f"{100 * uniexit.dsr_all:.1f} % against {100 * rows[best].dsr_all:.1f} % of {best}"
            ),
        ),
    ]

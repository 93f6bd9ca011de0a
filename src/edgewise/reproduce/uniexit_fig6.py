"""UniExit, Figure 6: language models at the highest clocks, the deadline full depth's latency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgewise.report.chart import Chart
from edgewise.reproduce import _language as lm
from edgewise.reproduce._simulated import DEVICES
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
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    charts: list[Chart] = []
    details: dict[str, Any] = {}
    for device in DEVICES[:1] if setup.quick else DEVICES:
        board = lm.Board(
            name=device, clocks="static", budget_s=lm.STATIC_DEADLINE_S, seed=setup.seed
        )
        player = lm.LanguagePlayer(case, board)
        figures.append(
            Figure(
                name=f"{board.title}: full depth, the deadline",
                unit="s",
                paper=lm.STATIC_DEADLINE_S,
                ours=player.full_depth_s(),
                provenance="simulated",
                note="without noise; the paper's is the deadline here",
            )
        )
        rows = player.compare(lm.ways("static").values(), setup.say)
        for name, row in rows.items():
            figures += lm.row_figures(f"{board.title}, {name}", row)
        verdicts += judge(board.title, rows)
        charts.append(lm.bars(f"{board.title}, highest clocks", rows))
        details[device] = lm.as_json(rows)
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
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(*case.notes, *lm.NOTES),
        charts=tuple(charts),
        details=details,
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

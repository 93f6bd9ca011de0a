"""What SwapLess's played figures share: models measured now, and how their rows are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from edgewise.bench.placement_runs import MeasuredModel, Models, Row, mape
from edgewise.device import device_fingerprint, usable_cores
from edgewise.frontends.zoo_int8 import models_folder
from edgewise.reproduce import _placement as common
from edgewise.reproduce.registry import Figure, Setup, Verdict

_ROUNDS = (40, 5)  # full, quick
_TIME_CAP_S = (40.0, 5.0)
_BUSY_RATIO = 0.1  # of the machine, used by others: then an error may be theirs
_PARTS = ("accelerator wait", "accelerator", "core wait", "cores", "handing over")


def models(setup: Setup) -> Models:
    """Networks of the zoo, measured when they are asked for."""
    return Models(
        common.device(),
        models_folder(),
        rounds=_ROUNDS[setup.quick],
        time_cap_s=_TIME_CAP_S[setup.quick],
        cores=cores(),
        seed=setup.seed,
        say=setup.say,
    )


def cores() -> int:
    """Cores for suffixes: all that this process may use."""
    return max(1, int(usable_cores().usable))


def setting(paper: str, *, ours: str, others: Iterable[float | None]) -> dict[str, str]:
    """What was played on, and what else ran.

    Args:
        paper: What the paper measured on.
        ours: What we did.
        others: Shares of the machine that other processes used, of each play.
    """
    return {
        "paper": paper,
        "ours": ours,
        "observed": "real requests on the real clock: suffixes computed and measured on this"
        " machine, the accelerator simulated (it sleeps as long as its description says; outputs"
        " are precomputed)",
        "predicted": "from costs measured right before and right after each play, means, one"
        " thread each, and what handing a request over costs, seen right before",
        "machine": f"{device_fingerprint().cpu_model or 'unknown'}, {cores()} cores for suffixes",
        "other load": _other(others),
    }


def _other(others: Iterable[float | None]) -> str:
    known = [o for o in others if o is not None]
    if not known:
        return "unknown"
    return (
        f"other programs used {100 * sum(known) / len(known):.0f} % of the machine on average,"
        f" {100 * max(known):.0f} % in the worst play"
    )


def verdict(
    setup: Setup, claim: str, *, holds: bool, detail: str, others: Iterable[float | None]
) -> Verdict:
    """Judge; a miss on a busy machine, or in a quick run, says nothing.

    Args:
        setup: Whether it is quick.
        claim: The statement.
        holds: Whether the numbers bear it out.
        detail: By how much.
        others: As for `setting`.
    """
    known = [o for o in others if o is not None]
    other = sum(known) / len(known) if known else 0.0
    if holds:
        return Verdict(claim=claim, holds=True, detail=detail)
    if setup.quick:
        return Verdict(claim=claim, holds=None, detail=f"{detail}; too few requests to say")
    if other > _BUSY_RATIO:
        busy = f"other programs used {100 * other:.0f} % of the machine"
        return Verdict(claim=claim, holds=None, detail=f"{detail}; {busy}")
    return Verdict(claim=claim, holds=False, detail=detail)


def error_verdicts(
    setup: Setup, rows: Sequence[Row], *, reach_ratio: float, what: str
) -> tuple[Verdict, Verdict]:
    """Judge predicted means by their MAPE, and again given the plays' own suffix times.

    Args:
        setup: As for `verdict`.
        rows: What was played.
        reach_ratio: Largest MAPE that bears the claim out.
        what: Rows are called so.
    """
    others = [row.other_ratio for row in rows]
    error, given = mape(rows), mape(rows, "given")
    worst = max(abs(row.error_ratio("given")) for row in rows)
    return (
        verdict(
            setup,
            f"the predicted means are within {100 * reach_ratio:.0f} % of the observed ones on"
            " average",
            holds=error <= reach_ratio,
            detail=f"MAPE {100 * error:.1f} % over {len(rows)} {what}",
            others=others,
        ),
        verdict(
            setup,
            f"given the plays' own suffix times, the formulas are within {100 * reach_ratio:.0f} %",
            holds=given <= reach_ratio,
            detail=f"MAPE {100 * given:.1f} %, worst {100 * worst:.1f} %",
            others=others,
        ),
    )


def row_figures(rows: Sequence[Row]) -> list[Figure]:
    """Observed mean of each row, with what was predicted in the note."""
    return [
        Figure(
            name=f"{row.label}, {row.tenant} cut at {row.place}: mean response, observed",
            unit="s",
            ours=row.observed_s,
            provenance="measured",
            note=f"{row.requests} requests; settled {_ms(row.settled_s)}, predicted"
            f" {_ms(row.predicted_s)} ({100 * row.error_ratio():+.1f} %), by the paper's formulas"
            f" {_ms(row.paper_s)} ({100 * row.error_ratio('paper'):+.1f} %)",
        )
        for row in rows
    ]


SETTLED = (
    "Errors are against settled means: what was observed, less what its arrivals do by chance. A"
    " replay of them on a virtual clock is the control variate (observed - replayed + the replay's"
    " long run); faults of the formulas and of the costs stay in. The raw error is given too."
)


def together_note(models: Sequence[MeasuredModel]) -> str:
    """How much suffixes slow each other."""
    ratios = ", ".join(f"{m.name} {m.together_ratio:.2f}" for m in models)
    return (
        f"CPU time of a call with all {cores()} cores at it over alone: {ratios}; predictions count"
        " that by how often cores are busy together."
    )


def error_note(rows: Sequence[Row]) -> str:
    """Where observed times exceed predicted ones, part by part, over all rows."""
    count = len(rows)
    more = [
        sum(r.observed_parts_s[k] - r.predicted_parts_s[k] for r in rows) / count
        for k in range(len(_PARTS))
    ]
    parts = ", ".join(f"{name} {1e3 * m:+.2f} ms" for name, m in zip(_PARTS, more, strict=True))
    return f"Observed less predicted, mean over all plays: {parts}."


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row, for JSON."""
    return [{**asdict(row), "settled_s": row.settled_s} for row in rows]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

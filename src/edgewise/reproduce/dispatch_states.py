"""Does the preferred backend, or its number of threads, flip beside a co-runner?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgewise.backends.threads import govern
from edgewise.bench.background import Load
from edgewise.bench.dispatch_states import (
    CALM,
    Loss,
    StateTimes,
    cheapest,
    loss,
    measure_states,
    model_shapes,
)
from edgewise.device import usable_cores
from edgewise.dispatch.states import Choice, Preference, flips, lost_ratio, preferences
from edgewise.errors import ConfigError
from edgewise.profiles.operators import OperatorShape, OperatorTable
from edgewise.report.chart import Chart, Series
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "The preferred backend and number of threads, calm and beside a co-runner"

_QUIET_CORES = 0.25  # as `edgewise doctor` says
_MODEL = "smollm2-135m"

Counts = Mapping[OperatorShape, int]
Choices = dict[OperatorShape, Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The calm plan and the contended one beside one co-runner.

    Every other round is chosen by, the rounds between them are judged by.

    Attributes:
        state: What ran beside.
        preferences: Of each shape, all threads, by the first half of the rounds.
        one_thread: The same with one thread.
        flips: Those of ``preferences`` that flip in both halves, beyond the intervals.
        one_thread_flips: The same of ``one_thread``: only the backend can flip.
        by_table: What the calm plan loses by the costs it was chosen by, as a share.
        timed: The same, timed afresh.
        timed_one_thread: The same for plans of one thread.
        threads_s: Total of the best plan with each number of threads: calm, contended; seconds,
            timed afresh.
        threads: The number of threads that is faster: calm, contended; timed afresh. ``None``
            where the interval of the difference holds zero, or there is one number only.
    """

    state: str
    preferences: tuple[Preference, ...]
    one_thread: tuple[Preference, ...]
    flips: tuple[Preference, ...]
    one_thread_flips: tuple[Preference, ...]
    by_table: float
    timed: Loss
    timed_one_thread: Loss
    threads_s: Mapping[int, tuple[float, float]]
    threads: tuple[int | None, int | None]


def run(setup: Setup) -> Reproduction:
    """Time operators and segments of a small model in all states, and compare plans for them.

    Args:
        setup: ``limit`` replaces the number of rounds, ``models`` the model; ``seed`` of weights
            and orders.
    """
    if len(setup.models) > 1:
        raise ConfigError(f"expected one model, found {', '.join(setup.models)}")
    model = setup.models[0] if setup.models else _MODEL
    threads = (1, 2) if usable_cores().threads > 1 else (1,)
    # Before torch is imported, if it is not yet: then its threads sleep while they wait.
    policy = govern(max(threads))
    counts = model_shapes(model, (1, 16) if setup.quick else (1, 16, 64))
    rounds = setup.limit or (4 if setup.quick else 24)
    kinds = ("cpu",) if setup.quick else ("cpu", "memory")
    times = measure_states(
        list(counts),
        {f"beside {kind}": Load(kind, engine="builtin") for kind in kinds},
        threads=threads,
        rounds=rounds,
        passes=2 if setup.quick else 4,
        seed=setup.seed,
        say=setup.say,
    )
    return report(times, counts, model=model, spinning=policy.spinning)


def report(
    times: Mapping[str, StateTimes], counts: Counts, *, model: str, spinning: bool = False
) -> Reproduction:
    """Judge what was measured.

    Args:
        times: By state, ``"calm"`` first; at least two rounds.
        counts: How often each shape is in the forward passes.
        model: Its name.
        spinning: Whether threads of torch spin while they wait.

    Raises:
        ConfigError: Fewer than two rounds: none would be left to judge by.
    """
    calm = times[CALM]
    rounds = len(next(iter(calm.samples_s.values())))
    if rounds < 2:
        raise ConfigError(f"expected at least two rounds, found {rounds}")
    found = [
        compare_states(calm, t, counts, spinning=spinning) for s, t in times.items() if s != CALM
    ]
    quiet = calm.others_cores is not None and calm.others_cores <= _QUIET_CORES
    return Reproduction(
        title=TITLE,
        source="none of the three papers has plans for several states of the device",
        setting={
            "paper": "–",
            "ours": f"{len(counts)} operators and segments of {model}; random weights; each sample"
            f" the mean of several calls; {rounds} rounds in which all states take turns; plans are"
            " made by one half of them and timed by the other; switches between backends left out",
            "load of others": "; ".join(_load(t) for t in times.values()),
            "threads": "spin while they wait" if spinning else "sleep while they wait",
        },
        figures=tuple(f for c in found for f in _figures(c)),
        verdicts=tuple(v for c in found for v in _verdicts(c, quiet=quiet)),
        notes=(
            (
                "A flip counts where the intervals of both backends are apart, in both states and"
                " both halves of the rounds; all else is a tie."
            ),
            (
                "A plan takes the cheapest for each shape; each counts as often as it is in a"
                " forward pass, segments beside the operators that they replace."
            ),
            *(
                ()
                if quiet
                else (f"The calm state was not calm ({_load(calm)}): no verdict is given.",)
            ),
        ),
        charts=tuple(_chart(c, counts) for c in found),
        details={c.state: _details(c) for c in found},
    )


def compare_states(
    calm: StateTimes, contended: StateTimes, counts: Counts, *, spinning: bool = False
) -> Compared:
    """Choose in both states by one half of the rounds, and judge by the other half.

    Args:
        calm: Times on the calm machine.
        contended: Times beside a co-runner.
        counts: How often each shape counts.
        spinning: Whether threads of torch spin while they wait.
    """
    chosen, fresh = slice(0, None, 2), slice(1, None, 2)
    first = [t.tables(chosen, spinning=spinning) for t in (calm, contended)]
    second = [t.tables(fresh, spinning=spinning) for t in (calm, contended)]
    numbers = sorted({choice.threads for _, choice in calm.samples_s})
    singles = [[t for t in tables if t.thread_policy.threads == 1] for tables in (*first, *second)]
    plans = [cheapest(tables) for tables in first]
    one = [cheapest(tables, threads=numbers[0]) for tables in first]
    all_of = preferences(first[0], first[1])
    by_number = {n: [cheapest(tables, threads=n) for tables in first] for n in numbers}
    return Compared(
        state=contended.state,
        preferences=all_of,
        one_thread=preferences(singles[0], singles[1]),
        flips=_confirmed(flips(first[0], first[1]), second[0], second[1]),
        one_thread_flips=_confirmed(flips(singles[0], singles[1]), singles[2], singles[3]),
        by_table=lost_ratio(all_of, counts),
        timed=loss(contended, plans[0], plans[1], counts, rounds=fresh),
        timed_one_thread=loss(contended, one[0], one[1], counts, rounds=fresh),
        threads_s={
            n: (
                loss(calm, plan[0], plan[0], counts, rounds=fresh).first_s,
                loss(contended, plan[1], plan[1], counts, rounds=fresh).first_s,
            )
            for n, plan in by_number.items()
        },
        threads=(
            _faster(calm, {n: plan[0] for n, plan in by_number.items()}, counts, fresh),
            _faster(contended, {n: plan[1] for n, plan in by_number.items()}, counts, fresh),
        ),
    )


def _confirmed(
    found: Sequence[Preference], calm: Sequence[OperatorTable], contended: Sequence[OperatorTable]
) -> tuple[Preference, ...]:
    """Those whose two choices are in the same order, beyond the intervals, in other tables too."""
    kept = []
    for each in found:
        for tables, better, worse in (
            (calm, each.calm, each.contended),
            (contended, each.contended, each.calm),
        ):
            rows = [_latency(tables, each.shape, choice) for choice in (better, worse)]
            if rows[0].median_high_s >= rows[1].median_low_s:
                break
        else:
            kept.append(each)
    return tuple(kept)


def _latency(tables: Sequence[OperatorTable], shape: OperatorShape, choice: Choice) -> Any:
    (table,) = (t for t in tables if t.thread_policy.threads == choice.threads)
    return table.cost(shape, choice.backend).latency


def _faster(
    times: StateTimes, plans: Mapping[int, Choices], counts: Counts, rounds: slice
) -> int | None:
    """Which of two numbers of threads is faster; ``None`` where nobody can tell."""
    if len(plans) != 2:
        return None
    (few, first), (many, second) = sorted(plans.items())
    found = loss(times, first, second, counts, rounds=rounds)
    return few if found.high < 0 else many if found.low > 0 else None


def _figures(found: Compared) -> list[Figure]:
    state = found.state
    rows = [
        Figure(
            name=f"{state}: {p.shape.key}",
            unit="% lost by the calm choice",
            ours=100 * p.lost_s / p.contended_s[1],
            provenance="measured",
            note=_said(p, found),
        )
        for p in found.preferences
    ]
    for name, timed in (("", found.timed), (" with one thread", found.timed_one_thread)):
        rows.append(
            Figure(
                name=f"{state}: all, the calm plan{name}, timed afresh",
                unit="% lost against the plan for this state",
                ours=100 * timed.ratio,
                low=100 * timed.low,
                high=100 * timed.high,
                provenance="measured",
            )
        )
    rows.append(
        Figure(
            name=f"{state}: all, the calm plan, by the costs it was chosen by",
            unit="% lost against the plan for this state",
            ours=100 * found.by_table,
            provenance="measured",
            note="never negative: noise looks like a gain",
        )
    )
    for number, seconds in found.threads_s.items():
        for when, value in zip((CALM, state), seconds, strict=True):
            rows.append(
                Figure(
                    name=f"{when}: all, the best plan with {number} thread" + "s" * (number > 1),
                    unit="s",
                    ours=value,
                    provenance="measured",
                )
            )
    return rows


def _said(p: Preference, found: Compared) -> str:
    if not p.differs:
        return f"{p.calm} in both"
    return f"{p.calm} → {p.contended}: " + ("flips" if p in found.flips else "a tie")


def _verdicts(found: Compared, *, quiet: bool) -> list[Verdict]:
    state, timed = found.state, found.timed
    names = ", ".join(p.shape.key for p in found.one_thread_flips) or "none"
    calm, contended = found.threads
    said = (
        f"calm: {_number(calm)}; {state}: {_number(contended)}"
        if len(found.threads_s) > 1
        else "one core only"
    )
    judged = None if calm is None or contended is None else calm != contended
    verdicts = [
        Verdict(
            claim=f"{state}: some shape prefers another backend, one thread each",
            holds=bool(found.one_thread_flips),
            detail=f"{len(found.one_thread_flips)} of {len(found.one_thread)} shapes: {names}",
        ),
        Verdict(
            claim=f"{state}: another number of threads is faster for the whole",
            holds=judged,
            detail=said,
        ),
        Verdict(
            claim=f"{state}: the plan for this state is faster than the calm plan, timed afresh",
            holds=timed.low > 0 if timed.low > 0 or timed.high <= 0 else None,
            detail=f"the calm plan loses {100 * timed.ratio:.1f} %"
            f" [{100 * timed.low:.1f}–{100 * timed.high:.1f}]"
            if any(p.differs for p in found.preferences)
            else "both plans are the same",
        ),
    ]
    return verdicts if quiet else [dataclasses.replace(v, holds=None) for v in verdicts]


def _number(threads: int | None) -> str:
    return "a tie" if threads is None else f"{threads} thread" + "s" * (threads > 1)


def _load(times: StateTimes) -> str:
    cores = times.others_cores
    return f"{times.state}: " + ("unknown" if cores is None else f"{cores:.2f} cores")


def _details(found: Compared) -> dict[str, Any]:
    return {
        "shapes": [_row(p) for p in found.preferences],
        "shapes_one_thread": [_row(p) for p in found.one_thread],
        "flips": [p.shape.key for p in found.flips],
        "flips_one_thread": [p.shape.key for p in found.one_thread_flips],
        "lost_by_table_ratio": found.by_table,
        "lost_timed": dataclasses.asdict(found.timed),
        "lost_timed_one_thread": dataclasses.asdict(found.timed_one_thread),
        "threads_s": {str(n): list(s) for n, s in found.threads_s.items()},
        "threads": list(found.threads),
    }


def _row(p: Preference) -> dict[str, Any]:
    return {
        "shape": p.shape.key,
        "calm": str(p.calm),
        "contended": str(p.contended),
        "calm_s": list(p.calm_s),
        "contended_s": list(p.contended_s),
        "certain": p.certain,
    }


def _chart(found: Compared, counts: Counts) -> Chart:
    rows = sorted(found.preferences, key=lambda p: -p.lost_s * counts.get(p.shape, 1))[:8]
    return Chart(
        title=f"Where the calm plan loses most, {found.state}",
        x_label="",
        y_label="time over the contended choice's",
        series=(
            Series(
                name="calm choice",
                x=[p.shape.key for p in rows],
                y=[p.contended_s[0] / p.contended_s[1] for p in rows],
            ),
            Series(name="contended choice", x=[p.shape.key for p in rows], y=[1.0 for _ in rows]),
        ),
        provenance="measured",
        kind="bars",
    )

"""UniExit, Figure 16: what a cache of predictions saves at each exit while nothing changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgewise.device.simulated import load_device, static_max
from edgewise.report.chart import Chart, Series
from edgewise.reproduce._predicted import (
    CALL_S,
    HIT,
    LM,
    ORIN,
    TABLE,
    Timing,
    controller_calls,
    named,
    timed,
    timing_figure,
)
from edgewise.reproduce._simulated import NETS
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict
from edgewise.reproduce.uniexit_fig17 import CAPACITY, Plan, Walk, dearest, plan_of, walk

TITLE = "Latency to each exit with predictions cached, computed each time, or published"

# Where the axes of the paper's two panels end, seconds; its curves are a picture only.
_PAPER_AXIS_S = {NETS[0]: 0.025, NETS[1]: 0.025, LM: 0.080}
_PAPER_CALL_S = 0.60e-3
_ROUNDS, _QUICK_ROUNDS = 40, 8


def run(setup: Setup) -> Reproduction:
    """Play requests on the simulated Orin Nano at its highest clocks; time calls on this machine.

    Args:
        setup: ``seed`` of the noise; ``quick`` takes one net and fewer requests.
    """
    plans = [plan_of(net) for net in ((NETS[0],) if setup.quick else (*NETS, LM))]
    duration_s = 0.5 if setup.quick else 5.0
    clocks = static_max(load_device(ORIN).clocks)
    walks: dict[str, tuple[Walk, Walk]] = {}
    for plan in plans:
        setup.say(f"{named(ORIN, plan.net)}: playing requests")
        # A cache of one entry never holds the unit that is asked for next.
        without, with_ = (
            walk(
                plan,
                clocks,
                call_s=CALL_S[plan.net],
                duration_s=duration_s,
                seed=setup.seed,
                capacity=capacity,
            )
            for capacity in (1, CAPACITY)
        )
        walks[plan.net] = without, with_
    setup.say("timing decisions here")
    calls, problem = controller_calls(seed=setup.seed)
    times = timed(calls, rounds=_QUICK_ROUNDS if setup.quick else _ROUNDS, repeats=100)
    figures = [
        *(f for plan in plans for f in _simulated(plan, *walks[plan.net])),
        *(timing_figure(f"one call: {name}", found) for name, found in times.items()),
        *(f for plan in plans for f in _estimated(plan, times)),
    ]
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 16",
        setting={
            "paper": "Jetson Orin Nano, locked clocks",
            "ours": (
                "latencies simulated: Orin Nano at its highest clocks; a prediction takes 0.20 ms"
                " of a CNN and 0.10 ms of the LM, a hit nothing: the paper's Table 3, read as one"
                " decision of three predictions, or two"
            ),
            "calls": "measured on this machine, one thread",
        },
        figures=tuple(figures),
        verdicts=_verdicts(plans, walks, times),
        notes=_notes(plans, walks, problem),
        charts=_charts(plans, walks, times),
        details={
            net: {"without_s": list(a.to_exit_s), "with_s": list(b.to_exit_s)}
            for net, (a, b) in walks.items()
        },
    )


def calls_to_exit(plan: Plan) -> npt.NDArray[np.int64]:
    """[E], predictions asked for until an exit is reached."""
    return np.cumsum([len(stages) + 1 for stages in plan.ahead])


def _simulated(plan: Plan, without: Walk, with_: Walk) -> list[Figure]:
    name = named(ORIN, plan.net)
    last = len(plan.ahead) - 1
    figures = []
    for k in (0, last):
        for what, found in (("without", without), ("with", with_)):
            figures.append(
                Figure(
                    name=f"{name}, exit {k + 1}: latency {what} cache",
                    unit="s",
                    ours=found.to_exit_s[k],
                    provenance="simulated",
                )
            )
    saved = 1 - with_.to_exit_s[last] / without.to_exit_s[last]
    figures.append(
        Figure(
            name=f"{name}, last exit: saved by the cache",
            unit="%",
            ours=100 * saved,
            provenance="simulated",
            note=f"{with_.hit_ratio:.1%} hits; nothing changes but noise",
        )
    )
    return figures


def _estimated(plan: Plan, times: Mapping[str, Timing]) -> list[Figure]:
    calls, call = int(calls_to_exit(plan)[-1]), dearest(times)
    decisions = len(plan.ahead) + 1
    rows = (
        (f"computed each time, {call}", calls * times[call].p50_s, f"{calls} predictions"),
        ("cached, all hits", calls * times[HIT].p50_s, f"{calls} look-ups"),
        ("published table", decisions * times[TABLE].p50_s, f"{decisions} decisions"),
    )
    return [
        Figure(
            name=f"{named(ORIN, plan.net)}, controller's time to the last exit: {what}",
            unit="s",
            ours=seconds,
            provenance="estimated",
            note=f"{note}, each as measured here",
        )
        for what, seconds, note in rows
    ]


def _verdicts(
    plans: list[Plan], walks: Mapping[str, tuple[Walk, Walk]], times: Mapping[str, Timing]
) -> tuple[Verdict, ...]:
    verdicts = []
    for plan in plans:
        without, with_ = walks[plan.net]
        saved = np.subtract(without.to_exit_s, with_.to_exit_s)
        axis_s = _PAPER_AXIS_S[plan.net]
        verdicts += [
            Verdict(
                claim=f"{named(ORIN, plan.net)}: the cache saves at every exit, more the deeper",
                holds=bool((saved > 0).all() and (np.diff(saved) > 0).all()),
                detail=f"{1e3 * saved[0]:.2f} ms at the first exit, {1e3 * saved[-1]:.2f} at last",
            ),
            Verdict(
                claim=f"{named(ORIN, plan.net)}: without cache within the paper's axis",
                holds=without.to_exit_s[-1] <= axis_s,
                detail=f"{1e3 * without.to_exit_s[-1]:.1f} ms of {1e3 * axis_s:.0f} ms",
            ),
        ]
    worst = max(
        (len(p.ahead) + 1) * times[TABLE].p50_s / (calls_to_exit(p)[-1] * times[HIT].p50_s)
        for p in plans
    )
    verdicts.append(
        Verdict(
            claim="a published table takes less than a cache that always hits",
            holds=bool(worst < 1),
            detail=f"{worst:.2f} of its time, measured here",
        )
    )
    return tuple(verdicts)


def _notes(
    plans: list[Plan], walks: Mapping[str, tuple[Walk, Walk]], problem: str
) -> tuple[str, ...]:
    cnn = plans[0]
    calls = int(calls_to_exit(cnn)[-1])
    whole_s = walks[cnn.net][1].to_exit_s[-1] + calls * _PAPER_CALL_S
    notes = [
        "The paper's curves are a picture only, so no number of it stands beside ours.",
        (
            f"Were the 0.60 ms of its Table 3 one prediction, {calls} of them would bring ResNet-50"
            f" to {1e3 * whole_s:.1f} ms, beyond the panel's 25 ms; so they are taken to be one"
            " decision of three predictions."
        ),
        "A published table leaves no predictions on the request path: what a cache could save.",
    ]
    return (*notes, problem) if problem else tuple(notes)


def _charts(
    plans: list[Plan], walks: Mapping[str, tuple[Walk, Walk]], times: Mapping[str, Timing]
) -> tuple[Chart, ...]:
    charts = []
    for plan in plans:
        exits = list(range(1, len(plan.ahead) + 1))
        charts.append(
            Chart(
                title=named(ORIN, plan.net),
                x_label="exit",
                y_label="latency, ms",
                series=tuple(
                    Series(name=name, x=exits, y=[1e3 * s for s in found.to_exit_s])
                    for name, found in zip(
                        ("without cache", "with cache"), walks[plan.net], strict=True
                    )
                ),
                provenance="simulated",
            )
        )
    plan = plans[0]
    exits = list(range(1, len(plan.ahead) + 1))
    calls, call = calls_to_exit(plan), dearest(times)
    charts.append(
        Chart(
            title=f"Controller's time, {named(ORIN, plan.net)}",
            x_label="exit",
            y_label="us",
            series=(
                Series(
                    name="published table",
                    x=exits,
                    y=[1e6 * (k + 1) * times[TABLE].p50_s for k in exits],
                ),
                Series(name=call, x=exits, y=(1e6 * calls * times[call].p50_s).tolist()),
                Series(
                    name="cache, all hits", x=exits, y=(1e6 * calls * times[HIT].p50_s).tolist()
                ),
            ),
            provenance="estimated",
        )
    )
    return tuple(charts)

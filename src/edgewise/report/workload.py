"""What playing a workload gave: predicted against observed, as records and as one HTML page.

The page needs no network and no script; its template stands beside this file.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Literal

from edgewise.errors import ConfigError
from edgewise.placement.plan import Share
from edgewise.report.timeline import PANEL_HEIGHT, Tick, _even_ticks, _LogAxis
from edgewise.report.wording import format_share
from edgewise.units import format_bytes, format_duration

RATE_HEIGHT = 44.0
MAX_MARKS = 1500  # of one tenant on the page
_PAD = 7.0
_BINS = 60  # of a time line, at most
_PER_BIN = 6  # requests, about, at least

Outcome = Literal["answered", "refused", "cancelled", "failed", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRequest:
    """One request. Instants are seconds since the start.

    Attributes:
        tenant: Whose.
        due_s: When it should have been sent: latency counts from here.
        sent_s: When the player sent it.
        done_s: When it ended.
        outcome: How.
        met: Whether it was answered within its budget; ``None`` without one.
        plan: Number of the plan it ran under.
        accelerator_wait_s: Until its prefix began; ``None`` without one.
        service_s: Its prefix, reloading included; likewise.
        load_s: Of that, reloading; ``None`` where not told.
        missed: Whether it had to reload; ``None`` where not told.
        cpu_wait_s: Until its suffix began; ``None`` without one.
        cpu_s: Its suffix; likewise.
        exit_index: Where it left early; ``None`` where it did not.
        reason: Why it was not answered.
    """

    tenant: str
    due_s: float
    sent_s: float
    done_s: float
    outcome: Outcome
    met: bool | None
    plan: int
    accelerator_wait_s: float | None = None
    service_s: float | None = None
    load_s: float | None = None
    missed: bool | None = None
    cpu_wait_s: float | None = None
    cpu_s: float | None = None
    exit_index: int | None = None
    reason: str = ""

    @property
    def response_s(self) -> float:
        """From the due instant to the end."""
        return self.done_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a tenant sees, predicted or observed; ``None`` is not known, ``inf`` unstable.

    Attributes:
        mean_s: Mean response time of what was answered.
        p95_s: 95 % of answers came sooner.
        p99_s: 99 % did.
        miss: Share of requests with a prefix that found their parameters displaced.
        dsr: Share answered within the budget, refused and failed ones counting as late.
        cpu_busy: Utilisation of its workers, 0 to 1.
    """

    mean_s: float | None
    p95_s: float | None
    p99_s: float | None
    miss: float | None
    dsr: float | None
    cpu_busy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """One tenant over the whole play, warm-up cut.

    Attributes:
        tenant: Its name.
        model: Its model's.
        budget_s: Time within which it should answer; ``None`` for none.
        rate_per_s: Requests that came, per second.
        requests: How many count.
        outcomes: How many of them ended how.
        predicted: By the plans in force.
        observed: What came.
        exits: Answers by exit; empty for a tenant without exits.
        accuracy_ratio: Of those exits on the model's validation data, weighted by answers;
            ``None`` where not known.
    """

    tenant: str
    model: str
    budget_s: float | None
    rate_per_s: float
    requests: int
    outcomes: dict[Outcome, int]
    predicted: Figures
    observed: Figures
    exits: tuple[int, ...] = ()
    accuracy_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """A plan while it was in force. Instants are seconds since the start.

    Attributes:
        number: From 0.
        from_s: When new requests went to it; 0 or less for the first.
        warm_s: How long it was warmed before; 0 for the first.
        drain_s: How long the old plan's last requests took after; ``None`` where not known.
        reason: Why it came.
        residency: Whether models switch in the accelerator's memory or have shares of it.
        shares: What each tenant got.
    """

    number: int
    from_s: float
    warm_s: float
    drain_s: float | None
    reason: str
    residency: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedWorkload:
    """What was played, and what became of it.

    Attributes:
        name: The workload's.
        objective: What plans minimise.
        queue: In which order the accelerator served.
        forecast: Where predictions are from.
        duration_s: How long requests came.
        warm_up_s: Of that, cut from all figures.
        accelerator: Its name; ``None`` for none.
        accelerator_provenance: ``"simulated"`` or ``"measured"``; ``None`` without one.
        accelerator_busy: Its utilisation, predicted and observed; ``None`` where not known.
        tenants: One each.
        plans: In order.
        requests: All, warm-up included, in order of due instants.
        rates: What the workload asks for: (seconds since the start, rate per second) by tenant.
        late_p99_s: 99 % of requests were sent within so long after they were due.
        stopped: Why the play ended early; ``""`` where it did not.
        machine: Facts about it.
        notes: What must be said.
    """

    name: str
    objective: str
    queue: str
    forecast: str
    duration_s: float
    warm_up_s: float
    accelerator: str | None
    accelerator_provenance: str | None
    accelerator_busy: tuple[float | None, float | None]
    tenants: tuple[TenantResult, ...]
    plans: tuple[PlayedPlan, ...]
    requests: tuple[PlayedRequest, ...] = field(repr=False)
    rates: dict[str, tuple[tuple[float, float], ...]]
    late_p99_s: float | None
    stopped: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def provenance(self) -> str:
        """Which part of the figures is measured, in words."""
        if self.accelerator is None:
            return "CPU measured"
        return f"accelerator {self.accelerator_provenance}, CPU measured"

    @property
    def mean_s(self) -> tuple[float | None, float | None]:
        """Mean response over all answered requests, predicted and observed."""
        pairs = [(t.outcomes.get("answered", 0), t.predicted.mean_s, t.observed.mean_s)
                 for t in self.tenants]  # fmt: skip
        total = sum(count for count, _, _ in pairs)
        predicted, observed = 0.0, 0.0
        for count, said, seen in pairs:
            if not count:
                continue
            if said is None or seen is None:
                return None, None
            predicted += count * said / total
            observed += count * seen / total
        return (predicted, observed) if total else (None, None)


def error_ratio(predicted: float | None, observed: float | None) -> float | None:
    """(Predicted - observed) / observed; ``None`` where either is not known, infinite or zero.

    Example:
        >>> round(error_ratio(0.021, 0.020), 3), error_ratio(0.02, None)
        (0.05, None)
    """
    if predicted is None or not observed or not math.isfinite(predicted):
        return None
    return (predicted - observed) / observed


def format_error(ratio: float | None) -> str:
    """Write an error for people, with its sign.

    Example:
        >>> format_error(0.052), format_error(-0.31), format_error(None)
        ('+5.2 %', '-31 %', '–')
    """
    if ratio is None:
        return "–"
    percent = 100 * ratio
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def format_time(time_s: float | None) -> str:
    """Write a response time; an unstable queue has none.

    Example:
        >>> format_time(0.0123), format_time(float("inf"))
        ('12.3 ms', '∞')
    """
    return "∞" if time_s is not None and math.isinf(time_s) else format_duration(time_s)


def requests_csv(played: PlayedWorkload) -> str:
    """All requests as CSV, one a line, unknown cells empty."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = [f.name for f in fields(PlayedRequest)]
    rows.writerow([*names[:4], "response_s", *names[4:]])
    for r in played.requests:
        cells = [getattr(r, name) for name in names]
        cells.insert(4, r.response_s)
        rows.writerow([f"{c:.6f}" if isinstance(c, float) else c for c in cells])
    return text.getvalue()


def finding(played: PlayedWorkload) -> str:
    """One sentence: predicted and observed mean, what was in time, what was lost."""
    said, seen = played.mean_s
    counted = sum(t.requests for t in played.tenants)
    if seen is None or not counted:
        return f"No request of {played.name} was answered."
    answered = sum(t.outcomes.get("answered", 0) for t in played.tenants)
    of = "" if answered == counted else f"{answered} of "
    text = f"{of}{_count(counted, 'request')} of {_count(len(played.tenants), 'tenant')} were"
    text += f" answered, in {format_duration(seen)} on average; predicted {format_time(said)}"
    if (error := error_ratio(said, seen)) is not None:
        text += f" ({format_error(error)})"
    with_budget = [t for t in played.tenants if t.observed.dsr is not None]
    total = sum(t.requests for t in with_budget)
    if total:
        met = sum((t.observed.dsr or 0.0) * t.requests for t in with_budget)
        text += f". {format_share(met / total)} of those with a budget were in time"
    lost = sum(t.outcomes.get("failed", 0) + t.outcomes.get("dropped", 0) for t in played.tenants)
    changes = len(played.plans) - 1
    text += f"; {_count(changes, 'change')} of plan, {lost or 'no'} lost request"
    return text + ("s." if lost != 1 else ".")


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")


# --- the page ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """One request on a panel; ``kind`` is met, free (no budget), late or lost."""

    x: float
    y: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One tenant over time."""

    result: TenantResult
    marks: tuple[_Mark, ...]
    y_ticks: tuple[Tick, ...]
    budget_y: float | None
    mean: tuple[str, ...]  # of predicted and observed means by bin, as SVG points
    asked: str
    came: str
    most_per_s: float
    drawn: int
    total: int


def render_workload_page(played: PlayedWorkload, *, command: str, created: str) -> str:
    """Write a play as a self-contained HTML page, light or dark as its reader prefers.

    Args:
        played: What was played.
        command: That plays it again.
        created: When, in words.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "the page of a workload needs jinja2, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        share=format_share, time=format_time, size=format_bytes, error=format_error, busy=_percent
    )
    environment.globals.update(error_of=error_ratio)
    source = resources.files("edgewise.report").joinpath("workload.html.j2").read_text("utf-8")
    end_s = max([played.duration_s, *(r.due_s for r in played.requests)]) or 1.0
    return environment.from_string(source).render(
        played=played,
        finding=finding(played),
        command=command,
        created=created,
        panels=[_panel(played, tenant, end_s) for tenant in played.tenants],
        plans=_plan_boxes(played, end_s),
        x_ticks=[Tick(at=_x(t, end_s), label=f"{t:g} s") for t in _even_ticks(end_s)],
        warm_x=_x(played.warm_up_s, end_s),
        panel_height=PANEL_HEIGHT,
        rate_height=RATE_HEIGHT,
    )


def _percent(share: float | None) -> str:
    """Write a utilisation."""
    return "–" if share is None else f"{100 * share:.0f} %"


def _x(at_s: float, end_s: float) -> float:
    return round(100.0 * min(max(at_s / end_s, 0.0), 1.0), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanBox:
    x: float
    width: float
    label: str
    title: str


def _plan_boxes(played: PlayedWorkload, end_s: float) -> list[_PlanBox]:
    starts = [max(0.0, p.from_s) for p in played.plans]
    boxes = []
    for plan, start_s, stop_s in zip(played.plans, starts, [*starts[1:], end_s], strict=True):
        x = _x(start_s, end_s)
        title = [f"plan {plan.number} from {start_s:.1f} s: {plan.reason or 'first plan'}"]
        title += [f"{s.tenant}: {say_share(s)}" for s in plan.shares]
        boxes.append(
            _PlanBox(
                x=x,
                width=round(_x(stop_s, end_s) - x, 2),
                label=f"{plan.number}: " + " · ".join(f"{s.tenant} {s.place}" for s in plan.shares),
                title="\n".join(title),
            )
        )
    return boxes


def say_share(share: Share) -> str:
    """What a tenant gets, in words.

    Example:
        >>> say_share(Share(tenant="a", place=3, cut="x", cores=2, workers=1, threads=2))
        'cut at place 3 (x), 2 cores as 1 worker x 2 threads'
    """
    text = f"cut at place {share.place} ({share.cut})"
    if share.cores:
        text += f", {_count(share.cores, 'core')} as {_count(share.workers, 'worker')} x"
        text += f" {_count(share.threads, 'thread')}"
    else:
        text += ", no core"
    if share.sram_bytes is not None:
        text += f", {format_bytes(share.sram_bytes)} of memory"
    return text


def _panel(played: PlayedWorkload, result: TenantResult, end_s: float) -> _Panel:
    own = [r for r in played.requests if r.tenant == result.tenant]
    every = max(1, math.ceil(len(own) / MAX_MARKS))
    axis = _LogAxis(
        [r.response_s for r in own if r.outcome == "answered"]
        + ([result.budget_s] if result.budget_s else [])
    )
    # What went wrong is always drawn.
    shown = [r for n, r in enumerate(own) if n % every == 0 or r.met is False]
    steps = played.rates.get(result.tenant, ())
    came = _per_bin([r.due_s for r in own], end_s)
    most = max([*(rate for _, rate in steps), *(rate for _, rate in came)], default=0.0) or 1.0
    return _Panel(
        result=result,
        marks=tuple(_mark(r, axis, end_s) for r in shown),
        y_ticks=axis.ticks(),
        budget_y=axis.y_of(result.budget_s) if result.budget_s else None,
        mean=tuple(_means(own, axis, end_s)),
        asked=_stairs(steps, most, end_s),
        came=_stairs(came, most, end_s),
        most_per_s=most,
        drawn=len(shown),
        total=len(own),
    )


def _mark(request: PlayedRequest, axis: _LogAxis, end_s: float) -> _Mark:
    lost = request.outcome != "answered"
    lines = [
        f"{request.due_s:.2f} s, plan {request.plan}: {request.outcome}"
        + (", too late" if request.met is False and not lost else ""),
        f"took {format_duration(request.response_s)}",
    ]
    for said, value in (
        ("waited for the accelerator", request.accelerator_wait_s),
        ("on the accelerator", request.service_s),
        ("of that reloading", request.load_s or None),
        ("waited for a core", request.cpu_wait_s),
        ("on the CPU", request.cpu_s),
    ):
        if value is not None:
            lines.append(f"{said} {format_duration(value)}")
    if request.exit_index is not None:
        lines.append(f"answered at exit {request.exit_index}")
    if request.reason:
        lines.append(request.reason)
    kind = "free" if request.met is None else "met" if request.met else "late"
    return _Mark(
        x=_x(request.due_s, end_s),
        y=_PAD if lost else axis.y_of(request.response_s),
        kind="lost" if lost else kind,
        title="\n".join(lines),
    )


def _bin_s(end_s: float, requests: int) -> float:
    """Width of a bin: a round number, for at most `_BINS` of them."""
    steps = [m * 10.0**e for e in range(-2, 5) for m in (1, 2, 5)]
    bins = min(_BINS, max(4, requests // _PER_BIN))
    return next((s for s in steps if end_s / s <= bins), end_s)


def _per_bin(due_s: Sequence[float], end_s: float) -> list[tuple[float, float]]:
    """(start, rate per second) of each bin; the last may be short."""
    width_s = _bin_s(end_s, len(due_s))
    starts = [n * width_s for n in range(math.ceil(end_s / width_s - 1e-9))]
    counts = [0] * len(starts)
    for at_s in due_s:
        counts[min(int(at_s / width_s), len(starts) - 1)] += 1
    return [
        (start_s, count / min(width_s, end_s - start_s))
        for start_s, count in zip(starts, counts, strict=True)
    ]


def _stairs(steps: Sequence[tuple[float, float]], most: float, end_s: float) -> str:
    """SVG path, x from 0 to 1000, y in pixels."""
    path = ""
    for n, (start_s, rate) in enumerate(steps):
        if start_s >= end_s:
            break
        stop_s = min(steps[n + 1][0], end_s) if n + 1 < len(steps) else end_s
        y = round(RATE_HEIGHT - 2 - (RATE_HEIGHT - 6) * rate / most, 1)
        x1, x2 = 10 * _x(start_s, end_s), 10 * _x(stop_s, end_s)
        path += f"{'L' if path else 'M'}{x1:g} {y:g}H{x2:g}"
    return path


def _means(own: Sequence[PlayedRequest], axis: _LogAxis, end_s: float) -> list[str]:
    """SVG paths of the mean response over time; a bin without an answer interrupts the line."""
    width_s = _bin_s(end_s, len(own))
    bins: dict[int, list[float]] = {}
    for r in own:
        if r.outcome == "answered":
            bins.setdefault(int(r.due_s / width_s), []).append(r.response_s)
    paths: list[str] = []
    last = None
    for n in sorted(bins):
        x = 10 * _x((n + 0.5) * width_s, end_s)
        y = axis.y_of(sum(bins[n]) / len(bins[n]))
        if last is not None and n == last + 1:
            paths[-1] += f"L{x:g} {y:g}"
        else:
            paths.append(f"M{x:g} {y:g}")
        last = n
    return [p for p in paths if "L" in p]

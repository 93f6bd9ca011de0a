"""``edgewise run-workload``: play a workload for real, predicted against observed."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain
from edgewise.cli.place import (
    count_exits,
    plain_table,
    plan_workload,
    print_table,
    search_within,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgewise.backends.accelerator import AcceleratorDevice
    from edgewise.placement.plan import Placement
    from edgewise.placement.problem import Problem
    from edgewise.placement.workload import Workload
    from edgewise.report.workload import PlayedWorkload

_POOL = 4  # inputs of each tenant, taken in turn
_LOOK_S = 0.3  # at what else runs, before the play
_WARM_S = 60.0  # for a first answer of each tenant


def run_workload(
    workload: Annotated[
        Path, typer.Argument(help="TOML file with a device and its tenants.", show_default=False)
    ],
    *,
    duration: Annotated[
        str | None,
        typer.Option(help="How long requests come, such as '30 s'; the file's horizon by default."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Begin with this plan of `edgewise place --out`.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="How to search for plans, as in edgewise place.")
    ] = "best",
    replan: Annotated[
        bool, typer.Option("--replan/--no-replan", help="Plan anew when rates change.")
    ] = True,
    queue: Annotated[
        str,
        typer.Option(
            help="The accelerator's order: switch-aware (the resident model first), fcfs."
        ),
    ] = "switch-aware",
    device: Annotated[
        str,
        typer.Option(help="simulated (outputs from the CPU, times as described), or edgetpu."),
    ] = "simulated",
    html: Annotated[Path | None, typer.Option(help="Write a page with the time line here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every request here.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> int:
    """Play a workload: requests come when they are due, plans follow the rates.

    Latency counts from the instant a request was due. Ctrl-C and SIGTERM end the play early: what
    is under way is finished, within bounds, and what was done is reported.
    """
    from edgewise.report.workload import render_workload_page, requests_csv
    from edgewise.units import parse_duration_s

    duration_s = None if duration is None else parse_duration_s(duration)
    _check_first(queue=queue, device=device, html=html, csv=csv)
    say = stderr_console()
    with _stopping() as stop:
        played = _play(
            workload,
            say,
            stop=stop.event,
            duration_s=duration_s,
            plan_file=plan,
            method=method,
            replan=replan,
            discipline=queue,
            device=device,
        )
    if csv is not None:
        _write(csv, requests_csv(played))
        say.print(f"requests: {csv}", soft_wrap=True)
    if html is not None:
        page = render_workload_page(played, command=_again(workload, duration), created=_now())
        _write(html, page)
        say.print(f"page: {html}", soft_wrap=True)
    if json:
        emit_json(_as_json(played))
    else:
        show_played(stdout_console(), played)
    return 128 + stop.number if stop.number else 0


def _check_first(*, queue: str, device: str, html: Path | None, csv: Path | None) -> None:
    """What would otherwise fail after a play that may be long."""
    import importlib.util

    from edgewise.errors import ConfigError, nearest_names

    for option, word, known in (
        ("queue", queue, ("switch-aware", "fcfs")),
        ("device", device, ("simulated", "edgetpu")),
    ):
        if word not in known:
            raise ConfigError(f"unknown --{option} {word!r}", help=nearest_names(word, known))
    for path in (html, csv):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no folder {path.resolve().parent} to write {path} to")
    if html is not None and importlib.util.find_spec("jinja2") is None:
        raise ConfigError(
            "the page of a workload needs jinja2, which is not installed",
            help="pip install 'edgewise[report]'",
        )


class _Stop:
    """Set by the first signal; the second one interrupts at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number = 0

    def __call__(self, number: int, _frame: object) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.number = number
        self.event.set()


@contextlib.contextmanager
def _stopping() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _play(
    path: Path,
    say: Console,
    *,
    stop: threading.Event,
    duration_s: float | None,
    plan_file: Path | None,
    method: str,
    replan: bool,
    discipline: str,
    device: str,
) -> PlayedWorkload:
    import dataclasses

    import numpy as np

    from edgewise.bench.compiled import CompiledModel
    from edgewise.bench.remembered import RememberedModel, make_inputs
    from edgewise.bench.workload import play_workload
    from edgewise.clock import MonotonicClock
    from edgewise.device import other_load
    from edgewise.placement.workload import load_workload
    from edgewise.runtime.tenants.engine import TenantEngine
    from edgewise.runtime.tenants.records import QueueRule

    workload, staged = count_exits(
        load_workload(path), functools.partial(plan_workload, method=method)
    )
    _check_exits(staged, device)
    problem, placement = _first_plan(workload, plan_file, method)
    rng = np.random.default_rng(workload.seed)
    inputs = {}
    models = {}
    clock = MonotonicClock()
    for tenant in workload.tenants:
        with say.status(f"reading {tenant.name}") as status:
            model, file = _open_model(tenant, status.update)
            model = staged.get(tenant.name, model)
            inputs[tenant.name] = make_inputs(model, count=_POOL, rng=rng)
            # A simulated device must leave the cores to the suffixes; a real one needs its files.
            models[tenant.name] = (
                RememberedModel(model, inputs[tenant.name])
                if device == "simulated"
                else CompiledModel(model, file)
            )
    rule = QueueRule(discipline=discipline)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        accelerator = _open_device(workload, device, models, clock)
        if accelerator is not None:
            stack.callback(accelerator.close)
            say.print(_say_device(workload, accelerator), soft_wrap=True)
        other_ratio = other_load(_LOOK_S).other_ratio
        with say.status("warming up"):
            engine = stack.enter_context(
                TenantEngine(
                    _tenant_models(workload, models),
                    placement,
                    device=accelerator,
                    clock=clock,
                    queue=rule,
                    cores=workload.cores,
                )
            )
            for tenant in workload.tenants:
                engine.submit(tenant.name, inputs[tenant.name][0], deadline_s=_WARM_S).result(
                    _WARM_S
                )
        if replan:
            from edgewise.runtime.tenants.replanner import Replanner

            search = functools.partial(search_within, workload)
            stack.enter_context(
                Replanner(engine, problem, plan=search, method=method, horizon_s=workload.horizon_s)
            )
        length_s = workload.horizon_s if duration_s is None else duration_s
        say.print(f"playing {workload.name} for {length_s:g} s", soft_wrap=True)
        tick = stack.enter_context(_live_table(say, workload))
        played = play_workload(
            workload,
            engine,
            inputs,
            duration_s=duration_s,
            queue=rule,
            accelerator_provenance=accelerator.provenance if accelerator else "simulated",
            clock=clock,
            stop=stop,
            on_tick=tick,
            accuracies={
                name: [e.accuracy for e in model.model.exits] for name, model in staged.items()
            },
        )
    notes = [*played.notes, *_notes(workload, accelerator)]
    return dataclasses.replace(played, machine=_machine(workload, other_ratio), notes=tuple(notes))


def _first_plan(
    workload: Workload, plan_file: Path | None, method: str
) -> tuple[Problem, Placement]:
    from edgewise.errors import Infeasible
    from edgewise.placement.plan import read_shares

    if plan_file is None:
        return plan_workload(workload, method=method)
    problem = workload.problem(residency=_residency_in(plan_file, workload))
    placement = read_shares(plan_file, problem)
    if not placement.stable:
        raise Infeasible(
            f"the plan in {plan_file} cannot keep up with the workload's rates",
            closest=placement,
            help="edgewise place WORKLOAD --out FILE",
        )
    return problem, placement


def _check_exits(staged: Mapping[str, Any], device: str) -> None:
    from edgewise.errors import ConfigError

    if staged and device != "simulated":
        raise ConfigError(
            f"tenant {next(iter(staged))!r} has exits, and models with exits are ONNX in floating"
            " point: an Edge TPU runs int8 TFLite",
            help="take `exits = true` out and name a .tflite file, or --device simulated",
        )


def _residency_in(path: Path, workload: Workload) -> Any:
    """What a plan file says, where the workload leaves it open."""
    import json

    with contextlib.suppress(OSError, ValueError, AttributeError):
        said = json.loads(path.read_text(encoding="utf-8")).get("residency")
        if said in workload.residencies:
            return said
    return workload.residencies[0]


def _open_model(tenant: Any, say: Callable[[str], None]) -> tuple[Any, Path]:
    """A tenant's model, cut where its profile was measured, and its file."""
    from edgewise.bench.tenant_models import model_file, open_model
    from edgewise.errors import ConfigError, ProfileError

    named = tenant.model or tenant.model_name
    try:
        return open_model(named, tenant.profile, say=say), model_file(named)
    except (ConfigError, ProfileError) as error:
        raise type(error)(f"tenant {tenant.name!r}: {error.message}", help=error.help) from error


def _open_device(
    workload: Workload, device: str, models: Mapping[str, Any], clock: Any
) -> AcceleratorDevice | None:
    from edgewise.errors import BackendUnavailable

    description = workload.accelerator
    if description is None:
        return None
    if device == "simulated":
        from edgewise.backends.simulated_accelerator import SimulatedAccelerator
        from edgewise.bench.remembered import remembered_loader

        loader = remembered_loader(list(models.values()))
        return SimulatedAccelerator(description, clock=clock, piece_loader=loader)
    from edgewise.backends.edgetpu import EdgeTpuDevice

    try:
        return EdgeTpuDevice(description)
    except BackendUnavailable as error:
        raise BackendUnavailable(
            error.message, help=f"{error.help}; or --device simulated" if error.help else None
        ) from error


def _say_device(workload: Workload, accelerator: AcceleratorDevice) -> str:
    assert workload.accelerator is not None  # noqa: S101 - there is a device
    name = workload.accelerator.name
    if accelerator.provenance == "simulated":
        return f"accelerator {name} is simulated: outputs from the CPU, times as described"
    return f"accelerator {name} is real"


def _tenant_models(workload: Workload, models: Mapping[str, Any]) -> list[Any]:
    from edgewise.runtime.tenants.records import TenantModel

    return [
        TenantModel(
            name=t.name,
            model=models[t.name],
            profile=t.profile,
            deadline_s=t.budget_s,
            priority=t.priority,
        )
        for t in workload.tenants
    ]


def _notes(workload: Workload, accelerator: Any) -> list[str]:
    from edgewise.device import device_fingerprint, usable_cores

    notes = []
    here = device_fingerprint().id
    notes += [
        f"The CPU costs of {t.name!r} are of another machine: {t.profile.cpu}."
        for t in workload.tenants
        if t.profile.cpu and here not in t.profile.cpu
    ]
    usable = usable_cores().usable
    if workload.cores > usable:
        notes.append(
            f"The workload has {workload.cores} cores, this process may use {usable:g}: suffixes"
            " wait for each other."
        )
    overruns = getattr(accelerator, "overruns", 0)
    if overruns:
        notes.append(
            f"{overruns} of {accelerator.calls} simulated calls took the CPU longer than the"
            " device is described to take."
        )
    return notes


def _machine(workload: Workload, other_ratio: float | None) -> dict[str, str]:
    from edgewise.device import device_fingerprint, usable_cores

    found = device_fingerprint()
    other = "an unknown share" if other_ratio is None else f"{100 * other_ratio:.0f} %"
    return {
        "Processor": str(found.cpu_model or "unknown"),
        "Usable cores": f"{usable_cores().usable:g}, of which {workload.cores} for suffixes",
        "System": str(found.kernel or "unknown"),
        "Other programs before": f"{other} of the machine",
    }


# --- what a person sees --------------------------------------------------------------------------


@contextlib.contextmanager
def _live_table(say: Console, workload: Workload) -> Iterator[Any]:
    """What shows a snapshot; nothing where nobody looks."""
    if not say.is_terminal:
        yield None
        return
    from rich.live import Live

    with Live(console=say, transient=True, auto_refresh=False) as live:
        yield lambda snapshot: live.update(live_table(snapshot, workload), refresh=True)


def live_table(snapshot: Any, workload: Workload) -> Table:
    """One line for each tenant, as it is now.

    Args:
        snapshot: An `EngineSnapshot`.
        workload: Its tenants' budgets.
    """
    from edgewise.units import format_duration

    busy = snapshot.accelerator_busy
    device = "" if busy is None else f", accelerator busy {100 * busy:.0f} %"
    table = plain_table(f"{workload.name}: plan {snapshot.plan}{device}")
    table.add_column("tenant", overflow="fold")
    for name in ("rate", "waiting", "mean", "p95", "budget", "CPU busy", "answered", "not"):
        table.add_column(name, justify="right")
    budgets = {t.name: t.budget_s for t in workload.tenants}
    for t in snapshot.tenants:
        not_answered = t.refused + t.cancelled + t.failed + t.dropped
        table.add_row(
            t.tenant,
            "–" if t.rate_per_s is None else f"{t.rate_per_s:.3g}/s",
            str(t.waiting),
            format_duration(t.response_s),
            format_duration(t.p95_s),
            format_duration(budgets.get(t.tenant)),
            "–" if t.cpu_busy is None else f"{100 * t.cpu_busy:.0f} %",
            str(t.answered),
            str(not_answered),
        )
    troubles = [f"{t.tenant}: {t.problem}" for t in snapshot.tenants if t.problem]
    if snapshot.lost:
        troubles.insert(0, f"accelerator: {snapshot.lost}")
    if troubles:
        table.caption = "\n".join(troubles)
    return table


def show_played(out: Console, played: PlayedWorkload) -> None:
    """Print what was predicted and observed."""
    from edgewise.report.workload import finding

    if played.stopped:
        out.print(f"stopped {played.stopped}", soft_wrap=True)
    out.print(finding(played), soft_wrap=True)
    print_table(out, _times_table(played))
    busy = _pair(*(_percent(b) for b in played.accelerator_busy))
    device = [] if played.accelerator is None else [f"accelerator busy {busy}"]
    print_table(out, _shares_table(played), *device)
    if any(t.exits for t in played.tenants):
        print_table(out, _exits_table(played), *_say_accuracies(played))
    if len(played.plans) > 1:
        names = ", ".join(t.tenant for t in played.tenants)
        print_table(out, _plans_table(played), f"cuts and cores in the order {names}")
    out.print()
    facts = [played.provenance, f"queue {played.queue}", f"predicted by {played.forecast}"]
    if other := played.machine.get("Other programs before"):
        facts.append(f"other programs used {other} before")
    facts.append(f"{played.warm_up_s:g} s of warm-up cut")
    if played.late_p99_s is not None:
        facts.append(f"99 % sent within {_time(played.late_p99_s)} of the instant they were due")
    out.print("; ".join(facts), soft_wrap=True)
    for note in played.notes:
        out.print(f"note: {note}", soft_wrap=True)


def _times_table(played: PlayedWorkload) -> Table:
    from edgewise.report.workload import error_ratio, format_error

    table = plain_table("response, predicted against observed")
    table.add_column("tenant", overflow="fold")
    for name in ("requests", "mean", "observed", "error", "p95", "observed", "error"):
        table.add_column(name, justify="right")
    for t in played.tenants:
        said, seen = t.predicted, t.observed
        table.add_row(
            t.tenant,
            str(t.requests),
            _time(said.mean_s),
            _time(seen.mean_s),
            format_error(error_ratio(said.mean_s, seen.mean_s)),
            _time(said.p95_s),
            _time(seen.p95_s),
            format_error(error_ratio(said.p95_s, seen.p95_s)),
        )
    return table


def _shares_table(played: PlayedWorkload) -> Table:
    from edgewise.report.wording import format_share

    table = plain_table("shares, predicted → observed")
    table.add_column("tenant", overflow="fold")
    for name in ("reloads", "CPU busy", "in time (DSR)", "refused", "failed", "other"):
        table.add_column(name, justify="right")
    for t in played.tenants:
        said, seen = t.predicted, t.observed
        other = t.outcomes.get("cancelled", 0) + t.outcomes.get("dropped", 0)
        table.add_row(
            t.tenant,
            _pair(format_share(said.miss), format_share(seen.miss)),
            _pair(_percent(said.cpu_busy), _percent(seen.cpu_busy)),
            _pair(format_share(said.dsr), format_share(seen.dsr)),
            str(t.outcomes.get("refused", 0)),
            str(t.outcomes.get("failed", 0)),
            str(other),
        )
    return table


def _exits_table(played: PlayedWorkload) -> Table:
    from edgewise.report.wording import format_share

    table = plain_table("where answers came from, share of each exit")
    table.add_column("tenant", overflow="fold")
    most = max(len(t.exits) for t in played.tenants)
    for k in range(most):
        table.add_column(f"exit {k}", justify="right")
    table.add_column("accuracy", justify="right")
    for t in played.tenants:
        if total := sum(t.exits):
            shares = [format_share(n / total) if n else "–" for n in t.exits]
            shares += ["–"] * (most - len(shares))
            table.add_row(t.tenant, *shares, format_share(t.accuracy_ratio))
    return table


def _say_accuracies(played: PlayedWorkload) -> list[str]:
    known = any(t.accuracy_ratio is not None for t in played.tenants)
    return ["accuracy: of these exits on the model's own validation data"] if known else []


def _pair(said: str, seen: str) -> str:
    return "–" if said == seen == "–" else f"{said} → {seen}"


def _plans_table(played: PlayedWorkload) -> Table:
    table = plain_table("plans")
    table.add_column("plan", justify="right")
    table.add_column("from", justify="right")
    table.add_column("cut at")
    table.add_column("cores")
    table.add_column("warmed", justify="right")
    table.add_column("why", overflow="fold")
    for p in played.plans:
        table.add_row(
            str(p.number),
            f"{max(0.0, p.from_s):.1f} s",
            " ".join(str(s.place) for s in p.shares),
            " ".join(str(s.cores) for s in p.shares),
            _time(p.warm_s) if p.number else "–",
            p.reason or "first plan",
        )
    return table


def _time(time_s: float | None) -> str:
    from edgewise.report.workload import format_time

    return format_time(time_s)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _again(workload: Path, duration: str | None) -> str:
    return f"edgewise run-workload {workload}" + (f" --duration '{duration}'" if duration else "")


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _write(path: Path, text: str) -> None:
    from edgewise.cli.evaluate import write_text

    write_text(path, text)


def _as_json(played: PlayedWorkload) -> dict[str, Any]:
    """Everything but the single requests."""
    plain = to_plain(played)
    assert isinstance(plain, dict)  # noqa: S101 - a record
    plain.pop("requests")
    said_s, seen_s = played.mean_s
    return {
        "provenance": played.provenance,
        "mean_predicted_s": said_s,
        "mean_observed_s": seen_s,
        **plain,
    }

"""``edgewise doctor``: what this machine offers, what is missing, and the command that adds it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgewise.backends.threads import (
    TARGET_RATIO,
    Coresidency,
    ThreadState,
    check_threads,
    coresidency,
)
from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.cli.runtimes import RuntimeStatus, examine_runtimes
from edgewise.device import (
    ClockReading,
    DeviceFingerprint,
    Memory,
    MeterStatus,
    OtherLoad,
    TimerQuality,
    UsableCores,
    device_fingerprint,
    find_meters,
    other_load,
    read_clocks,
    read_memory,
    timer_quality,
    usable_cores,
)
from edgewise.errors import EdgeError
from edgewise.profiles import default_store_path
from edgewise.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.text import Text

# Below this, a measurement is not disturbed by more than the margins allow for.
_QUIET_CORES = 0.25
_RUNS_STAGES = {"onnxruntime", "openvino", "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """Where measured costs are kept.

    Attributes:
        path: The database.
        exists: Whether it has been made.
        size_bytes: Its size; ``None`` where it does not exist.
        free_bytes: Free space beside it; ``None`` if unknown.
        writable: Whether this user may write there.
    """

    path: str
    exists: bool
    size_bytes: int | None
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that could be had.

    Attributes:
        what: What is missing.
        effect: What cannot be done without it.
        command: What would change it.
    """

    what: str
    effect: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceStatus:
    """Whether torch and ONNX Runtime disturb each other in one process.

    Attributes:
        target_ratio: Up to this they do not, under the governor.
        found: What was measured; ``None`` where it could not be.
        findings: What that means and what to do, or why it could not be measured.
    """

    target_ratio: float
    found: Coresidency | None
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that the doctor found; the fields of ``edgewise doctor --json``.

    ``threads`` are those of this process; ``interference`` is ``None`` unless it was asked for.
    """

    version: str
    python: dict[str, str]
    ready: bool
    device: DeviceFingerprint
    cores: UsableCores
    memory: Memory
    clocks: tuple[ClockReading, ...]
    timer: TimerQuality
    load: OtherLoad
    meters: tuple[MeterStatus, ...]
    runtimes: tuple[RuntimeStatus, ...]
    store: StoreStatus
    missing: tuple[Missing, ...]
    threads: tuple[ThreadState, ...]
    interference: InterferenceStatus | None


def doctor(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    backends: Annotated[
        bool,
        typer.Option("--backends", help="Ask slow runtimes too (torch): takes some seconds."),
    ] = False,
    interference: Annotated[
        bool,
        typer.Option(
            "--interference",
            help="Let torch and ONNX Runtime take turns, with governed and with naive threads:"
            " half a minute, longer where the cores are busy.",
        ),
    ] = False,
) -> None:
    """Say what this machine offers, what is missing and which command would change it.

    Changes nothing. Cores are those this process may use, by affinity and control-group quota.
    """
    if as_json:
        emit_json(examine(ask_all=backends, test_interference=interference))
        return
    with stderr_console().status("looking at this machine"):
        diagnosis = examine(ask_all=backends, test_interference=interference)
    show(diagnosis)


def examine(
    root: Path = Path("/"), *, ask_all: bool = False, test_interference: bool = False
) -> Diagnosis:
    """Look at the machine and at this Python.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        ask_all: Ask the slow runtimes for their devices too.
        test_interference: Let torch and ONNX Runtime take turns.
    """
    from edgewise.cli.main import version

    load = other_load(root=root)  # first: the runtimes asked below would count as load
    runtimes = tuple(examine_runtimes(ask_all=ask_all))
    meters = tuple(find_meters(root))
    return Diagnosis(
        version=version(),
        python={
            "version": platform.python_version(),
            "executable": sys.executable,
            "implementation": platform.python_implementation(),
        },
        ready=any(each.backends and each.name in _RUNS_STAGES for each in runtimes),
        device=device_fingerprint(root),
        cores=usable_cores(root),
        memory=read_memory(root),
        clocks=tuple(read_clocks(root).values()),
        timer=timer_quality(root),
        load=load,
        meters=meters,
        runtimes=runtimes,
        store=_store_status(default_store_path()),
        missing=tuple(_missing(runtimes, meters)),
        threads=check_threads(window_s=0.0, root=root),
        interference=_test_interference() if test_interference else None,
    )


def show(diagnosis: Diagnosis) -> None:
    """Print the findings for a person."""
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    device = diagnosis.device
    console.print(
        Text.assemble(
            (f"Edgewise {diagnosis.version}", "bold"),
            f" · Python {diagnosis.python['version']} · {device.os or 'unknown system'}",
            f" · Linux {device.kernel}" if device.kernel else "",
        )
    )
    console.print()
    machine = Table.grid(padding=(0, 2))
    machine.add_column(style="bold", min_width=9)
    machine.add_column()
    for name, lines in _machine_lines(diagnosis):
        machine.add_row(name, Text("\n").join(lines))
    console.print(machine)
    console.print()

    runtimes = Table.grid(padding=(0, 2))
    for title, kind in (("Runtimes", "runtime"), ("Libraries", "library")):
        for index, each in enumerate(r for r in diagnosis.runtimes if r.kind == kind):
            runtimes.add_row(
                Text(title if index == 0 else "", style="bold"),
                _mark(each.status),
                each.name,
                each.version or "–",
                _runtime_note(each),
            )
    console.print(runtimes)
    if diagnosis.missing:
        console.print()
        console.print(Text("What could be added", style="bold"))
        for gap in diagnosis.missing:
            console.print(Text.assemble("  ", (gap.what, "yellow"), f": {gap.effect}"))
            console.print(Text(f"    {gap.command}", style="cyan"), soft_wrap=True)
    console.print()
    console.print(_verdict(diagnosis))


def _verdict(diagnosis: Diagnosis) -> Text:
    from rich.text import Text

    if diagnosis.ready:
        return Text.assemble(("Ready.", "bold green"), " Next: edgewise demo")
    return Text.assemble(
        ("Not ready:", "bold red"), " no runtime can run a model; install one of those above"
    )


def _machine_lines(diagnosis: Diagnosis) -> Iterable[tuple[str, list[Text]]]:
    from rich.text import Text

    device, cores, memory = diagnosis.device, diagnosis.cores, diagnosis.memory
    kind = {True: "virtual machine", False: "bare metal", None: None}[device.hypervisor]
    yield (
        "Machine",
        [
            Text(
                " · ".join(
                    each for each in (device.cpu_model, device.board, device.arch, kind) if each
                )
            ),
            Text(f"{' '.join(device.isa) or 'extensions unknown'} · id {device.id}", style="dim"),
        ],
    )
    yield "Cores", [_cores_line(cores)]
    limit = f", limited to {format_bytes(memory.limit_bytes)}" if memory.limit_bytes else ""
    yield (
        "Memory",
        [
            Text(
                f"{format_bytes(memory.available_bytes)} available of "
                f"{format_bytes(memory.total_bytes)}{limit}"
            )
        ],
    )
    yield "Clocks", [_clocks_line(diagnosis.clocks)]
    timer = diagnosis.timer
    source = f" ({timer.source})" if timer.source else ""
    yield "Timer", [Text(f"tells {format_duration(timer.step_s)} apart{source}")]
    yield "Load", [_load_line(diagnosis.load)]
    if narrowed := [each for each in diagnosis.threads if each.fits is False]:
        yield "Threads", [_thread_line(each) for each in narrowed]
    if diagnosis.interference is not None:
        yield "Together", _interference_lines(diagnosis.interference)
    yield "Meters", _meter_lines(diagnosis.meters)
    yield "Store", [_store_line(diagnosis.store)]


def _cores_line(cores: UsableCores) -> Text:
    from rich.text import Text

    host = "an unknown number" if cores.host is None else str(cores.host)
    limits = []
    if cores.affinity is not None and cores.affinity != cores.host:
        limits.append(f"affinity allows {cores.affinity}")
    if cores.quota_cores is not None:
        limits.append(f"quota of {cores.quota_cores:g} in {cores.quota_source}")
    why = "; ".join(limits) or "no affinity or quota in the way"
    style = "yellow" if cores.host is not None and cores.usable < cores.host else ""
    return Text.assemble((f"{cores.usable:g} usable", style), f" of {host}: {why}")


def _clocks_line(clocks: tuple[ClockReading, ...]) -> Text:
    from rich.text import Text

    known = [each.current_hz for each in clocks if each.current_hz is not None]
    if not known:
        reason = clocks[0].reason if clocks else "the kernel lists no CPU"
        return Text(f"unknown: {reason}", style="dim")
    top = max((each.max_hz for each in clocks if each.max_hz is not None), default=None)
    governors = sorted({each.governor for each in clocks if each.governor})
    asleep = sum(1 for each in clocks if each.quality == "masked")
    return Text(
        f"{min(known) / 1e9:.2f} to {max(known) / 1e9:.2f} GHz now"
        + (f", at most {top / 1e9:.2f} GHz" if top else "")
        + (f", governor {', '.join(governors)}" if governors else "")
        + (f", {asleep} offline" if asleep else "")
    )


def _load_line(load: OtherLoad) -> Text:
    from rich.text import Text

    if load.other_ratio is None or load.other_cores is None:
        return Text(f"unknown: {load.reason or 'the kernel lists no cores'}", style="dim")
    stolen = f", {load.steal_ratio:.0%} stolen by the hypervisor" if load.steal_ratio else ""
    busy = load.other_cores > _QUIET_CORES
    advice = ": measure when it is quieter" if busy else ": quiet"
    return Text(
        f"{load.other_cores:.2f} cores used by other processes{stolen}{advice}",
        style="yellow" if busy else "",
    )


def _thread_line(state: ThreadState) -> Text:
    from rich.text import Text

    return Text(
        f"{state.runtime} {state.what}: {state.found}, not {state.wanted}; {state.help}",
        style="yellow",
    )


def _interference_lines(status: InterferenceStatus) -> list[Text]:
    from rich.text import Text

    if status.found is None:
        return [Text(each, style="dim") for each in status.findings]
    style = "" if status.found.holds else "yellow"
    return [Text(status.findings[0], style=style), *map(Text, status.findings[1:])]


def _meter_lines(meters: tuple[MeterStatus, ...]) -> list[Text]:
    from rich.text import Text

    if not meters:
        return [Text("none found: energy stays unknown", style="dim")]
    return [
        Text.assemble(_mark(each.quality), f" {each.name}", f": {each.reason}" * bool(each.reason))
        for each in meters
    ]


def _store_line(store: StoreStatus) -> Text:
    from rich.text import Text

    home = str(Path.home())
    path = (
        "~" + store.path.removeprefix(home) if store.path.startswith(home + os.sep) else store.path
    )
    state = format_bytes(store.size_bytes) if store.exists else "not made yet"
    return Text.assemble(
        f"{path} · {state} · {format_bytes(store.free_bytes)} free",
        ("" if store.writable else " · cannot be written", "red"),
    )


def _runtime_note(status: RuntimeStatus) -> Text:
    from rich.text import Text

    if status.reason:
        return Text(status.reason, style="dim" if status.status == "missing" else "red")
    if status.backends is None:
        return Text(status.use, style="dim")
    return Text("\n").join(
        Text.assemble((each.name, "cyan"), (f"  {each.device_name}", "dim"))
        for each in status.backends
    )


def _mark(state: str) -> Text:
    from rich.text import Text

    marks: Mapping[str, tuple[str, str]] = {
        "ok": ("✓", "green"),
        "denied": ("!", "yellow"),
        "broken": ("✗", "red"),
    }
    return Text(*marks.get(state, ("–", "dim")))


def _test_interference() -> InterferenceStatus:
    try:
        found = coresidency()
    except EdgeError as error:
        return InterferenceStatus(
            target_ratio=TARGET_RATIO,
            found=None,
            findings=tuple(filter(None, (f"unknown: {error.message}", error.help))),
        )
    return InterferenceStatus(target_ratio=TARGET_RATIO, found=found, findings=found.findings())


def _store_status(path: Path) -> StoreStatus:
    place = path
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - Path.exists can raise
        place = place.parent
    exists = place == path
    try:
        size, free = path.stat().st_size if exists else None, shutil.disk_usage(place).free
    except OSError:
        size, free = None, None
    return StoreStatus(
        path=str(path),
        exists=exists,
        size_bytes=size,
        free_bytes=free,
        writable=os.access(place, os.W_OK),
    )


def _missing(
    runtimes: tuple[RuntimeStatus, ...], meters: tuple[MeterStatus, ...]
) -> Iterable[Missing]:
    by_command: dict[str, list[RuntimeStatus]] = {}
    for runtime in runtimes:
        if runtime.help is not None:
            by_command.setdefault(runtime.help, []).append(runtime)
    for command, group in by_command.items():
        uses = list(dict.fromkeys(each.use for each in group))
        yield Missing(
            what=", ".join(each.name for each in group), effect="; ".join(uses), command=command
        )
    for meter in meters:
        if meter.help is not None:
            yield Missing(
                what=meter.name, effect="energy of each inference, in joules", command=meter.help
            )

"""``edgewise monitor``: the device's state now, live, and what watching it costs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.clock import Clock, MonotonicClock, VirtualClock
from edgewise.device.monitor import Monitor, MonitorCost
from edgewise.device.recording import Recorder, Replay
from edgewise.device.state import DeviceState, Quantity, StateSource
from edgewise.errors import ConfigError, EdgeError
from edgewise.units import format_bytes, format_duration, parse_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_REFRESH_S = 0.2
_PIPED_S = 2.0
_PARTS = ("cpu", "gpu", "emc", "thermal", "throttle", "power", "energy")
_STYLES = {"ok": "green", "stale": "yellow", "denied": "yellow"}
_BAR_CELLS = 6


def monitor(
    *,
    period: Annotated[str, typer.Option(help="Time between readings.")] = "10 ms",
    duration: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="How long to watch, for example '10 s'. By default until Ctrl-C on a terminal,"
            " 2 s elsewhere; a recording is played to its end.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write every state to this file.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show a recording instead of this machine.")
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object on standard output, when it is over."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Each core, and a line for each missing quantity.")
    ] = False,
    root: Annotated[
        Path, typer.Option(help="Where the file tree starts, to look at a copied one.")
    ] = Path("/"),
) -> None:
    """Show the device's state: clocks, load, heat, throttling, power, energy.

    What cannot be read says why. On a terminal the table is live and ends with Ctrl-C; elsewhere
    one table is printed at the end. --json prints the last state and what watching cost; every
    state goes to --record FILE, as JSON Lines.
    """
    for_s = None if duration is None else parse_duration_s(duration)
    live = stdout_console().is_terminal and not json
    if replay is not None:
        if record is not None or root != Path("/"):
            raise ConfigError(
                f"--replay shows a recording and cannot be used with"
                f" {'--record' if record is not None else '--root'}",
                help="give only one of them",
            )
        _show_replay(replay, for_s=for_s, live=live, as_json=json, everything=everything)
        return
    period_s = parse_duration_s(period)
    if not root.is_dir():
        raise ConfigError(f"--root {root} is not a directory", help="leave it out, or name one")
    if for_s is None and not live:
        for_s = _PIPED_S
    _watch(
        root,
        period_s=period_s,
        for_s=for_s,
        record=record,
        live=live,
        as_json=json,
        everything=everything,
    )


def _watch(
    root: Path,
    *,
    period_s: float,
    for_s: float | None,
    record: Path | None,
    live: bool,
    as_json: bool,
    everything: bool,
) -> None:
    from edgewise.device.fingerprint import device_fingerprint
    from edgewise.device.sensor import make_sensors

    device = device_fingerprint(root)
    note = " · ".join(each for each in (device.board, device.cpu_model) if each)
    clock = MonotonicClock()
    with contextlib.ExitStack() as stack:
        # Entered first and left last: the thread has ended when the recording is closed.
        recorder = (
            None
            if record is None
            else stack.enter_context(Recorder(record, period_s=period_s, note=note, root=root))
        )
        watcher = Monitor(
            make_sensors(root),
            clock=clock,
            period_s=period_s,
            on_state=[] if recorder is None else [recorder],
        )
        stack.enter_context(watcher)
        start_s = clock.now_s()

        def draw() -> RenderableType:
            heading = f"every {format_duration(period_s)} for {clock.now_s() - start_s:.1f} s"
            return _page(
                watcher.latest(),
                heading=f"{note} · {heading}" if note else heading,
                footer=_footer(watcher.cost, recorder),
                everything=everything,
                one_line=live and not everything,
            )

        try:
            state = _play(watcher, draw, clock, for_s=for_s, live=live)
        except KeyboardInterrupt:
            kept = f"; {record} holds {recorder.states} states" if recorder is not None else ""
            raise KeyboardInterrupt(f"watched for {clock.now_s() - start_s:.1f} s{kept}") from None
        page = draw()
        watched_s = clock.now_s() - start_s
    if as_json:
        emit_json(
            {
                "source": str(root),
                "watched_s": watched_s,
                "period_s": period_s,
                "at_s": state.at_s,
                "quantities": state.quantities,
                "cost": watcher.cost,
                "recording": None
                if recorder is None
                else {"path": recorder.path, "states": recorder.states},
            }
        )
    elif not live:
        stdout_console().print(page)
    if recorder is not None and recorder.problem:
        raise EdgeError(
            f"the recording stopped: {recorder.problem}",
            help="free some space and record again; what was written can be replayed",
        )


def _show_replay(
    path: Path, *, for_s: float | None, live: bool, as_json: bool, everything: bool
) -> None:
    # Nobody watches a pipe: there the instant that was asked for is shown at once.
    clock: Clock = MonotonicClock() if live else VirtualClock()
    with stderr_console().status(f"reading {path}"):
        source = Replay(path, clock)
    start_s = clock.now_s()
    for_s = source.duration_s if for_s is None else for_s

    def draw() -> RenderableType:
        played_s = min(clock.now_s() - start_s, source.duration_s)
        heading = f"recording {path.name} at {played_s:.1f} of {source.duration_s:.1f} s"
        return _page(
            source.latest(),
            heading=f"{source.note} · {heading}" if source.note else heading,
            footer=f"{len(source.states)} states recorded; this machine is not read",
            everything=everything,
            one_line=live and not everything,
        )

    state = _play(source, draw, clock, for_s=for_s, live=live)
    if as_json:
        emit_json(
            {
                "source": path,
                "watched_s": for_s,
                "period_s": source.period_s,
                "at_s": state.at_s,
                "quantities": state.quantities,
                "cost": None,
                "recording": {"path": path, "states": len(source.states)},
            }
        )
    elif not live:
        stdout_console().print(draw())


def _play(
    source: StateSource,
    draw: Callable[[], RenderableType],
    clock: Clock,
    *,
    for_s: float | None,
    live: bool,
) -> DeviceState:
    """Wait until it is over, with a live table on a terminal; the last state."""
    from rich.live import Live

    if not live:
        with stderr_console().status("watching"):
            clock.sleep_s(for_s or 0.0)
        return source.latest()
    end_s = None if for_s is None else clock.now_s() + for_s
    # Drawn from this thread, so that nothing but the monitor runs beside it.
    with Live(draw(), console=stdout_console(), auto_refresh=False) as screen:
        while (left_s := _REFRESH_S if end_s is None else end_s - clock.now_s()) > 0:
            clock.sleep_s(min(_REFRESH_S, left_s))
            screen.update(draw(), refresh=True)
    return source.latest()


def _page(
    state: DeviceState, *, heading: str, footer: str, everything: bool, one_line: bool = False
) -> RenderableType:
    """The table for a person.

    Args:
        state: What is shown.
        heading: What it is the state of, and when.
        footer: What watching cost.
        everything: Each core, and a row for each missing quantity.
        one_line: Cut what is too long, so that a live table keeps its height.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # Of the texts, not of the columns: those would no longer be the first to give way.
    long: Literal["ellipsis", "fold"] = "ellipsis" if one_line else "fold"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(max_width=None if everything else 24)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for part, rows in _by_part(state, everything=everything):
        for index, (names, found) in enumerate(rows):
            style = "" if found.quality in _STYLES else "dim"
            table.add_row(
                part if index == 0 else "",
                Text(names, style=style, overflow=long, no_wrap=one_line),
                Text(_format(names, found.value), style=style),
                _bar(names, found),
                Text(found.quality, style=_STYLES.get(found.quality, "dim")),
                Text(found.reason, style="dim", overflow=long, no_wrap=one_line),
            )
    return Group(
        Text.assemble(("Device state", "bold"), f" · {heading}", "\n"),
        table if state.quantities else Text("nothing has been read yet"),
        Text(f"\n{footer}", style="dim"),
    )


def _by_part(
    state: DeviceState, *, everything: bool
) -> Iterator[tuple[str, list[tuple[str, Quantity]]]]:
    """Rows of each part; what is missing for one reason shares a row, where not all is asked."""
    parts: dict[str, list[tuple[str, Quantity]]] = {}
    for name, found in state.quantities.items():
        device, _, rest = name.partition(".")
        part = device.rstrip("0123456789")
        if part == "cpu" and device != part and not everything:
            continue
        parts.setdefault(part, []).append((rest if device == part else name, found))
    for part in sorted(parts, key=lambda p: (_PARTS.index(p) if p in _PARTS else len(_PARTS), p)):
        # What has a device of its own in its name, such as a core, comes after the whole.
        rows = sorted(parts[part], key=lambda row: ("." in row[0], _natural(row[0])))
        if everything:
            yield part, rows
            continue
        missing: dict[Quantity, list[str]] = {}
        for name, found in rows:
            if found.value is None:
                missing.setdefault(found, []).append(name)
        yield (
            part,
            [row for row in rows if row[1].value is not None]
            + [(", ".join(names), found) for found, names in missing.items()],
        )


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _format(name: str, value: float | None) -> str:  # noqa: PLR0911 - one line per unit
    if value is None:
        return "–"
    match name.rpartition("_")[2]:
        case "hz":
            return f"{value / 1e9:.2f} GHz" if value >= 1e9 else f"{value / 1e6:.0f} MHz"
        case "ratio":
            return f"{100 * value:.0f} %"
        case "celsius":
            return f"{value:.1f} °C"
        case "w":
            return f"{value:.2f} W"
        case "j":
            return f"{value:.1f} J"
        case "s":
            return format_duration(value)
        case "bytes":
            return format_bytes(value)
        case _:
            return f"{value:g}"


def _bar(name: str, found: Quantity) -> Text:
    from rich.text import Text

    if found.value is None or not name.endswith("_ratio"):
        return Text("")
    full = round(_BAR_CELLS * min(1.0, max(0.0, found.value)))
    return Text.assemble(("━" * full, "cyan"), ("─" * (_BAR_CELLS - full), "dim"))


def _footer(cost: MonitorCost, recorder: Recorder | None) -> str:
    said = [f"watching costs {_percent(cost.cpu_ratio)} of one core"]
    said.append(
        f"a reading {format_duration(cost.read_p50_s)}, p99 {format_duration(cost.read_p99_s)}"
    )
    said.append(f"{cost.reads} readings, {_percent(cost.late_ratio)} late")
    if recorder is not None:
        said.append(
            recorder.problem
            or f"{recorder.states} states in {recorder.path},"
            f" {_percent(cost.callback_cpu_ratio)} of one core"
        )
    return " · ".join(said)


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.2g} %"

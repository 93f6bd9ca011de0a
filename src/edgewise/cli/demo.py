"""``edgewise demo``: the main job, played on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from edgewise.report.records import DemoReport
    from edgewise.runtime import Session

_SECONDS = 15.0
_QUICK_SECONDS = 3.0
_MODEL = "fashion-lite0"
_SAMPLE = "fashion-mnist-sample"
_IMAGES = 500  # as many as a scene can use, and 300 MB as inputs


def demo(
    model: Annotated[str, typer.Option(help="Shipped name or checkpoint.")] = _MODEL,
    backend: Annotated[
        str, typer.Option(help="Where it runs; auto measures and takes the fastest.")
    ] = "auto",
    seconds: Annotated[float, typer.Option(help="Length of each scene, s.")] = _SECONDS,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write a picture of the load scene here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Scenes of 3 s.")] = False,
    store: Annotated[Path | None, typer.Option(help="Profile store to use.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Watch a classifier meet its latency budget on this machine while load comes and goes."""
    say = stderr_console()
    seconds = _QUICK_SECONDS if quick else seconds
    sessions, images, labels, source = _open(model, backend, store, say)
    report = _play(sessions, images, labels, source, seconds=seconds, quick=quick, say=say)
    if html is not None:
        from edgewise.report.page import render_demo_page

        _write(html, render_demo_page(report))
        say.print(f"page: {html}")
    if figure is not None:
        from edgewise.report.figure import demo_figure

        demo_figure(report, figure, scene="load")
        say.print(f"figure: {figure}")
    if json:
        emit_json(_as_json(report))
    else:
        _show(report)


def _open(
    model: str, backend: str, store: Path | None, say: Console
) -> tuple[list[Session], Any, Any, str]:
    """Load model, sample and costs, and one session per policy."""
    from edgewise.backends import available_backends, load_program
    from edgewise.backends.registry import full_name
    from edgewise.bench.demo import POLICIES
    from edgewise.data import Preprocess, load_dataset
    from edgewise.errors import ConfigError
    from edgewise.frontends.checkpoint import load_model
    from edgewise.runtime import Session

    with say.status("loading the model"):
        staged = load_model(model)
        sample = load_dataset(_SAMPLE, split="test", limit=_IMAGES)
        if staged.preprocess is None or staged.class_names != sample.class_names:
            raise ConfigError(
                f"model {staged.name!r} does not answer with the classes of {_SAMPLE!r}",
                help="use a checkpoint made by `edgewise prepare ... --data fashion-mnist`",
            )
        images = Preprocess.from_json(staged.preprocess)(sample.images)
        names = (
            [n for n in available_backends() if not n.startswith(("numpy", "torch"))]
            if backend == "auto"
            else [full_name(backend)]
        )
        programs = {n: load_program(staged, n) for n in names}
    costs = {n: _costs(p, store, say) for n, p in programs.items()}
    fastest = min(costs, key=lambda n: costs[n].full_depth_s())
    program = programs[fastest]
    sessions = [Session(program, costs[fastest], policy=p) for p in POLICIES]
    sessions[0].warm_up()
    return sessions, images, sample.labels, sample.source


def _costs(program: Any, store: Path | None, say: Console) -> Any:
    from edgewise.api import costs_of

    with measuring(say, program.backend) as on_progress:
        return costs_of(program, store=store, on_progress=on_progress)


@contextlib.contextmanager
def measuring(say: Console, what: str) -> Iterator[Callable[[Any], None]]:
    """A bar for a measurement, which is told how far it is.

    Args:
        say: Where it is shown.
        what: Is measured.
    """
    with _progress(say) as bar:
        task = bar.add_task(f"measuring {what}", total=1.0)
        yield lambda progress: bar.update(task, completed=progress.done_ratio)


@contextlib.contextmanager
def _progress(say: Console) -> Iterator[Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=say, transient=True) as bar:
        yield bar


def _play(
    sessions: list[Session],
    images: Any,
    labels: Any,
    source: str,
    *,
    seconds: float,
    quick: bool,
    say: Console,
) -> DemoReport:
    from edgewise.bench.demo import assemble, default_scenes, play_scene
    from edgewise.device import device_fingerprint, other_load, usable_cores
    from edgewise.units import format_duration

    device = device_fingerprint()
    cores = usable_cores()
    session = sessions[0]
    full_s = session.costs.full_depth_s()
    noise = other_load(0.5)
    say.print(
        f"{session.model.name}: {session.model.num_exits} exits, whole network"
        f" {format_duration(full_s)} on {session.program.backend}, one thread"
    )
    scenes = []
    with _progress(say) as bar:
        first_s = session.costs.remaining_s(0, 0)
        for scene in default_scenes(cores.threads, least_ratio=max(0.3, 1.4 * first_s / full_s)):
            task = bar.add_task(f"scene: {scene.title.lower()}", total=1.0)
            scenes.append(
                play_scene(
                    scene,
                    sessions,
                    images,
                    labels,
                    duration_s=seconds,
                    full_depth_s=full_s,
                    clock=session.clock,
                    on_progress=lambda share, t=task: bar.update(t, completed=share),  # type: ignore[misc]
                )
            )
            bar.update(task, completed=1.0)
    notes = [
        "Every image went to every policy, one request at a time, in an order that rotates.",
        f"Budgets are multiples of the whole network's median, {format_duration(full_s)}.",
        f"Before the first scene other programs used {_share(noise)} of the machine.",
    ]
    return assemble(
        scenes,
        sessions,
        device={
            "processor": str(device.cpu_model or "unknown"),
            "usable cores": f"{cores.usable:g}",
            "system": str(device.kernel or "unknown"),
        },
        command="edgewise demo" + (" --quick" if quick else ""),
        data_source=source,
        notes=notes,
    )


def _share(load: Any) -> str:
    ratio = load.other_ratio
    return "an unknown share" if ratio is None else f"{100 * ratio:.0f} %"


def _write(path: Path, text: str) -> None:
    """Write beside the target and rename, so that an old page is never half replaced."""
    path = path.resolve()
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _as_json(report: DemoReport) -> dict[str, Any]:
    return {
        "provenance": report.provenance,
        "backend": report.backend,
        "thread_policy": report.thread_policy,
        "device": dict(report.device),
        "model": dict(report.model),
        "exits": list(report.exit_table),
        "scenes": {
            scene.name: {
                s.policy: {
                    "requests": s.requests,
                    "dsr": s.dsr,
                    "accuracy": s.accuracy,
                    "accuracy_in_time": s.accuracy_in_time,
                    "mean_exit_depth_ratio": s.mean_exit_depth_ratio,
                    "p50_s": s.p50_s,
                    "p99_s": s.p99_s,
                }
                for s in report.summaries
                if s.scene == scene.name
            }
            for scene in report.scenes
        },
        "notes": list(report.notes),
    }


def _show(report: DemoReport) -> None:
    from edgewise.report.tables import summary_table
    from edgewise.report.wording import headline

    out = stdout_console()
    out.print(summary_table(report.summaries, provenance=report.provenance))
    found = headline(report)
    out.print(found.text, soft_wrap=True)
    if found.detail:
        out.print(found.detail, soft_wrap=True)

"""What ``edgewise profile MODEL --segments`` does: what a model costs at each place to cut it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.device import device_fingerprint, read_memory, usable_cores
from edgewise.device.accelerator import Accelerator, load_accelerator
from edgewise.errors import ConfigError
from edgewise.frontends.partition import PartitionedModel
from edgewise.profiles.partition import PartitionProfile, write_partition_profile
from edgewise.units import format_bytes, format_duration

if TYPE_CHECKING:
    from edgewise.profiling.segments import SegmentProgress, SegmentTimes

PLACES = 10
ACCELERATOR = "coral-usb"

_ROUNDS, _TIME_CAP_S = 30, 90.0
_QUICK_ROUNDS, _QUICK_TIME_CAP_S = 9, 15.0
_BUSY_CORES = 0.3
_UNKNOWN_MEMORY_BYTES = 2e9
_PRICE_OF_CUTTING = (
    " runtimes change the layout of what enters and leaves each piece. What is left after a place"
    " was measured as one piece, so it has that price once"
)


def profile_segments(
    model: str,
    *,
    places: int = PLACES,
    threads_up_to: int | None = None,
    accelerator: str = ACCELERATOR,
    quick: bool = False,
    rounds: int | None = None,
    as_json: bool = False,
    export: Path | None = None,
) -> None:
    """Measure a model at each place to cut it, and print or write what was found.

    Args:
        model: An ONNX or TFLite file, or a network of the zoo.
        places: How many places inside the model at most.
        threads_up_to: Measured with 1 to so many threads; all usable cores by default.
        accelerator: A shipped description or a TOML file.
        quick: Fewer rounds.
        rounds: How many rounds; none of them is skipped for lack of time.
        as_json: Print one JSON object and nothing else.
        export: Write the partition profile to this file too.

    Raises:
        ConfigError: A number is out of range, or there is no such accelerator.
        ModelError: The file cannot be read or cut.
        BackendError: A runtime is missing, or refuses a piece.
        ProfileError: The profile cannot be written.
    """
    from edgewise.bench.tenant_models import read_model
    from edgewise.profiling.segments import measure_segments, partition_profile

    device = load_accelerator(accelerator)
    threads = _threads(threads_up_to)
    if places < 0:
        raise ConfigError(f"expected a number of places of at least 0, found {places}")
    with stderr_console().status(f"reading {model}") as status:
        cut = read_model(model, places=places, say=status.update)
    with _progress(cut.name, quiet=as_json) as on_progress:
        times = measure_segments(
            cut,
            threads=threads,
            rounds=rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
            time_cap_s=_time_cap_s(quick=quick, rounds=rounds),
            memory_bytes=_memory_bytes(),
            on_progress=on_progress,
        )
    machine = device_fingerprint()
    profile = partition_profile(
        cut, times, accelerator=device, cpu=f"{machine.id} ({machine.cpu_model or 'unknown CPU'})"
    )
    if export is not None:
        write_partition_profile(profile, export)
    found = summary(profile, times, cut, device)
    if as_json:
        emit_json(found)
        return
    show(found)
    if export is not None:
        stdout_console().print(f"written to {export}", soft_wrap=True)


def summary(
    profile: PartitionProfile, times: SegmentTimes, model: PartitionedModel, device: Accelerator
) -> dict[str, Any]:
    """Summarise what was found: what ``--json`` prints.

    Args:
        profile: Costs at each place.
        times: The samples behind it.
        model: That was measured.
        device: Accelerator that the prefixes are for.
    """
    calls = [
        float(compute) + device.fixed_s + device.stream_s(float(size)) if place else 0.0
        for place, (compute, size) in enumerate(
            zip(profile.accelerator_s, profile.prefix_bytes, strict=True)
        )
    ]
    by_threads = [str(count) for count in profile.threads]
    return {
        "model": profile.model_id,
        "model_version": profile.model_version,
        "format": model.format,
        "backend": times.backend,
        "cpu": profile.cpu,
        "cpu_provenance": profile.cpu_provenance,
        "accelerator": device.name,
        "accelerator_provenance": profile.accelerator_provenance,
        "rounds": times.rounds,
        "kept_rounds": times.kept_rounds,
        "elapsed_s": times.elapsed_s,
        "other_cores": times.other_cores,
        "places": [
            {
                "place": k,
                "tensor": name,
                "depth_ratio": profile.depth_ratio[k],
                "prefix_bytes": profile.prefix_bytes[k],
                "boundary_bytes": profile.boundary_bytes[k],
                "accelerator_compute_s": profile.accelerator_s[k],
                "accelerator_call_s": calls[k],
                "cpu_rest_s": dict(zip(by_threads, profile.cpu_s[k], strict=True)),
            }
            for k, name in enumerate(profile.cuts)
        ],
        "segments": [
            {"from": k, "to": k + 1, "cpu_s": dict(zip(by_threads, each, strict=True))}
            for k, each in enumerate(times.segment_median_s)
        ],
        "sums": [
            {"threads": count, "segments_s": total, "whole_s": whole, "ratio": ratio}
            for count, total, whole, ratio in zip(
                profile.threads,
                times.segment_median_s.sum(axis=0),
                profile.cpu_s[0],
                times.sum_to_whole_ratio,
                strict=True,
            )
        ],
        "notes": _notes(profile, times, model),
    }


def show(found: Mapping[str, Any]) -> None:
    """Print a summary for people."""
    from edgewise.cli.place import plain_table, short_tensor

    console = stdout_console()
    console.print(
        f"{found['model']} at {len(found['places'])} places, {found['backend']},"
        f" {found['rounds']} rounds in {format_duration(found['elapsed_s'])}",
        soft_wrap=True,
    )
    counts = [each["threads"] for each in found["sums"]]
    table = plain_table("")
    table.add_column("place", justify="right", no_wrap=True)
    table.add_column("tensor", no_wrap=True)
    for name in (
        "depth",
        "weights\nbefore",
        "crosses",
        f"before, on\n{short_tensor(found['accelerator'], 10)},\nsimulated",
        *(f"after, on\n{_threads_text(count)},\nmeasured" for count in counts),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    last = len(found["places"]) - 1
    for each in found["places"]:
        table.add_row(
            str(each["place"]),
            short_tensor(each["tensor"]),
            f"{each['depth_ratio']:.0%}",
            format_bytes(each["prefix_bytes"]),
            format_bytes(each["boundary_bytes"]),
            format_duration(each["accelerator_call_s"]) if each["place"] else "–",
            *(
                format_duration(each["cpu_rest_s"][str(count)]) if each["place"] < last else "–"
                for count in counts
            ),
        )
    console.print(table)
    console.print(
        f"{found['accelerator']}: fixed cost, computing, and parameters that do not fit; loading"
        " after another model is not in it",
        soft_wrap=True,
    )
    for each in found["sums"]:
        console.print(
            f"segments together on {_threads_text(each['threads'])}:"
            f" {format_duration(each['segments_s'])}, the whole model"
            f" {format_duration(each['whole_s'])} ({each['ratio']:.2f} times)",
            soft_wrap=True,
        )
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _notes(profile: PartitionProfile, times: SegmentTimes, model: PartitionedModel) -> list[str]:
    from edgewise.profiling.segments import SUM_TOLERANCE_RATIO, is_quantised

    notes = []
    if profile.last == 1:
        notes.append(
            "no place inside the model: at every one more than one tensor crosses, or none was"
            " asked for; it runs whole, here or there"
        )
    worst = max(times.sum_to_whole_ratio, key=lambda ratio: abs(ratio - 1))
    busy = times.other_cores is not None and times.other_cores > _BUSY_CORES
    if busy:
        notes.append(
            f"other processes used {times.other_cores:.1f} cores meanwhile, so these times are"
            " uncertain: measure again on a quiet machine"
        )
    if abs(worst - 1) > SUM_TOLERANCE_RATIO:
        notes.append(
            f"warning: segments together take {worst:.2f} times the whole model;"
            + (" the machine was busy" if busy else _PRICE_OF_CUTTING)
        )
    if not is_quantised(model):
        notes.append(
            "the model is in floating point; an Edge TPU takes int8, whose bytes are a quarter"
        )
    return notes


def _threads(up_to: int | None) -> tuple[int, ...]:
    usable = usable_cores().threads
    if up_to is None:
        return tuple(range(1, usable + 1))
    if not 1 <= up_to <= usable:
        raise ConfigError(
            f"expected --threads-up-to from 1 to {usable}, the cores usable here, found {up_to}"
        )
    return tuple(range(1, up_to + 1))


def _time_cap_s(*, quick: bool, rounds: int | None) -> float:
    if quick:
        return _QUICK_TIME_CAP_S
    return _TIME_CAP_S if rounds is None else float("inf")


def _memory_bytes() -> float:
    memory = read_memory()
    known = [each for each in (memory.available_bytes, memory.limit_bytes) if each]
    return min(known) / 2 if known else _UNKNOWN_MEMORY_BYTES


def _threads_text(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")


@contextlib.contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Callable[[SegmentProgress], None] | None]:
    """A bar on standard error with the time left; nothing where a program reads the output."""
    if quiet and not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=stderr_console()) as bar:
        task = bar.add_task(name, total=1.0, said="loading pieces")

        def on_progress(progress: SegmentProgress) -> None:
            said = "warming up"
            if progress.remaining_s is not None:
                said = (
                    f"round {progress.rounds} of {progress.max_rounds},"
                    f" at most {progress.remaining_s:.0f} s left"
                )
            bar.update(task, completed=progress.rounds / progress.max_rounds, said=said)

        yield on_progress
        bar.update(task, completed=1.0, said="done")

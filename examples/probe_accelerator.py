# ruff: noqa: INP001 - a script, not a package
"""Find out what an accelerator costs, and write its description.

    python examples/probe_accelerator.py door.tflite yard.tflite gate.tflite --out my-usb.toml

Three models or more, of which two fit into the memory together but not all. Each was compiled:
`edgetpu_compiler -s door.tflite > door.log` leaves `door_edgetpu.tflite` beside it.
With ``--simulated`` a device is played on a virtual clock from the description it starts from, to
see what the probe does; ONNX files and networks of the zoo will do then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgewise.backends.accelerator import AcceleratorDevice, Prefix
from edgewise.backends.edgetpu import EdgeTpuDevice
from edgewise.backends.piece import ArraySpec
from edgewise.backends.simulated_accelerator import SimulatedAccelerator
from edgewise.bench.tenant_models import model_file
from edgewise.clock import MonotonicClock, VirtualClock
from edgewise.device.accelerator import load_accelerator
from edgewise.device.compiler_log import read_compiler_log
from edgewise.errors import EdgeError
from edgewise.frontends.partition import read_partitioned
from edgewise.profiling.accelerator_model import edge_tpu, prefix_work
from edgewise.profiling.accelerator_probe import accelerator_text, probe_accelerator
from edgewise.profiling.segments import example_input, graph_of


def prefix_of(path: Path, *, compiled: bool) -> Prefix:
    """A whole model as a device takes it.

    Args:
        path: The model before it was compiled: it knows its own shapes and parameters.
        compiled: Whether to take the compiled file beside it, and the compiler's log.
    """
    model = read_partitioned(path, places=0)
    first, last = model.places[0], model.places[-1]
    log = path.with_suffix(".log")
    told = read_compiler_log(log)[0].sram_bytes if compiled and log.is_file() else None
    file = path.with_name(f"{path.stem}_edgetpu.tflite") if compiled else path
    return Prefix(
        key=path.stem,
        model=file.read_bytes(),
        format=model.format,
        weight_bytes=last.prefix_bytes,
        sram_bytes=told,
        compute_s=edge_tpu().compute_s(prefix_work(graph_of(model), last.tensor)),
        input=ArraySpec(shape=first.shape, dtype=first.dtype),
        output=ArraySpec(shape=last.shape, dtype=last.dtype),
    )


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, say what was found, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="three or more")
    parser.add_argument("--device", default="coral-usb", help="description to start from")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--out", type=Path, help="TOML file to write")
    asked = parser.parse_args(arguments)

    description = load_accelerator(asked.device)
    clock: MonotonicClock | VirtualClock = VirtualClock() if asked.simulated else MonotonicClock()
    device: AcceleratorDevice = (
        SimulatedAccelerator(description, clock=clock)
        if asked.simulated
        else EdgeTpuDevice(description)
    )
    files = [model_file(name, say=say) for name in asked.models]
    prefixes = [prefix_of(file, compiled=not asked.simulated) for file in files]
    rng = np.random.default_rng(0)
    inputs = {p.key: example_input(p.input, rng) for p in prefixes}
    try:
        found = probe_accelerator(device, prefixes, inputs, clock=clock)
    finally:
        device.close()
    say(f"{found.calls} calls in {found.elapsed_s:.1f} s of the device's time")
    for note in found.notes:
        say(f"note: {note}")
    text = accelerator_text(found.accelerator)
    say(text.rstrip())
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except EdgeError as error:
        raise SystemExit(f"error: {error}") from None

"""Make the partition profiles that ship: nine networks built, quantised, cut and measured here.

    pip install 'edgewise[torch,onnx]'
    python benchmarks/placement_profiles.py --out DIR [--net NAME] [--threads-up-to 2]

Weights are random: times are real, answers are not. The accelerator's times are computed by
`edgewise.profiling.accelerator_model`. Each profile is written as soon as it is measured, so a
stopped run goes on with ``--missing``. About a quarter of an hour for all nine; where the machine
is not quiet, run it under `chrt -f 5` (as root), which lets nothing else in between.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from edgewise.device import device_fingerprint
from edgewise.device.accelerator import load_accelerator
from edgewise.frontends.partition import PartitionedModel, read_partitioned
from edgewise.frontends.zoo_int8 import int8_file, models_folder
from edgewise.profiles.partition import PartitionProfile, write_partition_profile
from edgewise.profiling.segments import SegmentProgress, measure_segments, partition_profile

INNER_PLACES = 9  # P is 10
REAL_TIME = "measured under real-time scheduling, before all other processes of the machine"
STANDIN = (
    "GPUNet's definition is not to be had; this is ResNet-18, of about the same size (11.7 M"
    " parameters, GPUNet-0 has 11.9 M)"
)

# By name of the profile: the network of the zoo.
NETS = {
    "squeezenet": "squeezenet",
    "mobilenet_v2": "mobilenet_v2",
    "mnasnet": "mnasnet",
    "efficientnet_b0": "efficientnet_b0",
    "gpunet_standin": "resnet18",
    "densenet201": "densenet201",
    "xception": "xception",
    "resnet50_v2": "resnet50_v2",
    "inception_v4": "inception_v4",
}


def measured(
    name: str, model: PartitionedModel, made: str, arguments: argparse.Namespace
) -> PartitionProfile:
    """Measure one network and say how."""
    times = measure_segments(
        model,
        threads=tuple(range(1, arguments.threads_up_to + 1)),
        rounds=arguments.rounds,
        time_cap_s=arguments.time_cap_s,
        kept_ratio=arguments.kept_ratio,
        on_progress=lambda progress: show(name, progress),
    )
    device = device_fingerprint()
    profile = partition_profile(
        model,
        times,
        accelerator=load_accelerator(arguments.accelerator),
        cpu=f"{device.id} ({device.cpu_model}, {device.cores} cores, {device.arch})",
    )
    notes = {"network": made, **profile.notes}
    if name == "gpunet_standin":
        notes["remark"] = STANDIN
    if os.sched_getscheduler(0) in {os.SCHED_FIFO, os.SCHED_RR}:
        notes["priority"] = REAL_TIME
    return dataclasses.replace(profile, model_id=name, notes=notes)


def show(name: str, progress: SegmentProgress) -> None:
    """Say how far one network is, on one line."""
    left = "warming up" if progress.remaining_s is None else f"{progress.remaining_s:.0f} s left"
    line = f"\r{name}: round {progress.rounds} of {progress.max_rounds}, {left}    "
    sys.stderr.write(line)
    sys.stderr.flush()


def say(text: str) -> None:
    """Write a line of progress."""
    sys.stderr.write(f"\r{text}\n")
    sys.stderr.flush()


def main() -> None:
    """Make the profiles that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the profiles")
    parser.add_argument("--net", choices=sorted(NETS), action="append", help="may be given again")
    parser.add_argument("--missing", action="store_true", help="skip those that are there already")
    parser.add_argument("--models", type=Path, help="folder to keep the int8 ONNX files in")
    parser.add_argument("--threads-up-to", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--time-cap-s", type=float, default=180.0, help="for each network")
    parser.add_argument("--kept-ratio", type=float, default=0.25, help="share of quickest rounds")
    parser.add_argument("--accelerator", default="coral-usb")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.net or NETS:
        target = arguments.out / f"{name}.json"
        if arguments.missing and target.exists():
            continue
        start_s = time.perf_counter()
        file, made = int8_file(NETS[name], arguments.models or models_folder(), say=say)
        profile = measured(name, read_partitioned(file, places=INNER_PLACES), made, arguments)
        write_partition_profile(profile, target)
        whole = ", ".join(f"{1e3 * each:.1f}" for each in profile.cpu_s[0])
        say(
            f"{name}: P {profile.last}, {profile.weight_bytes / 1e6:.1f} MB, all on the CPU"
            f" {whole} ms, {profile.notes['sum_to_whole']};"
            f" {time.perf_counter() - start_s:.0f} s"
        )


if __name__ == "__main__":
    main()

"""Trainings that several claims share: two small nets, four losses, some seeds, each made once.

Every run keeps its state as it goes and its test logits at the end, so a killed command goes on
where it was, and a claim that needs the same runs needs no training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.clock import MonotonicClock
from edgewise.data import load_dataset
from edgewise.data.dataset import Dataset
from edgewise.device.user_cache import user_cache
from edgewise.errors import ConfigError, DataError, nearest_names
from edgewise.reproduce.registry import Setup
from edgewise.units import format_duration

NETS = ("small_resnet", "small_mobilenet")
LOSSES = {
    "equal": "equal",
    "mean": "equal+mean",
    "wel": "weighted",
    "mono": "equal+mono",
    "both": "weighted+mono",
    "both-mean": "weighted+mono+mean",
}
"""By method: the loss it trains with."""

SAID = {
    "equal": "Equal",
    "mean": "Equal as a mean",
    "wel": "WEL",
    "mono": "Mono",
    "both": "WEL+Mono",
    "both-mean": "WEL+Mono as a mean",
    "product": "product anytime on Equal",
    "caching": "caching anytime on Equal",
}
_LOGITS = "logits.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What every run has in common.

    Attributes:
        data: The data set's name or path.
        images: Training images drawn from it, the held-out ones included.
        epochs: Passes.
        test_images: Test images, at most.
        width: Hidden width of the pooling heads.
        seeds: How many seeds, from 0.
    """

    data: str = "fashion-mnist"
    images: int = 20_000
    epochs: int = 8
    test_images: int = 10_000
    width: int = 64
    seeds: int = 3

    @classmethod
    def of(cls, setup: Setup) -> Protocol:
        """The protocol of a setup; the quick one shows that it runs and nothing else."""
        own = cls(images=600, epochs=1, test_images=500, seeds=1) if setup.quick else cls()
        return replace(
            own,
            data=setup.data or own.data,
            test_images=setup.limit or own.test_images,
            seeds=setup.seeds or own.seeds,
        )

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.data}, {self.images} training images, some of them held out,"
            f" {self.epochs} epochs of SGD at 0.1 falling at 50 and 75 %, batch 64, crops and"
            f" flips, pooling heads {self.width} wide; {self.test_images} test images;"
            f" {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRun:
    """What one trained net answers.

    Attributes:
        logits: [E, N, C] on the test images.
        labels: [N].
        elapsed_s: Seconds of training, over all its sessions.
    """

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    elapsed_s: float


def trained_runs(
    setup: Setup, *, methods: Sequence[str] = tuple(LOSSES)
) -> dict[str, list[list[TrainedRun]]]:
    """Train what is missing and read the rest.

    Args:
        setup: ``models`` names the nets (`NETS` by default), ``out`` where runs are kept.
        methods: Of `LOSSES`.

    Returns:
        By net: [method][seed].

    Raises:
        ConfigError: A net is not one of `NETS`, or another process is training the same run.
        DataError: The data has no labelled test images.
    """
    protocol = Protocol.of(setup)
    nets = setup.models or NETS
    for net in nets:
        if net not in NETS:
            raise ConfigError(
                f"this claim trains {' and '.join(NETS)}, found {net!r}",
                help=nearest_names(net, NETS),
            )
    folder = (setup.out or _cache()) / "joint-runs"
    data = load_dataset(protocol.data, split="train", limit=protocol.images)
    test = load_dataset(protocol.data, split="test", limit=protocol.test_images)
    found: dict[str, list[list[TrainedRun]]] = {net: [[] for _ in methods] for net in nets}
    plan = [(s, n, m) for s in range(protocol.seeds) for n in nets for m in methods]
    for number, (seed, net, method) in enumerate(plan):
        run = _one_run(
            net,
            method,
            seed,
            protocol=protocol,
            data=data,
            test=test,
            folder=folder,
            setup=setup,
            count=f"{number + 1} of {len(plan)}",
        )
        found[net][methods.index(method)].append(run)
    return found


def paired(differences: npt.NDArray[np.float64]) -> tuple[float, float | None, float | None]:
    """Mean and 95 % interval of the mean by Student's t; no interval from one value.

    Args:
        differences: [seeds].
    """
    from scipy.stats import t

    mean = float(differences.mean())
    count = len(differences)
    if count < 2:
        return mean, None, None
    half = float(t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return mean, mean - half, mean + half


def _one_run(  # noqa: PLR0913 - one run has that many coordinates
    net: str,
    method: str,
    seed: int,
    *,
    protocol: Protocol,
    data: Dataset,
    test: Dataset,
    folder: Path,
    setup: Setup,
    count: str,
) -> TrainedRun:
    from edgewise.frontends.checkpoint import bytes_to_tensors, tensors_to_bytes
    from edgewise.frontends.zoo import build_backbone
    from edgewise.training.joint import fit_jointly
    from edgewise.training.joint_run import STATE, JointSettings
    from edgewise.training.losses import ExitLoss
    from edgewise.training.progress import Progress
    from edgewise.training.work import write_file

    settings = JointSettings(
        epochs=protocol.epochs,
        loss=ExitLoss.parse(LOSSES[method]),
        width=protocol.width,
        max_validation=1000,
        seed=seed,
        threads=setup.threads,
    )
    facts = json.dumps([asdict(protocol) | {"seeds": None}, asdict(settings)], sort_keys=True)
    key = hashlib.sha256(facts.encode()).hexdigest()[:8]
    work = folder / f"{net}-{method}-{seed}-{key}"
    name = f"{net}, {SAID[method]}, seed {seed} ({count})"
    if not (work / _LOGITS).is_file():
        if test.labels is None:
            raise DataError(f"{test.name} has no labels to test with")

        clock = MonotonicClock()
        begun: list[tuple[float, int]] = []

        def told(progress: Progress) -> None:
            # What an earlier session did says nothing about how fast this one is.
            now_s, done, total = clock.now_s(), progress.done, progress.total
            if not begun:
                begun.append((now_s, done))
            begin_s, before = begun[0]
            left = ""
            if done > before:
                left_s = (now_s - begin_s) / (done - before) * (total - done)
                left = f", {format_duration(left_s)} left"
            setup.say(f"{name}: {done / total:.0%}, {progress.detail}{left}")

        setup.say(f"{name}: starting")
        fit = fit_jointly(
            build_backbone(net, size_pixels=28, seed=seed),
            data,
            work=work,
            settings=settings,
            on_progress=told,
        )
        arrays: dict[str, npt.NDArray[Any]] = {
            # As a checkpoint keeps them.
            "logits": fit.run.logits(test.images).astype(np.float16),
            "labels": test.labels,
            "elapsed_s": np.array([fit.curve["elapsed_s"]]),
        }
        write_file(work / _LOGITS, tensors_to_bytes(arrays))
        (work / STATE).unlink(missing_ok=True)  # it is the large part, and no longer needed
    kept = bytes_to_tensors((work / _LOGITS).read_bytes(), where=work / _LOGITS)
    return TrainedRun(
        logits=kept["logits"].astype(np.float32),
        labels=kept["labels"],
        elapsed_s=float(kept["elapsed_s"][0]),
    )


def _cache() -> Path:
    return user_cache() / "reproduce"


def exit_accuracies(
    probabilities: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """[E]: share of samples answered rightly."""
    return np.asarray((probabilities.argmax(axis=2) == labels).mean(axis=1))


def seconds_of(runs: Sequence[Sequence[TrainedRun]]) -> Iterator[float]:
    """Training times of runs."""
    return (run.elapsed_s for of_method in runs for run in of_method)

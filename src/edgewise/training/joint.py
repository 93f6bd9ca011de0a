"""Backbone and heads trained together: a torch backbone and labelled images in, a model out."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.clock import Clock, MonotonicClock
from edgewise.data.dataset import Dataset
from edgewise.data.preprocess import Preprocess
from edgewise.errors import ConfigError, DataError
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone
from edgewise.model.staged import StagedModel
from edgewise.model.validation import Validation
from edgewise.training.joint_run import (
    STATE,
    JointRun,
    JointSettings,
    LabelledImages,
    write_curve,
)
from edgewise.training.prepare import (
    PreparedModel,
    PrepareSettings,
    _calibrated,
    _calibration_logits,
    _check_data,
    _kept_backbone,
    split_images,
    stage_backbone,
)
from edgewise.training.progress import OnProgress, Progress, ignore_progress
from edgewise.training.work import WorkDirectory, WriteFile, write_file

_HASH_WHOLE_BYTES = 2 * 1024**3
_HASHED_IMAGES = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointFit:
    """A trained network before it is stored and calibrated.

    Attributes:
        model: Staged torch model with a head at every exit, temperatures 1.
        run: The training, which answers in batches.
        curve: Losses and accuracies over the epochs, ready for JSON.
        held_out: Positions in the data that were neither fitted on nor stopped on.
        epochs: Passes made.
    """

    model: StagedModel
    run: JointRun
    curve: Mapping[str, Any]
    held_out: npt.NDArray[np.int64]
    epochs: int


def train_jointly(  # noqa: PLR0913 - the parts of a job; most have a default
    backbone: Backbone,
    data: Dataset,
    *,
    work: Path,
    exits: int | Sequence[float] | Sequence[str] = 8,
    until: str | None = None,
    settings: JointSettings | None = None,
    finish: bool = False,
    name: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
    write: WriteFile = write_file,
) -> PreparedModel:
    """Train a backbone together with a head at every exit, store, validate and calibrate it.

    Stopped at any moment, even by kill -9, the same call goes on from the last saved state and
    gives the same bits as a run that was never stopped (on the CPU with one thread).

    Args:
        backbone: Where training starts; it is not changed.
        data: The training split, labelled. A part of it is held out for stopping and calibration.
        work: Directory for the state; some times the size of the weights.
        exits: A count, fractions of the backbone's FLOPs, or names of modules or tensors.
        until: Module or tensor that ends the backbone; its last feature map by default.
        settings: How.
        finish: Train no further: make a model of the state that is kept.
        name: Of the result; the backbone's and the data's by default.
        provenance: More facts for people, kept in the model.
        on_progress: Told how far it is.
        clock: Says when to save and how long it took; the machine's by default.
        write: Writes a file of the work directory whole.

    Raises:
        DataError: No labels, a class without images, or too few images.
        ConfigError: The settings do not fit, or ``work`` belongs to another job.
        CheckpointError: The kept state is damaged or of another architecture.
        ModelError: The backbone cannot be trained, or the loss became NaN or infinite.
        EdgeError: The disk is full; what was saved before is kept.
        BackendUnavailable: torch, onnx or safetensors is not installed.
    """
    settings = settings or JointSettings()
    directory = WorkDirectory(work, write=write)
    with _fitted(
        backbone,
        data,
        directory=directory,
        exits=exits,
        until=until,
        settings=settings,
        finish=finish,
        on_progress=on_progress,
        clock=clock or MonotonicClock(),
    ) as fit:
        write_curve(fit.curve, directory)
        # Another state of the same training is another model, so each has its own place.
        finished = WorkDirectory(work / f"finish-{fit.run.epoch}-{fit.run.step}", write=write)
        like = PrepareSettings(
            head=settings.head,
            width=settings.width,
            seed=settings.seed,
            threads=settings.threads,
            weights_dtype=settings.weights_dtype,
            max_validation=settings.max_validation,
        )
        on_progress(Progress(phase="backbone", done=0, total=1, detail=backbone.name))
        model = _kept_backbone(
            fit.model, finished.path / "backbone", like, len(data.class_names)
        ).with_heads({e.index: e.head for e in fit.model.exits if e.head is not None})
        on_progress(Progress(phase="backbone", done=1, total=1, detail=backbone.name))
        truth = _labels(data)[fit.held_out]
        logits = _calibration_logits(
            model,
            np.asarray(data.images[fit.held_out]),
            backbone.preprocess,
            work=finished,
            settings=like,
            on_progress=on_progress,
        )
    heads, reports = _calibrated(model, logits, truth, [{}] * model.num_exits)
    facts = {
        **backbone.provenance,
        "weights": f"trained together with the heads on {data.name}",
        "training": {**asdict(settings), "epochs_made": fit.epochs},
        "training_curve": fit.curve,
        **(provenance or {}),
    }
    model = replace(
        model,
        name=name or f"{backbone.name}-{data.name}",
        class_names=data.class_names,
        preprocess=backbone.preprocess.to_json(),
        validation=Validation(
            logits=logits,
            labels=truth,
            source=f"{len(truth)} images held out from the training split of {data.name}",
        ),
        provenance=facts,
    ).with_heads(heads, accuracy={r.index: r.accuracy for r in reports})
    return PreparedModel(model=model, exits=reports)


def fit_jointly(  # noqa: PLR0913
    backbone: Backbone,
    data: Dataset,
    *,
    work: Path,
    exits: int | Sequence[float] | Sequence[str] = 8,
    until: str | None = None,
    settings: JointSettings | None = None,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
    write: WriteFile = write_file,
) -> JointFit:
    """Train only; the arguments and errors are those of `train_jointly`."""
    with _fitted(
        backbone,
        data,
        directory=WorkDirectory(work, write=write),
        exits=exits,
        until=until,
        settings=settings or JointSettings(),
        finish=False,
        on_progress=on_progress,
        clock=clock or MonotonicClock(),
    ) as fit:
        return fit


@contextlib.contextmanager
def _fitted(  # noqa: PLR0913
    backbone: Backbone,
    data: Dataset,
    *,
    directory: WorkDirectory,
    exits: int | Sequence[float] | Sequence[str],
    until: str | None,
    settings: JointSettings,
    finish: bool,
    on_progress: OnProgress,
    clock: Clock,
) -> Iterator[JointFit]:
    """Train with the work directory held, which stays held inside."""
    staged = stage_backbone(
        replace(backbone, module=copy.deepcopy(backbone.module)).stage(), exits=exits, until=until
    )
    labels = _check_data(data, backbone.preprocess, staged)
    _check_classes(data, labels)
    staged = replace(staged, num_classes=len(data.class_names))
    order, stop_from, calibrate_from = split_images(
        labels, seed=settings.seed, max_validation=settings.max_validation
    )
    fit = LabelledImages(images=data.images, labels=labels, rows=order[:stop_from])
    stop = LabelledImages(images=data.images, labels=labels, rows=order[stop_from:calibrate_from])
    if len(fit) < 2:
        raise DataError(f"expected at least two images to fit on, found {len(fit)}")
    job = _job(staged, data, backbone.preprocess, settings)
    with _threads(settings.threads), directory.claim(job):
        run = JointRun(staged, settings, backbone.preprocess, clock=clock)
        if directory.has(STATE):
            run.restore(directory.load(STATE), where=str(directory.path / STATE))
        elif finish:
            raise ConfigError(
                f"{directory.path} holds no state of a training that could be finished",
                help="leave --finish out",
            )
        if not finish:
            run.train(fit, stop, work=directory, on_progress=on_progress)
        run.take_best()
        run.to_cpu()
        yield JointFit(
            model=staged.with_heads(run.heads()),
            run=run,
            curve=run.curve(len(fit)),
            held_out=order[calibrate_from:],
            epochs=run.epoch,
        )


def _labels(data: Dataset) -> npt.NDArray[np.int64]:
    assert data.labels is not None  # noqa: S101 - checked before training
    return data.labels


def _check_classes(data: Dataset, labels: npt.NDArray[np.int64]) -> None:
    counts = np.bincount(labels, minlength=len(data.class_names))
    empty = [n for n, c in zip(data.class_names, counts, strict=True) if c == 0]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(data.class_names)} classes of data set {data.name!r} have no"
            f" image to train on: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}",
            help="remove the class, bring images of it, or raise --limit",
        )


def _job(
    staged: StagedModel, data: Dataset, preprocess: Preprocess, settings: JointSettings
) -> dict[str, Any]:
    """All that decides the result; how often the state is saved does not."""
    content = hashlib.sha256(_labels(data).tobytes())
    step = 1 if data.images.nbytes <= _HASH_WHOLE_BYTES else len(data) // _HASHED_IMAGES
    for first in range(0, len(data), 1024 * step):
        content.update(
            np.ascontiguousarray(data.images[first : first + 1024 * step : step]).tobytes()
        )
    return {
        "joint": True,
        "backbone": staged.name,
        "exits": [e.name for e in staged.exits],
        "weights": staged.source.weights_digest(),
        "data": data.name,
        "images": len(data),
        "data_sha256": content.hexdigest(),
        "preprocess": preprocess.to_json(),
        "settings": {k: v for k, v in asdict(settings).items() if k != "save_every_s"},
    }


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    torch = import_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

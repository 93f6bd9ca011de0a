"""The whole job: backbone and labelled images in, a model that answers at every exit out."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgewise.backends import Program, load_program
from edgewise.backends.base import probe_input
from edgewise.data.dataset import Dataset
from edgewise.data.preprocess import Preprocess
from edgewise.data.split import stratified_sample
from edgewise.errors import ConfigError, DataError, ModelError, nearest_names
from edgewise.frontends.checkpoint import (
    Recorded,
    WeightsDtype,
    is_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from edgewise.model.cuts import Cut, choose_cuts, legal_cuts
from edgewise.model.heads import ExitHead, HeadSpec, default_head_spec
from edgewise.model.staged import StagedModel
from edgewise.model.validation import Validation
from edgewise.training.evaluate import evaluate_exits
from edgewise.training.features import CachePlan, extract_features, load_features
from edgewise.training.fit import FitSettings, FittedHead, Split, fit_head
from edgewise.training.progress import OnProgress, Progress, ignore_progress
from edgewise.training.temperature import expected_calibration_error, fit_temperature
from edgewise.training.work import WorkDirectory, WriteFile, write_file

_HEAD_CHOICES = ("auto", "pool", "conv")
_MIN_IMAGES = 10
_RECORDED_VALUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """How a model is prepared.

    Attributes:
        head: ``"pool"``, ``"conv"``, or ``"auto"``: both are fitted where the convolutional one is
            affordable, and it is kept where it is worth its cost.
        width: Hidden width of the heads.
        seed: Of everything that is drawn.
        threads: Threads of every computation; with one, the same run gives the same bits.
        backend: Computes features; ``"auto"`` takes the best that is installed.
        weights_dtype: How the backbone is stored, and hence what the heads are fitted on.
        max_conv_share: Largest work of a convolutional head that ``"auto"`` considers, as a share
            of the average stage's.
        min_gain: Least gain in accuracy on the stopping split for which ``"auto"`` takes it.
        max_validation: Most images held out for calibration; as many again stop the fits.
        fit: How one head is fitted.
    """

    head: str = "auto"
    width: int = 128
    seed: int = 0
    threads: int = 1
    backend: str = "auto"
    weights_dtype: WeightsDtype = "float16"
    max_conv_share: float = 0.25
    min_gain: float = 0.01
    max_validation: int = 4000
    fit: FitSettings = field(default_factory=FitSettings)

    def __post_init__(self) -> None:
        if self.head not in _HEAD_CHOICES:
            raise ConfigError(
                f"unknown kind of head {self.head!r}", help=nearest_names(self.head, _HEAD_CHOICES)
            )
        if self.threads < 1:
            raise ConfigError(f"expected at least one thread, found {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """One line of the final table.

    Attributes:
        index: Which exit.
        name: Of the place.
        depth_ratio: Work before it as a share of the backbone's.
        boundary_shape: What crosses there, for one sample.
        head: Kind of head.
        head_flops: Its work for one sample.
        accuracy: On the calibration split, 0 to 1.
        temperature: Fitted on that split.
        ece_before: Expected calibration error at temperature 1.
        ece: The same at the fitted temperature.
        considered: Accuracy on the stopping split of every kind of head that was fitted.
    """

    index: int
    name: str
    depth_ratio: float
    boundary_shape: tuple[int, ...]
    head: str
    head_flops: float
    accuracy: float
    temperature: float
    ece_before: float
    ece: float
    considered: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A prepared model and the account of it.

    Attributes:
        model: With a calibrated head at every exit.
        exits: One line per exit.
    """

    model: StagedModel
    exits: tuple[ExitReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingData:
    """What a trainer may see.

    Attributes:
        images: uint8 [N, H, W, C].
        labels: [N].
        preprocess: How images become inputs.
        stop_from: Images from here on are not fitted on: they decide when to stop.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    preprocess: Preprocess
    stop_from: int


class Trainer(Protocol):
    """Gives a backbone its heads. Fitting backbone and heads together would be another trainer."""

    def train(
        self,
        model: StagedModel,
        data: TrainingData,
        *,
        work: WorkDirectory,
        settings: PrepareSettings,
        on_progress: OnProgress,
    ) -> tuple[StagedModel, tuple[Mapping[str, float], ...]]:
        """Return the model with a head at every exit, and what was considered at each.

        The returned model may have another backbone than the one given. Work that is finished is
        kept in ``work``, so that the same call after kill -9 goes on and gives the same result.
        """
        ...


class FrozenBackboneTrainer:
    """Caches the features of a backbone that stays as it is, and fits each head alone."""

    def train(
        self,
        model: StagedModel,
        data: TrainingData,
        *,
        work: WorkDirectory,
        settings: PrepareSettings,
        on_progress: OnProgress,
    ) -> tuple[StagedModel, tuple[Mapping[str, float], ...]]:
        """Fit; see `Trainer`."""
        specs = [_head_specs(model, k, settings) for k in range(model.num_exits)]
        plan = CachePlan(
            shapes=tuple(s.stop.shape for s in model.stages),
            with_maps=frozenset(k for k, s in enumerate(specs) if "conv" in s),
            num_images=len(data.images),
            seed=settings.seed,
        )
        if not all(work.has(plan.shard_name(s)) for s in range(plan.num_shards)):
            program = _program(model.with_random_heads(), settings, check=False)
            extract_features(
                program, data.images, data.preprocess, plan=plan, work=work, on_progress=on_progress
            )
        jobs = [(k, spec) for k, by_kind in enumerate(specs) for spec in by_kind.values()]
        epochs = settings.fit.epochs
        fitted: list[dict[str, FittedHead]] = [{} for _ in specs]
        for number, (k, spec) in enumerate(jobs):

            def on_epoch(epoch: int, said: str, number: int = number, k: int = k) -> None:
                on_progress(
                    Progress(
                        phase="fit",
                        done=number * epochs + epoch,
                        total=len(jobs) * epochs,
                        detail=f"exit {k}: {said}",
                    )
                )

            features = load_features(work, plan, k, maps=spec.kind == "conv")
            cut = data.stop_from
            fitted[k][spec.kind] = fit_head(
                spec,
                Split(features=features[:cut], labels=data.labels[:cut]),
                Split(features=features[cut:], labels=data.labels[cut:]),
                settings=replace(settings.fit, seed=settings.seed + 1000 * k),
                work=work,
                name=f"{_settings_key(settings)}/exit-{k}-{spec.kind}",
                on_epoch=on_epoch,
            )
            on_epoch(epochs, "done")
        heads = {k: choose_head(by_kind, settings).head for k, by_kind in enumerate(fitted)}
        considered = tuple({kind: f.accuracy for kind, f in by.items()} for by in fitted)
        return model.with_heads(heads), considered


def prepare(  # noqa: PLR0913 - the parts of a job; most have a default
    backbone: StagedModel,
    data: Dataset,
    *,
    preprocess: Preprocess,
    work: Path,
    settings: PrepareSettings | None = None,
    trainer: Trainer | None = None,
    name: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    on_progress: OnProgress = ignore_progress,
    write: WriteFile = write_file,
) -> PreparedModel:
    """Fit and calibrate a head at every exit of a backbone.

    Stopped at any moment, even by kill -9, the same call goes on from what is finished and gives
    the same result as a run that was never stopped.

    Args:
        backbone: Its stages say where exits are; `stage_backbone` makes one.
        data: The training split, labelled. A part of it is held out for stopping and calibration.
        preprocess: How images become inputs.
        work: Directory for finished work; some gigabytes for convolutional heads.
        settings: How.
        trainer: Gives the heads; `FrozenBackboneTrainer` by default.
        name: Of the result; the backbone's and the data's by default.
        provenance: More facts for people, kept in the model.
        on_progress: Told how far it is.
        write: Writes a file of the work directory whole.

    Raises:
        DataError: The images have no labels, or are too few.
        ConfigError: The settings do not fit the backbone, or ``work`` belongs to another job.
        ModelError: Features or a loss are NaN or infinite.
        EdgeError: The disk is full; finished work is kept.
        BackendUnavailable: torch, onnx or safetensors is not installed.
    """
    settings = settings or PrepareSettings()
    labels = _check_data(data, preprocess, backbone)
    order, stop_from, calibrate_from = split_images(
        labels, seed=settings.seed, max_validation=settings.max_validation
    )
    directory = WorkDirectory(work, write=write)
    with directory.claim(_job(backbone, data, preprocess, settings)):
        on_progress(Progress(phase="backbone", done=0, total=1, detail=backbone.name))
        model = _kept_backbone(backbone, work / "backbone", settings, len(data.class_names))
        on_progress(Progress(phase="backbone", done=1, total=1, detail=backbone.name))
        fitting = order[:calibrate_from]
        model, considered = (trainer or FrozenBackboneTrainer()).train(
            model,
            TrainingData(
                images=data.images[fitting],
                labels=labels[fitting],
                preprocess=preprocess,
                stop_from=stop_from,
            ),
            work=directory,
            settings=settings,
            on_progress=on_progress,
        )
        held_out = order[calibrate_from:]
        logits = _calibration_logits(
            model,
            data.images[held_out],
            preprocess,
            work=directory,
            settings=settings,
            on_progress=on_progress,
        )
    truth = labels[held_out]
    heads, reports = _calibrated(model, logits, truth, considered)
    model = replace(
        model,
        name=name or f"{backbone.name}-{data.name}",
        class_names=data.class_names,
        preprocess=preprocess.to_json(),
        validation=Validation(
            logits=logits,
            labels=truth,
            source=f"{len(truth)} images held out from the training split of {data.name}",
        ),
        provenance={**backbone.provenance, **(provenance or {})},
    ).with_heads(heads, accuracy={r.index: r.accuracy for r in reports})
    return PreparedModel(model=model, exits=reports)


def stage_backbone(
    model: StagedModel,
    *,
    exits: int | Sequence[float] | Sequence[str] = 8,
    until: str | None = None,
) -> StagedModel:
    """Stage a classifier's backbone: what answers other classes than its own is left out.

    Args:
        model: Staged in any way; its source is staged again.
        exits: A count (equal steps of FLOPs of the backbone), fractions of its FLOPs, or names of
            modules or tensors.
        until: Module or tensor that ends the backbone; by default the last feature map, or the
            last tokens, before the classifier.

    Raises:
        ModelError: The model has no place with feature maps or tokens.
        ConfigError: ``exits`` or ``until`` is out of range or names nothing.
    """
    graph = model.source.graph
    found = [c for c in legal_cuts(graph) if _has_features(c)]
    if not found:
        raise ModelError(
            f"model {model.name!r} has no legal cut with feature maps or tokens, where an exit head"
            " could be put",
            help="edgewise stage MODEL --cuts lists its cuts",
        )
    last = found[-1] if until is None else choose_cuts(graph, [until], cuts=found)[0]
    inside = [
        replace(c, depth_ratio=c.depth_ratio / last.depth_ratio)
        for c in found
        if c.index <= last.index
    ]
    chosen = {c.index: c for c in choose_cuts(graph, exits, cuts=inside)} | {last.index: last}
    cuts = [chosen[i] for i in sorted(chosen)]
    staged = StagedModel.from_boundaries(
        model.source, [c.tensor.name for c in cuts], name=model.name, num_classes=model.num_classes
    )
    labels = [c.scope or c.tensor.name for c in cuts]
    return replace(
        staged,
        stages=tuple(replace(s, name=n) for s, n in zip(staged.stages, labels, strict=True)),
        exits=tuple(replace(e, name=n) for e, n in zip(staged.exits, labels, strict=True)),
        preprocess=model.preprocess,
        provenance=model.provenance,
    )


def split_images(
    labels: npt.NDArray[np.int64], *, seed: int, max_validation: int
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Divide images: fit on most, stop on a tenth, calibrate on a tenth; each class in its share.

    Args:
        labels: [N].
        seed: Decides which images.
        max_validation: Most images of each of the two small parts.

    Returns:
        Positions [N], where the stopping part begins, where the calibration part begins.

    Raises:
        DataError: Fewer than ten images.
    """
    if len(labels) < _MIN_IMAGES:
        raise DataError(
            f"expected at least {_MIN_IMAGES} labelled images to fit, stop and calibrate on, found"
            f" {len(labels)}",
            help="bring more images of each class, or raise --limit",
        )
    rng = np.random.default_rng(seed)
    size = min(max_validation, len(labels) // 10)
    rest = np.arange(len(labels))
    parts = []
    for _ in range(2):
        drawn = stratified_sample(labels[rest], size, rng=rng)
        parts.append(rest[drawn])
        rest = np.delete(rest, drawn)
    calibrate, stop = parts
    order = np.concatenate([rest, stop, calibrate]).astype(np.int64)
    return order, len(rest), len(rest) + len(stop)


def choose_head(by_kind: Mapping[str, FittedHead], settings: PrepareSettings) -> FittedHead:
    """The cheap head, unless the convolutional one gains enough to be worth its cost."""
    cheap = min(by_kind.values(), key=lambda f: f.head.spec.flops)
    conv = by_kind.get("conv", cheap)
    return conv if conv.accuracy >= cheap.accuracy + settings.min_gain else cheap


def record_reference(model: StagedModel) -> Recorded:
    """Compute what ONNX's own numpy evaluator says at each boundary, and keep a sample.

    Args:
        model: Loaded from a checkpoint, so with the weights that backends will run.
    """
    reference = importlib.import_module("onnx.reference")
    x = probe_input(model)
    indices: dict[str, npt.NDArray[np.int64]] = {}
    values: dict[str, npt.NDArray[np.float32]] = {}
    rng = np.random.default_rng(0)
    for stage in model.stages:
        proto = model.source.onnx_segment(stage.start.name, stage.stop.name)
        evaluator = reference.ReferenceEvaluator(proto)
        x = np.asarray(evaluator.run(None, {proto.graph.input[0].name: x})[0], dtype=np.float32)
        count = min(_RECORDED_VALUES, x.size)
        # The largest is always among them: the tolerance is a share of it.
        drawn = {int(np.abs(x).argmax()), *rng.choice(x.size, count, replace=False).tolist()}
        indices[stage.stop.name] = np.array(sorted(drawn), dtype=np.int64)
        values[stage.stop.name] = x.ravel()[indices[stage.stop.name]]
    return Recorded(indices=indices, values=values, by="onnx.reference, numpy")


def _has_features(cut: Cut) -> bool:
    shape = cut.tensor.shape
    return len(shape) == 3 or (len(shape) == 4 and shape[2] * shape[3] > 1)


def _head_specs(model: StagedModel, k: int, settings: PrepareSettings) -> dict[str, HeadSpec]:
    """The heads to fit at an exit, by kind."""
    shape = model.stages[k].stop.shape

    def spec(kind: str) -> HeadSpec:
        return default_head_spec(shape, model.num_classes, kind=kind, width=settings.width)

    if settings.head != "auto" or len(shape) == 3:
        only = spec(settings.head)
        return {only.kind: only}
    conv = spec("conv")
    affordable = conv.flops <= settings.max_conv_share * model.flops / model.num_exits
    return {"pool": spec("pool"), **({"conv": conv} if affordable else {})}


def _program(model: StagedModel, settings: PrepareSettings, *, check: bool) -> Program:
    backend = settings.backend
    if backend == "auto":
        installed = importlib.util.find_spec("onnxruntime") is not None
        has_torch = model.source.torch_segment(model.input.name, model.stages[0].stop.name)
        backend = "onnxruntime" if installed else "torch" if has_torch else "numpy"
    return load_program(model, backend, threads=settings.threads, segments=(), check=check)


def _kept_backbone(
    backbone: StagedModel, path: Path, settings: PrepareSettings, num_classes: int
) -> StagedModel:
    """The backbone as it will be loaded by users, written once."""
    if not is_checkpoint(path):
        bare = replace(
            backbone,
            num_classes=num_classes,
            exits=tuple(replace(e, head=None, accuracy=None) for e in backbone.exits),
            validation=None,
        )
        if bare.source.torch_segment(bare.input.name, bare.stages[0].stop.name) is not None:
            # Before anything is rounded: what was exported must compute what torch does.
            _program(bare.with_random_heads(), settings, check=True)
        rounded = path.with_name("backbone-rounded")
        save_checkpoint(bare, rounded, weights_dtype=settings.weights_dtype)
        model = load_checkpoint(rounded)
        recorded = record_reference(model)
        save_checkpoint(model, path, weights_dtype=settings.weights_dtype, recorded=recorded)
    model = load_checkpoint(path)
    _program(model.with_random_heads(), settings, check=True)
    return model


def _check_data(
    data: Dataset, preprocess: Preprocess, backbone: StagedModel
) -> npt.NDArray[np.int64]:
    if data.labels is None:
        raise DataError(
            f"data set {data.name!r} has no labels, so nothing can be fitted on it",
            help="use one folder per class, or add labels to the file",
        )
    if (1, *preprocess.output_shape) != backbone.input.shape:
        raise ConfigError(
            f"the preprocessing makes {list(preprocess.output_shape)}, the backbone takes"
            f" {list(backbone.input.shape[1:])}",
            help="make them the same with --size",
        )
    return data.labels


def _job(
    backbone: StagedModel, data: Dataset, preprocess: Preprocess, settings: PrepareSettings
) -> dict[str, Any]:
    """All that decides the features; what decides the heads alone is in ``_settings_key``."""
    content = hashlib.sha256(np.ascontiguousarray(data.images).tobytes())
    content.update(b"" if data.labels is None else data.labels.tobytes())
    return {
        "backbone": backbone.name,
        "exits": [e.name for e in backbone.exits],
        "weights": backbone.source.weights_digest(),
        "data": data.name,
        "images": len(data),
        "data_sha256": content.hexdigest(),
        "preprocess": preprocess.to_json(),
        "seed": settings.seed,
        "weights_dtype": settings.weights_dtype,
        "backend": settings.backend,
        "max_validation": settings.max_validation,
    }


def _settings_key(settings: PrepareSettings) -> str:
    """Names the place of heads in the work directory, so that other settings fit them anew."""
    text = json.dumps(asdict(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _calibration_logits(  # noqa: PLR0913
    model: StagedModel,
    images: npt.NDArray[np.uint8],
    preprocess: Preprocess,
    *,
    work: WorkDirectory,
    settings: PrepareSettings,
    on_progress: OnProgress,
) -> npt.NDArray[np.float32]:
    name = f"heads/{_settings_key(settings)}/calibration.safetensors"
    if not work.has(name):
        program = _program(model, settings, check=True)
        logits = evaluate_exits(program, images, preprocess, on_progress=on_progress)
        # A checkpoint keeps them as float16; what is fitted on them should be what is kept.
        work.save(name, {"logits": logits.astype(np.float16)})
    kept = work.load(name)["logits"].astype(np.float32)
    on_progress(Progress(phase="validate", done=len(images), total=len(images)))
    return kept


def _calibrated(
    model: StagedModel,
    logits: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    considered: Sequence[Mapping[str, float]],
) -> tuple[dict[int, ExitHead], tuple[ExitReport, ...]]:
    heads: dict[int, ExitHead] = {}
    reports = []
    for e, stage, tried in zip(model.exits, model.stages, considered, strict=True):
        if e.head is None:
            raise ModelError(f"the trainer gave exit {e.index} no head")
        own = logits[e.index]
        temperature = fit_temperature(own, labels)
        heads[e.index] = replace(e.head, temperature=temperature)
        reports.append(
            ExitReport(
                index=e.index,
                name=e.name,
                depth_ratio=e.depth_ratio,
                boundary_shape=stage.stop.shape,
                head=e.head.spec.kind,
                head_flops=e.head.spec.flops,
                accuracy=float((own.argmax(axis=1) == labels).mean()),
                temperature=temperature,
                ece_before=expected_calibration_error(own, labels),
                ece=expected_calibration_error(own, labels, temperature),
                considered=tried,
            )
        )
    return heads, tuple(reports)

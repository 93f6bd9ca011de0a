"""One joint training: what changes from step to step, kept so that a kill loses little.

The order of images, their crops and the learning rate follow from the seed and the step alone, so
the parameters, momenta and statistics are all there is to keep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.clock import Clock
from edgewise.data.preprocess import Preprocess
from edgewise.errors import CheckpointError, ConfigError, EdgeError, ModelError
from edgewise.frontends.checkpoint import Arrays, WeightsDtype
from edgewise.frontends.torch_module import import_torch
from edgewise.model.heads import ExitHead, default_head_spec
from edgewise.model.staged import StagedModel
from edgewise.training.augment import crop_and_flip
from edgewise.training.heads import TrainableHead
from edgewise.training.losses import ExitLoss, LossTerms, exit_loss
from edgewise.training.progress import OnProgress, Progress
from edgewise.training.schedule import Schedule
from edgewise.training.temperature import log_softmax
from edgewise.training.trainable import (
    TrainableBackbone,
    pooled_or_positions,
    with_channels_last,
)
from edgewise.training.work import WorkDirectory, write_file

STATE, CURVE = "joint/state.safetensors", "joint/curve.json"
_STEPS_PER_POINT = 25
_EVALUATE_BATCH = 256
_SAY_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSettings:
    """How backbone and heads are trained together; the defaults are the paper's.

    Attributes:
        epochs: Passes over the fitting images.
        batch: Images per step.
        learning_rate: Highest, of the heads.
        backbone_rate_ratio: The backbone's learning rate as a share of the heads'; below 1 for a
            pretrained backbone.
        momentum: Of SGD.
        weight_decay: Of SGD, on every parameter.
        schedule: How the learning rate goes.
        loss: What is minimised.
        head: ``"pool"`` or ``"conv"``, the paper's; tokens have one kind.
        width: Hidden width of the heads.
        padding: Pixels of a random crop's padding; 0 for none.
        flip: Whether images are mirrored at random.
        patience: Stop after so many epochs without a better mean loss on the stopping split, and
            keep the best epoch; ``None`` makes all epochs and keeps the last.
        seed: Of the heads' first weights, the order of images, crops and flips.
        threads: Threads of every computation; with one, the same run gives the same bits.
        device: Torch device that trains.
        save_every_s: Longest time between two savings of the state, besides each epoch's end.
        max_validation: Most images held out for calibration; as many again for stopping.
        weights_dtype: How the finished backbone is stored.
    """

    epochs: int = 200
    batch: int = 64
    learning_rate: float = 0.1
    backbone_rate_ratio: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Schedule = field(default_factory=Schedule)
    loss: ExitLoss = field(default_factory=lambda: ExitLoss.parse("weighted+mono"))
    head: str = "pool"
    width: int = 128
    padding: int = 2
    flip: bool = True
    patience: int | None = None
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    save_every_s: float = 60.0
    max_validation: int = 2000
    weights_dtype: WeightsDtype = "float16"

    def __post_init__(self) -> None:
        least = {"epochs": 1, "threads": 1, "width": 1, "batch": 2, "padding": 0}
        if self.patience is not None:
            least["patience"] = 1
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"expected {name} of at least {low}, found {getattr(self, name)}")
        for name in ("learning_rate", "backbone_rate_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"expected {name} above zero, found {value}")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"expected {name} in [0, 1), found {getattr(self, name)}")
        if self.head not in ("pool", "conv"):
            raise ConfigError(
                f"joint training fits one kind of head, 'pool' or 'conv', found {self.head!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledImages:
    """Some images of an array that may be too large for the memory.

    Attributes:
        images: uint8 [N, H, W, C].
        labels: [N].
        rows: Which of them, [n].
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def take(
        self, positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Images and labels at some positions of ``rows``."""
        rows = self.rows[positions]
        return np.asarray(self.images[rows]), self.labels[rows]


class JointRun:
    """Backbone, heads, optimiser and curve of one training."""

    def __init__(
        self, model: StagedModel, settings: JointSettings, preprocess: Preprocess, *, clock: Clock
    ) -> None:
        torch = import_torch()
        self._torch = torch
        self._settings = settings
        self._preprocess = preprocess
        self._clock = clock
        self._backbone = TrainableBackbone(model)
        self._heads = [_first_head(model, k, settings) for k in range(model.num_exits)]
        self._channels_last = len(model.input.shape) == 4
        self._backbone.move_to(settings.device, channels_last=self._channels_last)
        for head in self._heads:
            head.arrays = {k: v.to(settings.device) for k, v in head.arrays.items()}
            for array in head.parameters().values():
                array.requires_grad_(requires_grad=True)
        self._parameters = {f"backbone.{k}": v for k, v in self._backbone.parameters.items()}
        self._buffers = {f"backbone.{k}": v for k, v in self._backbone.buffers.items()}
        for k, head in enumerate(self._heads):
            fitted = head.parameters()
            self._parameters |= {f"head.{k}.{n}": a for n, a in fitted.items()}
            rest = {n: a for n, a in head.arrays.items() if n not in fitted}
            self._buffers |= {f"head.{k}.{n}": a for n, a in rest.items()}
        of_backbone = [v for k, v in self._parameters.items() if k.startswith("backbone.")]
        of_heads = [v for k, v in self._parameters.items() if k.startswith("head.")]
        self._optimiser = torch.optim.SGD(
            [
                {"params": of_backbone, "ratio": settings.backbone_rate_ratio},
                {"params": of_heads, "ratio": 1.0},
            ],
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
        self.epoch = 0
        self.step = 0
        self.since_best = 0
        self.elapsed_s = 0.0
        self._begun_s = clock.now_s()
        self._best_loss = math.inf
        self._best: Arrays = {}
        self._sums = np.zeros(3 + model.num_exits)
        self._points: list[list[float]] = []  # [epochs done, loss], one per some steps
        self._epochs: list[list[float]] = []  # one row per epoch, see curve()

    @property
    def finished(self) -> bool:
        """Whether all epochs are made, or early stopping has set in."""
        s = self._settings
        return self.epoch >= s.epochs or (s.patience is not None and self.since_best >= s.patience)

    def train(
        self,
        fit: LabelledImages,
        stop: LabelledImages,
        *,
        work: WorkDirectory,
        on_progress: OnProgress,
    ) -> None:
        """Go on until finished; the state is saved at every epoch's end and between.

        Raises:
            ModelError: The loss or a parameter became NaN or infinite. What was saved last stays.
            EdgeError: The disk is full. What was saved last stays.
        """
        s = self._settings
        steps = max(1, len(fit) // s.batch)  # the last step takes the remainder along
        bounds = [*range(0, steps * s.batch, s.batch), len(fit)]
        saved_s = said_s = self._clock.now_s()
        while not self.finished:
            order = np.random.default_rng([s.seed, self.epoch]).permutation(len(fit))
            while self.step < steps:
                images, labels = fit.take(np.sort(order[bounds[self.step] : bounds[self.step + 1]]))
                terms = self._one_step(images, labels, steps=steps, work=work)
                self._note(terms, len(labels), steps=steps)
                self.step += 1
                now_s = self._clock.now_s()
                if now_s - said_s >= _SAY_EVERY_S:
                    said_s = now_s
                    self._say(on_progress, fit, bounds[self.step])
                if now_s - saved_s >= s.save_every_s and self.step < steps:
                    self._save(work)
                    saved_s = self._clock.now_s()
            self._end_epoch(stop)
            self._save(work)
            saved_s = self._clock.now_s()
            self._say(on_progress, fit, 0)

    def _one_step(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        *,
        steps: int,
        work: WorkDirectory,
    ) -> LossTerms:
        s, torch = self._settings, self._torch
        done = self.epoch + self.step / steps
        rate = s.learning_rate * s.schedule.ratio(done, s.epochs)
        for group in self._optimiser.param_groups:
            group["lr"] = rate * group["ratio"]
        if s.padding or s.flip:
            rng = np.random.default_rng([s.seed, self.epoch, self.step])
            images = crop_and_flip(images, padding=s.padding, flip=s.flip, rng=rng)
        logits = self._logits(self._input(images), training=True)
        truth = torch.tensor(labels, device=s.device)
        terms = exit_loss(logits, truth, s.loss, progress=done / s.epochs)
        if not math.isfinite(terms.total.item()):
            raise self._not_finite(f"the loss became {terms.total.item()}", work)
        self._optimiser.zero_grad()
        terms.total.backward()
        self._optimiser.step()
        return terms

    def _not_finite(self, what: str, work: WorkDirectory) -> ModelError:
        kept = "nothing was saved before"
        if work.has(STATE):
            epoch, step = _read_facts(work.load(STATE))[:2]
            kept = f"the state before step {step} of epoch {epoch} is kept in {work.path}"
        return ModelError(
            f"{what} at step {self.step} of epoch {self.epoch}; {kept}",
            help="lower the learning rate (--learning-rate) and pass another --work directory;"
            " --finish makes a model of what is kept",
        )

    def _input(self, images: npt.NDArray[np.uint8]) -> Any:
        # A copy that torch allocates: numpy's alignment may differ from run to run.
        x = self._torch.tensor(self._preprocess(images), device=self._settings.device)
        if self._channels_last:
            x = with_channels_last(x)
        return x

    def _logits(self, x: Any, *, training: bool) -> Any:
        """[E, B, C]."""
        features = self._backbone.features(x, training=training)
        return self._torch.stack(
            [
                head.logits(
                    pooled_or_positions(f, positions=head.spec.kind == "conv"), training=training
                )
                for head, f in zip(self._heads, features, strict=True)
            ]
        )

    def logits(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """What every exit answers, [E, N, C]."""
        parts = []
        with self._torch.no_grad():
            for first in range(0, len(images), _EVALUATE_BATCH):
                x = self._input(np.asarray(images[first : first + _EVALUATE_BATCH]))
                parts.append(self._logits(x, training=False).cpu().numpy())
        return np.concatenate(parts, axis=1)

    def _note(self, terms: LossTerms, count: int, *, steps: int) -> None:
        row = [terms.total.item(), terms.monotonicity.item(), terms.distillation.item()]
        self._sums[:3] += np.array(row) * count
        self._sums[3:] += terms.cross_entropy.detach().cpu().numpy().astype(np.float64) * count
        if self.step % _STEPS_PER_POINT == 0:
            self._points.append([self.epoch + self.step / steps, row[0]])

    def _end_epoch(self, stop: LabelledImages) -> None:
        s = self._settings
        accuracy = np.full(len(self._heads), math.nan)
        losses = np.full(len(self._heads), math.nan)
        if len(stop):
            images, labels = stop.take(np.arange(len(stop)))
            logits = self.logits(images)
            accuracy = (logits.argmax(axis=2) == labels).mean(axis=1)
            logp = log_softmax(logits)
            losses = -logp[:, np.arange(len(labels)), labels].mean(axis=1)
        rate = self._optimiser.param_groups[1]["lr"]
        row = np.array([rate, *self._sums, *losses, *accuracy], dtype=np.float64)
        self._epochs.append(row.tolist())
        self._sums = np.zeros_like(self._sums)
        self.epoch += 1
        self.step = 0
        self.since_best += 1
        if s.patience is not None and float(losses.mean()) < self._best_loss:
            self._best_loss = float(losses.mean())
            self.since_best = 0
            self._best = {f"best.{k}": _to_numpy(v) for k, v in self._arrays().items()}

    def _say(self, on_progress: OnProgress, fit: LabelledImages, done: int) -> None:
        s = self._settings
        said = "first epoch"
        if self._epochs:
            accuracy = self._epochs[-1][-len(self._heads) :]
            loss = self._points[-1][1]
            said = f"loss {loss:.3f}, accuracy {accuracy[0]:.3f} … {accuracy[-1]:.3f}"
        total = s.epochs * len(fit)
        images = total if self.finished else self.epoch * len(fit) + done
        on_progress(Progress(phase="train", done=images, total=total, detail=said))

    def _arrays(self) -> dict[str, Any]:
        return {**self._parameters, **self._buffers}

    def _save(self, work: WorkDirectory) -> None:
        arrays = {k: _to_numpy(v) for k, v in self._arrays().items()}
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise self._not_finite(f"{name} became NaN or infinite", work)
        for name, parameter in self._parameters.items():
            memory = self._optimiser.state[parameter].get("momentum_buffer")
            if memory is not None:
                arrays[f"momentum.{name}"] = _to_numpy(memory)
        now_s = self._clock.now_s()
        self.elapsed_s += now_s - self._begun_s
        self._begun_s = now_s
        facts = [self.epoch, self.step, self.since_best, self._best_loss, self.elapsed_s]
        arrays["facts"] = np.array(facts, dtype=np.float64)
        arrays["curve.sums"] = self._sums
        arrays["curve.points"] = np.array(self._points, dtype=np.float64).reshape(-1, 2)
        width = 1 + len(self._sums) + 2 * len(self._heads)
        arrays["curve.epochs"] = np.array(self._epochs, dtype=np.float64).reshape(-1, width)
        work.save(STATE, {**arrays, **self._best})

    def restore(self, arrays: Arrays, *, where: str) -> None:
        """Take over a saved state.

        Raises:
            CheckpointError: It is of another architecture.
        """
        torch = self._torch
        wanted = {k: tuple(v.shape) for k, v in self._arrays().items()}
        for name, shape in wanted.items():
            found = arrays.get(name)
            if found is None or found.shape != shape:
                raise CheckpointError(
                    f"{where} is of another architecture: expected {name} of shape {list(shape)},"
                    f" found {'none' if found is None else list(found.shape)}",
                    help="pass another --work directory",
                )
        self._load({k: arrays[k] for k in wanted})
        for name, parameter in self._parameters.items():
            memory = arrays.get(f"momentum.{name}")
            if memory is not None:
                buffer = torch.empty_like(parameter)
                buffer.copy_(torch.from_numpy(memory.copy()))
                self._optimiser.state[parameter]["momentum_buffer"] = buffer
        self.epoch, self.step, self.since_best, self._best_loss, self.elapsed_s = _read_facts(
            arrays
        )
        self._sums = arrays["curve.sums"].copy()
        self._points = arrays["curve.points"].tolist()
        self._epochs = arrays["curve.epochs"].tolist()
        self._best = {k: v for k, v in arrays.items() if k.startswith("best.")}

    def _load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        own = self._arrays()
        with self._torch.no_grad():
            for name, array in arrays.items():
                own[name].copy_(self._torch.from_numpy(np.array(array)))

    def take_best(self) -> None:
        """Go back to the epoch with the least loss, where early stopping was asked for."""
        if self._best:
            self._load({k.removeprefix("best."): v for k, v in self._best.items()})

    def to_cpu(self) -> None:
        """Put the trained arrays where every other user of the model expects them."""
        self._backbone.move_to("cpu", channels_last=False)
        for head in self._heads:
            head.arrays = {k: v.detach().cpu() for k, v in head.arrays.items()}

    def heads(self) -> dict[int, ExitHead]:
        """The heads in the form that backends run; after `to_cpu`."""
        return {k: head.folded() for k, head in enumerate(self._heads)}

    def curve(self, num_images: int) -> dict[str, Any]:
        """What was recorded, ready for JSON.

        Args:
            num_images: Of the fitting split, by which sums become means.
        """
        count = len(self._heads)
        rows = []
        for row in self._epochs:
            rate, total, mono, distil, *rest = row
            rows.append(
                {
                    "learning_rate": rate,
                    "loss": total / num_images,
                    "monotonicity": mono / num_images,
                    "distillation": distil / num_images,
                    "cross_entropy": [v / num_images for v in rest[:count]],
                    "stop_loss": [_known(v) for v in rest[count : 2 * count]],
                    "stop_accuracy": [_known(v) for v in rest[2 * count :]],
                }
            )
        return {
            "epochs": rows,
            "steps": [{"epoch": e, "loss": v} for e, v in self._points],
            "elapsed_s": self.elapsed_s,
        }


def write_curve(curve: Mapping[str, Any], work: WorkDirectory) -> None:
    """Keep the curve beside the state, for people and reports."""
    data = json.dumps(curve, indent=1, allow_nan=False).encode()
    try:
        write_file(work.path / CURVE, data)
    except OSError as error:
        raise EdgeError(
            f"the curve cannot be written to {work.path / CURVE}: {error.strerror or error}",
            help="free some space and run the same command again",
        ) from error


def _first_head(model: StagedModel, k: int, settings: JointSettings) -> TrainableHead:
    spec = default_head_spec(
        model.stages[k].stop.shape, model.num_classes, kind=settings.head, width=settings.width
    )
    # Features of an untrained backbone say nothing about scales to come: their mean is left at 0
    # and their deviation at 1, and the head's own normalisation does the rest.
    nothing = np.zeros((1, spec.channels), dtype=np.float16)
    return TrainableHead.draw(spec, nothing, seed=settings.seed + 1000 * k)


def _read_facts(arrays: Arrays) -> tuple[int, int, int, float, float]:
    epoch, step, since_best, best_loss, elapsed_s = arrays["facts"].tolist()
    return int(epoch), int(step), int(since_best), best_loss, elapsed_s


def _to_numpy(tensor: Any) -> npt.NDArray[Any]:
    return np.array(tensor.detach().cpu().numpy(), order="C")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value

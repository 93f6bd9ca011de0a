"""Fit one exit head on cached features; every finished epoch survives kill -9."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.checkpoint import Arrays
from edgewise.frontends.torch_module import import_torch
from edgewise.model.heads import ExitHead, HeadSpec
from edgewise.training.features import Float16
from edgewise.training.heads import TrainableHead
from edgewise.training.work import WorkDirectory

Labels = npt.NDArray[np.int64]
_MIN_BATCH, _MIN_STEPS = 8, 20  # running statistics need steps to settle
OnEpoch = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a head is fitted.

    Attributes:
        epochs: At most so many passes.
        patience: Stop after so many without a better loss on the stopping split; the rate has
            to fall for the loss to get there, so few epochs do more than much patience.
        batch: Images per step; fewer where an epoch would have less than twenty steps.
        learning_rate: At the start; it falls to zero along a cosine.
        weight_decay: AdamW's, per step and learning rate.
        seed: Of the first weights and of the order of images.
    """

    epochs: int = 20
    patience: int = 10
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.patience < 1 or self.batch < 2:
            raise ConfigError(
                f"expected at least one epoch, a patience of one and a batch of two, found"
                f" {self.epochs}, {self.patience} and {self.batch}"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"expected a learning rate above zero, found {self.learning_rate}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Features and labels of one part of the data.

    Attributes:
        features: [N, C], or [N, P, C] for a convolutional head.
        labels: [N].
    """

    features: Float16
    labels: Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedHead:
    """A head and how well it does on the split that stopped its fit.

    Attributes:
        head: In the form that backends run, temperature 1.
        accuracy: Share answered rightly, 0 to 1.
        loss: Mean negative log-likelihood, nats.
        epochs: Passes made.
    """

    head: ExitHead
    accuracy: float
    loss: float
    epochs: int


def fit_head(  # noqa: PLR0913 - what, on what, how, where to, and who is told
    spec: HeadSpec,
    train: Split,
    stop: Split,
    *,
    settings: FitSettings,
    work: WorkDirectory,
    name: str,
    on_epoch: OnEpoch = lambda _epoch, _said: None,
) -> FittedHead:
    """Fit a head, or read it where it was fitted before.

    Args:
        spec: Its shape.
        train: Fitted on.
        stop: Decides when to stop and which epoch is kept.
        settings: How.
        work: Where finished epochs are kept.
        name: Of the head in the work directory, for example ``"exit-3-pool"``; a folder may
            stand before it.
        on_epoch: Told how many epochs are done, and how it goes.

    Raises:
        ModelError: The loss became NaN or infinite; the message names the step.
        EdgeError: The disk is full.
    """
    done_name, state_name = f"heads/{name}.safetensors", f"heads/{name}.state.safetensors"
    name = name.rpartition("/")[2]
    if work.has(done_name):
        fitted = _read_fitted(spec, work.load(done_name))
        on_epoch(settings.epochs, "kept from before")
        return fitted
    torch = import_torch()
    head = TrainableHead.draw(spec, train.features, seed=settings.seed)
    run = _Run(torch, head, settings)
    if work.has(state_name):
        run.restore(work.load(state_name))
        on_epoch(run.epoch, "continued")
    while run.epoch < settings.epochs and run.since_best < settings.patience:
        run.one_epoch(train, name)
        loss, accuracy = _score(torch, head, stop)
        if not math.isfinite(loss):
            raise ModelError(
                f"the loss of {name} on the stopping split became {loss} after epoch {run.epoch}",
                help="lower the learning rate (--learning-rate), or check the backbone",
            )
        run.judge(loss, accuracy)
        work.save(state_name, run.state())
        on_epoch(run.epoch, f"accuracy {accuracy:.3f}")
    arrays = run.result()
    work.save(done_name, arrays)
    work.remove(state_name)
    return _read_fitted(spec, arrays)


class _Run:
    """One fit: what changes from epoch to epoch, as arrays that can be written and read back."""

    def __init__(self, torch: Any, head: TrainableHead, settings: FitSettings) -> None:
        self._torch = torch
        self._head = head
        self._settings = settings
        self._parameters = head.parameters()
        for tensor in self._parameters.values():
            tensor.requires_grad_(requires_grad=True)
        self._optimiser = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
        self.epoch = 0
        self.since_best = 0
        self._best_loss = math.inf
        self._best_accuracy = 0.0
        self._best: Arrays = {}

    def one_epoch(self, train: Split, name: str) -> None:
        torch, s = self._torch, self._settings
        count = len(train.labels)
        # Order and learning rate follow from the epoch alone, so a resumed fit is the same fit.
        order = np.random.default_rng([s.seed, self.epoch]).permutation(count)
        batch = min(s.batch, max(_MIN_BATCH, count // _MIN_STEPS))
        steps = max(1, count // batch)  # the last step takes the remainder along
        bounds = [*range(0, steps * batch, batch), count]
        for step, (first, last) in enumerate(pairwise(bounds)):
            progress = (self.epoch + step / steps) / s.epochs
            for group in self._optimiser.param_groups:
                group["lr"] = s.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
            chosen = np.sort(order[first:last])
            x = torch.from_numpy(train.features[chosen].astype(np.float32))
            y = torch.from_numpy(train.labels[chosen])
            loss = torch.nn.functional.cross_entropy(self._head.logits(x, training=True), y)
            if not math.isfinite(loss.item()):
                raise ModelError(
                    f"the loss of {name} became {loss.item()} at step {step} of epoch {self.epoch}",
                    help="lower the learning rate (--learning-rate), or check the backbone",
                )
            self._optimiser.zero_grad()
            loss.backward()
            self._optimiser.step()
        self.epoch += 1

    def judge(self, loss: float, accuracy: float) -> None:
        self.since_best += 1
        if loss < self._best_loss:
            self.since_best = 0
            self._best_loss, self._best_accuracy = loss, accuracy
            self._best = {f"head.{k}": v for k, v in self._head.folded().weights.items()}

    def result(self) -> Arrays:
        facts = [self._best_accuracy, self._best_loss, float(self.epoch)]
        return {**self._best, "facts": np.array(facts)}

    def state(self) -> Arrays:
        arrays: Arrays = {k: v.detach().numpy().copy() for k, v in self._head.arrays.items()}
        for name, tensor in self._parameters.items():
            memory = self._optimiser.state[tensor]
            for key in ("step", "exp_avg", "exp_avg_sq"):
                arrays[f"adam.{name}.{key}"] = memory[key].numpy().copy()
        arrays |= {f"best.{k}": v for k, v in self._best.items()}
        facts = [self.epoch, self.since_best, self._best_loss, self._best_accuracy]
        return {**arrays, "facts": np.array(facts, dtype=np.float64)}

    def restore(self, arrays: Arrays) -> None:
        torch = self._torch
        with torch.no_grad():
            for name, tensor in self._head.arrays.items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        for name, tensor in self._parameters.items():
            self._optimiser.state[tensor] = {
                key: torch.from_numpy(arrays[f"adam.{name}.{key}"].copy())
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        self._best = {k[5:]: v for k, v in arrays.items() if k.startswith("best.")}
        epoch, since_best, self._best_loss, self._best_accuracy = arrays["facts"].tolist()
        self.epoch, self.since_best = int(epoch), int(since_best)


def _score(torch: Any, head: TrainableHead, split: Split) -> tuple[float, float]:
    """Loss and accuracy on a split."""
    loss, right = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(split.labels), 512):
            x = torch.from_numpy(split.features[start : start + 512].astype(np.float32))
            y = torch.from_numpy(split.labels[start : start + 512])
            logits = head.logits(x, training=False)
            loss += float(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
            right += int((logits.argmax(1) == y).sum())
    return loss / len(split.labels), right / len(split.labels)


def _read_fitted(spec: HeadSpec, arrays: Arrays) -> FittedHead:
    accuracy, loss, epochs = arrays["facts"].tolist()
    weights = {k[5:]: v for k, v in arrays.items() if k.startswith("head.")}
    return FittedHead(
        head=ExitHead(spec=spec, weights=weights),
        accuracy=accuracy,
        loss=loss,
        epochs=int(epochs),
    )

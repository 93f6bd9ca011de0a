"""``edgewise prepare --joint``: its options as settings, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from edgewise.data import Dataset
from edgewise.errors import ConfigError, nearest_names
from edgewise.frontends.zoo import backbone_names, build_backbone
from edgewise.training import PreparedModel
from edgewise.training.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions:
    """What only joint training takes.

    Attributes:
        loss: Words joined by ``+``.
        schedule: Kind of schedule.
        batch: Images per step.
        backbone_rate: The backbone's learning rate as a share of the heads'.
        patience: Epochs without a better loss before it stops; ``None`` for all epochs.
        finish: Make a model of what is kept, without further training.
    """

    loss: str = "wel+mono"
    schedule: str = "milestones"
    batch: int = 64
    backbone_rate: float = 1.0
    patience: int | None = None
    finish: bool = False

    def as_flags(self) -> str:
        """As on a command line, without ``--finish``, which changes no training."""
        flags = f"--joint --loss {self.loss} --schedule {self.schedule} --batch {self.batch}"
        flags += f" --backbone-rate {self.backbone_rate:g}"
        return flags + (f" --patience {self.patience}" if self.patience else "")


def prepare_jointly(
    backbone: str,
    dataset: Dataset,
    *,
    options: JointOptions,
    work: Path,
    exits: int | list[float] | list[str],
    until: str | None,
    head: str,
    width: int,
    size: int | None,
    epochs: int,
    learning_rate: float,
    threads: int,
    seed: int,
    name: str,
    provenance: dict[str, Any],
    on_progress: OnProgress,
) -> PreparedModel:
    """Train a backbone of the zoo together with its heads.

    Raises:
        ConfigError: It is not in the zoo, or an option does not fit.
    """
    from edgewise.training.joint import train_jointly
    from edgewise.training.joint_run import JointSettings
    from edgewise.training.losses import ExitLoss
    from edgewise.training.schedule import Schedule, ScheduleKind

    if backbone not in backbone_names():
        raise ConfigError(
            f"--joint trains a backbone by name, found {backbone!r}",
            help=f"{nearest_names(backbone, backbone_names())}; from Python,"
            " edgewise.training.joint.train_jointly takes any torch module",
        )
    if options.schedule not in get_args(ScheduleKind):
        raise ConfigError(
            f"unknown schedule {options.schedule!r}",
            help=nearest_names(options.schedule, get_args(ScheduleKind)),
        )
    settings = JointSettings(
        epochs=epochs,
        batch=options.batch,
        learning_rate=learning_rate,
        backbone_rate_ratio=options.backbone_rate,
        schedule=Schedule(kind=options.schedule),  # type: ignore[arg-type]  # checked above
        loss=ExitLoss.parse(options.loss),
        head="pool" if head == "auto" else head,
        width=width,
        patience=options.patience,
        seed=seed,
        threads=threads,
    )
    return train_jointly(
        build_backbone(backbone, size_pixels=size, seed=seed),
        dataset,
        work=work,
        exits=exits,
        until=until,
        settings=settings,
        finish=options.finish,
        name=name,
        provenance=provenance,
        on_progress=on_progress,
    )

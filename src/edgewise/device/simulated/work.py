"""How much work the stages and heads of some networks are: plain numbers, shipped as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from edgewise.errors import ConfigError, nearest_names

Kind = Literal["image", "token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """What a stage or a head asks of a device, whatever its clocks.

    Attributes:
        name: ``"stage:0"``, …, ``"head:0"``, ….
        kind: ``"image"`` for a network of images, ``"token"`` for one token of a language model:
            what a launch costs differs.
        launches: Operators that the CPU hands to the GPU.
        flops: Floating-point operations; a multiply-add counts two.
        traffic_bytes: Bytes that go through memory.
    """

    name: str
    kind: Kind
    launches: int
    flops: float
    traffic_bytes: float


def work_names() -> tuple[str, ...]:
    """Names that :func:`load_work` knows."""
    files = resources.files(__package__).joinpath("data").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_work(model: str) -> tuple[UnitWork, ...]:
    """The units of a network: all stages in order, then the head at each one's end.

    Args:
        model: One of :func:`work_names`. The networks of images have 8 stages that end at cuts
            spaced by FLOPs and, at each, a head of 576 hidden channels; the language model has
            its 16 layers and its own head at each.

    Raises:
        ConfigError: There is no such file.
    """
    if model not in work_names():
        raise ConfigError(
            f"no work of {model!r} is known to the simulated devices",
            help=nearest_names(model, work_names()),
        )
    text = resources.files(__package__).joinpath("data", f"{model}.json").read_text("utf-8")
    found = json.loads(text)
    return tuple(UnitWork(kind=found["kind"], **unit) for unit in found["units"])


def full_depth(work: tuple[UnitWork, ...]) -> tuple[str, ...]:
    """Names of the units that the deepest answer takes: every stage and the last head.

    Example:
        >>> full_depth(load_work("resnet50"))[-2:]
        ('stage:7', 'head:7')
    """
    return (*(u.name for u in work if u.name.startswith("stage:")), work[-1].name)

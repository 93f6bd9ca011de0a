"""A model as shapes and FLOPs alone, for simulation: it runs on the `null` backend only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from edgewise.errors import ModelError
from edgewise.model import Graph, Op, StagedModel, TensorSpec


class OutlineSource:
    """A chain of stages without weights.

    Args:
        shapes: Of the input and of each stage's end, batch axis 1 first.
        flops: Of each stage, for one sample.
    """

    dynamic_batch = True

    def __init__(self, shapes: Sequence[tuple[int, ...]], flops: Sequence[float]) -> None:
        if len(shapes) != len(flops) + 1:
            raise ModelError(f"expected {len(flops) + 1} shapes, found {len(shapes)}")
        names = ["input", *(f"stage{k}" for k in range(len(flops)))]
        specs = {
            n: TensorSpec(name=n, shape=s, dtype="float32")
            for n, s in zip(names, shapes, strict=True)
        }
        ops = tuple(
            Op(
                name=stop,
                kind="stage",
                inputs=(start,),
                outputs=(stop,),
                flops=f,
                is_contraction=True,
            )
            for start, stop, f in zip(names, names[1:], flops, strict=False)
        )
        self.graph = Graph(inputs=(names[0],), outputs=(names[-1],), ops=ops, tensors=specs)

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:  # noqa: ARG002
        """There is nothing to export.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "this model is an outline: shapes and FLOPs without weights",
            help="run it on the 'null' backend",
        )

    def torch_segment(self, start: str, stop: str) -> Callable[[Any], Any] | None:  # noqa: ARG002
        """Always ``None``."""
        return None

    def weights_digest(self) -> str:
        """SHA-256 over shapes and FLOPs."""
        return hashlib.sha256(repr(self.graph).encode()).hexdigest()


def outline_model(
    num_stages: int = 8,
    *,
    num_classes: int = 10,
    flops: Sequence[float] | None = None,
    name: str = "outline",
) -> StagedModel:
    """Make a chain whose last stage answers and whose other exits have heads of random weights.

    Args:
        num_stages: S.
        num_classes: C.
        flops: [S], equal by default.
        name: For people.
    """
    work = list(flops) if flops is not None else [1e6] * num_stages
    shapes = [(1, 3, 8, 8)] + [(1, 4, 4, 4)] * (num_stages - 1) + [(1, num_classes)]
    source = OutlineSource(shapes, work)
    stops = [f"stage{k}" for k in range(num_stages - 1)]
    model = StagedModel.from_source(source, exits=stops or 1, name=name)
    return model.with_random_heads(width=4)

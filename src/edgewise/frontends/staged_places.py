"""Where a model with exits can be cut between an accelerator and the CPU: at its stages' ends."""

from __future__ import annotations

import math

import numpy as np

from edgewise.frontends.partition import Place
from edgewise.model.staged import StagedModel


def staged_places(model: StagedModel) -> tuple[Place, ...]:
    """Describe the places of a staged model: its input, the end of each stage, its answer.

    At the last place the answer crosses, also where the last exit has a head of its own: that head
    then belongs to the last piece. The other heads lie on no piece; the CPU runs them.

    Args:
        model: With a batch axis of 1.
    """
    specs = [model.input, *(s.stop for s in model.stages)]
    shapes = [(1, *spec.shape[1:]) for spec in specs]
    weights = [0, *(s.weight_bytes for s in model.stages)]
    head = model.exits[-1].head
    if head is not None:
        shapes[-1] = (1, model.num_classes)
        weights[-1] += sum(int(w.nbytes) for w in head.weights.values())
    held = np.cumsum(weights)
    flops = np.cumsum([0.0, *(s.flops for s in model.stages)])
    return tuple(
        Place(
            tensor=spec.name,
            shape=shape,
            dtype="float32",
            nbytes=4 * math.prod(shape),
            prefix_bytes=int(size),
            flops=float(work),
            depth_ratio=float(work / max(flops[-1], 1.0)),
        )
        for spec, shape, size, work in zip(specs, shapes, held, flops, strict=True)
    )

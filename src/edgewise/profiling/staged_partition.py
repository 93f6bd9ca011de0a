"""Models with exits as models that can be cut in two, so that their segments can be measured."""

from __future__ import annotations

from dataclasses import dataclass

from edgewise.backends.staged_pieces import staged_segment
from edgewise.frontends.partition import PartitionedModel
from edgewise.frontends.staged_places import staged_places
from edgewise.model.graph import Graph
from edgewise.model.staged import StagedModel


@dataclass(frozen=True, slots=True)
class StagedCutter:
    """Makes pieces of a staged model.

    Attributes:
        model: Whose.
    """

    model: StagedModel

    @property
    def graph(self) -> Graph:
        """Its operators; that of the last head, which is small, is not among them."""
        return self.model.source.graph

    def segment(self, start: str, stop: str) -> bytes:
        """Content of a complete model file that computes one tensor from another."""
        names = [self.model.input.name, *(s.stop.name for s in self.model.stages)]
        return staged_segment(self.model, names.index(start), names.index(stop))


def partitioned(model: StagedModel) -> PartitionedModel:
    """Take a staged model as one that is cut at its stages' ends and always runs to its last exit.

    Args:
        model: With weights.
    """
    return PartitionedModel(
        name=model.name,
        version=model.version(),
        format="onnx",
        places=staged_places(model),
        cutter=StagedCutter(model),
    )

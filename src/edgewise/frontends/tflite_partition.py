"""TFLite models cut in two: each half a complete flatbuffer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgewise.frontends.partition import PartitionedModel
from edgewise.frontends.places import check_ends, choose_places
from edgewise.frontends.tflite_file import TfliteSource


def read(path: Path, *, places: int | Sequence[str] | None = None) -> PartitionedModel:
    """Read a TFLite file, as `edgewise.frontends.partition.read_partitioned`."""
    source = TfliteSource.read(path)
    check_ends(source.name, source.graph.inputs, source.graph.outputs)
    return PartitionedModel(
        name=source.name,
        version=hashlib.sha256(source.content).hexdigest(),
        format="tflite",
        places=choose_places(source.graph, places, constants=source.constants),
        cutter=source,
    )

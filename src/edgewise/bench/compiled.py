"""Prefixes that an accelerator's own compiler made: files beside the model, one for each place."""

from __future__ import annotations

from pathlib import Path

from edgewise.errors import BackendUnavailable
from edgewise.runtime.tenants.records import Cuttable


class CompiledModel:
    """A `Cuttable` whose prefixes come from compiled files; suffixes are cut as ever.

    What was not compiled would run on the CPU behind the device's back, so it is refused.

    Args:
        model: The model.
        path: Its file; the prefix of place 3 of ``net.tflite`` is ``net_3_edgetpu.tflite``.

    Attributes:
        name: Of the model.
        last: P.
        format: Of its pieces.
        places: Of the model.
    """

    def __init__(self, model: Cuttable, path: Path) -> None:
        self.name = model.name
        self.last = model.last
        self.format = model.format
        self.places = model.places
        self._model = model
        self._path = path

    def segment(self, start: int, stop: int) -> bytes:
        """Content of the model file between two places.

        Raises:
            BackendUnavailable: A prefix was not compiled.
        """
        if start > 0 or stop == 0:
            return self._model.segment(start, stop)
        file = self._path.with_name(f"{self._path.stem}_{stop}_edgetpu.tflite")
        try:
            return file.read_bytes()
        except OSError as error:
            raise BackendUnavailable(
                f"the part of {self.name!r} before place {stop} is not compiled: {error}",
                help=f"write prefix({stop}) of read_partitioned() to a file"
                f" {self._path.stem}_{stop}.tflite and run edgetpu_compiler on it",
            ) from error

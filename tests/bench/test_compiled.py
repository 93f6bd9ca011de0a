from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.bench.compiled import CompiledModel
from edgewise.errors import BackendUnavailable


class Model:
    name, last, format = "net", 3, "tflite"
    places: tuple[Any, ...] = ()

    def segment(self, start: int, stop: int) -> bytes:
        return f"{start}-{stop}".encode()


def test_prefixes_are_the_compiled_files_and_suffixes_are_cut(tmp_path: Path) -> None:
    (tmp_path / "net_2_edgetpu.tflite").write_bytes(b"compiled")
    model = CompiledModel(Model(), tmp_path / "net.tflite")
    assert model.segment(0, 2) == b"compiled"
    assert model.segment(2, 3) == b"2-3"


def test_what_was_not_compiled_is_refused_and_never_run_elsewhere(tmp_path: Path) -> None:
    model = CompiledModel(Model(), tmp_path / "net.tflite")
    with pytest.raises(BackendUnavailable, match="before place 1 is not compiled") as caught:
        model.segment(0, 1)
    assert caught.value.help is not None
    assert "edgetpu_compiler" in caught.value.help

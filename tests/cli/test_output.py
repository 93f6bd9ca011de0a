from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgewise.cli.output import emit_json, stdout_console


class _Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    wait_s: float
    where: Path


def test_one_object_is_written_and_nan_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json(
        {
            "record": _Record(wait_s=math.nan, where=Path("a/b")),
            "array": np.array([1.5, np.inf]),
            "scalar": np.float32(0.5),
            "count": np.int64(3),
            "colour": _Colour.RED,
            7: (True, None),
        }
    )

    assert json.loads(capsys.readouterr().out) == {
        "record": {"wait_s": None, "where": "a/b"},
        "array": [1.5, None],
        "scalar": 0.5,
        "count": 3,
        "colour": "red",
        "7": [True, None],
    }


@pytest.mark.parametrize("value", [[1], 3, "text", None], ids=repr)
def test_what_is_not_an_object_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected a mapping or a record"):
        emit_json(value)


def test_what_json_cannot_say_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(TypeError, match="cannot write object"):
        emit_json({"x": object()})
    assert capsys.readouterr().out == ""


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    stdout_console().print("[bold]edgewise[onnx]", style="red")

    assert capsys.readouterr().out == "[bold]edgewise[onnx]\n"

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from edgewise.errors import ConfigError, DataError
from edgewise.report.figure import demo_figure
from edgewise.report.records import DemoReport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_scene_is_drawn(report: DemoReport, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = demo_figure(report, tmp_path / f"scene{suffix}")

    assert path.read_bytes().startswith(magic)


def test_an_unknown_scene_or_suffix_is_refused(report: DemoReport, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scene 'lood'") as caught:
        demo_figure(report, tmp_path / "a.png", scene="lood")
    assert caught.value.help == "did you mean 'load'?"
    with pytest.raises(ConfigError, match=r"cannot draw a picture as 'a\.doc'"):
        demo_figure(report, tmp_path / "a.doc")


def test_a_scene_without_requests_and_a_path_that_cannot_be_written_are_reported(
    report: DemoReport, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="could not be written"):
        demo_figure(report, tmp_path / "missing" / "a.png")
    empty = replace(report, scenes=(replace(report.scenes[0], points=()),), summaries=())
    with pytest.raises(DataError, match="has no request"):
        demo_figure(empty, tmp_path / "a.png")

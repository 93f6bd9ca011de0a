from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgewise.errors import ConfigError, DataError
from edgewise.report.chart import Chart, Series, draw_charts

LINE = Chart(
    title="DSR",
    x_label="deadline, %",
    y_label="%",
    provenance="simulated",
    series=(
        Series(name="a", x=(25, 50), y=(90.0, None), low=(88.0, None), high=(92.0, None)),
        Series(name="b", x=(25, 50), y=(70.0, 80.0)),
    ),
)
BARS = Chart(
    title="DSR",
    x_label="",
    y_label="%",
    provenance="measured",
    kind="bars",
    series=(
        Series(name="a", x=("one", "two"), y=(1.0, 2.0), low=(0.5, 1.5), high=(1.5, 2.5)),
        Series(name="b", x=("one", "two"), y=(3.0, None)),
    ),
)


def test_every_panel_says_how_its_numbers_came_about(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        path = draw_charts([LINE, BARS], tmp_path / "f.svg", title="All")
    text = path.read_text()
    assert "DSR (simulated)" in text
    assert "DSR (measured)" in text
    assert "two" in text


def test_values_that_are_not_known_leave_a_gap() -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from edgewise.report.chart import _draw

    axes = Figure().subplots()
    _draw(axes, LINE)
    drawn = np.asarray(axes.lines[0].get_ydata(), dtype=float)
    assert drawn[0] == 90.0
    assert np.isnan(drawn[1])
    bars = Figure().subplots()
    _draw(bars, BARS)
    heights = [p.get_height() for p in bars.patches if isinstance(p, Rectangle)]
    assert heights[:3] == [1.0, 2.0, 3.0]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    empty = Chart(title="", x_label="", y_label="", provenance="measured", series=())
    with pytest.raises(DataError, match="nothing to draw"):
        draw_charts([empty], tmp_path / "f.png")


def test_an_unknown_kind_of_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="picture"):
        draw_charts([LINE], tmp_path / "f.txt")

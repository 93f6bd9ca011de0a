"""Loss and accuracy over the epochs of a joint training, as a picture file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgewise.errors import ConfigError, DataError
from edgewise.report.curves import check_figure_path, save_figure, style_axes

_INK, _LATE = "#1d2329", "#c44310"


def training_figure(curve: Mapping[str, Any], path: str | Path, *, title: str = "") -> Path:
    """Draw the losses on the left and each exit's accuracy on held-out images on the right.

    Args:
        curve: As a joint training leaves it in ``provenance["training_curve"]``: ``epochs`` with
            ``loss``, ``monotonicity`` and ``stop_accuracy`` [E], and ``steps``.
        path: Where to write; ``.png``, ``.svg`` or ``.pdf``.
        title: Above both panels.

    Returns:
        The path that was written.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is unknown.
        DataError: There is no finished epoch to draw, or the file cannot be written.
    """
    path = check_figure_path(path)
    epochs = curve.get("epochs") or []
    if not epochs:
        raise DataError("there is no finished epoch to draw", help="train for one epoch at least")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "this figure needs matplotlib, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    passed = range(1, len(epochs) + 1)
    steps = curve.get("steps") or []
    left.plot([s["epoch"] for s in steps], [s["loss"] for s in steps], color="#b9c2ca", lw=0.8)
    left.plot(passed, [e["loss"] for e in epochs], color=_INK, marker="o", label="whole loss")
    left.plot(
        passed,
        [e["monotonicity"] for e in epochs],
        color=_LATE,
        marker="s",
        label="confidence lost from exit to exit",
    )
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    left.set_title("loss on the images fitted on", loc="left", fontsize=10)
    accuracy = [e["stop_accuracy"] for e in epochs]
    count = len(accuracy[0])
    colours = colormaps["viridis_r"]
    for k in range(count):
        points = [(n, 100 * row[k]) for n, row in zip(passed, accuracy, strict=True) if row[k]]
        if points:
            right.plot(
                *zip(*points, strict=True),
                color=colours(0.15 + 0.85 * k / max(count - 1, 1)),
                marker=".",
                label=f"exit {k}",
            )
    right.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    right.set_title("right answers on held-out images, %", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("epoch", fontsize=9)
        style_axes(axes)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK)
    return save_figure(figure, path)

from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.errors import ConfigError, DataError

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from edgewise.report.training import training_figure

CURVE = {
    "epochs": [
        {"loss": 3.0, "monotonicity": 0.2, "stop_accuracy": [0.4, 0.5]},
        {"loss": 2.0, "monotonicity": 0.1, "stop_accuracy": [0.6, None]},
    ],
    "steps": [{"epoch": 0.5, "loss": 3.5}, {"epoch": 1.5, "loss": 2.2}],
}


def test_losses_and_accuracies_are_drawn_and_named(tmp_path: Path) -> None:
    drawn = training_figure(CURVE, tmp_path / "curves.svg", title="net <b>")

    text = drawn.read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert "<b>" not in text


def test_a_training_without_a_finished_epoch_has_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished epoch"):
        training_figure({}, tmp_path / "curves.png")


def test_an_unknown_kind_of_picture_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gif"):
        training_figure(CURVE, tmp_path / "curves.gif")

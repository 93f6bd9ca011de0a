from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgewise.errors import ConfigError, ModelError
from edgewise.model.heads import HeadSpec
from edgewise.training.fit import FitSettings, Split, fit_head
from edgewise.training.work import WorkDirectory

SETTINGS = FitSettings(epochs=6, patience=6, batch=16, learning_rate=1e-2)


def _data(kind: str, count: int, *, seed: int) -> Split:
    """Three classes that differ in the mean of their channels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    centres = np.random.default_rng(99).standard_normal((3, 6)) * 2
    shape = (count, 9, 6) if kind == "conv" else (count, 6)
    noise = rng.standard_normal(shape)
    means = centres[labels][:, None] if kind == "conv" else centres[labels]
    return Split(features=(means + noise).astype(np.float16), labels=labels)


def _spec(kind: str) -> HeadSpec:
    return HeadSpec(kind=kind, feature_shape=(1, 6, 3, 3), width=8, num_classes=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["conv", "pool"])
def test_a_head_learns_classes_that_can_be_told_apart(kind: str, tmp_path: Path) -> None:
    fitted = fit_head(
        _spec(kind),
        _data(kind, 300, seed=0),
        _data(kind, 100, seed=1),
        settings=SETTINGS,
        work=WorkDirectory(tmp_path),
        name="h",
    )

    assert fitted.accuracy > 0.9
    assert fitted.loss < 0.4
    assert not list(tmp_path.rglob("*.state.*"))


def test_a_fit_stopped_after_any_epoch_ends_with_the_same_bits(tmp_path: Path) -> None:
    train, stop = _data("pool", 100, seed=0), _data("pool", 50, seed=1)
    whole = fit_head(
        _spec("pool"), train, stop, settings=SETTINGS, work=WorkDirectory(tmp_path / "a"), name="h"
    )
    interrupted = WorkDirectory(tmp_path / "b")

    def stop_soon(_epoch: int, said: str) -> None:
        if said.startswith("accuracy"):
            raise KeyboardInterrupt

    for _ in range(SETTINGS.epochs - 1):
        with pytest.raises(KeyboardInterrupt):
            fit_head(
                _spec("pool"),
                train,
                stop,
                settings=SETTINGS,
                work=interrupted,
                name="h",
                on_epoch=stop_soon,
            )
    resumed = fit_head(_spec("pool"), train, stop, settings=SETTINGS, work=interrupted, name="h")

    assert resumed.epochs == whole.epochs == SETTINGS.epochs
    for name, array in whole.head.weights.items():
        assert array.tobytes() == resumed.head.weights[name].tobytes()


def test_a_finished_fit_is_read_and_not_made_again(tmp_path: Path) -> None:
    train, stop = _data("pool", 100, seed=0), _data("pool", 50, seed=1)
    work = WorkDirectory(tmp_path)
    first = fit_head(_spec("pool"), train, stop, settings=SETTINGS, work=work, name="h")
    said: list[str] = []
    again = fit_head(
        _spec("pool"),
        train,
        stop,
        settings=SETTINGS,
        work=work,
        name="h",
        on_epoch=lambda _, text: said.append(text),
    )

    assert said == ["kept from before"]
    assert again.accuracy == first.accuracy


def test_a_fit_stops_early_and_keeps_the_best_epoch(tmp_path: Path) -> None:
    train, stop = _data("pool", 40, seed=0), _data("pool", 40, seed=1)
    noise = Split(
        features=train.features, labels=np.random.default_rng(5).permutation(train.labels)
    )
    settings = FitSettings(epochs=60, patience=3, batch=8, learning_rate=3e-2)
    fitted = fit_head(
        _spec("pool"), noise, stop, settings=settings, work=WorkDirectory(tmp_path), name="h"
    )

    assert fitted.epochs < 60


def test_a_loss_that_is_no_number_stops_the_fit_and_names_the_step(tmp_path: Path) -> None:
    train = _data("pool", 64, seed=0)
    train.features[40, 2] = np.nan

    with pytest.raises(ModelError, match=r"the loss of h became nan at step \d of epoch 0"):
        fit_head(
            _spec("pool"),
            train,
            _data("pool", 10, seed=1),
            settings=SETTINGS,
            work=WorkDirectory(tmp_path),
            name="h",
        )


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"patience": 0}, {"batch": 1}, {"learning_rate": float("nan")}],
    ids=lambda w: f"{next(iter(w))} out of range",
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        FitSettings(**wrong)  # type: ignore[arg-type]

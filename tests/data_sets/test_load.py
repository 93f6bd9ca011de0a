from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.data import load_dataset
from edgewise.errors import ConfigError, DataError


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown data set 'fashion-mnst'") as caught:
        load_dataset("fashion-mnst")

    assert (caught.value.help or "").startswith("did you mean 'fashion-mnist'")


@pytest.mark.parametrize("path", ["no/such/folder", "missing.npz", "photo.png"])
def test_a_path_that_does_not_exist_is_said_to_be_a_path(path: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(path)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")

    with pytest.raises(DataError, match=r"'\.txt'") as caught:
        load_dataset(path)

    assert ".npz" in str(caught.value.help)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown split 'tset'"):
        load_dataset("shapes", split="tset")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(0, 3), (3,), (2.0, 2.0)])
def test_an_impossible_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="height and width"):
        load_dataset("shapes", size=size)


def test_a_limit_takes_the_same_samples_each_time() -> None:
    first, again = (load_dataset("shapes", limit=30, seed=5) for _ in range(2))

    assert np.array_equal(first.images, again.images)
    assert first.labels is not None
    assert np.bincount(first.labels).tolist() == [3] * 10


def test_a_limit_beyond_the_set_is_the_whole_set() -> None:
    assert len(load_dataset("shapes", split="test", limit=10**9)) == 200


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 0"):
        load_dataset("shapes", limit=0)


def test_the_digits_need_no_download_and_splits_do_not_overlap() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    train, test = (load_dataset("digits", split=s) for s in ("train", "test"))

    assert len(train) + len(test) == 1797
    assert test.images.shape[1:] == (8, 8, 1)
    assert (train.images.min(), train.images.max()) == (0, 255)
    assert test.labels is not None
    assert min(np.bincount(test.labels)) >= 34  # a fifth of each class of about 180


def test_drawn_shapes_are_the_same_each_time_and_differ_between_splits() -> None:
    first, again = load_dataset("shapes"), load_dataset("shapes")
    test = load_dataset("shapes", split="test")

    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images[: len(test)], test.images)


def test_drawn_shapes_can_be_told_apart() -> None:
    train, test = load_dataset("shapes"), load_dataset("shapes", split="test")
    assert train.labels is not None
    assert test.labels is not None

    def spectrum(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # Magnitudes ignore where a shape stands, which a CNN learns and a neighbour cannot.
        magnitude = np.abs(np.fft.rfft2(images[..., 0].astype(float)))
        magnitude[:, 0, 0] = 0
        flat = np.log1p(magnitude).reshape(len(images), -1)
        unit: np.ndarray[Any, Any] = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        return unit

    nearest = (spectrum(test.images) @ spectrum(train.images).T).argmax(axis=1)

    # Chance is 0.1; a neighbour in the spectrum is a weak classifier, so half is plenty.
    assert np.mean(train.labels[nearest] == test.labels) > 0.5

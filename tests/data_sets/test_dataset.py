from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.data import Dataset
from edgewise.data.split import stratified_sample, stratified_split
from edgewise.errors import ConfigError, DataError, ShapeError


def dataset(**changes: Any) -> Dataset:
    fields: dict[str, Any] = {
        "name": "tiny",
        "images": np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1),
        "labels": np.array([0] * 15 + [1] * 5, dtype=np.int64),
        "class_names": ("many", "few"),
        "split": "all",
        "source": "made up",
        "licence": None,
    }
    return Dataset(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"images": np.zeros((2, 3, 3), np.uint8)}, "expected uint8", id="no channel"),
        pytest.param({"images": np.zeros((2, 3, 3, 4), np.uint8)}, "C 1 or 3", id="four channels"),
        pytest.param({"images": np.zeros((2, 3, 3, 1))}, "found float64", id="floats"),
        pytest.param({"images": np.zeros((0, 3, 3, 1), np.uint8)}, "at least one", id="no images"),
        pytest.param({"images": np.zeros((2, 0, 3, 1), np.uint8)}, "at least one", id="no rows"),
        pytest.param({"labels": np.zeros(19, np.int64)}, r"found int64 \[19\]", id="a label short"),
        pytest.param({"labels": np.zeros(20, np.int32)}, "found int32", id="narrow labels"),
    ],
)
def test_arrays_of_the_wrong_shape_or_dtype_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ShapeError, match=f"'tiny'.*{said}"):
        dataset(**changes)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_without_a_class_is_refused(label: int) -> None:
    with pytest.raises(DataError, match="expected 0 to 1"):
        dataset(labels=np.full(20, label))


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match="names a class twice"):
        dataset(class_names=("a", "a"))


def test_a_smaller_set_keeps_the_share_of_every_class() -> None:
    small = dataset().take(8, seed=0)

    assert small.labels is not None
    assert small.labels.tolist() == [0] * 6 + [1] * 2


def test_the_same_seed_takes_the_same_samples_and_another_seed_others() -> None:
    first, again, other = (dataset().take(10, seed=seed).images for seed in (3, 3, 4))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_images_stay_with_their_labels() -> None:
    small = dataset().take(9, seed=1)

    assert small.labels is not None
    assert np.array_equal(small.images[:, 0, 0, 0] >= 15, small.labels == 1)


def test_without_labels_any_samples_are_taken() -> None:
    assert len(dataset(labels=None, class_names=()).take(3, seed=0)) == 3


@pytest.mark.parametrize("n", [0, -1, 21, 2.0, True])
def test_an_impossible_number_of_samples_is_refused(n: Any) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 20 samples"):
        dataset().take(n, seed=0)


def test_held_out_samples_are_in_neither_both_nor_none() -> None:
    train, test = dataset().hold_out("train"), dataset().hold_out("test")

    assert (len(train), len(test)) == (16, 4)
    pixels = np.concatenate([train.images.ravel(), test.images.ravel()])
    assert sorted(pixels.tolist()) == list(range(20))
    assert "a fifth of each class is held out" in test.source


def test_a_set_too_small_to_hold_out_is_refused() -> None:
    two = dataset(images=np.zeros((2, 1, 1, 1), np.uint8), labels=np.array([0, 1]))

    with pytest.raises(DataError, match="too few"):
        two.hold_out("test")


def test_data_without_labels_cannot_be_held_out() -> None:
    with pytest.raises(DataError, match="no labels"):
        dataset(labels=None).hold_out("test")


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_a_stratified_sample_is_exact_and_each_class_within_one_of_its_share(
    labels: list[int], share: float, seed: int
) -> None:
    known = np.array(labels)
    n = max(1, round(share * known.size))

    chosen = stratified_sample(known, n, rng=np.random.default_rng(seed))

    assert chosen.size == np.unique(chosen).size == n
    for label in set(labels):
        exact = labels.count(label) * n / known.size
        assert abs(np.count_nonzero(known[chosen] == label) - exact) < 1


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_the_two_splits_are_disjoint_and_complete(labels: list[int]) -> None:
    parts = [stratified_split(np.array(labels), split=split) for split in ("train", "test")]

    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))

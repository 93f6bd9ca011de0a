from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.data import load_dataset
from edgewise.errors import DataError, ShapeError

IMAGES = np.arange(10 * 4 * 3, dtype=np.uint8).reshape(10, 4, 3)
LABELS = np.array([0, 1] * 5)


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(("x", "y"), [("images", "labels"), ("x", "y")])
def test_images_and_labels_are_read_and_split(tmp_path: Path, x: str, y: str) -> None:
    path = write(tmp_path / "set.npz", **{x: IMAGES, y: LABELS})

    train, test = (load_dataset(path, split=s) for s in ("train", "test"))

    assert (len(train), len(test)) == (8, 2)
    assert train.images.shape == (8, 4, 3, 1)
    assert train.class_names == ("0", "1")


def test_a_file_with_its_own_split_keeps_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "set.npz",
        x_train=IMAGES,
        y_train=LABELS,
        x_test=IMAGES[:3],
        y_test=LABELS[:3],
        class_names=np.array(["cat", "dog"]),
    )

    test = load_dataset(path, split="test")

    assert (len(test), test.split, test.class_names) == (3, "test", ("cat", "dog"))


def test_images_alone_are_a_set_without_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES)

    for path in (tmp_path / "images.npy", write(tmp_path / "set.npz", images=IMAGES)):
        dataset = load_dataset(path)

        assert dataset.labels is None
        assert dataset.split == "all"
        assert len(dataset) == 10


def test_floats_from_nought_to_one_are_scaled(tmp_path: Path) -> None:
    np.save(tmp_path / "unit.npy", np.array([[0.0, 0.5, 1.0]]))

    assert load_dataset(tmp_path / "unit.npy").images.ravel().tolist() == [0, 128, 255]


def test_whole_numbers_of_another_width_are_narrowed(tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.array([[0, 7, 255]]))

    assert load_dataset(tmp_path / "wide.npy").images.ravel().tolist() == [0, 7, 255]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        pytest.param(np.full((2, 3, 3), np.nan), "found nan", id="not a number"),
        pytest.param(np.full((2, 3, 3), np.inf), "found inf", id="infinite"),
        pytest.param(np.full((2, 3, 3), 1.5), "0..1 in float64, found 1.5", id="floats above one"),
        pytest.param(np.full((2, 3, 3), 256), "0..255 in int64, found 256", id="above a byte"),
        pytest.param(np.full((2, 3, 3), -1), "found -1", id="negative"),
        pytest.param(np.full((2, 3, 3), "a"), "found dtype <U1", id="strings"),
        pytest.param(np.ones((2, 3, 3), complex), "complex128", id="complex"),
        pytest.param(np.ones((2, 3, 3), bool), "dtype bool", id="booleans"),
        pytest.param(np.zeros((0, 3, 3), np.uint8), "is empty", id="empty"),
        pytest.param(np.zeros(3, np.uint8), r"found \[3\]", id="one axis"),
        pytest.param(np.zeros((2, 3, 8, 8), np.uint8), "C 1 or 3", id="channel first"),
        pytest.param(np.array([{}, None]), "Python objects", id="pickled objects"),
    ],
)
def test_arrays_that_are_no_images_are_refused(
    tmp_path: Path, images: np.ndarray[Any, Any], said: str
) -> None:
    np.save(tmp_path / "bad.npy", images)
    np.savez(tmp_path / "bad.npz", images=images, labels=np.zeros(len(images), np.int64))

    for name in ("bad.npy", "bad.npz"):
        with pytest.raises(DataError, match=f"{name}.*{said}") as caught:
            load_dataset(tmp_path / name)

        assert caught.value.help is not None


@pytest.mark.parametrize(
    ("labels", "error", "said"),
    [
        pytest.param(np.zeros(9, np.int64), ShapeError, "one per image", id="one too few"),
        pytest.param(np.zeros(10), ShapeError, "whole numbers", id="floats"),
        pytest.param(np.zeros((10, 1), int), ShapeError, "whole numbers", id="two axes"),
        pytest.param(np.full(10, -1), DataError, "found -1", id="negative"),
        pytest.param(np.full(10, 10**12), DataError, "below 65536", id="enormous"),
    ],
)
def test_labels_that_are_no_classes_are_refused(
    tmp_path: Path, labels: np.ndarray[Any, Any], error: type[DataError], said: str
) -> None:
    with pytest.raises(error, match=said):
        load_dataset(write(tmp_path / "bad.npz", images=IMAGES, labels=labels))


def test_a_label_beyond_the_named_classes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.npz", images=IMAGES, labels=LABELS, class_names=np.array(["only"]))

    with pytest.raises(DataError, match=r"\(1 classes\), found 0 to 1"):
        load_dataset(path)


def test_class_names_that_are_no_strings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.npz", images=IMAGES, labels=LABELS, class_names=np.arange(2))

    with pytest.raises(ShapeError, match="list of strings"):
        load_dataset(path)


def test_a_file_without_images_says_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "other.npz", weights=IMAGES)

    with pytest.raises(DataError, match="it has 'weights'"):
        load_dataset(path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 50, 200])
@pytest.mark.parametrize("name", ["cut.npy", "cut.npz"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str, kept_bytes: int) -> None:
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, IMAGES)
    else:
        np.savez(path, images=IMAGES)
    path.write_bytes(path.read_bytes()[:kept_bytes])

    with pytest.raises(DataError, match=name):
        load_dataset(path)


def test_a_changed_byte_in_an_archive_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "set.npz", images=IMAGES)
    raw = bytearray(path.read_bytes())
    raw[raw.index(IMAGES.tobytes()) + 3] ^= 1
    path.write_bytes(raw)

    with pytest.raises(DataError, match="CRC"):
        load_dataset(path)


def test_a_header_that_claims_terabytes_takes_no_memory(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    (tmp_path / "bomb.npy").write_bytes(header.getvalue())
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("images.npy", header.getvalue())

    for name in ("bomb.npy", "bomb.npz"):
        with pytest.raises(DataError, match="the limit is 4 GiB"):
            load_dataset(tmp_path / name)

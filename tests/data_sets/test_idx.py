from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from edgewise.data import load_dataset
from edgewise.data.idx import parse_idx, read_bytes
from edgewise.errors import DataError, ShapeError

HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])


def test_an_array_is_read_with_its_shape_and_can_be_written_to() -> None:
    array = parse_idx(HEADER + bytes(range(6)), where="here")

    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array.flags.writeable


def test_big_endian_numbers_arrive_in_the_order_of_this_machine() -> None:
    array = parse_idx(bytes([0, 0, 0x0C, 1, 0, 0, 0, 1, 0, 0, 1, 2]), where="here")

    assert array.dtype == np.int32
    assert array.tolist() == [258]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param(b"", "an empty file", id="nothing at all"),
        pytest.param(b"\x89PNG1234", "found 89504e47", id="another format"),
        pytest.param(bytes([0, 0, 7, 1, 0, 0, 0, 0]), "found 00000701", id="unknown type code"),
        pytest.param(HEADER[:9], "header of 12 bytes, found 9", id="header cut short"),
        pytest.param(HEADER + bytes(5), "truncated: its header .* 18 bytes, found 17", id="cut"),
        pytest.param(HEADER + bytes(7), "bytes left over", id="too long"),
        pytest.param(
            bytes([0, 0, 8, 3]) + b"\xff" * 12, "is truncated", id="a header that claims exabytes"
        ),
    ],
)
def test_damaged_bytes_are_refused_with_what_was_found(raw: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"somewhere .*{said}") as caught:
        parse_idx(raw, where="somewhere")

    assert caught.value.help is not None


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(bytes(1000))[:-9])

    with pytest.raises(DataError, match=r"cut\.gz is a truncated gzip file"):
        read_bytes(path)


def test_a_corrupted_gzip_file_is_refused(tmp_path: Path) -> None:
    raw = bytearray(gzip.compress(bytes(range(256)) * 4))
    raw[20:24] = b"\xff\xff\xff\xff"
    path = tmp_path / "bad.gz"
    path.write_bytes(raw)

    with pytest.raises(DataError, match=r"bad\.gz"):
        read_bytes(path)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_bytes(tmp_path)


def test_a_folder_of_idx_files_is_read_compressed_or_not(idx_folder: Path) -> None:
    train, test = (load_dataset(idx_folder, split=s) for s in ("train", "test"))

    assert train.images.shape == (20, 4, 3, 1)
    assert (len(test), test.split, test.labels.dtype) == (10, "test", np.int64)  # type: ignore[union-attr]
    assert train.class_names == tuple("0123456789")


def test_a_missing_label_file_is_named(idx_folder: Path) -> None:
    (idx_folder / "t10k-labels-idx1-ubyte").unlink()

    with pytest.raises(DataError, match="has no t10k-labels-idx1-ubyte"):
        load_dataset(idx_folder, split="test")


def test_a_label_outside_the_classes_is_refused(idx_folder: Path) -> None:
    path = idx_folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + bytes([10]))

    with pytest.raises(DataError, match=r"expected 0 to 9 \(10 classes\), found 0 to 10"):
        load_dataset(idx_folder, split="test")


def test_labels_of_another_split_are_refused(idx_folder: Path) -> None:
    path = idx_folder / "t10k-labels-idx1-ubyte"
    path.write_bytes((idx_folder / "train-labels-idx1-ubyte").read_bytes())

    with pytest.raises(ShapeError, match=r"expected uint8 \[10\], one per image, found .*\[20\]"):
        load_dataset(idx_folder, split="test")


def test_an_image_file_that_holds_labels_is_refused(idx_folder: Path) -> None:
    labels = (idx_folder / "train-labels-idx1-ubyte").read_bytes()
    (idx_folder / "train-images-idx3-ubyte.gz").write_bytes(labels)

    with pytest.raises(ShapeError, match=r"expected uint8 \[N, H, W\]"):
        load_dataset(idx_folder)

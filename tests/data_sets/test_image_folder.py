from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgewise.data import load_dataset
from edgewise.data.image_file import read_image
from edgewise.errors import DataError, ShapeError

WriteImage = Callable[..., Path]


def png_that_claims(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    header = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + header


def test_folders_are_classes_and_a_fifth_is_held_out(
    tmp_path: Path, write_image: WriteImage
) -> None:
    for name in ("dog", "cat"):
        for index in range(5):
            write_image(tmp_path / name / f"{index}.png")
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"not an image")
    (tmp_path / "cat" / "notes.txt").write_text("ignored")

    train, test = (load_dataset(tmp_path, split=s) for s in ("train", "test"))

    assert train.class_names == ("cat", "dog")
    assert (len(train), len(test)) == (8, 2)
    assert train.images.shape == (8, 6, 5, 3)


def test_train_and_test_folders_are_kept_apart(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "train" / "cat" / "a.jpg")
    write_image(tmp_path / "train" / "dog" / "b.bmp")
    write_image(tmp_path / "test" / "dog" / "c.webp")

    test = load_dataset(tmp_path, split="test")

    assert test.labels is not None
    assert test.labels.tolist() == [1]
    assert test.class_names == ("cat", "dog")


def test_a_test_class_that_was_never_trained_is_refused(
    tmp_path: Path, write_image: WriteImage
) -> None:
    write_image(tmp_path / "train" / "cat" / "a.png")
    write_image(tmp_path / "test" / "cow" / "a.png")

    with pytest.raises(DataError, match="cow"):
        load_dataset(tmp_path, split="test")


def test_a_flat_folder_has_no_labels_and_no_split(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "a.png", grey=True)
    write_image(tmp_path / "b.png")

    dataset = load_dataset(tmp_path, split="test")

    assert dataset.labels is None
    assert dataset.split == "all"
    assert dataset.images[0, 0, 0].tolist() == [100, 100, 100]  # grey repeated beside colour
    assert dataset.images[1, 0, 0].tolist() == [200, 100, 50]


def test_one_image_is_a_set_of_one(tmp_path: Path, write_image: WriteImage) -> None:
    dataset = load_dataset(write_image(tmp_path / "a.PNG", grey=True))

    assert dataset.images.shape == (1, 6, 5, 1)


def test_mixed_sizes_are_refused_unless_a_size_is_given(
    tmp_path: Path, write_image: WriteImage
) -> None:
    write_image(tmp_path / "a.png", size=(6, 5))
    write_image(tmp_path / "b.png", size=(7, 7))

    with pytest.raises(ShapeError, match=r"a\.png is 6 x 5 pixels, .*b\.png is 7 x 7") as caught:
        load_dataset(tmp_path)

    assert "size=(height, width)" in str(caught.value.help)
    resized = load_dataset(tmp_path, size=(4, 3)).images
    assert resized.shape == (2, 4, 3, 3)
    assert resized[1, 2, 2].tolist() == [200, 100, 50]


def test_damaged_images_are_left_out_when_asked_and_labels_stay_with_their_images(
    tmp_path: Path, write_image: WriteImage, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ant", "bee"):
        for i in range(5):
            write_image(tmp_path / "train" / name / f"{i}.png", size=(8, 8))
            write_image(tmp_path / "test" / name / f"{i}.png", size=(8, 8))
    (tmp_path / "train" / "ant" / "2.png").write_bytes(b"broken")

    data = load_dataset(tmp_path, split="train", damaged="skip")

    assert data.labels is not None
    assert data.labels.tolist() == [0] * 4 + [1] * 5
    assert len(data.images) == 9
    assert "1 damaged ones left out" in data.source
    assert "2.png" in caplog.text


def test_nothing_but_damaged_images_is_an_error_even_when_they_may_be_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").write_bytes(b"broken")

    with pytest.raises(DataError, match="1 of 1 images cannot be read"):
        load_dataset(tmp_path, damaged="skip")


def test_every_damaged_image_is_listed(tmp_path: Path, write_image: WriteImage) -> None:
    good = write_image(tmp_path / "good.png", size=(40, 40))
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:60])
    (tmp_path / "empty.bmp").touch()

    with pytest.raises(DataError, match=r"3 of 4 images cannot be read") as caught:
        load_dataset(tmp_path)

    assert all(name in str(caught.value) for name in ("text.jpg", "cut.png", "empty.bmp"))


def test_a_long_list_of_damaged_images_is_cut(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "good.png")
    for index in range(7):
        (tmp_path / f"{index}.png").touch()

    with pytest.raises(DataError, match="and 2 more"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("make_class_folder", [False, True])
def test_an_empty_folder_is_refused(tmp_path: Path, make_class_folder: bool) -> None:  # noqa: FBT001
    if make_class_folder:
        (tmp_path / "cat").mkdir()

    with pytest.raises(DataError, match="holds no images"):
        load_dataset(tmp_path)


def test_images_beside_class_folders_are_refused(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "cat" / "a.png")
    write_image(tmp_path / "lost.png")

    with pytest.raises(DataError, match=r"such as lost\.png"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(
    ("width", "height"),
    [
        pytest.param(8_000, 8_000, id="above our limit"),
        pytest.param(12_000, 12_000, id="where Pillow warns"),
        pytest.param(60_000, 60_000, id="where Pillow refuses"),
    ],
)
def test_an_enormous_image_is_refused_before_it_is_decoded(
    tmp_path: Path, width: int, height: int
) -> None:
    pytest.importorskip("PIL", reason="image files need Pillow")
    path = tmp_path / "bomb.png"
    path.write_bytes(png_that_claims(width, height))

    with pytest.raises(DataError, match=r"bomb\.png"):
        read_image(path)


def test_other_pixel_formats_become_grey_or_colour(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    made = {
        "palette": image_module.new("RGB", (2, 2), (255, 0, 0)).convert("P"),
        "transparent": image_module.new("RGBA", (2, 2), (255, 0, 0, 0)),
        "bits": image_module.new("1", (2, 2), 1),
        "deep": image_module.fromarray(np.full((2, 2), 0xABCD, dtype=np.uint16)),
    }
    for name, image in made.items():
        image.save(tmp_path / f"{name}.png")

    read = {name: read_image(tmp_path / f"{name}.png")[0, 0].tolist() for name in made}

    assert read == {
        "palette": [255, 0, 0],
        "transparent": [255, 0, 0],
        "bits": [255],
        "deep": [0xAB],
    }


def test_a_photo_taken_sideways_is_turned(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    image = image_module.new("L", (4, 2), 0)
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image.save(tmp_path / "photo.jpg", exif=exif)

    assert read_image(tmp_path / "photo.jpg").shape == (4, 2, 1)


def test_a_missing_image_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="image files need Pillow")

    with pytest.raises(DataError, match=r"none\.png"):
        read_image(tmp_path / "none.png")

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.data import Preprocess, check_input, read_inputs
from edgewise.errors import ConfigError, DataError, ShapeError

WriteImage = Callable[..., Path]
SHAPE = (1, 3, 4, 4)
TO_MODEL = Preprocess(size=(4, 4), mean=(0.0,) * 3, std=(1.0,) * 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_numbers_are_cast_to_float32_without_scaling(dtype: type[np.generic]) -> None:
    checked = check_input(np.full(SHAPE, 7, dtype=dtype), expected_shape=SHAPE)

    assert checked.dtype == np.float32
    assert checked.flags.c_contiguous
    assert float(checked.max()) == 7


def test_an_array_that_is_right_already_is_not_copied() -> None:
    x = np.zeros(SHAPE, dtype=np.float32)

    assert check_input(x, expected_shape=SHAPE) is x


def test_one_sample_gets_a_batch_axis() -> None:
    assert check_input(np.zeros(SHAPE[1:]), expected_shape=SHAPE).shape == SHAPE


def test_a_free_length_takes_any_batch() -> None:
    assert len(check_input(np.zeros((5, 3, 4, 4)), expected_shape=(None, 3, 4, 4))) == 5


@pytest.mark.parametrize(
    ("x", "said"),
    [
        pytest.param(np.zeros(SHAPE, complex), "found dtype complex128", id="complex"),
        pytest.param(np.zeros(SHAPE, object), "found dtype object", id="objects"),
        pytest.param(np.full(SHAPE, "a"), "found dtype <U1", id="strings"),
        pytest.param(np.zeros(SHAPE, np.int64), "found dtype int64", id="wide whole numbers"),
        pytest.param(np.zeros(SHAPE, bool), "found dtype bool", id="booleans"),
        pytest.param(None, "found dtype object", id="nothing"),
        pytest.param([[1.0], [1.0, 2.0]], "is not an array", id="ragged list"),
        pytest.param(np.zeros((1, 3, 4, 5)), r"expected shape \[1, 3, 4, 4\]", id="too wide"),
        pytest.param(np.zeros((2, 3, 4, 4)), r"found \[2, 3, 4, 4\]", id="a batch too large"),
        pytest.param(np.zeros((1, 4, 4, 3)), r"transpose\(0, 3, 1, 2\)", id="channel last"),
        pytest.param(np.float32(1), r"found \[\]", id="a scalar"),
    ],
)
def test_what_the_model_does_not_take_is_refused_by_name(x: Any, said: str) -> None:
    with pytest.raises(ShapeError, match="pixels") as caught:
        check_input(x, expected_shape=SHAPE, name="pixels")

    assert caught.match(said)
    assert caught.value.help is not None


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ShapeError, match="is empty"):
        check_input(np.zeros((0, 3, 4, 4)), expected_shape=(None, 3, 4, 4))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([np.nan], id="not a number"),
        pytest.param([np.inf], id="infinite"),
        pytest.param([np.inf, -np.inf], id="infinities that cancel"),
        pytest.param([1e39], id="beyond float32"),
    ],
)
def test_values_that_poison_a_sum_are_counted(values: list[float]) -> None:
    x = np.zeros(SHAPE)
    x.flat[: len(values)] = values

    with pytest.raises(DataError, match=f"input holds {len(values)} values of 48"):
        check_input(x, expected_shape=SHAPE)


def test_large_finite_values_pass_although_their_sum_overflows() -> None:
    x = np.full(SHAPE, 3e38, dtype=np.float32)

    assert check_input(x, expected_shape=SHAPE) is x


def test_images_and_folders_are_read_in_order(tmp_path: Path, write_image: WriteImage) -> None:
    single = write_image(tmp_path / "z.png")
    for name in ("b", "a"):
        write_image(tmp_path / "folder" / "deeper" / f"{name}.jpg", grey=True, size=(9, 3))

    read = list(
        read_inputs([single, str(tmp_path / "folder")], preprocess=TO_MODEL, expected_shape=SHAPE)
    )

    assert [Path(name).name for name, _ in read] == ["z.png", "a.jpg", "b.jpg"]
    assert all(x.shape == SHAPE and x.dtype == np.float32 for _, x in read)
    np.testing.assert_allclose(read[0][1][0, :, 0, 0], [200, 100, 50], rtol=1e-5)


def test_pixels_in_arrays_are_preprocessed_and_floats_are_not(tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", np.full((2, 8, 8), 9, dtype=np.uint8))
    np.savez(tmp_path / "ready.npz", x=np.full((2, 3, 4, 4), 0.5))

    read = dict(
        read_inputs(
            [tmp_path / "pixels.npy", tmp_path / "ready.npz"],
            preprocess=TO_MODEL,
            expected_shape=SHAPE,
        )
    )

    assert [Path(name).name for name in read] == [
        "pixels.npy[0]",
        "pixels.npy[1]",
        "ready.npz[0]",
        "ready.npz[1]",
    ]
    assert [float(x.mean()) for x in read.values()] == pytest.approx([9, 9, 0.5, 0.5])


def test_without_preprocessing_an_image_must_fit(tmp_path: Path, write_image: WriteImage) -> None:
    path = write_image(tmp_path / "a.png", size=(4, 4))

    ((_, x),) = read_inputs([path], preprocess=None, expected_shape=SHAPE)
    assert x[0, :, 0, 0].tolist() == [200, 100, 50]

    with pytest.raises(ShapeError, match=r"a\.png: expected shape \[1, 3, 9, 9\]"):
        list(read_inputs([path], preprocess=None, expected_shape=(1, 3, 9, 9)))


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        pytest.param("nan.npy", np.full(SHAPE, np.nan), "NaN", id="not a number"),
        pytest.param("wide.npy", np.zeros((1, 3, 4, 5)), "expected shape", id="wrong shape"),
        pytest.param("none.npy", np.zeros((0, 3, 4, 4)), "is empty", id="empty"),
        pytest.param("objects.npy", np.array([{}]), "Python objects", id="objects"),
        pytest.param("odd.npy", np.zeros(5, np.uint8), r"found \[5\]", id="pixels in a row"),
    ],
)
def test_a_bad_array_file_is_named(
    tmp_path: Path, name: str, array: np.ndarray[Any, Any], said: str
) -> None:
    np.save(tmp_path / name, array)

    with pytest.raises(DataError, match=f"{name}.*{said}"):
        list(read_inputs([tmp_path / name], preprocess=TO_MODEL, expected_shape=SHAPE))


def test_mistakes_in_names_show_before_the_first_sample(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.onnx").touch()

    for path, said in (
        ("missing.png", "does not exist"),
        ("empty", "holds no images"),
        ("model.onnx", "'.onnx'"),
    ):
        with pytest.raises(DataError, match=said):
            read_inputs([tmp_path / path], preprocess=None, expected_shape=SHAPE)


def test_no_input_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="at least one input"):
        read_inputs([], preprocess=None, expected_shape=SHAPE)


def test_a_preprocessing_for_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expects \[1, 1, 28, 28\], its preprocessing makes"):
        read_inputs(["a.png"], preprocess=TO_MODEL, expected_shape=(1, 1, 28, 28))


def test_a_damaged_image_is_refused_when_its_turn_comes(
    tmp_path: Path, write_image: WriteImage
) -> None:
    good = write_image(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(good.read_bytes()[:40])

    samples = read_inputs([tmp_path], preprocess=TO_MODEL, expected_shape=SHAPE)

    next(samples)
    with pytest.raises(DataError, match=r"b\.png"):
        next(samples)

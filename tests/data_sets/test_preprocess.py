from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.data import Preprocess
from edgewise.data.resize import resize_bilinear
from edgewise.errors import ConfigError, ShapeError

TORCH_TOLERANCE = 1e-4 * 255  # both interpolate in float32; the order of the sums differs


def preprocess(**changes: Any) -> Preprocess:
    fields: dict[str, Any] = {"size": (4, 4), "mean": (0.0,), "std": (1.0,), "channels": 1}
    return Preprocess(**(fields | changes))


@pytest.mark.parametrize(
    ("size_in", "size_out"),
    [
        pytest.param((28, 28), (224, 224), id="eight times larger"),
        pytest.param((100, 60), (33, 47), id="smaller"),
        pytest.param((5, 9), (9, 5), id="one axis each way"),
        pytest.param((1, 1), (3, 2), id="from one pixel"),
        pytest.param((7, 8), (1, 1), id="to one pixel"),
        pytest.param((7, 8), (7, 8), id="unchanged"),
        pytest.param((7, 8), (7, 3), id="one axis unchanged"),
    ],
)
def test_the_result_is_that_of_torch(
    size_in: tuple[int, int], size_out: tuple[int, int], rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle here")
    images = rng.integers(0, 256, size=(2, 3, *size_in), dtype=np.uint8)

    expected = torch.nn.functional.interpolate(
        torch.from_numpy(images.astype(np.float32)),
        size=size_out,
        mode="bilinear",
        align_corners=False,
    ).numpy()

    found = resize_bilinear(images, size=size_out)
    np.testing.assert_allclose(found, expected, atol=TORCH_TOLERANCE)
    assert found.dtype == np.float32


@given(value=st.integers(0, 255), size_in=st.integers(1, 40), size_out=st.integers(1, 40))
def test_a_flat_image_stays_flat_at_any_size(value: int, size_in: int, size_out: int) -> None:
    flat = np.full((1, 1, size_in, size_in), value, dtype=np.uint8)

    np.testing.assert_allclose(resize_bilinear(flat, size=(size_out, size_out)), value, rtol=1e-6)


def test_doubling_a_ramp_interpolates_at_half_pixel_centres() -> None:
    found = resize_bilinear(np.array([[0, 100]], dtype=np.uint8), size=(1, 4))

    assert found.tolist() == [[0.0, 25.0, 75.0, 100.0]]


def test_an_unchanged_size_still_gives_a_copy() -> None:
    images = np.zeros((1, 1, 4, 4), dtype=np.float32)

    resize_bilinear(images, size=(4, 4))[:] = 1

    assert images.max() == 0


def test_grey_is_repeated_and_scaled_for_each_channel() -> None:
    to_rgb = preprocess(channels=3, mean=(127.0, 0.0, 255.0), std=(128.0, 255.0, 1.0))

    found = to_rgb(np.full((2, 9, 9, 1), 255, dtype=np.uint8))

    assert found.shape == (2, 3, 4, 4)
    assert found.flags.c_contiguous
    np.testing.assert_allclose(found[1, :, 0, 0], [1.0, 1.0, 0.0], rtol=1e-6)


def test_colour_becomes_luma() -> None:
    images = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    images[..., 1] = 100

    np.testing.assert_allclose(preprocess()(images), 58.7, rtol=1e-6)


def test_channels_keep_their_order() -> None:
    images = np.broadcast_to(np.array([10, 20, 30], dtype=np.uint8), (1, 2, 2, 3))
    found = preprocess(channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)(images)

    np.testing.assert_allclose(found[0, :, 1, 1], [10, 20, 30], rtol=1e-6)


def test_a_batch_is_its_samples(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(3, 7, 6, 1), dtype=np.uint8)
    whole = preprocess()(images)

    for index in range(3):
        single = preprocess()(images[index : index + 1])
        np.testing.assert_allclose(single[0], whole[index], rtol=1e-5)


def test_a_record_survives_json() -> None:
    original = preprocess(channels=3, mean=(123.675, 116.28, 103.53), std=(58.0, 57.0, 57.5))

    assert Preprocess.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"size": (0, 4)}, "size of two whole numbers", id="no rows"),
        pytest.param({"size": (4.0, 4.0)}, "size of two whole numbers", id="size in floats"),
        pytest.param({"size": (4,)}, "size of two whole numbers", id="one length"),
        pytest.param({"channels": 4}, "1 or 3 channels", id="four channels"),
        pytest.param({"mean": (0.0, 0.0)}, "1 finite numbers as mean", id="too many means"),
        pytest.param({"std": (float("nan"),)}, "1 finite numbers as std", id="std not a number"),
        pytest.param({"std": (0.0,)}, "std above zero", id="division by zero"),
        pytest.param({"resample": "cubic"}, "unknown way to resample", id="unknown resampling"),
        pytest.param({"layout": "NHWC"}, "unknown layout", id="unknown layout"),
    ],
)
def test_an_impossible_record_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preprocess(**changes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"size": [4, 4]}, "missing or mistyped field", id="no mean"),
        pytest.param(
            {"size": [4, 4], "mean": [0], "std": ["a"], "channels": 1}, "mistyped", id="a letter"
        ),
        pytest.param(
            {"sise": [4, 4]}, "unknown field 'sise'.*\nhelp: did you mean 'size'", id="typo"
        ),
    ],
)
def test_a_damaged_json_record_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Preprocess.from_json(fields)


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(np.zeros((1, 4, 4, 1)), id="floats"),
        pytest.param(np.zeros((4, 4, 1), np.uint8), id="no batch"),
        pytest.param(np.zeros((1, 3, 4, 4), np.uint8), id="channel first"),
        pytest.param(np.zeros((0, 4, 4, 1), np.uint8), id="empty batch"),
        pytest.param(np.zeros((1, 4, 0, 1), np.uint8), id="no columns"),
    ],
)
def test_arrays_that_are_no_pixels_are_refused(images: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ShapeError, match="found"):
        preprocess()(images)

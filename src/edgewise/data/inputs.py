"""What a user asks a model about: files on the command line, arrays from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.data.array_file import npz_names, read_npy, read_npz, to_pixels
from edgewise.data.array_set import IMAGE_NAMES, find_name
from edgewise.data.image_file import IMAGE_SUFFIXES, find_images, is_image, read_image
from edgewise.data.preprocess import Preprocess
from edgewise.errors import ConfigError, DataError, ShapeError

_ARRAY_SUFFIXES = frozenset({".npz", ".npy"})
_ACCEPTED = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint8))


def read_inputs(
    paths: Sequence[str | Path],
    *,
    preprocess: Preprocess | None,
    expected_shape: Sequence[int | None],
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Read images, folders of images, ``.npz`` and ``.npy`` files, one sample at a time.

    Missing files and unknown kinds are refused before the first sample; damage inside a file when
    its turn comes. Pixels (image files, uint8 arrays) go through ``preprocess``; floating-point
    arrays are taken as prepared, [N, C, H, W]. Without ``preprocess`` pixels of image files are
    only cast to float32 0..255, and uint8 arrays must have the model's shape.

    Args:
        paths: At least one. Folders are searched with their subfolders, in order of name.
        preprocess: What the model wants done to pixels; ``None`` for nothing.
        expected_shape: The model's input, batch first; ``None`` where a length is free.

    Returns:
        Name and array [1, C, H, W] of each sample. The name is the path; samples of an array
        file are numbered from 0, as in ``faces.npz[3]``.

    Raises:
        DataError: A file is missing, damaged, enormous, empty, or holds NaN or infinity.
        ShapeError: An array does not have the shape or dtype that the model expects.
        ConfigError: ``preprocess`` does not make what the model expects.
    """
    sample_shape = (1, *expected_shape[1:])
    if preprocess is not None and not _fits((1, *preprocess.output_shape), sample_shape):
        raise ConfigError(
            f"the model expects {_written(sample_shape)}, its preprocessing makes "
            f"{_written((1, *preprocess.output_shape))}",
            help="use the preprocessing that was saved with the model",
        )
    files = [file for path in paths for file in _files_at(Path(path))]
    if not files:
        raise DataError("expected at least one input, found none", help="name an image or a folder")
    return _samples(files, preprocess=preprocess, sample_shape=sample_shape)


def check_input(
    x: npt.ArrayLike, *, expected_shape: Sequence[int | None], name: str = "input"
) -> npt.NDArray[np.float32]:
    """A raw array as the float32 batch a model takes, or an error that says why not.

    float32, float64 and uint8 are accepted and cast to float32 without scaling; every other dtype
    is refused, because silently rounding whole numbers or parsing strings hides mistakes. One
    sample without the batch axis gets one. Cheap enough for every request: the array is read once.

    Args:
        x: One sample or a batch.
        expected_shape: The model's input, batch first; ``None`` where a length is free.
        name: What to call the array in messages: a file, or the model's name for the input.

    Returns:
        C-contiguous float32; ``x`` itself where it is that already, so do not write to it.

    Raises:
        ShapeError: Another dtype or shape, or an empty array.
        DataError: NaN or infinity, or a float64 beyond the range of float32.

    Example:
        >>> check_input(np.zeros((3, 8, 8)), expected_shape=(None, 3, 8, 8)).shape
        (1, 3, 8, 8)
    """
    try:
        array: npt.NDArray[Any] = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors with gradients
        raise ShapeError(
            f"{name} is not an array: {error}", help="pass a numpy array of float32"
        ) from error
    if array.dtype not in _ACCEPTED:
        raise ShapeError(
            f"{name}: expected float32, float64 or uint8, found dtype {array.dtype}",
            help="cast it on purpose: x.astype('float32')",
        )
    if array.ndim == len(expected_shape) - 1:
        array = array[np.newaxis]
    if not _fits(array.shape, expected_shape):
        raise ShapeError(
            f"{name}: expected shape {_written(expected_shape)}, found {_written(np.shape(array))}",
            help=_shape_help(array.shape, expected_shape),
        )
    if array.size == 0:
        raise ShapeError(
            f"{name} is empty: its shape is {_written(array.shape)}",
            help="pass at least one sample",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        checked = np.ascontiguousarray(array, dtype=np.float32)
        # One NaN or infinity makes the sum not finite, and summing writes no mask of the array's
        # size. A finite array whose sum overflows is told apart by the slow check, then rarely run.
        finite = bool(np.isfinite(checked.sum())) or bool(np.isfinite(checked).all())
    if not finite:
        raise DataError(
            f"{name} holds {int(np.count_nonzero(~np.isfinite(checked)))} values of "
            f"{checked.size} that are NaN, infinite or beyond the range of float32",
            help="clean the input: np.nan_to_num(x), or find where they come from",
        )
    return checked


def _files_at(path: Path) -> list[Path]:
    """The files that one argument names."""
    if path.is_dir():
        files = find_images(path.rglob("*"))
        if not files:
            raise DataError(
                f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})",
                help="name a folder of images, or a .npz file",
            )
        return files
    if not path.exists():
        raise DataError(f"{path} does not exist", help="check the path")
    if not is_image(path) and path.suffix not in _ARRAY_SUFFIXES:
        raise DataError(
            f"{path} is not a kind of file that holds inputs: its name ends in "
            f"{path.suffix or 'nothing'!r}",
            help=f"use one of {', '.join(sorted(IMAGE_SUFFIXES | _ARRAY_SUFFIXES))}",
        )
    return [path]


def _samples(
    files: Sequence[Path], *, preprocess: Preprocess | None, sample_shape: Sequence[int | None]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for path in files:
        if is_image(path):
            pixels = read_image(path)[np.newaxis]  # [1, H, W, C]
            ready = preprocess(pixels) if preprocess else pixels.transpose(0, 3, 1, 2)
            yield str(path), check_input(ready, expected_shape=sample_shape, name=str(path))
        else:
            array = _read_array(path)
            if preprocess is not None and array.dtype == np.uint8:
                images = to_pixels(array, where=str(path))
                for index in range(len(images)):
                    yield f"{path}[{index}]", preprocess(images[index : index + 1])
            else:
                batch = check_input(array, expected_shape=(None, *sample_shape[1:]), name=str(path))
                for index in range(len(batch)):
                    yield f"{path}[{index}]", batch[index : index + 1]


def _read_array(path: Path) -> npt.NDArray[Any]:
    if path.suffix == ".npy":
        return read_npy(path)
    names = npz_names(path)
    name = names[0] if len(names) == 1 else find_name(names, (*IMAGE_NAMES, "x_test"), where=path)
    return read_npz(path, name)


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or want == have for have, want in zip(shape, expected, strict=True)
    )


def _written(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if length is None else str(length) for length in shape) + "]"


def _shape_help(shape: Sequence[int], expected: Sequence[int | None]) -> str:
    if len(shape) == 4 == len(expected) and _fits([shape[i] for i in (0, 3, 1, 2)], expected):
        return "the channel is last; move it: x.transpose(0, 3, 1, 2)"
    return "resize or reshape the input to what the model expects"

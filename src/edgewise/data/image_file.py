"""Read one image file into pixels, through Pillow."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgewise.data.limits import check_image_pixels
from edgewise.data.resize import resize_bilinear
from edgewise.errors import ConfigError, DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
_GREY_MODES = frozenset({"1", "L", "LA", "La"})
_WIDE_MODES = frozenset({"I", "F"})


def is_image(path: Path) -> bool:
    """Whether the name says so and the file is not hidden."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def find_images(paths: Iterable[Path]) -> list[Path]:
    """The image files among the paths, by name, in a fixed order."""
    return sorted(path for path in paths if is_image(path) and path.is_file())


def read_image(path: Path, *, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Decode one file.

    The orientation that a camera recorded is applied, transparency is dropped, palettes and CMYK
    become RGB, 16-bit grey keeps its upper byte, and of an animation the first picture is read.

    Args:
        path: PNG, JPEG, BMP or WebP.
        size: Height and width to resize to, bilinear; ``None`` keeps the file's.

    Returns:
        uint8 [H, W, C], C = 1 for grey files and 3 for all others.

    Raises:
        DataError: The file is missing, damaged, truncated, not an image, or enormous.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs Pillow, which is not installed",
            help="pip install 'edgewise[data]'",
        ) from error
    try:
        with Image.open(path) as stored:
            check_image_pixels(stored.height, stored.width, where=str(path))
            _check_mode(stored.mode, where=str(path))
            image = ImageOps.exif_transpose(stored)
            if image.mode.startswith("I;16"):
                pixels = (np.asarray(image) >> 8).astype(np.uint8)
            else:
                pixels = np.array(image.convert("L" if image.mode in _GREY_MODES else "RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{path} is enormous: {error}", help="scale the image down first"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path} is not an image that Pillow can read", help="check or replace the file"
        ) from error
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        # Pillow's decoders raise all of these for damaged files.
        raise DataError(
            f"cannot read the image {path}: {error}", help="replace the file"
        ) from error
    pixels = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels  # [H, W, C]
    if size is None or pixels.shape[:2] == size:
        return pixels
    resized = resize_bilinear(pixels.transpose(2, 0, 1), size=size)  # [C, h, w]
    return np.rint(resized).astype(np.uint8).transpose(1, 2, 0)


def _check_mode(mode: str, *, where: str) -> None:
    if mode in _WIDE_MODES:
        raise DataError(
            f"{where} stores 32-bit pixels (mode {mode!r}); expected 8 or 16 bits",
            help="convert the image to 8 bits per channel",
        )

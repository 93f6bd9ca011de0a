"""How large an input may be before it is refused, so that a bad file cannot eat the memory."""

from __future__ import annotations

from edgewise.errors import DataError
from edgewise.units import format_bytes

MAX_IMAGE_PIXELS = 50_000_000
"""Pixels (height times width) of one image file: larger than any phone camera's usual photo."""

MAX_ARRAY_BYTES = 4 * 1024**3
"""Uncompressed bytes of one array, whether read from a file or stacked from a folder."""


def check_array_bytes(size_bytes: int, *, where: str) -> None:
    """Refuse an array above ``MAX_ARRAY_BYTES`` before memory is taken for it.

    Args:
        size_bytes: What the array would take, uncompressed.
        where: The file, folder or argument, for the message.

    Raises:
        DataError: The array is larger than the limit.
    """
    if size_bytes > MAX_ARRAY_BYTES:
        raise DataError(
            f"{where} would take {format_bytes(size_bytes)} of memory; "
            f"the limit is {format_bytes(MAX_ARRAY_BYTES)}",
            help="split the data into smaller files, or store smaller images",
        )


def check_image_pixels(height: int, width: int, *, where: str) -> None:
    """Refuse an image above ``MAX_IMAGE_PIXELS`` before it is decoded.

    Args:
        height: Rows.
        width: Columns.
        where: The file, for the message.

    Raises:
        DataError: The image has more pixels than the limit.
    """
    if height * width > MAX_IMAGE_PIXELS:
        raise DataError(
            f"{where} has {height} x {width} pixels; the limit is {MAX_IMAGE_PIXELS} pixels",
            help="scale the image down first",
        )

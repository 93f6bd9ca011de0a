"""How pixels become what a model takes: channels, size, scale. Saved with the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.data.limits import check_image_pixels
from edgewise.data.resize import resize_bilinear
from edgewise.errors import ConfigError, ShapeError, nearest_names

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, as image libraries do


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Grey or RGB pixels to a normalised float tensor: ``(pixel - mean) / std``.

    Grey is repeated to RGB, RGB is weighted to grey (BT.601 luma); then comes the resize, then
    the normalisation. Nothing is cropped: the aspect ratio follows ``size``.

    Attributes:
        size: Height and width of the result, pixels.
        mean: Subtracted from each channel, in pixel units 0..255; one number per channel.
        std: What each channel is divided by, in pixel units, above zero.
        channels: 1 (grey) or 3 (RGB) of the result.
        resample: How to resize; see ``edgewise.data.resize``.
        layout: Order of the result's axes.

    Example:
        >>> to_unit = Preprocess(size=(2, 2), mean=(127.0,), std=(128.0,), channels=1)
        >>> to_unit(np.full((1, 4, 4, 1), 255, dtype=np.uint8)).tolist()
        [[[[1.0, 1.0], [1.0, 1.0]]]]
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: Literal[1, 3] = 3
    resample: Literal["bilinear"] = "bilinear"
    layout: Literal["NCHW"] = "NCHW"

    def __post_init__(self) -> None:
        if self.channels not in {1, 3}:
            raise ConfigError(
                f"expected 1 or 3 channels, found {self.channels!r}", help="use 1 or 3"
            )
        if [type(n) is int and n > 0 for n in self.size] != [True, True]:
            raise ConfigError(
                f"expected a size of two whole numbers above zero, found {self.size!r}",
                help="give height and width in pixels, for example (224, 224)",
            )
        check_image_pixels(*self.size, where="the size to resize to")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels or not all(math.isfinite(v) for v in values):
                raise ConfigError(
                    f"expected {self.channels} finite numbers as {name}, found {values!r}",
                    help="give one number per channel, in pixel units 0..255",
                )
        if min(self.std) <= 0:
            raise ConfigError(f"expected std above zero, found {self.std!r}", help="use 1 for none")
        if self.resample != "bilinear":
            raise ConfigError(
                f"unknown way to resample {self.resample!r}", help="only 'bilinear' is known"
            )
        if self.layout != "NCHW":
            raise ConfigError(f"unknown layout {self.layout!r}", help="only 'NCHW' is known")

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of one sample of the result: channels, height, width."""
        return (self.channels, *self.size)

    def __call__(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Prepare a batch.

        Args:
            images: uint8 [N, H, W, C], C = 1 or 3.

        Returns:
            [N, channels, h, w], contiguous, never a view of ``images``.

        Raises:
            ShapeError: ``images`` has another dtype or shape, or is empty.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in {1, 3}:
            raise ShapeError(
                f"expected uint8 images [N, H, W, C] with C 1 or 3, found {images.dtype} "
                f"{list(images.shape)}",
                help="pass pixels 0..255 with the channel last",
            )
        if images.size == 0:
            raise ShapeError(
                f"expected at least one pixel, found images of shape {list(images.shape)}",
                help="pass at least one image",
            )
        if images.shape[-1] == 3 and self.channels == 1:
            planes: npt.NDArray[Any] = (images @ _LUMA)[:, np.newaxis]  # [N, 1, H, W]
        else:
            planes = images.transpose(0, 3, 1, 2)  # [N, C, H, W]
        resized = resize_bilinear(planes, size=self.size)  # [N, C, h, w]
        normalised = np.empty((len(images), *self.output_shape), dtype=np.float32)
        per_channel = (self.channels, 1, 1)
        mean = np.array(self.mean, dtype=np.float32).reshape(per_channel)
        std = np.array(self.std, dtype=np.float32).reshape(per_channel)
        np.subtract(resized, mean, out=normalised)  # repeats a grey plane to every channel
        normalised /= std
        return normalised

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, for a JSON file."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Preprocess:
        """The record that ``to_json`` wrote.

        Args:
            fields: By field name; ``resample`` and ``layout`` may be missing.

        Raises:
            ConfigError: A field is missing, unknown, or has a wrong value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConfigError(
                    f"unknown field {name!r} in a preprocess record",
                    help=nearest_names(name, known),
                )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(
                f"a preprocess record has a missing or mistyped field: {error}",
                help=f"give {', '.join(known)} as Preprocess.to_json() writes them",
            ) from error

"""What a frozen backbone computes at each exit, kept in shards on disk.

Pooled vectors are kept for every exit. Where a convolutional head is to be fitted, the feature map
is kept too, thinned to a grid with a random offset per image where it is large: such a head
averages over positions, so a sample of them gives the same average with a little noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Program
from edgewise.data.preprocess import Preprocess
from edgewise.errors import ConfigError, ModelError
from edgewise.training.progress import OnProgress, Progress, ignore_progress
from edgewise.training.work import WorkDirectory
from edgewise.units import format_bytes

Float16 = npt.NDArray[np.float16]
Float32 = npt.NDArray[np.float32]

MAX_CACHE_BYTES = 16 * 1024**3
_MAP_VALUES = 8192  # per image and exit, 16 KiB ...
_MIN_POSITIONS = 49  # ... but never fewer positions than a 7 x 7 map has


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What is kept for each image.

    Attributes:
        shapes: Of each exit's features for one sample, [1, C, H, W] or [1, N, C].
        with_maps: Exits whose maps are kept, besides the pooled vectors.
        num_images: N.
        shard_images: Images per file.
        seed: Of the grids' offsets.
    """

    shapes: tuple[tuple[int, ...], ...]
    with_maps: frozenset[int]
    num_images: int
    shard_images: int = 256
    seed: int = 0

    @property
    def folder(self) -> str:
        """Where the shards are in the work directory: another choice of maps has its own place."""
        maps = "-".join(str(k) for k in sorted(self.with_maps))
        return f"features-maps-{maps}" if maps else "features"

    def shard_name(self, shard: int) -> str:
        """Name of a file in the work directory."""
        return f"{self.folder}/shard-{shard:05d}.safetensors"

    @property
    def num_shards(self) -> int:
        """How many files."""
        return math.ceil(self.num_images / self.shard_images)

    @property
    def size_bytes(self) -> int:
        """Size of the whole cache, float16."""
        values = 0
        for k, shape in enumerate(self.shapes):
            values += _channels(shape)
            if k in self.with_maps:
                rows, columns, _ = map_grid(shape)
                values += rows * columns * _channels(shape)
        return 2 * values * self.num_images

    def check_size(self) -> None:
        """Refuse a cache above ``MAX_CACHE_BYTES``.

        Raises:
            ConfigError: It is larger.
        """
        if self.size_bytes > MAX_CACHE_BYTES:
            raise ConfigError(
                f"the features of {self.num_images} images would take"
                f" {format_bytes(self.size_bytes)}; the limit is {format_bytes(MAX_CACHE_BYTES)}",
                help="use fewer images (--limit), or heads that pool first (--head pool)",
            )


def map_grid(shape: Sequence[int]) -> tuple[int, int, int]:
    """Rows, columns and stride of the positions kept of a feature map.

    Example:
        >>> map_grid((1, 40, 28, 28)), map_grid((1, 320, 7, 7))
        ((14, 14, 2), (7, 7, 1))
    """
    _, channels, height, width = shape
    wanted = max(_MIN_POSITIONS, _MAP_VALUES // channels)
    stride = max(1, math.ceil(math.sqrt(height * width / wanted)))
    stride = min(stride, height, width)
    return height // stride, width // stride, stride


def extract_features(  # noqa: PLR0913 - what, from what, where to, and who is told
    program: Program,
    images: npt.NDArray[np.uint8],
    preprocess: Preprocess,
    *,
    plan: CachePlan,
    work: WorkDirectory,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Fill the cache; shards that are there stay as they are.

    Args:
        program: The backbone, loaded.
        images: uint8 [N, H, W, C].
        preprocess: How images become inputs.
        plan: What to keep.
        work: Where to.
        on_progress: Told after every shard and every 32 images.

    Raises:
        ModelError: A feature is NaN, infinite or beyond the range of float16.
        ConfigError: The cache would be too large.
        EdgeError: The disk is full.
    """
    plan.check_size()
    for shard in range(plan.num_shards):
        first = shard * plan.shard_images
        last = min(first + plan.shard_images, plan.num_images)
        if not work.has(plan.shard_name(shard)):
            arrays: dict[str, Float16] = {}
            with program.context() as context:
                for n in range(first, last):
                    context.set_boundary(0, preprocess(images[n : n + 1]))
                    for k in range(len(plan.shapes)):
                        context.run_segment(k, k + 1)
                        features = context.boundary(k + 1)[0]
                        _keep(plan, k, features, image=n, first=first, last=last, arrays=arrays)
                    if (n + 1) % 32 == 0:
                        on_progress(Progress(phase="features", done=n + 1, total=plan.num_images))
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    stage = program.model.stages[int(name.split(".")[1])]
                    raise ModelError(
                        f"the features at the end of stage {stage.index} ({stage.name}) are NaN,"
                        " infinite or beyond the range of float16",
                        help="check the weights and the preprocessing of this backbone",
                    )
            work.save(plan.shard_name(shard), arrays)
        on_progress(Progress(phase="features", done=last, total=plan.num_images))


def load_features(work: WorkDirectory, plan: CachePlan, exit_index: int, *, maps: bool) -> Float16:
    """Read the features of all images at one exit.

    Args:
        work: Where they are.
        plan: What was kept.
        exit_index: Which exit.
        maps: Positions [N, P, C] instead of pooled vectors [N, C].
    """
    key = f"{'map' if maps else 'pooled'}.{exit_index}"
    shards = [work.load_one(plan.shard_name(s), key) for s in range(plan.num_shards)]
    return np.concatenate(shards)


def _keep(  # noqa: PLR0913
    plan: CachePlan,
    exit_index: int,
    features: Float32,
    *,
    image: int,
    first: int,
    last: int,
    arrays: dict[str, Float16],
) -> None:
    token = features.ndim == 2
    pooled = features.mean(axis=0) if token else features.reshape(len(features), -1).mean(axis=1)
    with np.errstate(over="ignore"):  # infinities are found and reported for the whole shard
        _row(arrays, f"pooled.{exit_index}", last - first, pooled.shape)[image - first] = pooled
        if exit_index not in plan.with_maps:
            return
        rows, columns, stride = map_grid(plan.shapes[exit_index])
        # The offset depends on the image alone, so a resumed run draws the same ones.
        rng = np.random.default_rng([plan.seed, exit_index, image])
        height, width = features.shape[1:]
        top = int(rng.integers(height - (rows - 1) * stride))
        left = int(rng.integers(width - (columns - 1) * stride))
        grid = features[:, top::stride, left::stride][:, :rows, :columns]
        positions = grid.reshape(len(features), -1).T  # [P, C]
        _row(arrays, f"map.{exit_index}", last - first, positions.shape)[image - first] = positions


def _row(arrays: dict[str, Float16], key: str, count: int, shape: tuple[int, ...]) -> Float16:
    if key not in arrays:
        arrays[key] = np.zeros((count, *shape), dtype=np.float16)
    return arrays[key]


def _channels(shape: Sequence[int]) -> int:
    return shape[-1] if len(shape) == 3 else shape[1]

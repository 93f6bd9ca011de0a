"""Fashion-MNIST: 70 000 grey images of clothes, 28 x 28, ten classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgewise.data.dataset import Dataset
from edgewise.data.download import OpenUrl, download, open_https
from edgewise.data.idx_folder import find_idx_file, idx_file_names, load_idx_folder
from edgewise.data.split import Split
from edgewise.errors import ConfigError

NAME = "fashion-mnist"
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

# The commit of the authors' repository whose files have the MD5 sums that its README states.
_URL = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/"
    "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/"
)
_MAX_DOWNLOAD_BYTES = 64 * 1024**2
_HELP = "install the data with: apt install dataset-fashion-mnist"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """What the authors published, as checksums.

    Debian ships the same compressed data with the file name taken out of the gzip header, so the
    sum of the ``.gz`` differs there and the sum of the content does not.

    Attributes:
        gzip_sha256: SHA-256 of the ``.gz`` as the authors serve it.
        content_sha256: SHA-256 of the uncompressed file.
    """

    gzip_sha256: str
    content_sha256: str


PUBLISHED = {
    "train-images-idx3-ubyte": PublishedFile(
        gzip_sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        content_sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte": PublishedFile(
        gzip_sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        content_sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte": PublishedFile(
        gzip_sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        content_sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte": PublishedFile(
        gzip_sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        content_sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}


def search_folders(
    *, cache_dir: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[Path, ...]:
    """Where the files may be, most explicit first; a download goes to the last.

    Args:
        cache_dir: The user's cache for data; by default ``edgewise/data`` in ``XDG_CACHE_HOME``
            or ``~/.cache``.
        environ: Environment variables.

    Returns:
        The folder in ``EDGEWISE_DATA`` where that is set, Debian's, and the cache's.

    Raises:
        ConfigError: ``EDGEWISE_DATA`` names no folder.
    """
    folders = [DEBIAN_FOLDER]
    if user := environ.get("EDGEWISE_DATA"):
        if not Path(user).is_dir():
            raise ConfigError(
                f"EDGEWISE_DATA is {user!r}, which is not a folder",
                help="make the folder, or unset EDGEWISE_DATA",
            )
        folders.insert(0, Path(user) / NAME)
    if cache_dir is None:
        cache_home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = Path(cache_home) / "edgewise" / "data"
    return (*folders, cache_dir / NAME)


def load(*, split: Split, cache_dir: Path | None = None) -> Dataset:
    """Read one split from this machine, or fetch it first where there is a network.

    Args:
        split: ``"train"`` (60 000) or ``"test"`` (10 000).
        cache_dir: Where downloads are kept; ``~/.cache/edgewise/data`` by default.

    Raises:
        DataError: Not here and no network, or not the published content.
        ConfigError: ``EDGEWISE_DATA`` names no folder.
    """
    return load_from(search_folders(cache_dir=cache_dir), split=split)


def load_from(
    folders: tuple[Path, ...], *, split: Split, open_url: OpenUrl = open_https
) -> Dataset:
    """Read one split from the first folder that has both its files, or fetch it into the last.

    Args:
        folders: Searched in order; at least one.
        split: Which part.
        open_url: Opens an address; tests pass their own.

    Raises:
        DataError: Not here and no network, or not the published content.
    """
    names = idx_file_names(split)
    for folder in folders:
        if all(find_idx_file(folder, name) is not None for name in names):
            break
    else:
        folder = folders[-1]
        for name in names:
            if find_idx_file(folder, name) is None:
                download(
                    f"{_URL}{name}.gz",
                    folder / f"{name}.gz",
                    sha256=PUBLISHED[name].gzip_sha256,
                    max_bytes=_MAX_DOWNLOAD_BYTES,
                    open_url=open_url,
                    otherwise=_HELP,
                )
    dataset = load_idx_folder(
        folder,
        split=split,
        content_sha256={name: file.content_sha256 for name, file in PUBLISHED.items()},
    )
    return replace(
        dataset,
        name=NAME,
        class_names=CLASS_NAMES,
        source="Fashion-MNIST by H. Xiao, K. Rasul and R. Vollgraf (arXiv:1708.07747), "
        f"read from {folder}",
        licence="MIT, Copyright 2017 Zalando SE",
    )

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest

from edgewise.data.download import Body, download, open_https
from edgewise.data.idx_folder import find_idx_file
from edgewise.data.named.fashion_mnist import (
    CLASS_NAMES,
    DEBIAN_FOLDER,
    PUBLISHED,
    load,
    load_from,
    search_folders,
)
from edgewise.errors import ConfigError, DataError

installed = pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(),
    reason="needs the data: apt install dataset-fashion-mnist",
)
CONTENT = b"some bytes"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def no_network(url: str) -> contextlib.AbstractContextManager[Body]:
    raise URLError(f"no route to {url}")


def serve(content: bytes) -> contextlib.AbstractContextManager[Body]:
    return contextlib.nullcontext(io.BytesIO(content))


@installed
def test_the_test_split_of_the_installed_package_has_the_published_content() -> None:
    dataset = load(split="test")

    assert dataset.images.shape == (10_000, 28, 28, 1)
    assert dataset.class_names == CLASS_NAMES
    assert dataset.labels is not None
    assert np.bincount(dataset.labels).tolist() == [1000] * 10
    assert dataset.licence is not None
    assert str(DEBIAN_FOLDER) in dataset.source


@installed
@pytest.mark.parametrize("name", ["train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"])
def test_the_published_download_is_the_packaged_file_with_its_name_in_the_header(name: str) -> None:
    path = find_idx_file(DEBIAN_FOLDER, name)
    assert path is not None
    packaged = path.read_bytes()
    mtime = {"train": 1504176606, "t10k": 1504176627}[name.split("-", maxsplit=1)[0]]
    header = b"\x1f\x8b\x08\x08" + mtime.to_bytes(4, "little") + packaged[8:10]

    rebuilt = header + name.encode() + b"\0" + packaged[10:]
    assert hashlib.sha256(rebuilt).hexdigest() == PUBLISHED[name].gzip_sha256


def test_without_data_and_network_the_error_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot download https://") as caught:
        load_from((tmp_path / "none", tmp_path / "cache"), split="test", open_url=no_network)

    assert caught.value.help == "install the data with: apt install dataset-fashion-mnist"
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_content_under_the_name_is_refused(idx_folder: Path) -> None:
    with pytest.raises(DataError, match="does not have the published content"):
        load_from((idx_folder,), split="test", open_url=no_network)


def test_a_download_with_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="with SHA-256"):
        load_from((tmp_path,), split="test", open_url=lambda _: serve(gzip.compress(b"other")))

    assert list(tmp_path.iterdir()) == []


def test_a_right_download_appears_under_its_name_only(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.gz"

    download("https://x", target, sha256=SHA256, max_bytes=100, open_url=lambda _: serve(CONTENT))

    assert [p.name for p in target.parent.iterdir()] == ["file.gz"]
    assert target.read_bytes() == CONTENT


def test_a_download_that_never_ends_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sent more than 5 B"):
        download(
            "https://x",
            tmp_path / "f",
            sha256=SHA256,
            max_bytes=5,
            open_url=lambda _: serve(CONTENT),
        )

    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted:
        def read(self, size: int, /) -> bytes:
            raise KeyboardInterrupt(size)

    @contextlib.contextmanager
    def interrupt(_: str) -> Iterator[Body]:
        yield Interrupted()

    with pytest.raises(KeyboardInterrupt):
        download("https://x", tmp_path / "f", sha256=SHA256, max_bytes=5, open_url=interrupt)

    assert list(tmp_path.iterdir()) == []


def test_only_https_is_opened() -> None:
    with pytest.raises(DataError, match="https://"):
        open_https("file:///etc/hostname")


def test_the_users_folder_is_searched_first_and_the_cache_last(tmp_path: Path) -> None:
    folders = search_folders(cache_dir=tmp_path / "cache", environ={"EDGEWISE_DATA": str(tmp_path)})

    assert folders == (
        tmp_path / "fashion-mnist",
        DEBIAN_FOLDER,
        tmp_path / "cache" / "fashion-mnist",
    )


def test_a_users_folder_that_does_not_exist_is_an_error_not_a_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EDGEWISE_DATA"):
        search_folders(environ={"EDGEWISE_DATA": str(tmp_path / "typo")})


def test_the_cache_follows_the_desktop_convention(tmp_path: Path) -> None:
    folders = search_folders(environ={"XDG_CACHE_HOME": str(tmp_path)})

    assert folders[-1] == tmp_path / "edgewise" / "data" / "fashion-mnist"

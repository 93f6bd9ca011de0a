from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from edgewise.errors import CheckpointError, ConfigError, EdgeError
from edgewise.training.work import WorkDirectory, write_file


def test_a_piece_comes_back_as_it_was(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path)
    work.save(
        "a/b.safetensors", {"x": np.arange(6).reshape(2, 3), "y": np.array([1.5], dtype=np.float16)}
    )

    assert work.has("a/b.safetensors")
    assert work.load("a/b.safetensors")["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert work.load_one("a/b.safetensors", "y").dtype == np.float16


def test_a_truncated_piece_is_refused(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path)
    work.save("x", {"x": np.arange(6)})
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-5])

    with pytest.raises(CheckpointError, match="damaged"):
        work.load("x")
    with pytest.raises(CheckpointError, match="damaged"):
        work.load_one("x", "x")


def test_the_same_job_may_come_back_and_another_may_not(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path)
    with work.claim({"seed": 0, "sizes": (1, 2)}):
        pass
    with work.claim({"seed": 0, "sizes": (1, 2)}):
        pass

    with pytest.raises(ConfigError, match="seed was 0, now 1"), work.claim({"seed": 1}):
        pass


def test_two_processes_cannot_work_in_one_directory(tmp_path: Path) -> None:
    with (
        WorkDirectory(tmp_path).claim({}),
        pytest.raises(ConfigError, match="another process"),
        WorkDirectory(tmp_path).claim({}),
    ):
        pass


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")

    with (
        pytest.raises(ConfigError, match=r"no work of `edgewise prepare`: thesis\.txt"),
        WorkDirectory(tmp_path).claim({}),
    ):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_full_disk_is_said_plainly_and_earlier_work_stays(tmp_path: Path) -> None:
    def fill_up(path: Path, data: bytes) -> None:
        if path.name == "second":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, data)

    work = WorkDirectory(tmp_path, write=fill_up)
    work.save("first", {"x": np.arange(3)})

    with pytest.raises(EdgeError, match="the disk is full: 88 bytes") as caught:
        work.save("second", {"x": np.arange(3)})
    assert "finished work is kept" in str(caught.value.help)
    assert work.has("first")
    assert not work.has("second")


def test_a_write_that_fails_leaves_no_part_behind(tmp_path: Path) -> None:
    (tmp_path / "x.part").symlink_to("/dev/full")  # a device that is always full

    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "x", b"data")
    assert list(tmp_path.iterdir()) == []


def test_another_failure_to_write_is_passed_on(tmp_path: Path) -> None:
    def refuse(path: Path, _data: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(PermissionError):
        WorkDirectory(tmp_path, write=refuse).save("x", {"x": np.arange(3)})

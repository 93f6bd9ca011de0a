"""The directory in which a job keeps what it has finished, so that it survives kill -9."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from edgewise.errors import CheckpointError, ConfigError, EdgeError
from edgewise.frontends.checkpoint import Arrays, bytes_to_tensors, tensors_to_bytes

WriteFile = Callable[[Path, bytes], None]
_JOB = "job.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        part.unlink(missing_ok=True)  # half a file would only keep the disk full
        raise
    part.replace(path)


class WorkDirectory:
    """Finished pieces of one job; another job is refused.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, *, write: WriteFile = write_file) -> None:
        self.path = path
        self._write = write

    @contextlib.contextmanager
    def claim(self, job: Mapping[str, Any]) -> Iterator[None]:
        """Hold the directory for one job in one process.

        Args:
            job: All that decides the result; kept as JSON.

        Raises:
            ConfigError: Another job's work is here, another process works here, or the directory
                holds something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"another process is preparing a model in {self.path}",
                    help="wait for it, or pass another --work directory",
                ) from error
            self._check_job(dict(job))
            yield

    def _check_job(self, job: dict[str, Any]) -> None:
        file = self.path / _JOB
        job = json.loads(json.dumps(job))
        try:
            earlier = json.loads(file.read_text())
        except FileNotFoundError:
            others = [p.name for p in self.path.iterdir() if not p.name.startswith((".", _JOB))]
            if others:
                raise ConfigError(
                    f"{self.path} holds something that is no work of `edgewise prepare`:"
                    f" {others[0]}",
                    help="pass another --work directory",
                ) from None
            self._guarded(file, json.dumps(job, indent=1).encode())
            return
        except ValueError as error:
            raise CheckpointError(
                f"{file} is damaged: {error}", help=f"remove {self.path} and start again"
            ) from error
        differing = sorted(k for k in {*job, *earlier} if job.get(k) != earlier.get(k))
        if differing:
            k = differing[0]
            raise ConfigError(
                f"{self.path} holds the work of another job: {k} was {earlier.get(k)!r}, now"
                f" {job.get(k)!r}",
                help="pass another --work directory, or remove that one",
            )

    def has(self, name: str) -> bool:
        """Whether a piece is finished."""
        return (self.path / name).is_file()

    def save(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep a piece.

        Raises:
            EdgeError: The disk is full; what was kept before stays.
        """
        self._guarded(self.path / name, tensors_to_bytes(arrays))

    def load(self, name: str) -> Arrays:
        """Read a piece.

        Raises:
            CheckpointError: It is damaged.
        """
        path = self.path / name
        return bytes_to_tensors(path.read_bytes(), where=path)

    def load_one(self, name: str, key: str) -> npt.NDArray[Any]:
        """Read one array of a piece without reading the others.

        Raises:
            CheckpointError: It is damaged.
        """
        from safetensors import safe_open

        path = self.path / name
        try:
            with safe_open(path, framework="np") as arrays:
                array: npt.NDArray[Any] = arrays.get_tensor(key)
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged: {error}", help="remove it and run the command again"
            ) from error
        return array

    def remove(self, name: str) -> None:
        """Forget a piece."""
        (self.path / name).unlink(missing_ok=True)

    def _guarded(self, path: Path, data: bytes) -> None:
        try:
            self._write(path, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise EdgeError(
                f"the disk is full: {len(data)} bytes for {path} do not fit",
                help="free some space and run the same command again; finished work is kept in"
                f" {self.path}",
            ) from error

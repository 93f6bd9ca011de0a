"""The SQLite file under the profile store: opening, checking and refusing it.

The file is in write-ahead mode, so a process killed at any moment loses at most the statement it
was in, and readers never wait for a writer. ``synchronous`` is ``NORMAL``: a power cut may cost
the last commits but does not damage the file. Write-ahead mode needs a local file system.

A file that is damaged, newer than this program or somebody else's database is refused with the
reason, and is never deleted or overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import sqlite3
from typing import TYPE_CHECKING

from edgewise.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edgewise.clock import Clock

APPLICATION_ID = 0x45444757  # "EDGW": tells our files from other programs' databases
SCHEMA_VERSION = 1

_SCHEMA = (
    """CREATE TABLE campaigns (
        campaign_id INTEGER PRIMARY KEY AUTOINCREMENT,
        model_id TEXT NOT NULL,
        model_version TEXT NOT NULL,
        device_id TEXT NOT NULL,
        device TEXT NOT NULL,          -- JSON
        thread_policy TEXT NOT NULL,   -- JSON
        method TEXT NOT NULL,          -- JSON
        provenance TEXT NOT NULL,
        energy_note TEXT NOT NULL,
        state TEXT NOT NULL,           -- JSON
        created_unix_s REAL NOT NULL,
        finished_unix_s REAL,          -- NULL while samples may still come
        digest TEXT                    -- of the whole profile, once finished
    )""",
    """CREATE TABLE units (
        unit_id INTEGER PRIMARY KEY,
        campaign_id INTEGER NOT NULL REFERENCES campaigns,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        backend TEXT NOT NULL,
        batch INTEGER NOT NULL,
        energy_j REAL,                 -- NULL where unknown
        energy_note TEXT NOT NULL,
        UNIQUE (campaign_id, name, backend, batch)
    )""",
    """CREATE TABLE samples (
        unit_id INTEGER NOT NULL REFERENCES units,
        round_index INTEGER NOT NULL CHECK (round_index >= 0),
        latency_s REAL NOT NULL CHECK (latency_s >= 0),
        PRIMARY KEY (unit_id, round_index)
    ) WITHOUT ROWID""",
)
_HEADER_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100

# Primary result codes, https://www.sqlite.org/rescode.html
_PERM, _BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _CONSTRAINT, _NOTADB = (
    3, 5, 6, 8, 10, 11, 13, 14, 19, 26,
)  # fmt: skip


class Database:
    """The file; touches nothing until it is opened.

    Args:
        path: The file.
        busy_timeout_s: How long to wait while another process writes.
        clock: Times the retries of the waiting.
        on_connect: Called with every new connection, before its first use.
    """

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout_s: float,
        clock: Clock,
        on_connect: Callable[[sqlite3.Connection], None] | None,
    ) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._clock = clock
        self._on_connect = on_connect

    def has_content(self) -> bool:
        """Whether there is a file with something in it.

        Raises:
            ProfileError: Its folder cannot be looked into.
        """
        try:
            return self.path.stat().st_size > 0 or _wal(self.path).exists()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ProfileError(
                f"cannot look at the profile store {self.path}: {error.strerror or error}"
            ) from error

    def open_writing(self) -> sqlite3.Connection:
        """Open the file, and make it and its folder where there is none; close what you get.

        Raises:
            ProfileError: It cannot be written, or is damaged, newer or not a store.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfileError(
                f"cannot make the folder of the profile store {self.path}: "
                f"{error.strerror or error}",
                help="choose a folder you may write to: export EDGEWISE_HOME=FOLDER",
            ) from error
        _check_header(self.path)
        with translated(self.path, "open it for writing"):
            connection = self._connect("rwc")
            try:
                _check_integrity(connection, self.path)
                if _check_ours(connection, self.path) == 0:
                    self._create(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _create(self, connection: sqlite3.Connection) -> None:
        # Two processes may get here together. Switching the journal does not wait for a lock
        # by itself, so it is tried again; the schema is made by whoever is first.
        until_s = self._clock.now_s() + self._busy_timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                if _code(error) not in (_BUSY, _LOCKED) or self._clock.now_s() >= until_s:
                    raise
                self._clock.sleep_s(0.01)
        with transaction(connection):
            if _check_ours(connection, self.path) == 0:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open an existing file for reading, also from a folder that may not be written.

        Content that cannot be understood inside the block is reported as damage.

        Raises:
            ProfileError: It cannot be read, or is damaged, newer or not a store.
        """
        _check_header(self.path)
        with translated(self.path, "read it"):
            connection = self._open_reading()
            try:
                _check_integrity(connection, self.path)
                if _check_ours(connection, self.path) == 0:  # left by a kill during creation
                    for statement in _SCHEMA:
                        connection.execute(statement.replace("CREATE", "CREATE TEMPORARY", 1))
                connection.execute("PRAGMA query_only = 1")
                try:
                    yield connection
                except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                    raise damaged(self.path, f"{type(error).__name__}: {error}") from error
            finally:
                connection.close()

    def _open_reading(self) -> sqlite3.Connection:
        # Write-ahead mode needs to make files beside the store even to read it. Where that is
        # not allowed and no writer left a log, the file is complete and can be read as it is.
        wal = _wal(self.path)
        modes = ["rw", "ro"]
        if not (wal.exists() and wal.stat().st_size):
            modes.append("ro&immutable=1")
        for mode in modes:
            connection = None
            try:
                connection = self._connect(mode)
                connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if mode == modes[-1] or _code(error) not in (_PERM, _READONLY, _CANTOPEN):
                    raise
            else:
                return connection
        raise AssertionError("the last mode returns or raises")

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # each statement commits itself unless a transaction is open
        )
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            if self._on_connect is not None:
                self._on_connect(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, also on Ctrl-C."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors, a full disk among them.
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _check_header(path: Path) -> None:
    """Refuse what is not a whole database before SQLite may touch it or its log.

    Source:
        https://www.sqlite.org/fileformat.html, section 1.3.
    """
    if path.is_dir():
        raise ProfileError(
            f"{path} is a folder; expected the file of a profile store",
            help=f"name a file in it, such as {path / 'profiles.sqlite3'}",
        )
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProfileError(
            f"cannot read the profile store {path}: {error.strerror or error}"
        ) from error
    if not header:
        return
    if len(header) < _HEADER_BYTES or not header.startswith(_HEADER_MAGIC):
        raise damaged(path, "it is not a SQLite database")
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    said_bytes = page_bytes * int.from_bytes(header[28:32], "big")
    in_use = header[24:28] == header[92:96]  # else the page count is not to be trusted
    # With a log beside it the file may rightly be short; SQLite's own check follows. The order
    # matters: a checkpoint that ends now has extended the file before its log disappears.
    if in_use and not _wal(path).exists():
        with contextlib.suppress(FileNotFoundError):
            size_bytes = path.stat().st_size
            if size_bytes < said_bytes:
                raise damaged(path, f"it is truncated: {size_bytes} bytes of {said_bytes}")


def _check_integrity(connection: sqlite3.Connection, path: Path) -> None:
    finding = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    if finding != "ok":
        raise damaged(path, " ".join(finding.split()))


def _check_ours(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version; 0 for an empty database."""
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application_id != APPLICATION_ID:
        num_tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if application_id or version or num_tables:
            raise ProfileError(
                f"{path} is a database of another program, not a profile store; it was left alone",
                help="name another file, or export EDGEWISE_HOME=ANOTHER_FOLDER",
            )
        return 0
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"the profile store {path} has schema version {version}; this Edgewise reads "
            f"{SCHEMA_VERSION}; it was left alone",
            help="pip install --upgrade edgewise",
        )
    return version


def damaged(path: Path, finding: str) -> ProfileError:
    """Return the error for a damaged file: what was found, and how to move it aside."""
    moves = f"mv {shlex.quote(str(path))} {shlex.quote(str(path) + '.damaged')}"
    for log in (_wal(path), path.with_name(path.name + "-shm")):
        if log.exists():
            moves += f" && mv {shlex.quote(str(log))} {shlex.quote(str(log) + '.damaged')}"
    return ProfileError(
        f"the profile store {path} is damaged: {finding}; it was left as it is",
        help=f"move it aside and profile again: {moves}",
    )


def _code(error: BaseException) -> int | None:
    """Primary SQLite result code; ``None`` where the error is the module's own."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@contextlib.contextmanager
def translated(path: Path, doing: str, *, kept: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn SQLite's errors into ours, with what was being done and what is kept."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _translate(error, path, doing, kept) from error


def _translate(  # noqa: PLR0911 - one return for each cause
    error: sqlite3.Error | OSError, path: Path, doing: str, kept: Callable[[], str]
) -> ProfileError:
    code = _code(error)
    if code in (_CORRUPT, _NOTADB):
        return damaged(path, str(error))
    failed = f"cannot {doing} in the profile store {path}"
    if code == _FULL or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return ProfileError(
            f"{failed}: the disk is full ({error}){kept()}",
            help="free some space and run the same command again: it goes on from there",
        )
    if code in (_BUSY, _LOCKED):
        return ProfileError(
            f"{failed}: another process has been writing to it for too long ({error}){kept()}",
            help="wait for the other process to end, then run the same command again",
        )
    if code == _CONSTRAINT:
        return ProfileError(
            f"{failed}: it has one already{kept()}",
            help="is another process profiling this model into the same store? let one finish",
        )
    if code in (_PERM, _READONLY, _CANTOPEN):
        return ProfileError(
            f"{failed}: it may not be read or written here ({error}){kept()}",
            help="give yourself permission, or choose a folder: export EDGEWISE_HOME=FOLDER",
        )
    if code == _IOERR:
        return ProfileError(
            f"{failed}: the disk failed, or has no room left ({error}){kept()}",
            help="check free space and the disk, then run the same command again",
        )
    return ProfileError(f"{failed}: {str(error).rstrip('.')}{kept()}")

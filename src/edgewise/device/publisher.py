"""Publishes the memory clock, which only root may read, for programs without privileges.

On Jetson boards the clock of the external memory controller (EMC) stands in debugfs, closed to all
but root. A small service reads it and writes it to one file under ``/run``; whoever wants it
checks who wrote that file, and when, before it is believed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from edgewise.clock import Clock, MonotonicClock
from edgewise.device.files import Quality, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.state import Quantity
from edgewise.errors import ConfigError, EdgeError
from edgewise.units import format_duration

PUBLISHED = "run/edgewise/emc.json"
"""Where the memory clock is published, under the root of the file tree."""

UNIT = "edgewise-emc.service"
"""The systemd unit that runs the publisher; it lies beside this file."""

MAX_AGE_S = 0.05
"""How old what was published may be: five periods of the publisher."""

_BOOT_ID = "proc/sys/kernel/random/boot_id"
_EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
_CAP = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
_VERSION = 1
_MAX_BYTES = 4096
_NO_PUBLISHER = (
    "and no publisher runs; `edgewise publish-emc`, run as root on a Jetson board, publishes it"
)


def read_boot_id(root: Path = Path("/")) -> str | None:
    """What tells this start of the machine from all others; ``None`` where it cannot be read."""
    return read_text(root / _BOOT_ID).value


def read_published(
    path: Path,
    *,
    now_s: float,
    max_age_s: float = MAX_AGE_S,
    boot_id: str | None,
    owners: frozenset[int] = frozenset({0}),
) -> tuple[Quantity, Quantity]:
    """Read the memory clock that a publisher has written, if it can be trusted.

    Args:
        path: The published file.
        now_s: The present instant on the machine's monotonic clock, as `MonotonicClock` tells it.
        max_age_s: How old it may be.
        boot_id: Of this machine, from `read_boot_id`. Monotonic clocks of two starts cannot be
            compared.
        owners: Users that are believed, by number.

    Returns:
        The frequency and the highest frequency, both in Hz. ``"stale"``, with its age in the
        reason and the last value kept, where it is too old; ``"unsupported"`` or ``"denied"``
        where it is absent, not to be trusted or damaged. Never raises for what it finds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _twice("unsupported", f"{path} does not exist {_NO_PUBLISHER}")
    except PermissionError:
        return _twice("denied", f"no permission to read {path}")
    except OSError as error:
        return _twice("unsupported", f"{path} cannot be read: {error.strerror}")
    try:
        # Of the open file: between two looks at a path it may become another.
        why = _distrust(os.fstat(descriptor), owners)
        data = b"" if why else os.read(descriptor, _MAX_BYTES)
    except OSError as error:
        why, data = f"cannot be read: {error.strerror}", b""
    finally:
        os.close(descriptor)
    if why:
        return _twice("unsupported", f"{path} {why}")
    return _judge(path, data, now_s=now_s, max_age_s=max_age_s, boot_id=boot_id)


class EmcClock:
    """The memory clock as root reads it, from files that stay open.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Source:
        L4T's BPMP debugfs: ``rate`` and ``max_rate`` in Hz. nvpmodel's ``emc_iso_cap`` in Hz, 0
        for none: the highest frequency is the lower of the two.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._rate = KeptFile(root / _EMC / "rate")
        self._max_rate = KeptFile(root / _EMC / "max_rate")
        self._cap = KeptFile(root / _CAP)

    def read(self, now_s: float) -> tuple[Quantity, Quantity]:
        """Read the frequency and the highest frequency, both in Hz, or why there is none."""
        cap_hz = self._cap.number(now_s).value or math.inf
        rate_hz, max_hz = _hz(self._rate, now_s), _hz(self._max_rate, now_s)
        if max_hz.value is not None:
            max_hz = Quantity.ok(min(max_hz.value, cap_hz))
        return rate_hz, max_hz

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        for each in (self._rate, self._max_rate, self._cap):
            each.close()


class EmcPublisher:
    """Writes the memory clock to a file again and again; a context manager that removes the file.

    Each time a new file is written and takes the place of the old one at once: a reader finds one
    or the other, never a part. Where the process is killed, what it wrote last stays and is known
    as old by its stamp.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        path: What to write; ``run/edgewise/emc.json`` under ``root`` by default.
        period_s: Time between two writings, from 1 ms to half of what readers take for old.
        clock: The machine's monotonic clock, which readers use as well.

    Raises:
        ConfigError: The period is out of range.
        EdgeError: The clock cannot be read here, the file cannot be written, or another publisher
            writes it already.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        path: Path | None = None,
        period_s: float = 0.01,
        clock: Clock | None = None,
    ) -> None:
        if not 1e-3 <= period_s <= MAX_AGE_S / 2:
            raise ConfigError(
                f"expected a period from 1 ms to {format_duration(MAX_AGE_S / 2)}, found"
                f" {format_duration(period_s)}",
                help=f"readers take what is older than {format_duration(MAX_AGE_S)} for stale",
            )
        self.path = path if path is not None else root / PUBLISHED
        self.period_s = period_s
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")
        self._clock = clock if clock is not None else MonotonicClock()
        self._emc = EmcClock(root)
        self._writes = False
        boot_id = read_boot_id(root)
        if boot_id is None:
            raise EdgeError(
                f"{root / _BOOT_ID} cannot be read: what is published could outlive a restart"
            )
        self._boot_id = boot_id
        self._check()

    def publish(self) -> Quantity:
        """Read and write once.

        Returns:
            The frequency in Hz. Where it cannot be read nothing is written, so that what was
            published grows old.

        Raises:
            EdgeError: The file cannot be written.
        """
        now_s = self._clock.now_s()
        rate_hz, max_hz = self._emc.read(now_s)
        if rate_hz.value is not None:
            content = {
                "boot_id": self._boot_id,
                "monotonic_s": now_s,
                "frequency_hz": rate_hz.value,
                "max_frequency_hz": max_hz.value,
                "version": _VERSION,
            }
            self._replace(json.dumps(content).encode())
        return rate_hz

    def run(self, stopping: threading.Event) -> None:
        """Publish once per period until ``stopping`` is set, which is noticed within a period.

        Raises:
            EdgeError: The file cannot be written.
        """
        due_s = self._clock.now_s()
        while not stopping.is_set():
            self.publish()
            # What was missed is skipped: an old clock is of no use to anybody.
            due_s = max(due_s + self.period_s, self._clock.now_s())
            self._clock.sleep_s(due_s - self._clock.now_s())

    def close(self) -> None:
        """Remove what was published; nothing is left behind."""
        self._emc.close()
        if self._writes:
            self._writes = False
            for path in (self._temporary, self.path):
                with contextlib.suppress(OSError):
                    path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        now_s = self._clock.now_s()
        rate_hz, _ = self._emc.read(now_s)
        if rate_hz.value is None:
            raise EdgeError(
                f"the memory clock cannot be read: {rate_hz.reason}",
                help="run it as root: sudo edgewise publish-emc"
                if rate_hz.quality == "denied"
                else "only Jetson boards have it, and only root may read it",
            )
        published, _ = read_published(
            self.path, now_s=now_s, boot_id=self._boot_id, owners=frozenset({os.geteuid()})
        )
        if published.quality == "ok":
            raise EdgeError(
                f"another publisher writes {self.path} already",
                help="systemctl status edgewise-emc, or name another file with --path",
            )
        # Not an existing folder's mode: it is its owner's.
        with self._telling():
            if not os.path.exists(self.path.parent):  # noqa: PTH110 - Path.exists can raise
                self.path.parent.mkdir(parents=True)
                self.path.parent.chmod(0o755)

    def _replace(self, data: bytes) -> None:
        self._writes = True
        with self._telling():
            try:
                descriptor = self._create()
                try:
                    os.fchmod(descriptor, 0o644)  # whatever the umask says
                    os.write(descriptor, data)
                finally:
                    os.close(descriptor)
                self._temporary.replace(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._temporary.unlink()
                raise

    def _create(self) -> int:
        # Never through a link or into a file that somebody else made.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._temporary, flags, 0o644)
        except FileExistsError:  # a publisher was killed before it could rename
            self._temporary.unlink()
            return os.open(self._temporary, flags, 0o644)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EdgeError(
                f"{self.path} cannot be written: {error.strerror}",
                help="run it as root, or name another file with --path",
            ) from error


def _twice(quality: Quality, reason: str) -> tuple[Quantity, Quantity]:
    missing = Quantity.missing(quality, reason)
    return missing, missing


def _hz(file: KeptFile, now_s: float) -> Quantity:
    found = file.number(now_s)
    if found.value is None:
        return Quantity.missing(found.quality, found.reason)
    if found.value == 0:
        return Quantity.missing("unsupported", f"{file.path} says 0")
    return Quantity.ok(float(found.value))


def _distrust(status: os.stat_result, owners: frozenset[int]) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid not in owners:
        return f"is not trusted: it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"is not trusted: others may write it (mode {status.st_mode & 0o777:o})"
    return ""


def _judge(
    path: Path, data: bytes, *, now_s: float, max_age_s: float, boot_id: str | None
) -> tuple[Quantity, Quantity]:
    content = _parse(data)
    stamp_s, rate_hz = _positive(content, "monotonic_s"), _positive(content, "frequency_hz")
    age_s = math.nan if stamp_s is None else now_s - stamp_s
    why = ""
    if not content:
        why = "is truncated or damaged"
    elif content.get("version") != _VERSION:
        why = f"has version {str(content.get('version'))[:20]}, not {_VERSION}"
    elif rate_hz is None or math.isnan(age_s):
        why = "lacks a stamp or a frequency"
    elif boot_id is None:
        why = "cannot be dated: this machine's boot id cannot be read"
    elif content.get("boot_id") != boot_id:
        why = "was written before this machine was last started"
    elif age_s < -max_age_s:  # a little is usual: it was published after the reader looked
        why = f"bears a stamp {format_duration(-age_s)} in the future"
    if why or rate_hz is None:
        return _twice("unsupported", f"{path} {why}")
    max_hz = _positive(content, "max_frequency_hz")
    if age_s > max_age_s:
        why = f"published {format_duration(age_s)} ago, at most {format_duration(max_age_s)} counts"
        return (
            Quantity(value=rate_hz, quality="stale", reason=why),
            Quantity(value=max_hz, quality="stale", reason=why),
        )
    if max_hz is None:
        return Quantity.ok(rate_hz), Quantity.missing("unsupported", f"{path} says no highest one")
    return Quantity.ok(rate_hz), Quantity.ok(max_hz)


def _parse(data: bytes) -> Mapping[str, object]:
    """What the file says; nothing where it is not one whole JSON object."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _positive(content: Mapping[str, object], key: str) -> float | None:
    found = content.get(key)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if 0 < found < 2**62 else None

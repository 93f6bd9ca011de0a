"""Writes the states of a device to a file, and plays them again through the same interface.

JSON Lines. The first line is a header: ``{"edgewise_recording": 1, "period_s": …, "boot_id": …,
"note": …}``. Each further line is one state: ``at_s``, then either ``full`` with every quantity or
``changed`` (and ``gone``) against the line before. A good quantity is its number, any other
``[value, quality, reason]``.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, get_args

from edgewise.clock import Clock
from edgewise.device.files import Quality, read_text
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

_VERSION = 1
_FLUSH_S = 0.5
_MARK = "edgewise_recording"
_QUALITIES = get_args(Quality)


class Recorder:
    """Appends each state to a file; a callback for `Monitor`'s ``on_state``.

    Whole lines are written about twice a second, so that little is lost where the program is
    killed. A full disk ends the recording with one warning; whoever calls goes on.

    Args:
        path: The file. One that exists is replaced only if it is a recording or empty.
        period_s: Time between states; only noted.
        note: What device this is; only noted.
        root: Where the file tree with the boot id starts.
        full_every: After how many lines everything is written again.

    Attributes:
        path: The file.
        states: How many states were recorded.
        problem: Why the recording stopped; empty where it did not.

    Raises:
        ConfigError: The file cannot be written, or is something else than a recording.
    """

    def __init__(
        self,
        path: Path,
        *,
        period_s: float | None = None,
        note: str = "",
        root: Path = Path("/"),
        full_every: int = 500,
    ) -> None:
        self.path = path
        self.states = 0
        self.problem = ""
        self._full_every = full_every
        self._before: Mapping[str, Quantity] = {}
        self._last_s = self._flushed_s = -math.inf
        _refuse_other_file(path)
        try:
            # Without a buffer of Python's, which would be written twice after a fork.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot record to {path}: {error.strerror}",
                help="name a file in a directory that can be written",
            ) from error
        header = {
            _MARK: _VERSION,
            "period_s": period_s,
            "boot_id": read_text(root / "proc/sys/kernel/random/boot_id").value,
            "note": note,
        }
        self._unwritten = [_line(header)]
        self._flush()

    def __call__(self, state: DeviceState) -> None:
        """Record one state; one that is older than the last is left out."""
        if self._file.closed or self.problem or not self._last_s <= state.at_s < math.inf:
            return
        self._last_s = state.at_s
        now = state.quantities
        entry: dict[str, Any] = {"at_s": state.at_s}
        if self.states % self._full_every == 0:
            entry["full"] = {name: _encode(found) for name, found in now.items()}
        else:
            before = self._before
            entry["changed"] = {
                name: _encode(found)
                for name, found in now.items()
                if found is not before.get(name) and found != before.get(name)
            }
            if gone := [name for name in before if name not in now]:
                entry["gone"] = gone
        self._before = now
        self._unwritten.append(_line(entry))
        self.states += 1
        if state.at_s - self._flushed_s >= _FLUSH_S:
            self._flushed_s = state.at_s
            self._flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if not self._file.closed:
            self._flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        if self.problem:
            return
        rest = memoryview(b"".join(self._unwritten))
        self._unwritten = []
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            self.problem = f"{error.strerror}: {self.path}"
            _log.warning("the recording stops: %s", self.problem)


class Replay:
    """Plays a recording; a `StateSource`.

    The first state is current when this is made. After the end the last state stays, or the
    recording begins anew. States carry the instant of the playing clock at which they became
    current.

    Args:
        path: A file that `Recorder` wrote. One that was cut off is played as far as it is whole,
            with a warning in the log.
        clock: In whose time it is played.
        speed: 2 plays twice as fast.
        loop: Begin anew after the end.

    Attributes:
        states: The states as they were recorded, in order.
        duration_s: From the first state to the last, as recorded, seconds.
        period_s: Time between states as noted; ``None`` if it was not.
        boot_id: Of the machine when recorded; ``None`` if unknown.
        note: What device it was.
        problem: What is wrong with the end of the file; empty where nothing is.

    Raises:
        ConfigError: The speed is not above zero.
        DataError: The file cannot be read, is no recording, is damaged before its end, or holds
            no state.
    """

    def __init__(self, path: Path, clock: Clock, *, speed: float = 1.0, loop: bool = False) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigError(
                f"expected a playing speed above zero, found {speed!r}",
                help="1 plays as it was, 2 twice as fast",
            )
        header, lines = _read_lines(path)
        self.states, self.problem = _decode_states(path, lines)
        if self.problem:
            _log.warning("%s", self.problem)
        self.period_s: float | None = header.get("period_s")
        self.boot_id: str | None = header.get("boot_id")
        self.note = str(header.get("note") or "")
        first_s = self.states[0].at_s
        self.duration_s = self.states[-1].at_s - first_s
        self._at_s = [(each.at_s - first_s) / speed for each in self.states]
        self._clock = clock
        # The last state lasts as long as the others do on average before the first comes again.
        self._lap_s = self._at_s[-1] * len(self.states) / max(1, len(self.states) - 1)
        self._loop = loop and self._lap_s > 0
        self.restart()

    def restart(self) -> None:
        """Make the first state current now."""
        self._start_s = self._clock.now_s()
        self._current: tuple[tuple[float, int], DeviceState] = ((-1.0, -1), self.states[0])

    @property
    def ended(self) -> bool:
        """Whether the last state has been current; never, where it is played in a loop."""
        return not self._loop and self._clock.now_s() - self._start_s >= self._at_s[-1]

    def latest(self) -> DeviceState:
        """The state that is current now; no file is read."""
        played_s, lap_start_s = self._clock.now_s() - self._start_s, 0.0
        if self._loop:
            lap_start_s = played_s // self._lap_s * self._lap_s
            played_s -= lap_start_s
        index = max(0, bisect.bisect_right(self._at_s, played_s) - 1)
        key = lap_start_s, index
        made_for, state = self._current
        if made_for != key:
            at_s = self._start_s + lap_start_s + self._at_s[index]
            state = DeviceState(at_s=at_s, quantities=self.states[index].quantities)
            self._current = key, state
        return state


def _refuse_other_file(path: Path) -> None:
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return
        with path.open("rb") as file:
            found = file.read(len(_MARK) + 2)
    except OSError:
        return  # opening it for writing tells why
    if found != f'{{"{_MARK}'.encode():
        raise ConfigError(
            f"{path} exists and is not a recording", help="name another file, or remove this one"
        )


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _encode(found: Quantity) -> float | list[Any]:
    value = found.value
    if value is not None and not math.isfinite(value):
        value = None  # JSON has no such numbers
    if value is not None and found.quality == "ok":
        return value
    return [value, found.quality, found.reason]


def _decode(entry: Any) -> Quantity:
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return Quantity.ok(float(entry))
    value, quality, reason = entry
    if quality not in _QUALITIES or not isinstance(reason, str):
        raise ValueError
    return Quantity(value=None if value is None else float(value), quality=quality, reason=reason)


def _read_lines(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    help_ = "record one: edgewise monitor --record FILE"
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 16)  # what is no recording may be one endless line
            header = _header(first)
            lines = file.read().splitlines(keepends=True) if header is not None else []
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", help=help_) from error
    if header is None:
        raise DataError(
            f"{path} is not a recording: expected a first line with {_MARK!r}", help=help_
        )
    if header[_MARK] != _VERSION:
        raise DataError(
            f"{path} is a recording of version {header[_MARK]!r}; this program reads {_VERSION}",
            help="play it with the program that recorded it",
        )
    return header, lines


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(line)
    except ValueError:
        return None
    return header if isinstance(header, dict) and _MARK in header else None


def _decode_states(path: Path, lines: list[bytes]) -> tuple[list[DeviceState], str]:
    states: list[DeviceState] = []
    problem = ""
    for number, line in enumerate(lines, start=2):
        try:
            states.append(_decode_state(line, states[-1] if states else None))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number <= len(lines):
                raise DataError(
                    f"{path} is damaged at line {number} of {1 + len(lines)}",
                    help=f"to play what comes before: head -n {number - 1} {path} > part.jsonl",
                ) from error
            problem = f"{path} was cut off in line {number}; played up to there"
    if not states:
        raise DataError(
            f"{path} is a recording without a state",
            help="record for longer: edgewise monitor --record FILE",
        )
    return states, problem


def _decode_state(line: bytes, before: DeviceState | None) -> DeviceState:
    if not line.endswith(b"\n"):
        raise ValueError("cut off")
    entry = json.loads(line)
    at_s = float(entry["at_s"])
    if not (-math.inf if before is None else before.at_s) <= at_s < math.inf:
        raise ValueError("back in time")
    if "full" in entry:
        return DeviceState(
            at_s=at_s, quantities={name: _decode(each) for name, each in entry["full"].items()}
        )
    if before is None:
        raise ValueError("nothing to change")
    quantities = dict(before.quantities)
    quantities.update((name, _decode(each)) for name, each in entry["changed"].items())
    for name in entry.get("gone", ()):
        del quantities[name]
    return DeviceState(at_s=at_s, quantities=quantities)

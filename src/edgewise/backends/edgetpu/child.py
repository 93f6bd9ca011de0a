"""A supervised child process: started, spoken to with a time limit, and surely ended."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgewise.backends.accelerator import AcceleratorLost
from edgewise.backends.edgetpu import frames

WORKER = (sys.executable, "-P", "-m", "edgewise.backends.edgetpu.worker")

_ROOT = Path(__file__).parents[3]  # the folder that holds the package
_TAIL_BYTES = 4096
_REAP_S = 10.0
_DYING_S = 2.0


class ChildDied(AcceleratorLost):
    """The child process ended by itself.

    Attributes:
        cause: Name of the signal, or its exit code in words.
        said: Last line of its error output.
    """

    def __init__(self, message: str, *, cause: str, said: str) -> None:
        super().__init__(message, help="restart it")
        self.cause = cause
        self.said = said


class ChildHung(AcceleratorLost):
    """The child process did not answer in time and was killed."""


class Child:
    """One child process and the socket to it; used by one thread at a time.

    A thread of its own starts it and waits for it: the kernel kills the child when that thread
    ends, which is when this process does, by whatever means, even where it hangs in a driver.

    Attributes:
        pid: Its process number.

    Args:
        command: What to start; three arguments are appended: settings, socket, our process number.
        settings: For the child, written as JSON.
        what: For messages, for example ``"the Edge TPU"``.

    Raises:
        AcceleratorLost: It cannot be started.
    """

    def __init__(self, command: Sequence[str], *, settings: str, what: str) -> None:
        self._what = what
        self._channel, theirs = socket.socketpair()
        self._errors, their_errors = os.pipe()
        os.set_blocking(self._errors, False)
        self._tail = b""
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(self._errors, select.POLLIN)
        self._process: subprocess.Popen[bytes] | OSError | None = None
        self._is_open = True
        started = threading.Event()

        def live() -> None:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own worker
                    [*command, settings, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=their_errors,
                    stderr=their_errors,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(),
                )
            except OSError as error:
                self._process = error
            finally:
                theirs.close()
                os.close(their_errors)
                started.set()
            if isinstance(self._process, subprocess.Popen):
                self._process.wait()
                with contextlib.suppress(OSError):  # a fork may hold the other end open
                    self._channel.shutdown(socket.SHUT_RDWR)

        self._minder = threading.Thread(target=live, name="accelerator child", daemon=True)
        self._minder.start()
        started.wait()
        if not isinstance(self._process, subprocess.Popen):
            self._release()
            raise AcceleratorLost(f"the process for {what} cannot be started: {self._process}")
        self.pid: int = self._process.pid

    def call(
        self, header: Mapping[str, Any], payload: bytes = b"", *, timeout_s: float
    ) -> tuple[frames.Header, bytearray]:
        """Send a message and wait for the answer.

        Raises:
            ChildHung: There was none in time; the child was killed.
            ChildDied: It ended instead.
        """
        until_s = time.perf_counter() + timeout_s
        self._hear()
        self._tail = b""  # what it says from here on is about this call
        try:
            self._channel.settimeout(timeout_s)
            frames.send(self._channel, header, payload)
        except TimeoutError:
            raise self._hung(timeout_s) from None
        except OSError:
            raise self._died() from None
        return self.receive(timeout_s=max(0.0, until_s - time.perf_counter()))

    def receive(self, *, timeout_s: float) -> tuple[frames.Header, bytearray]:
        """Wait for a message.

        Raises:
            ChildHung: As `call`.
            ChildDied: As `call`.
        """
        until_s = time.perf_counter() + timeout_s

        def fill(buffer: memoryview) -> bool:
            while buffer:
                left_s = max(0.0, until_s - time.perf_counter())
                ready = [number for number, _ in self._poll.poll(math.ceil(left_s * 1e3))]
                if not ready:
                    raise self._hung(timeout_s)
                if self._errors in ready and not self._hear():
                    self._poll.unregister(self._errors)
                if self._channel.fileno() in ready:
                    count = self._channel.recv_into(buffer)
                    if count == 0:
                        return False
                    buffer = buffer[count:]
            return True

        try:
            message = frames.receive(fill)
        except ValueError as error:
            self.kill()
            cause = "something that is no message"
            raise ChildDied(
                f"the process of {self._what} sent {cause} and was killed", cause=cause, said=""
            ) from error
        except OSError:
            message = None
        if message is None:
            raise self._died()
        return message

    def kill(self) -> None:
        """End it at once and wait until it is gone."""
        if isinstance(self._process, subprocess.Popen):
            self._process.kill()
        self._minder.join(_REAP_S)
        self._release()

    def close(self, *, grace_s: float = 2.0) -> None:
        """Ask it to end, and kill it where it does not."""
        if not self._is_open:
            return
        with contextlib.suppress(OSError):
            self._channel.settimeout(grace_s)
            frames.send(self._channel, {"op": "end"})
        self._minder.join(grace_s)
        self.kill()

    def _release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._channel.close()
            os.close(self._errors)

    def _hear(self) -> bool:
        """Take what it wrote to its error output; ``False`` where that was closed."""
        while True:
            try:
                heard = os.read(self._errors, 65536)
            except BlockingIOError:
                return True
            if not heard:
                return False
            self._tail = (self._tail + heard)[-_TAIL_BYTES:]

    def _hung(self, timeout_s: float) -> ChildHung:
        self.kill()
        return ChildHung(
            f"{self._what} did not answer within {timeout_s:.3g} s; its process was killed",
            help="restart it",
        )

    def _died(self) -> ChildDied:
        self._minder.join(_DYING_S)
        if self._is_open:
            self._hear()
        self.kill()
        code = self._process.returncode if isinstance(self._process, subprocess.Popen) else None
        cause = "an unknown cause"
        if code is not None:
            cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        lines = self._tail.decode(errors="replace").strip().splitlines()
        said = lines[-1][:300] if lines else ""
        return ChildDied(
            f"the process of {self._what} ended with {cause}" + (f": {said}" if said else ""),
            cause=cause,
            said=said,
        )


def _environment() -> dict[str, str]:
    """Ours, with the folder that this package lies in on Python's path."""
    known = os.environ.get("PYTHONPATH")
    path = f"{_ROOT}{os.pathsep}{known}" if known else str(_ROOT)
    return {**os.environ, "PYTHONPATH": path}

"""A tenant's cores: so many workers, each with a suffix of its own, in front of one line."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from edgewise.backends.piece import Array, Piece

if TYPE_CHECKING:
    from edgewise.runtime.tenants.request import Request


class Suffix(Protocol):
    """What is left of a model after a place, loaded for one thread."""

    def run(
        self, x: Array, *, arrival_s: float, deadline_s: float | None
    ) -> tuple[Array, int | None]:
        """Compute the answer.

        Args:
            x: The tensor at the place; only read.
            arrival_s: When the request was due.
            deadline_s: Counted from then; ``None`` for none.

        Returns:
            The answer, and the exit that gave it for models that have some.
        """
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class WholeSuffix:
    """A suffix without exits: one piece."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def run(self, x: Array, *, arrival_s: float, deadline_s: float | None) -> tuple[Array, None]:  # noqa: ARG002
        """Run to the end, however late it is."""
        return self._piece.run(x), None

    def close(self) -> None:
        """Close the piece."""
        self._piece.close()


class CpuPool:
    """Workers that share one line, first come first served.

    Plans share a pool where they cut a model at the same place with the same threads: changing the
    number of workers loads or closes only the difference. All methods but `grow` are called
    under the engine's lock.

    Args:
        name: Of its threads.
        make: Loads and warms one suffix.
        begin: Told under the lock that a request was taken.
        serve: Runs one request on a suffix; never raises.
        retire: Given a suffix whose worker leaves; never raises.
        lock: The engine's.
        gate: Entered while a request runs, where more tenants than cores share them.

    Attributes:
        users: Number of each plan that uses it, with the workers that plan gives it.
        running: Requests that run now.
    """

    def __init__(  # noqa: PLR0913 - each is one end of it
        self,
        name: str,
        *,
        make: Callable[[], Suffix],
        begin: Callable[[Request], None],
        serve: Callable[[Request, Suffix], None],
        retire: Callable[[Suffix], None],
        lock: threading.Lock,
        gate: AbstractContextManager[object] | None = None,
    ) -> None:
        self.users: dict[int, int] = {}
        self.running = 0
        self._name = name
        self._make = make
        self._begin = begin
        self._serve = serve
        self._retire = retire
        self._lock = lock
        self._gate = gate or nullcontext()
        self._wake = threading.Condition(lock)
        self._line: deque[Request] = deque()
        self._alive = 0
        self._wanted = 0
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._line)

    @property
    def workers(self) -> int:
        """How many there are."""
        return self._alive

    @property
    def line(self) -> tuple[Request, ...]:
        """Who waits, in order."""
        return tuple(self._line)

    def push(self, request: Request) -> None:
        """Add a request to the line."""
        self._line.append(request)
        self._wake.notify()

    def remove(self, request: Request) -> None:
        """Take a request out of the line."""
        self._line.remove(request)

    def clear(self) -> list[Request]:
        """Take all out of the line."""
        found = list(self._line)
        self._line.clear()
        return found

    def grow(self, workers: int) -> None:
        """Have at least so many workers; without the engine's lock.

        Raises:
            Exception: Whatever loading or warming raised; what was loaded before stays.
        """
        while True:
            with self._lock:
                self._wanted = max(self._wanted, workers)
                if self._alive >= workers:
                    return
            suffix = self._make()
            with self._lock:
                self._alive += 1
                thread = threading.Thread(
                    target=self._work, args=(suffix,), name=self._name, daemon=True
                )
                self._threads = [*self.threads, thread]
                thread.start()

    def shrink(self, workers: int) -> None:
        """Let surplus workers leave as soon as they have nothing in hand."""
        self._wanted = min(self._wanted, workers)
        self._wake.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """Its workers' threads that have not ended."""
        return [t for t in self._threads if t.is_alive()]

    def _work(self, suffix: Suffix) -> None:
        try:
            while (request := self._next()) is not None:
                try:
                    with self._gate:
                        self._serve(request, suffix)
                finally:
                    with self._lock:
                        self.running -= 1
                del request  # its arrays must not outlive it while this worker waits
        finally:
            self._retire(suffix)

    def _next(self) -> Request | None:
        with self._lock:
            while not self._line and self._alive <= self._wanted:
                self._wake.wait()
            if self._alive > self._wanted and (self._wanted or not self._line):
                self._alive -= 1
                # Its notification may have been meant for one that stays.
                self._wake.notify()
                return None
            self.running += 1
            request = self._line.popleft()
            self._begin(request)
            return request

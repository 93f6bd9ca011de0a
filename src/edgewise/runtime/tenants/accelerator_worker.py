"""The one thread that uses the accelerator: requests in the queue's order, commands between."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from edgewise.backends.accelerator import AcceleratorAnswer, AcceleratorDevice, AcceleratorLost
from edgewise.clock import Clock
from edgewise.errors import BackendError
from edgewise.runtime.tenants.order import AcceleratorQueue

if TYPE_CHECKING:
    from edgewise.runtime.tenants.request import Request

T = TypeVar("T")
_log = logging.getLogger(__name__)


class AcceleratorWorker:
    """Runs prefixes one at a time.

    Args:
        device: Used by this worker's thread alone.
        queue: Changed under the lock only.
        lock: The engine's.
        clock: Tells time.
        begin: Told under the lock that a request was taken, and when.
        served: Told what a prefix gave, without the lock.
        failed: Told that a prefix failed, without the lock.
        lost: Told that the device was lost, with the request that noticed.

    Attributes:
        lost: Why the device is away; ``""`` where it is there. Nothing is served meanwhile.
        running: The request in hand and when it began.
        thread: Its own.
    """

    def __init__(  # noqa: PLR0913 - each is one end of it
        self,
        device: AcceleratorDevice,
        queue: AcceleratorQueue[Request],
        *,
        lock: threading.Lock,
        clock: Clock,
        begin: Callable[[Request, float], None],
        served: Callable[[Request, AcceleratorAnswer], None],
        failed: Callable[[Request, Exception], None],
        lost: Callable[[Request | None, AcceleratorLost], None],
    ) -> None:
        self.lost = ""
        self.running: tuple[Request, float] | None = None
        self._device = device
        self._queue = queue
        self._lock = lock
        self._clock = clock
        self._begin, self._served, self._failed, self._lost = begin, served, failed, lost
        self._wake = threading.Condition(lock)
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self.thread = threading.Thread(target=self._work, name="edgewise-accelerator", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Look at the queue again; under the lock."""
        self._wake.notify()

    def forget(self, key: str) -> None:
        """Drop the line of a prefix that is not used any more; under the lock."""
        self._queue.forget(key)

    def call(self, action: Callable[[], T]) -> T:
        """Run something on the worker's thread before the next request, and wait for it.

        Raises:
            BackendError: The worker is stopping.
            Exception: What the action raised.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_stopping:
                raise BackendError("the engine is closing")
            self._commands.append((action, future))
            self._wake.notify()
        return future.result()

    def stop(self) -> None:
        """Take nothing more; under the lock."""
        self._is_stopping = True
        while self._commands:
            self._commands.popleft()[1].set_exception(BackendError("the engine is closing"))
        self._wake.notify()

    def _work(self) -> None:
        while True:
            found = self._next(self._resident())
            if found is None:
                return
            if isinstance(found, tuple):
                _run(*found)
            else:
                self._serve(found)
            del found  # its arrays must not outlive it while this worker waits

    def _next(
        self, resident: Container[str]
    ) -> Request | tuple[Callable[[], Any], Future[Any]] | None:
        with self._lock:
            while not self._is_stopping:
                if self._commands:
                    return self._commands.popleft()
                wait_s = None
                if not self.lost:
                    now_s = self._clock.now_s()
                    request = self._queue.pop(now_s, resident)
                    if request is not None:
                        self._begin(request, now_s)
                        self.running = (request, now_s)
                        return request
                    wait_s = self._queue.ready_in_s(now_s)
                self._wake.wait(wait_s)
        return None

    def _serve(self, request: Request) -> None:
        try:
            assert request.x is not None  # noqa: S101 - kept until it has ended
            answer = self._device.run(request.key, request.x)
        except AcceleratorLost as error:
            self._done()
            self._lost(request, error)
        except Exception as error:  # noqa: BLE001 - it fails its own request only
            self._done()
            self._failed(request, error)
        else:
            self._done()
            self._served(request, answer)

    def _done(self) -> None:
        with self._lock:
            self.running = None

    def _resident(self) -> Container[str]:
        try:
            return self._device.resident
        except Exception:  # noqa: BLE001 - only the order suffers
            _log.debug("the accelerator does not tell what it holds", exc_info=True)
            return ()


def _run(action: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001 - raised where it was called
        future.set_exception(error)

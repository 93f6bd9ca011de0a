"""A real Edge TPU, owned by a child process: what aborts or hangs there is survived here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from edgewise.backends.accelerator import (
    AcceleratorAnswer,
    AcceleratorDevice,
    AcceleratorLost,
    Prefix,
)
from edgewise.backends.edgetpu import frames
from edgewise.backends.edgetpu.child import WORKER, Child
from edgewise.backends.edgetpu.probe import (
    LIBRARY,
    WHAT,
    Versions,
    await_ready,
    hear_versions,
    probe,
    worker_settings,
)
from edgewise.backends.piece import Array
from edgewise.backends.supervision import (
    WATCHDOG_FACTOR,
    WATCHDOG_LEAST_S,
    RestartBudget,
    call_s,
    watchdog_s,
)
from edgewise.clock import Clock, MonotonicClock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError, BackendUnavailable, ShapeError, nearest_names

_log = logging.getLogger(__name__)
_RECENT = 0.1  # weight of the latest call, as in Frigate's average inference time


class EdgeTpuDevice(AcceleratorDevice):
    """Runs compiled TFLite models through libedgetpu in a child process of its own.

    Construction tries the delegate out in a throw-away child, the first `load` its model as well.
    With ``library=None`` the child computes on the CPU: the same supervision without a device.

    Attributes:
        versions: Runtime and library; ``None`` without a device.

    Args:
        description: What is known about the device; calls are expected to take what it says.
        library: The delegate's library.
        options: The delegate's own, for example ``{"device": "usb:0"}``.
        threads: For what runs on the CPU.
        clock: For the restart budget.
        restarts: How many restarts are allowed ``within_s``.
        within_s: See ``restarts``, seconds.
        watchdog_factor: A call that takes so many times what is expected counts as hung.
        watchdog_least_s: But none before this time, seconds.
        start_timeout_s: For a child to come up and open the device, and for loading a model.
        root: Where the file tree starts, for the diagnosis.
        command: Starts the child.

    Raises:
        BackendUnavailable: No runtime, library or device, the device is held by another process, or
            runtime and library do not fit each other.
    """

    provenance = "measured"

    def __init__(  # noqa: PLR0913 - each is one property of the device
        self,
        description: Accelerator,
        *,
        library: str | None = LIBRARY,
        options: Mapping[str, str] | None = None,
        threads: int = 1,
        clock: Clock | None = None,
        restarts: int = 5,
        within_s: float = 60.0,
        watchdog_factor: float = WATCHDOG_FACTOR,
        watchdog_least_s: float = WATCHDOG_LEAST_S,
        start_timeout_s: float = 60.0,
        root: Path = Path("/"),
        command: Sequence[str] = WORKER,
    ) -> None:
        self.description = description
        self._library = library
        self._options = dict(options or {})
        self._threads = threads
        self._budget = RestartBudget(
            clock=clock or MonotonicClock(), restarts=restarts, within_s=within_s
        )
        self._watchdog_factor = watchdog_factor
        self._watchdog_least_s = watchdog_least_s
        self._start_timeout_s = start_timeout_s
        self._root = root
        self._command = tuple(command)
        self._loaded: dict[str, Prefix] = {}
        self._usual_s: dict[str, float] = {}
        self._last: str | None = None
        self._child: Child | None = None
        self._lost = ""
        self._is_proven = False
        self.versions = None if library is None else self._probe(library)

    @property
    def pid(self) -> int | None:
        """Process number of the child; ``None`` while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def restart_wait_s(self) -> float:
        """Time until the budget allows a restart, seconds."""
        return self._budget.wait_s

    @property
    def resident(self) -> tuple[str, ...]:
        """What ran last; the driver keeps at least that, and does not tell more."""
        return () if self._last is None else (self._last,)

    def load(self, prefix: Prefix) -> None:
        """See `AcceleratorDevice.load`.

        Raises:
            BackendUnavailable: The first model shows that runtime and library do not fit.
        """
        self._check_here()
        if self._library is not None and not self._is_proven:
            self._probe(self._library, prefix.model)
            self._is_proven = True
        if self._child is None:
            self._child = self._start()
        self._load_into(self._child, prefix)
        self._loaded[prefix.key] = prefix
        self._usual_s.pop(prefix.key, None)

    def unload(self, key: str) -> None:
        """See `AcceleratorDevice.unload`."""
        if self._loaded.pop(key, None) is None:
            return
        self._usual_s.pop(key, None)
        if self._last == key:
            self._last = None
        if self._child is not None:
            try:
                self._call(self._child, {"op": "unload", "key": key}, b"", self._start_timeout_s)
            except AcceleratorLost:
                _log.warning("%s was lost while a prefix was unloaded", WHAT, exc_info=True)

    def run(self, key: str, x: Array) -> AcceleratorAnswer:
        """See `AcceleratorDevice.run`; ``service_s`` is without the way to the child and back."""
        self._check_here()
        prefix = self._loaded.get(key)
        if prefix is None or self._child is None:
            raise BackendError(
                f"no prefix {key!r} is loaded on {WHAT}", help=nearest_names(key, self._loaded)
            )
        if x.shape != prefix.input.shape or x.dtype.name != prefix.input.dtype:
            raise ShapeError(
                f"prefix {key!r}: expected an array of {prefix.input.dtype} {prefix.input.shape},"
                f" found {x.dtype.name} {x.shape}"
            )
        header = {"op": "run", "key": key, **frames.array_header(x)}
        answer, data = self._call(self._child, header, x.tobytes(), self._limit_s(prefix))
        service_s = float(answer["service_s"])
        usual_s = self._usual_s.get(key, service_s)
        self._usual_s[key] = usual_s + _RECENT * (service_s - usual_s)
        self._last = key
        return AcceleratorAnswer(
            output=frames.array_of(answer, data), service_s=service_s, load_s=None, missed=None
        )

    def restart(self) -> None:
        """See `AcceleratorDevice.restart`."""
        self._budget.take(WHAT)
        self._drop("is being restarted")
        child = None
        try:
            child = self._start()
            for prefix in self._loaded.values():
                self._load_into(child, prefix)
        except BackendError as error:
            if child is not None:
                child.kill()
            self._lost = "could not be brought back"
            raise AcceleratorLost(
                f"{WHAT} cannot be brought back: {error.message}; the next try is allowed in"
                f" {self._budget.wait_s:.0f} s",
                help=error.help,
            ) from error
        self._child = child
        self._lost = ""

    def close(self, *, grace_s: float = 2.0) -> None:
        """See `AcceleratorDevice.close`; a child that does not end within ``grace_s`` is killed."""
        child, self._child = self._child, None
        self._lost = "was closed"
        if child is not None:
            child.close(grace_s=grace_s)

    def _check_here(self) -> None:
        if self._lost:
            raise AcceleratorLost(f"{WHAT} {self._lost}", help="restart it")

    def _probe(self, library: str, model: bytes | None = None) -> Versions:
        return probe(
            library=library,
            options=self._options,
            model=model,
            timeout_s=self._start_timeout_s,
            root=self._root,
            command=self._command,
        )

    def _start(self) -> Child:
        settings = worker_settings(self._library, self._options)
        limit_s = self._start_timeout_s
        child = Child(self._command, settings=settings, what=WHAT)
        try:
            if self._library is not None:
                hear_versions(child, timeout_s=limit_s)
            await_ready(child, library=self._library, root=self._root, timeout_s=limit_s)
        except BackendError:
            child.kill()
            raise
        return child

    def _load_into(self, child: Child, prefix: Prefix) -> None:
        header = {
            "op": "load",
            "key": prefix.key,
            "format": prefix.format,
            "threads": self._threads,
            "input": asdict(prefix.input),
            "output": asdict(prefix.output),
        }
        self._call(child, header, prefix.model, self._start_timeout_s)

    def _call(
        self, child: Child, header: frames.Header, payload: bytes, timeout_s: float
    ) -> tuple[frames.Header, bytearray]:
        """Ask the child; what it refuses is raised, and losing it is remembered."""
        try:
            answer, data = child.call(header, payload, timeout_s=timeout_s)
        except AcceleratorLost as error:
            if child is self._child:
                self._drop(f"was lost: {error.message}")
            raise
        if "error" in answer:
            kinds = {"shape": ShapeError, "unavailable": BackendUnavailable}
            raise kinds.get(answer["kind"], BackendError)(
                f"prefix {header['key']!r}: {answer['error']}", help=answer["help"]
            )
        return answer, data

    def _drop(self, why: str) -> None:
        self._lost = why
        self._last = None
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _limit_s(self, prefix: Prefix) -> float:
        """Time after which a call of this prefix counts as hung, loading included."""
        said_s = call_s(self.description, prefix) + self.description.load_s(
            prefix.weight_bytes, sram_bytes=prefix.sram_bytes
        )
        expected_s = max(said_s, self._usual_s.get(prefix.key, 0.0))
        return watchdog_s(expected_s, factor=self._watchdog_factor, least_s=self._watchdog_least_s)

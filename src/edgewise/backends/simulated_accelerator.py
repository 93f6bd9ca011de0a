"""An accelerator that is not there: real outputs from the CPU, time from its description."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from edgewise.backends.accelerator import (
    AcceleratorAnswer,
    AcceleratorDevice,
    AcceleratorLost,
    Prefix,
)
from edgewise.backends.piece import Array, Piece, load_piece
from edgewise.backends.supervision import RestartBudget, call_s, watchdog_s
from edgewise.clock import Clock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError, ConfigError, nearest_names

Fault = Literal["fails", "lost", "hangs", "gone"]
PieceLoader = Callable[..., Piece]

_MARGIN_S = (50e-6, 0.2e-3)  # who spins longer is preempted for milliseconds


class Memory:
    """What lies in an accelerator's memory for parameters, under each policy.

    Compiled apart, models behave as ``description.cache_policy`` says. Models pinned together never
    displace each other. On a ``token`` device a model that is not among them displaces them all,
    and they come back one by one; elsewhere their shares stay.

    Source:
        google-coral/libedgetpu, driver/driver.cc (one current token; another one makes the driver
        forget everything cached) and executable/executable.fbs, as told in public documentation.
    """

    def __init__(self, description: Accelerator) -> None:
        self._description = description
        self._prefixes: dict[str, Prefix] = {}  # in the order of loading
        self._pinned: dict[str, int] = {}  # shares in force
        self._asked: dict[str, int] = {}  # of them, those that were asked for
        self._held: dict[str, int] = {}  # oldest use first
        self._token: str | None = None

    @property
    def resident(self) -> tuple[str, ...]:
        """Keys whose parameters are there, the oldest use first."""
        return tuple(self._held)

    def add(self, prefix: Prefix) -> None:
        """Know a prefix; on a ``pinned`` device it gets what its compiler said, or what is left."""
        self.remove(prefix.key)
        self._prefixes[prefix.key] = prefix
        self._share(prefix)

    def remove(self, key: str) -> None:
        """Forget a prefix and its share."""
        for table in (self._prefixes, self._pinned, self._held):
            table.pop(key, None)

    def pin(self, shares: Mapping[str, int]) -> None:
        """Compile models together anew: nothing that lay in memory is of use any more."""
        self._asked = dict(shares)
        self._pinned = dict(shares)
        self.forget()
        for prefix in self._prefixes.values():
            if prefix.key not in shares:
                self._share(prefix)

    def forget(self) -> None:
        """Lose everything that lies in memory."""
        self._held.clear()

    def room_bytes(self, key: str) -> int:
        """Memory that a prefix may use, bytes."""
        if key in self._pinned:
            return self._pinned[key]
        room = self._description.sram_bytes
        if self._description.cache_policy == "lru":
            room -= sum(self._pinned.values())
        said = self._prefixes[key].sram_bytes
        return max(0, room if said is None else min(room, said))

    def use(self, key: str) -> bool:
        """Have a prefix in memory, and return whether it had to be brought in."""
        room = self.room_bytes(key)
        size = min(self._prefixes[key].weight_bytes, room)
        pinned = key in self._pinned
        if self._description.cache_policy == "token":
            token = None if pinned else key
            if token != self._token:
                self._held.clear()
            self._token = token
        missed = key not in self._held
        self._held.pop(key, None)
        if self._description.cache_policy == "lru" and not pinned:
            self._make_room(size)
        self._held[key] = size
        return missed

    def _make_room(self, size: int) -> None:
        """Drop the least recently used models until one of that size fits."""
        free = self._description.sram_bytes - sum(self._pinned.values())
        loose = {k: held for k, held in self._held.items() if k not in self._pinned}
        used = sum(loose.values())
        for key, held in loose.items():
            if used + size <= free:
                return
            used -= held
            del self._held[key]

    def _share(self, prefix: Prefix) -> None:
        if prefix.key in self._asked:
            self._pinned[prefix.key] = self._asked[prefix.key]
        elif self._description.cache_policy == "pinned":
            left = max(0, self._description.sram_bytes - sum(self._pinned.values()))
            wanted = left if prefix.sram_bytes is None else prefix.sram_bytes
            self._pinned[prefix.key] = min(prefix.weight_bytes, wanted)


@dataclass(slots=True)
class _Loaded:
    prefix: Prefix
    piece: Piece


class SimulatedAccelerator(AcceleratorDevice):
    """Takes as long as a real one would by its description, and answers as the CPU computes.

    A call takes t₀ + in/B + compute + overflow/B + out/B_out, and loading where its parameters are
    not in memory. On a real clock a call sleeps until then; outputs are remembered, so that the
    simulated device leaves the real CPU alone. Where computing an output took longer than the call
    may, ``overruns`` counts it: `prepare` what is to be timed. On a virtual clock time just moves.
    Not for two threads at once.

    Attributes:
        calls: Calls that answered.
        misses: Calls that brought parameters in.
        overruns: Calls that the real CPU made longer than the model says.

    Args:
        description: The device.
        clock: Real or virtual.
        piece_loader: Called as `load_piece` is.
        remember_bytes: How much of outputs is remembered, the least recently used leave first.
        restarts: How many restarts are allowed ``within_s``.
        within_s: See ``restarts``, seconds.
    """

    provenance = "simulated"

    def __init__(  # noqa: PLR0913 - each is one property of the device
        self,
        description: Accelerator,
        *,
        clock: Clock,
        piece_loader: PieceLoader = load_piece,
        remember_bytes: int = 64 << 20,
        restarts: int = 5,
        within_s: float = 60.0,
    ) -> None:
        self.description = description
        self.calls = 0
        self.misses = 0
        self.overruns = 0
        self._clock = clock
        self._load_piece = piece_loader
        self._loaded: dict[str, _Loaded] = {}
        self._memory = Memory(description)
        self._outputs: OrderedDict[tuple[str, bytes], Array] = OrderedDict()
        self._remember_bytes = remember_bytes
        self._remembered_bytes = 0
        self._budget = RestartBudget(clock=clock, restarts=restarts, within_s=within_s)
        self._faults: deque[Fault] = deque()
        self._lost = ""
        self._is_gone = False
        self._late_s = _MARGIN_S[0]

    @property
    def resident(self) -> tuple[str, ...]:
        """See `AcceleratorDevice.resident`."""
        return self._memory.resident

    @property
    def restart_wait_s(self) -> float:
        """Time until the budget allows a restart, seconds."""
        return self._budget.wait_s

    def load(self, prefix: Prefix) -> None:
        """See `AcceleratorDevice.load`."""
        self._check_here()
        if prefix.compute_s is None:
            raise BackendError(
                f"prefix {prefix.key!r} has no compute_s, so {self._what} cannot know its time",
                help="take it from the model's partition profile",
            )
        piece = self._load_piece(prefix.model, prefix.format, threads=1)
        if (piece.input, piece.output) != (prefix.input, prefix.output):
            piece.close()
            raise BackendError(
                f"prefix {prefix.key!r}: expected {prefix.input} to {prefix.output}, its model file"
                f" has {piece.input} to {piece.output}"
            )
        self.unload(prefix.key)
        self._loaded[prefix.key] = _Loaded(prefix, piece)
        self._memory.add(prefix)

    def unload(self, key: str) -> None:
        """See `AcceleratorDevice.unload`."""
        found = self._loaded.pop(key, None)
        if found is None:
            return
        found.piece.close()
        self._memory.remove(key)
        for known in [k for k in self._outputs if k[0] == key]:
            self._remembered_bytes -= self._outputs.pop(known).nbytes

    def pin(self, shares: Mapping[str, int]) -> None:
        """Give prefixes fixed shares of the memory, as compiling them together would.

        Replaces earlier shares. What was in memory is brought in again at first use. Prefixes may
        be loaded later.

        Args:
            shares: Key to bytes; empty for no shares.

        Raises:
            ConfigError: The device has no fixed shares, or they exceed its memory.
        """
        if shares and not (self.description.can_pin or self.description.cache_policy == "pinned"):
            raise ConfigError(f"{self._what} gives models no fixed shares of its memory")
        total = sum(shares.values())
        if min(shares.values(), default=0) < 0 or total > self.description.sram_bytes:
            raise ConfigError(
                f"expected shares of at most {self.description.sram_bytes} bytes together, found"
                f" {total}: {dict(shares)}"
            )
        self._memory.pin(shares)

    def prepare(self, key: str, inputs: Iterable[Array]) -> None:
        """Compute and remember outputs ahead, so that timed calls need no real CPU.

        Raises:
            ShapeError: An input does not fit.
            BackendError: No such prefix is loaded, or it failed.
        """
        for x in inputs:
            self._output(self._find(key), x)

    def run(self, key: str, x: Array) -> AcceleratorAnswer:
        """See `AcceleratorDevice.run`."""
        start_s = self._clock.now_s()
        self._check_here()
        found = self._find(key)
        found.piece.check(x)
        room = self._memory.room_bytes(key)
        busy_s = call_s(self.description, found.prefix, sram_bytes=room)
        self._stumble(key, busy_s)
        output = self._output(found, x)
        missed = self._memory.use(key)
        load_s = (
            self.description.load_s(found.prefix.weight_bytes, sram_bytes=room) if missed else 0.0
        )
        self.calls += 1
        self.misses += missed
        self._sleep_until(start_s + busy_s + load_s)
        return AcceleratorAnswer(
            output=output,
            service_s=self._clock.now_s() - start_s,
            load_s=load_s,
            missed=missed,
        )

    def restart(self) -> None:
        """See `AcceleratorDevice.restart`."""
        self._budget.take(self._what)
        if self._is_gone:
            raise AcceleratorLost(f"{self._what} is not there", help="plug it in")
        self._memory.forget()
        self._lost = ""

    def inject(self, fault: Fault, *, calls: int = 1) -> None:
        """Make the next calls fail, for tests and drills.

        Args:
            fault: ``fails``: the call fails, the device stays. ``lost``: the device is lost until a
                restart. ``hangs``: the same once the watchdog has run out. ``gone``: no restart
                helps until `come_back`.
            calls: How many calls in a row.

        Raises:
            ConfigError: There is no such fault.
        """
        if fault not in get_args(Fault):
            raise ConfigError(
                f"unknown fault {fault!r}", help=nearest_names(fault, get_args(Fault))
            )
        self._faults.extend([fault] * calls)

    def come_back(self) -> None:
        """End ``gone``: the next restart succeeds."""
        self._is_gone = False

    def close(self) -> None:
        """See `AcceleratorDevice.close`."""
        for key in list(self._loaded):
            self.unload(key)
        self._lost = "was closed"

    @property
    def _what(self) -> str:
        return f"the simulated accelerator {self.description.name!r}"

    def _check_here(self) -> None:
        if self._lost:
            raise AcceleratorLost(f"{self._what} {self._lost}", help="restart it")

    def _find(self, key: str) -> _Loaded:
        found = self._loaded.get(key)
        if found is None:
            raise BackendError(
                f"no prefix {key!r} is loaded on {self._what}",
                help=nearest_names(key, self._loaded),
            )
        return found

    def _stumble(self, key: str, busy_s: float) -> None:
        """Play the next injected fault."""
        fault = self._faults.popleft() if self._faults else None
        if fault is None:
            return
        if fault == "fails":
            raise BackendError(f"prefix {key!r} failed at invocation (injected)")
        if fault == "hangs":
            limit_s = watchdog_s(busy_s)
            self._clock.sleep_s(limit_s)
            self._lost = f"hung for {limit_s:g} s (injected)"
        else:
            self._lost = "was lost (injected)"
            self._is_gone = fault == "gone"
        self._memory.forget()
        self._check_here()

    def _output(self, loaded: _Loaded, x: Array) -> Array:
        name = (loaded.prefix.key, hashlib.blake2b(x.tobytes(), digest_size=16).digest())
        known = self._outputs.get(name)
        if known is not None:
            self._outputs.move_to_end(name)
            return known.copy()
        output = loaded.piece.run(x)
        kept = np.array(output)
        self._outputs[name] = kept
        self._remembered_bytes += kept.nbytes
        while self._remembered_bytes > self._remember_bytes:
            self._remembered_bytes -= self._outputs.popitem(last=False)[1].nbytes
        return output

    def _sleep_until(self, due_s: float) -> None:
        """Sleep until shortly before, then yield; virtual clocks are moved to the instant.

        A sleep returns late by the timer's slack and more on a busy machine, so the margin follows
        what is usual; being away for milliseconds now and then is not.
        """
        clock = self._clock
        margin_s = min(max(2 * self._late_s, _MARGIN_S[0]), _MARGIN_S[1])
        now_s = clock.now_s()
        if now_s > due_s:
            self.overruns += 1
            return
        sleep_s = due_s - now_s - margin_s
        if sleep_s > 0:
            clock.sleep_s(sleep_s)
            before_s, now_s = now_s, clock.now_s()
            late_s = min(now_s - before_s - sleep_s, 3 * self._late_s)
            self._late_s = max(self._late_s + 0.1 * (late_s - self._late_s), _MARGIN_S[0] / 2)
        while now_s < due_s:
            clock.sleep_s(0.0)
            before_s, now_s = now_s, clock.now_s()
            if now_s == before_s:  # it stands still while we look: it is virtual
                clock.sleep_s(due_s - now_s)
                return

"""Loads, warms and gives back what plans need: prefixes on the device, pools of suffixes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from edgewise.backends.accelerator import AcceleratorDevice, AcceleratorLost, Prefix
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.clock import Clock
from edgewise.errors import EdgeError
from edgewise.placement.plan import Placement
from edgewise.runtime.tenants.accelerator_worker import AcceleratorWorker
from edgewise.runtime.tenants.checks import said, why
from edgewise.runtime.tenants.idle import IdleSuffixes
from edgewise.runtime.tenants.pool import CpuPool, Suffix, WholeSuffix
from edgewise.runtime.tenants.records import TenantModel, zeros_for
from edgewise.runtime.tenants.request import Request
from edgewise.runtime.tenants.routes import Expected, LivePlan, Route, prefix_key

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A device and the thread that alone uses it."""

    device: AcceleratorDevice
    worker: AcceleratorWorker


class PlanLoader:
    """What live plans hold. Used by one thread at a time: whoever changes the plan.

    Args:
        tenants: By name.
        on_device: ``None`` without one.
        lock: The engine's; taken for moments, never while something is loaded.
        clock: Of the suffixes.
        load: Loads a piece on the CPU.
        keep_idle: Prefixes, and suffixes, that are kept for plans that come back.
        begin: Told under the lock that a worker takes a request.
        serve: Runs a request on a suffix.

    Attributes:
        live: Plans with something loaded, by number; changed under the lock.
    """

    def __init__(  # noqa: PLR0913 - each is one end of it
        self,
        tenants: Mapping[str, TenantModel],
        *,
        on_device: OnDevice | None,
        lock: threading.Lock,
        clock: Clock,
        load: Callable[..., Piece],
        keep_idle: int,
        begin: Callable[[Request], None],
        serve: Callable[[Request, Suffix], None],
    ) -> None:
        self.live: dict[int, LivePlan] = {}
        self._tenants = tenants
        self._on_device = on_device
        self._lock = lock
        self._clock = clock
        self._load = load
        self._begin, self._serve = begin, serve
        self._pools: dict[tuple[str, int, int, bool], CpuPool] = {}
        self._leaving: list[CpuPool] = []
        self._keep_idle = keep_idle
        self._idle = IdleSuffixes(keep_idle)
        self._loaded: dict[str, None] = {}  # in the order in which plans last needed them
        self._pinned: dict[str, int] | None = {}  # shares in force; None for not known
        self._next_number = 0

    @property
    def pools(self) -> list[CpuPool]:
        """Every pool whose threads may still be there."""
        return [*self._pools.values(), *self._leaving]

    def make(
        self, placement: Placement, *, before: LivePlan, everybody: bool = False, shared: int = 0
    ) -> LivePlan:
        """Load and warm what a plan needs beside what is there; all undone where it fails.

        Args:
            placement: The plan.
            before: The plan in force.
            everybody: Whether any tenant may fail; else only one that fails already.
            shared: Cores that all suffixes take turns on; 0 where each has its own.

        Raises:
            AcceleratorLost: The device is away.
            EdgeError: Something cannot be loaded, or failed when it was warmed up.
        """
        plan = LivePlan(number=self._next_number, placement=placement)
        self._next_number += 1
        gate = threading.BoundedSemaphore(shared) if shared else None
        predicted = {p.tenant: p for p in placement.predicted}
        with self._lock:
            self.live[plan.number] = plan
        try:
            for share in placement.shares:
                soonest_s = getattr(self._tenants[share.tenant].model, "soonest_s", None)
                route = plan.routes[share.tenant] = Route(
                    plan=plan.number,
                    tenant=self._tenants[share.tenant],
                    share=share,
                    key=prefix_key(share.tenant, share.place) if share.place > 0 else None,
                    pool=None,
                    expected=Expected.of(
                        predicted[share.tenant],
                        soonest_cpu_s=soonest_s and soonest_s(share.place, share.threads),
                    ),
                )
                may_fail = everybody or bool(
                    share.tenant in before.routes and before.routes[share.tenant].problem
                )
                self._load_route(route, gate=gate, may_fail=may_fail)
            self._pin(plan)
        except BaseException:
            self.release(plan)
            raise
        return plan

    def release(self, plan: LivePlan) -> None:
        """Take a plan out and give back what no other needs."""
        with self._lock:
            self.live.pop(plan.number, None)
            needed = {key for other in self.live.values() for key in other.keys}
            for key, pool in list(self._pools.items()):
                if pool.users.pop(plan.number, None) is not None:
                    pool.shrink(max(pool.users.values(), default=0))
                if not pool.users:
                    del self._pools[key]
                    self._leaving.append(pool)
            self._leaving = [pool for pool in self._leaving if pool.threads]
        idle = [name for name in self._loaded if name not in needed]
        for name in idle[: max(0, len(idle) - self._most_idle_prefixes)]:
            self._unload(name)

    @property
    def _most_idle_prefixes(self) -> int:
        """None where whatever is loaded takes a share of the memory for good."""
        if self._on_device is None:
            return 0
        keeps = self._on_device.device.description.cache_policy == "pinned"
        return 0 if keeps else self._keep_idle

    def close(self) -> None:
        """Close what is kept for plans that might come back."""
        self._idle.close()

    def forget_prefixes(self) -> None:
        """Take nothing on the device for granted any more: it was restarted."""
        self._loaded.clear()
        self._pinned = None

    def _load_route(
        self, route: Route, *, gate: AbstractContextManager[object] | None, may_fail: bool
    ) -> None:
        try:
            self._load_both(route, gate=gate)
        except AcceleratorLost:
            raise
        except Exception as error:
            name = route.tenant.name
            if not may_fail:
                raise said(error, f"tenant {name!r} cannot run as planned") from error
            route.problem = f"tenant {name!r} cannot be served: {why(error)}"

    def _load_both(self, route: Route, *, gate: AbstractContextManager[object] | None) -> None:
        share, model = route.share, route.tenant.model
        x = zeros_for(model)
        if route.key is not None:
            x = self._load_prefix(route, route.key, x)
        if share.place == model.last:
            return
        key = (share.tenant, share.place, share.threads, gate is not None)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = CpuPool(
                    f"edgewise-cpu-{share.tenant}",
                    make=lambda: self._make_suffix(route, x),
                    begin=self._begin,
                    serve=self._serve,
                    retire=lambda suffix: self._idle.give(key[:3], suffix),
                    lock=self._lock,
                    gate=gate,
                )
            pool.users[route.plan] = share.workers
            route.pool = pool
        pool.grow(share.workers)

    def _load_prefix(self, route: Route, key: str, x: Array) -> Array:
        """Have a prefix on the device and run it once: it may fail only at invocation."""
        assert self._on_device is not None  # noqa: S101 - checked with the plan
        device, worker = self._on_device.device, self._on_device.worker
        if key not in self._loaded:
            prefix = _prefix(route, key)
            worker.call(lambda: device.load(prefix))
            self._loaded[key] = None
        elif any(key in plan.keys for plan in self.live.values() if plan.number != route.plan):
            return np.zeros(*_spec_of(route))  # it answers requests: warm already
        return worker.call(lambda: device.run(key, x)).output

    def _make_suffix(self, route: Route, x: Array) -> Suffix:
        model, share = route.tenant.model, route.share
        kept = self._idle.take((share.tenant, share.place, share.threads))
        if kept is not None:
            return kept
        own = getattr(model, "load_suffix", None)
        suffix: Suffix
        if own is not None:
            suffix = own(share.place, threads=share.threads, clock=self._clock)
        else:
            content = model.segment(share.place, model.last)
            suffix = WholeSuffix(self._load(content, model.format, threads=share.threads))
        try:
            suffix.run(x, arrival_s=self._clock.now_s(), deadline_s=None)
        except BaseException:
            suffix.close()
            raise
        return suffix

    def _pin(self, plan: LivePlan) -> None:
        """Give prefixes their fixed shares, last of all before requests are routed to them.

        Shares displace everything that lies in memory. So each prefix is run once more in the same
        breath, and the new plan's requests find their parameters there; a request of the old plan
        can come between only before or after.
        """
        if self._on_device is None or self._on_device.worker.lost:
            return
        shares: dict[str, int] = {}
        inputs: dict[str, Array] = {}
        for route in plan.routes.values():
            sram_bytes = route.share.sram_bytes
            if plan.placement.residency != "pinned" or sram_bytes is None:
                continue
            if route.key is not None and not route.problem:
                shares[route.key] = sram_bytes
                inputs[route.key] = zeros_for(route.tenant.model)
        if shares == self._pinned or not plan.keys:
            return
        device = self._on_device.device

        def pin() -> None:
            device.pin(shares)
            for key, x in inputs.items():
                _fill(device, key, x)

        self._on_device.worker.call(pin)
        self._pinned = shares

    def _unload(self, key: str) -> None:
        self._loaded.pop(key, None)
        if self._on_device is None:
            return
        device, worker = self._on_device.device, self._on_device.worker
        with self._lock:
            worker.forget(key)
        try:  # also while the device is lost, lest a restart brings it back
            worker.call(lambda: device.unload(key))
        except EdgeError:
            _log.info("prefix %s could not be given back", key, exc_info=True)


def _fill(device: AcceleratorDevice, key: str, x: Array) -> None:
    """Have a prefix's parameters in memory; it has answered once before."""
    try:
        device.run(key, x)
    except AcceleratorLost:
        raise
    except EdgeError:  # its next request brings them in, or fails by itself
        _log.info("prefix %s could not be brought in ahead", key, exc_info=True)


def _spec_of(route: Route) -> tuple[tuple[int, ...], str]:
    place = route.tenant.model.places[route.share.place]
    return tuple(place.shape), str(place.dtype)


def _prefix(route: Route, key: str) -> Prefix:
    share, profile, model = route.share, route.tenant.profile, route.tenant.model
    first, last = model.places[0], model.places[share.place]
    # A plan's fixed share is given by `pin`: it may change while the prefix stays.
    sram = None if profile.sram_bytes is None else int(profile.sram_bytes[share.place])
    return Prefix(
        key=key,
        model=model.segment(0, share.place),
        format=model.format,
        weight_bytes=int(profile.prefix_bytes[share.place]),
        sram_bytes=sram,
        compute_s=float(profile.accelerator_s[share.place]),
        input=ArraySpec(shape=tuple(first.shape), dtype=str(first.dtype)),
        output=ArraySpec(shape=tuple(last.shape), dtype=str(last.dtype)),
    )

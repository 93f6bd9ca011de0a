"""Runs a placement: one accelerator, cores for each tenant, and changes of plan without a gap."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from edgewise.backends.accelerator import AcceleratorAnswer, AcceleratorDevice, AcceleratorLost
from edgewise.backends.piece import Array, Piece, load_piece
from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import BackendError, ConfigError, EdgeError, nearest_names
from edgewise.placement.plan import Placement
from edgewise.runtime.tenants.accelerator_worker import AcceleratorWorker
from edgewise.runtime.tenants.admission import Admission, Verdict
from edgewise.runtime.tenants.checks import (
    check_array,
    check_placement,
    check_tenants,
    uses_device,
    why,
)
from edgewise.runtime.tenants.fallback import cpu_only
from edgewise.runtime.tenants.loading import OnDevice, PlanLoader
from edgewise.runtime.tenants.order import AcceleratorQueue
from edgewise.runtime.tenants.pool import Suffix
from edgewise.runtime.tenants.records import (
    Done,
    Outcome,
    PlanChange,
    QueueRule,
    TenantAnswer,
    TenantModel,
)
from edgewise.runtime.tenants.request import Request, Ticket
from edgewise.runtime.tenants.routes import (
    LivePlan,
    Route,
    deadline_with_room,
    predicted_response_s,
)
from edgewise.runtime.tenants.watch import (
    WINDOW_S,
    EngineSnapshot,
    TenantSnapshot,
    TenantWatch,
    busy_ratio,
)

Float64 = npt.NDArray[np.float64]
_log = logging.getLogger(__name__)

_KEPT_CHANGES = 1000
_DRAIN_LIMIT_S = 30.0  # for the plan before the present one, before a third is made
_JOIN_S = 5.0
_FIRST_RETRY_S = 0.5
_STABLE_S = 60.0  # a device lost again sooner than this after it came back is tried more rarely
_LAST_RETRY_S = 30.0
_DEFAULT_RULE = QueueRule()


class TenantEngine:
    """Answers requests of several tenants as a placement says.

    Every request that was submitted ends in exactly one `TenantAnswer`, under the plan it came in
    or, where the accelerator was lost, under the plan for the CPU alone. Loading, warming and
    giving back go on beside the requests. A tenant whose model cannot be loaded, or fails, has its
    own requests fail; the others do not notice.

    Where the device is lost, the request in hand and all that wait for it run whole on the CPU; the
    engine restarts the device until it is back and then returns to the plan before.

    Args:
        tenants: Whose placement it is.
        placement: The first plan.
        device: What prefixes run on; used by one thread of the engine alone until it is closed,
            and closed by the caller after that. ``None`` where the plan has no prefixes.
        clock: Of all instants; the machine's monotonic one by default.
        queue: In which order the accelerator serves.
        max_waiting: Requests of one tenant that may wait; more are refused.
        admission: Whether requests that are predicted to miss their deadline are refused.
        cores: For the plan that runs while the accelerator is away; by default as many as the
            plan in force gives away.
        load: Loads a piece on the CPU.
        keep_idle: How many suffixes, and prefixes on the device, are kept after the last plan
            that used them, for a plan that comes back; their memory is not given back before.
        first_retry_s: Wait before a lost device is restarted; doubles up to half a minute.

    Raises:
        ConfigError: The placement is of other tenants, cuts where a model has no place, gives no
            worker to a suffix, or needs a device and there is none; or a number is out of range.
        BackendError: No tenant can be served at all.
    """

    def __init__(  # noqa: PLR0913 - the circumstances of a whole machine
        self,
        tenants: Sequence[TenantModel],
        placement: Placement,
        *,
        device: AcceleratorDevice | None = None,
        clock: Clock | None = None,
        queue: QueueRule = _DEFAULT_RULE,
        max_waiting: int = 256,
        admission: bool = True,
        cores: int | None = None,
        load: Callable[..., Piece] = load_piece,
        keep_idle: int = 8,
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        if max_waiting < 1 or (cores is not None and cores < 1) or keep_idle < 0:
            raise ConfigError(
                "expected at least one request to wait, one core and no fewer than 0 pieces to"
                f" keep, found {max_waiting}, {cores} and {keep_idle}"
            )
        check_tenants(tenants)
        self.clock: Clock = clock or MonotonicClock()
        self._tenants = {t.name: t for t in tenants}
        check_placement(placement, self._tenants, has_device=device is not None)
        self._rule = queue
        self._cores = cores
        self._admission = Admission(
            max_waiting=max_waiting, by_deadline=admission, predict_s=self._predict_s
        )
        self._device = device
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # one change of plan at a time; taken before the lock
        self._moved = threading.Condition(self._lock)  # a request ended, or a plan is drained
        self._keeper_wake = threading.Condition(self._lock)
        self._queue: AcceleratorQueue[Request] = AcceleratorQueue(queue)
        self._watches = {name: TenantWatch() for name in self._tenants}
        self._services: deque[tuple[float, float]] = deque(maxlen=4096)  # done, spent
        self._unfinished: dict[int, Request] = {}
        self._stranded: list[Request] = []  # were in hand when the device was lost
        self._plan = LivePlan(number=-1, placement=placement)
        self._wanted = placement
        self._changes: deque[PlanChange] = deque(maxlen=_KEPT_CHANGES)
        self._number = 0
        self._is_closing = self._is_stopped = self._must_fall_back = False
        self._first_retry_s = self._retry_s = first_retry_s
        self._back_s: float | None = None  # when a lost device came back last
        self._start_s = self.clock.now_s()
        self._worker: AcceleratorWorker | None = None
        if device is not None:
            self._worker = AcceleratorWorker(
                device,
                self._queue,
                lock=self._lock,
                clock=self.clock,
                begin=self._begin_prefix,
                served=self._prefix_done,
                failed=self._prefix_failed,
                lost=self._device_lost,
            )
        self._loader = PlanLoader(
            self._tenants,
            on_device=OnDevice(device=device, worker=self._worker)
            if device is not None and self._worker is not None
            else None,
            lock=self._lock,
            clock=self.clock,
            keep_idle=keep_idle,
            load=load,
            begin=self._take,
            serve=self._serve_suffix,
        )
        try:
            self._start(placement)
        except BaseException:
            self._stop_all()
            raise
        self._keeper = threading.Thread(target=self._keep, name="edgewise-keeper", daemon=True)
        self._keeper.start()

    # ---- what callers use

    def submit(
        self,
        tenant: str,
        x: Array,
        *,
        due_s: float | None = None,
        deadline_s: float | None = None,
        on_done: Done | None = None,
    ) -> Ticket:
        """Hand a request in; never waits for anything.

        Args:
            tenant: Whose.
            x: Its input; not copied, so leave it alone until the request has ended.
            due_s: When it should have been sent; now by default. Response times and deadlines
                count from then.
            deadline_s: From ``due_s``, seconds; the tenant's own by default.
            on_done: Called once with its end, on one of the engine's threads or, where it is
                refused, on this one. It must be quick and neither change plans nor close the
                engine.

        Raises:
            ConfigError: No such tenant, or a deadline that is no time above zero.
            ShapeError: ``x`` does not fit the tenant's model.
        """
        given = self._tenants.get(tenant)
        if given is None:
            raise ConfigError(
                f"no tenant is called {tenant!r}", help=nearest_names(tenant, self._tenants)
            )
        deadline_s = given.deadline_s if deadline_s is None else deadline_s
        if deadline_s is not None and not 0 < deadline_s < math.inf:
            raise ConfigError(f"expected a deadline above zero, found {deadline_s!r} s")
        check_array(given, x)
        now_s = self.clock.now_s()
        refused = False
        with self._lock:
            watch = self._watches[tenant]
            watch.rate.add(now_s)
            route = self._plan.routes[tenant]
            request = Request(
                number=self._number,
                route=route,
                x=x,
                due_s=now_s if due_s is None else due_s,
                deadline_s=deadline_s,
                queued_s=now_s,
                on_done=on_done,
            )
            self._number += 1
            verdict = (
                Verdict("refused", "the engine is closing")
                if self._is_closing
                else self._admission.judge(request, watch, now_s)
            )
            if verdict.outcome is None:
                self._plan.in_flight += 1
                self._unfinished[request.number] = request
                self._enqueue(request, now_s)
            else:
                refused = True
                answer = request.end(
                    verdict.outcome,
                    now_s,
                    reason=verdict.reason,
                    retry_after_s=verdict.retry_after_s,
                )
                watch.end(answer, deadline_s=deadline_s)
        if refused:
            self._tell(request)
        return Ticket(request, self._cancel)

    def apply(self, placement: Placement, *, reason: str = "") -> PlanChange:
        """Change to another plan without dropping a request.

        What the new plan needs is loaded and warmed while the old one answers; then new requests
        go to the new plan at once, those under way end under the old one, and what only that one
        needed is given back.

        Args:
            placement: The new plan.
            reason: For the record.

        Raises:
            ConfigError: As for the first plan; also where the engine has been closed.
            BackendError: Something could not be loaded or failed when it was warmed up.
            AcceleratorLost: It has prefixes, and the device is away.

            In each case the old plan goes on as it was.
        """
        check_placement(placement, self._tenants, has_device=self._device is not None)
        with self._changing:
            if uses_device(placement) and self.lost:
                raise AcceleratorLost(
                    f"the plan has prefixes, and the accelerator is away: {self.lost}",
                    help="plan for the CPU alone until it is back",
                )
            self._make_room()
            try:
                change = self._change(placement, reason=reason)
            except AcceleratorLost as error:
                if not self.lost:
                    self._device_lost(None, error)
                raise
            self._wanted = placement
        return change

    @property
    def placement(self) -> Placement:
        """The plan that new requests run under."""
        return self._plan.placement

    @property
    def changes(self) -> tuple[PlanChange, ...]:
        """Every plan so far, the first included; the last thousand."""
        with self._lock:
            return tuple(self._changes)

    @property
    def waiting(self) -> Mapping[str, int]:
        """Requests in a line, by tenant."""
        with self._lock:
            return {name: watch.waiting for name, watch in self._watches.items()}

    @property
    def lost(self) -> str:
        """Why the accelerator is away; ``""`` where it is there, or where there is none."""
        return self._worker.lost if self._worker is not None else ""

    def snapshot(self) -> EngineSnapshot:
        """Say how it is going; cheap enough for several times a second."""
        now_s = self.clock.now_s()
        since_s = max(self._start_s, now_s - WINDOW_S)
        with self._lock:
            spent = [s for done, s in self._services if done >= since_s]
            return EngineSnapshot(
                at_s=now_s,
                plan=self._plan.number,
                tenants=tuple(
                    watch.snapshot(self._plan.routes[name], since_s=since_s, now_s=now_s)
                    for name, watch in self._watches.items()
                ),
                accelerator_busy=None
                if self._device is None
                else busy_ratio(spent, span_s=now_s - since_s),
                lost=self.lost,
            )

    def acknowledge_rates(self) -> None:
        """Take note that rates have changed: ``rate_changed`` is about later changes."""
        with self._lock:
            for watch in self._watches.values():
                watch.rate.acknowledge()

    def responses(self, start_s: float, stop_s: float) -> Float64:
        """Response times of what was answered in a span, all tenants; the last few thousand."""
        with self._lock:
            found = [w.responses(start_s, stop_s) for w in self._watches.values()]
        return np.concatenate(found) if found else np.zeros(0)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request is under way and everyone has been told.

        Returns:
            Whether that came about in time. New requests are taken meanwhile.
        """
        with self._lock:
            return self._moved.wait_for(lambda: not self._unfinished, timeout_s)

    def close(self, *, drain_s: float = 5.0) -> None:
        """Refuse new requests, let those under way end, drop the rest and stop all threads.

        Bounded: it returns after ``drain_s`` and a few seconds for pieces that run, whatever
        happens. The device is the caller's to close.

        Args:
            drain_s: How long requests may still take.
        """
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            self._keeper_wake.notify_all()
            self._moved.notify_all()
        if was_closing:
            return
        self.drain(drain_s)
        self._stop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def _predict_s(self, route: Route, now_s: float) -> float:
        left_s = 0.0
        if self._worker is not None and self._worker.running is not None:
            running, began_s = self._worker.running
            expected = running.route.expected
            left_s = max(0.0, began_s + expected.service_s - now_s)
        return predicted_response_s(
            route,
            lengths=self._queue.lengths(),
            routes=[r for plan in self._loader.live.values() for r in plan.routes.values()],
            running_left_s=left_s,
            resident=self._queue.last_key,
            rule=self._rule,
        )

    def _enqueue(self, request: Request, now_s: float) -> None:
        """Put a request into the line of its next step; under the lock."""
        route = request.route
        request.queued_s = now_s
        self._watches[route.tenant.name].waiting += 1
        if route.key is not None and request.service_s is None:
            request.where = "accelerator"
            self._queue.push(request)
            assert self._worker is not None  # noqa: S101 - checked with the plan
            self._worker.wake()
        else:
            assert route.pool is not None  # noqa: S101 - a route without a prefix has a suffix
            request.where = "cpu"
            route.pool.push(request)

    def _take(self, request: Request) -> None:
        """Count a request as running; under the lock."""
        watch = self._watches[request.route.tenant.name]
        watch.waiting -= 1
        watch.running += 1
        request.where = "running"

    def _begin_prefix(self, request: Request, now_s: float) -> None:
        request.accelerator_wait_s = now_s - request.queued_s
        self._take(request)

    def _prefix_done(self, request: Request, answer: AcceleratorAnswer) -> None:
        now_s = self.clock.now_s()
        route = request.route
        with self._lock:
            self._services.append((now_s, answer.service_s))
            if request.has_ended:
                return
            request.service_s, request.load_s = answer.service_s, answer.load_s
            request.missed = answer.missed
            route.expected.saw_accelerator(answer.service_s, answer.load_s, missed=answer.missed)
            self._watches[route.tenant.name].running -= 1
            request.where = "cpu"
            if request.cancelled:
                self._end(request, "cancelled", now_s, reason=_CANCELLED)
            elif route.pool is None:
                last = getattr(route.tenant.model, "num_exits", None)
                request.exit_index = None if last is None else last - 1
                self._end(request, "answered", now_s, output=answer.output)
            else:
                request.x = answer.output
                self._enqueue(request, now_s)
                return
        self._tell(request)

    def _prefix_failed(self, request: Request, error: Exception) -> None:
        with self._lock:
            if request.has_ended:
                return
            self._watches[request.route.tenant.name].running -= 1
            outcome: Outcome = "cancelled" if request.cancelled else "failed"
            self._end(request, outcome, self.clock.now_s(), reason=why(error))
        self._tell(request)

    def _serve_suffix(self, request: Request, suffix: Suffix) -> None:
        with self._lock:
            if request.has_ended:
                return
            began_s = self.clock.now_s()
            request.cpu_wait_s = began_s - request.queued_s
            x, deadline_s = request.x, deadline_with_room(request, began_s)
        output, exit_index, reason = None, None, _CANCELLED
        outcome: Outcome = "cancelled"
        if not request.cancelled:
            assert x is not None  # noqa: S101 - kept until it has ended
            try:
                output, exit_index = suffix.run(x, arrival_s=request.due_s, deadline_s=deadline_s)
                outcome, reason = "answered", ""
            except Exception as error:  # noqa: BLE001 - it fails its own request only
                outcome, reason = "failed", why(error)
        now_s = self.clock.now_s()
        with self._lock:
            if request.has_ended:
                return
            self._watches[request.route.tenant.name].running -= 1
            request.cpu_s = now_s - began_s
            if request.cancelled:
                outcome, output, reason = "cancelled", None, _CANCELLED
            if outcome == "answered":
                request.exit_index = exit_index
                request.route.expected.saw_cpu(request.cpu_s)
            self._end(request, outcome, now_s, output=output, reason=reason)
        self._tell(request)

    def _cancel(self, request: Request) -> bool:
        with self._lock:
            if request.has_ended:
                return False
            request.cancelled = True
            if request.where == "running" or request in self._stranded:
                return True
            self._leave(request)
            self._end(request, "cancelled", self.clock.now_s(), reason=_CANCELLED)
        self._tell(request)
        return True

    def _leave(self, request: Request) -> None:
        """Take a waiting request out of its line; under the lock."""
        self._watches[request.route.tenant.name].waiting -= 1
        if request.where == "accelerator":
            self._queue.remove(request)
        elif request.route.pool is not None:
            request.route.pool.remove(request)

    def _end(
        self,
        request: Request,
        outcome: Outcome,
        now_s: float,
        *,
        output: Array | None = None,
        reason: str = "",
    ) -> None:
        """Write an end down; under the lock. `_tell` must follow without it."""
        answer = request.end(outcome, now_s, output=output, reason=reason)
        self._watches[answer.tenant].end(answer, deadline_s=request.deadline_s)

    def _tell(self, request: Request) -> None:
        """Let everybody know of an end, and its plan last."""
        answer = request.answer
        assert answer is not None  # noqa: S101 - it has ended
        request.ended.set()
        if request.on_done is not None:
            try:
                request.on_done(answer)
            except Exception:  # noqa: BLE001 - its sender's mistake, told in the log
                _log.exception("what request %d was to call when done failed", request.number)
        with self._lock:
            if self._unfinished.pop(request.number, None) is None:
                return
            plan = self._loader.live.get(request.route.plan)
            if plan is not None:
                plan.in_flight -= 1
                self._note_drained(plan)
            if not self._unfinished:
                self._moved.notify_all()

    # ---- plans

    def _start(self, placement: Placement) -> None:
        with self._changing:
            try:
                self._change(placement, reason="the first plan", everybody=True)
            except AcceleratorLost as error:
                self._device_lost(None, error)
                self._must_fall_back = False
                self._fall_back(error.message)
            broken = [r for r in self._plan.routes.values() if r.problem]
            if len(broken) == len(self._tenants):
                raise BackendError(f"no tenant can be served: {broken[0].problem}")
            for route in broken:
                _log.warning("%s", route.problem)

    def _change(
        self, placement: Placement, *, reason: str, everybody: bool = False, shared: int = 0
    ) -> PlanChange:
        """Make, route, retire; under `_changing`. Arguments as `PlanLoader.make` has them."""
        began_s = self.clock.now_s()
        plan = self._loader.make(placement, before=self._plan, everybody=everybody, shared=shared)
        with self._lock:
            if not self._is_closing:
                return self._route(plan, began_s=began_s, reason=reason)
        self._loader.release(plan)
        raise ConfigError("the engine has been closed")

    def _route(self, plan: LivePlan, *, began_s: float, reason: str) -> PlanChange:
        """Send new requests another way; under the lock."""
        old, self._plan = self._plan, plan
        change = PlanChange(
            number=plan.number,
            placement=plan.placement,
            began_s=began_s,
            routed_s=self.clock.now_s(),
            reason=reason,
        )
        self._changes.append(change)
        for pool in plan.pools:
            pool.shrink(pool.users[plan.number])
        old.is_retired = True
        self._note_drained(old)
        return self._changes[-1]

    def _make_room(self) -> None:
        """Wait for the plan before the present one to drain; under `_changing`."""
        with self._lock:
            self._moved.wait_for(
                lambda: self._is_closing or self._must_fall_back or not self._draining(),
                _DRAIN_LIMIT_S,
            )
            stuck = self._draining()
        self._release_drained()
        if self._is_closing:
            raise ConfigError("the engine has been closed")
        if stuck:
            raise BackendError(
                f"{stuck[0].in_flight} requests of plan {stuck[0].number} have not ended within"
                f" {_DRAIN_LIMIT_S:g} s of its retirement",
                help="something hangs: the snapshot says which tenant has requests running",
            )

    def _draining(self) -> list[LivePlan]:
        return [p for p in self._loader.live.values() if p.is_retired and p.in_flight]

    def _drained(self) -> list[LivePlan]:
        return [p for p in self._loader.live.values() if p.is_retired and not p.in_flight]

    def _release_drained(self) -> None:
        """Give back what retired plans alone needed; under `_changing`."""
        with self._lock:
            drained = self._drained()
        for plan in drained:
            self._loader.release(plan)

    def _note_drained(self, plan: LivePlan) -> None:
        """Record that a retired plan has no request left; under the lock."""
        if not plan.is_retired or plan.in_flight:
            return
        for k, change in enumerate(self._changes):
            if change.number > plan.number and change.drained_s is None:
                self._changes[k] = replace(change, drained_s=self.clock.now_s())
                break
        self._moved.notify_all()
        self._keeper_wake.notify_all()

    # ---- a lost device

    def _device_lost(self, request: Request | None, error: AcceleratorLost) -> None:
        """Stop serving prefixes; the keeper does the rest."""
        _log.warning("the accelerator is lost: %s", error.message)
        with self._lock:
            assert self._worker is not None  # noqa: S101 - it told
            now_s = self.clock.now_s()
            soon = self._back_s is not None and now_s - self._back_s < _STABLE_S
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S) if soon else self._first_retry_s
            self._worker.lost = error.message or "it did not say why"
            self._must_fall_back = True
            if request is not None and not request.has_ended:
                watch = self._watches[request.route.tenant.name]
                watch.running -= 1
                watch.waiting += 1
                request.where = "accelerator"
                self._stranded.append(request)
            self._keeper_wake.notify_all()
            self._moved.notify_all()

    def _keep(self) -> None:
        """Give drained plans back, and get a lost device back."""
        while True:
            with self._lock:
                due = self._keeper_wake.wait_for(
                    lambda: self._is_stopped or self._must_fall_back or bool(self._drained()),
                    self._retry_s if self.lost else None,
                )
                if self._is_stopped:
                    return
            with self._changing:
                try:
                    self._release_drained()
                    with self._lock:
                        falls_back, self._must_fall_back = self._must_fall_back, False
                    if falls_back:
                        self._fall_back(self.lost)
                    elif not due and self.lost:
                        self._restart()
                except Exception:  # noqa: BLE001 - without it a lost device stays lost
                    _log.exception("the engine's keeper failed and goes on")

    def _fall_back(self, lost: str) -> None:
        """Change to the CPU alone and move what waits for the device; under `_changing`."""
        problem = ""
        given = self._plan.placement
        if uses_device(given):
            now_s = self.clock.now_s()
            planned = {p.tenant: p.rate_per_s for p in given.predicted}
            with self._lock:
                rates = {
                    n: w.rate.rate_per_s(now_s) or planned[n] for n, w in self._watches.items()
                }
            cores = self._cores or max(1, sum(given.cores))
            tenants = list(self._tenants.values())
            try:
                self._change(
                    cpu_only(tenants, rates, cores=cores, note=f"accelerator away: {lost}"),
                    reason=f"accelerator lost: {lost}",
                    everybody=True,
                    shared=cores if cores < len(tenants) else 0,
                )
            except EdgeError as error:
                problem = why(error)
        self._rescue(problem)

    def _rescue(self, problem: str) -> None:
        """Route what waited for the device anew, or let it fail."""
        now_s = self.clock.now_s()
        ended: list[Request] = []
        with self._lock:
            moved = [r for r in (*self._stranded, *self._queue.clear()) if not r.has_ended]
            self._stranded.clear()
            for request in moved:
                self._watches[request.route.tenant.name].waiting -= 1
                new = self._plan.routes[request.route.tenant.name]
                reason = problem or new.problem
                if request.cancelled:
                    self._end(request, "cancelled", now_s, reason=_CANCELLED)
                elif reason or new.pool is None:
                    reason = reason or "no core can do its work"
                    self._end(request, "failed", now_s, reason=f"{_LOST}, and {reason}")
                else:
                    self._move(request, new, now_s)
                    continue
                ended.append(request)
        for request in ended:
            self._tell(request)

    def _move(self, request: Request, new: Route, now_s: float) -> None:
        """Have a request that has not begun run under the present plan; under the lock."""
        old = self._loader.live.get(request.route.plan)
        if old is not None:
            old.in_flight -= 1
            self._note_drained(old)
        self._plan.in_flight += 1
        request.route, request.accelerator_wait_s = new, None
        self._enqueue(request, now_s)

    def _restart(self) -> None:
        """Try to get the device back; under `_changing`."""
        device, worker = self._device, self._worker
        assert device is not None  # noqa: S101 - it was lost
        assert worker is not None  # noqa: S101
        try:
            worker.call(device.restart)
            self._loader.forget_prefixes()
            with self._lock:
                worker.lost = ""
            self._back_s = self.clock.now_s()
            if uses_device(self._wanted) and not uses_device(self.placement):
                self._change(self._wanted, reason="the accelerator is back")
        except AcceleratorLost as error:
            _log.info("the accelerator is not back: %s", error.message)
            with self._lock:
                worker.lost = error.message or worker.lost
                self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        except EdgeError as error:
            _log.warning("the accelerator is back, its plan is not: %s", error.message)

    # ---- the end

    def _stop_all(self) -> None:
        with self._lock:
            self._is_closing = self._is_stopped = True
            self._keeper_wake.notify_all()
            left = [r for r in self._unfinished.values() if not r.has_ended]
            now_s = self.clock.now_s()
            for request in left:
                watch = self._watches[request.route.tenant.name]
                if request.where == "running":
                    watch.running -= 1
                else:
                    watch.waiting -= 1
                self._end(request, "dropped", now_s, reason="the engine was closed before its end")
            self._queue.clear()
            self._stranded.clear()
            for pool in self._loader.pools:
                pool.clear()
            if self._worker is not None:
                self._worker.stop()
        for request in left:
            self._tell(request)
        with self._lock:
            for pool in self._loader.pools:
                pool.shrink(0)
            threads = [t for pool in self._loader.pools for t in pool.threads]
        keeper = getattr(self, "_keeper", None)  # none where the first plan failed
        threads += [keeper] if keeper is not None else []
        threads += [self._worker.thread] if self._worker is not None else []
        self._join(threads)
        self._loader.close()

    @staticmethod
    def _join(threads: Sequence[threading.Thread]) -> None:
        """Wait for all together, for a while."""
        clock = MonotonicClock()  # the engine's own may be virtual
        ends_s = clock.now_s() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends_s - clock.now_s()))
        if any(t.is_alive() for t in threads):
            _log.warning("a piece still runs %g s after the engine was closed", _JOIN_S)


_CANCELLED = "its sender gave it up"
_LOST = "the accelerator was lost"


__all__ = ["EngineSnapshot", "TenantAnswer", "TenantEngine", "TenantSnapshot", "Ticket"]

"""Tenants whose models have exits: cut between stages, leaving the suffix early under a budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.backends import Program, load_program
from edgewise.backends.null import NullProgram
from edgewise.backends.piece import Array
from edgewise.backends.staged_pieces import staged_segment
from edgewise.clock import Clock, VirtualClock
from edgewise.errors import ConfigError
from edgewise.frontends.staged_places import staged_places
from edgewise.model import StagedModel
from edgewise.predict import CostTable
from edgewise.runtime.session import Session

Float64 = npt.NDArray[np.float64]
ProgramLoader = Callable[..., Program]

# These ask what happened before the place where they are begun.
_FROM_THE_START = ("oracle", "spinn", "static_table", "uniexit", "bandit")
NO_DEADLINE_S = 1e6
_SETTLING = 32  # requests before those that count


class StagedCuttable:
    """A staged model as a tenant: its places are the ends of its stages.

    Prefixes are pieces of the backbone. Suffixes run stage by stage with a session's own policy,
    which answers at the exit that the time left allows. One compiled program for each number of
    threads serves all places, so that moving a cut loads nothing on the CPU.

    Args:
        model: With a head at every exit; the last may do without, where its stage gives the answer.
        costs: Of its stages and heads on that backend with one thread, or for each number of
            threads.
        backend: What suffixes run on.
        policy: Name of the policy that leaves; it must be one that can begin in the middle.
        load: Loads a program, as `load_program` does.
        policy_options: The policy's own arguments.

    Raises:
        ConfigError: The policy cannot begin in the middle.
    """

    format: Literal["onnx"] = "onnx"

    def __init__(
        self,
        model: StagedModel,
        costs: CostTable | Callable[[int], CostTable],
        *,
        backend: str = "onnxruntime:CPU",
        policy: str = "edgewise",
        load: ProgramLoader = load_program,
        **policy_options: Any,
    ) -> None:
        check_policy(policy)
        self.model = model
        self.name = model.name
        self.places = staged_places(model)
        self._costs = costs
        self._backend, self._policy, self._options = backend, policy, policy_options
        self._load = load
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[Session, int]] = {}  # by threads, with users

    @property
    def last(self) -> int:
        """P: how many stages there are."""
        return len(self.places) - 1

    @property
    def num_exits(self) -> int:
        """How many exits; the last is the answer at place P."""
        return self.model.num_exits

    def segment(self, start: int, stop: int) -> bytes:
        """Content of the ONNX file between two places.

        Raises:
            ModelError: The places are not in order.
        """
        return staged_segment(self.model, start, stop)

    def soonest_s(self, place: int, threads: int) -> float:
        """Time from a place to the nearest answer: what admission must leave for a suffix."""
        if place == self.last:
            return 0.0
        costs = self.costs_for(threads)
        return min(costs.remaining_s(place, k) for k in range(max(place - 1, 0), self.num_exits))

    def load_suffix(self, place: int, *, threads: int, clock: Clock) -> StagedSuffix:
        """Load what is left after a place, for one thread of a pool.

        Raises:
            BackendError: The backend refuses a stage.
        """
        with self._lock:
            session, users = self._shared.get(threads) or (self._session(threads, clock), 0)
            self._shared[threads] = (session, users + 1)
        return StagedSuffix(session, place, close=lambda: self._give_back(threads))

    def _session(self, threads: int, clock: Clock) -> Session:
        program = self._load(self.model, self._backend, threads=threads)
        costs = self.costs_for(threads)
        session = Session(program, costs, policy=self._policy, clock=clock, **self._options)
        session.warm_up(1)  # its policy must not learn from a cold run
        return session

    def costs_for(self, threads: int) -> CostTable:
        """Costs of its stages and heads with so many threads."""
        return self._costs(threads) if callable(self._costs) else self._costs

    def _give_back(self, threads: int) -> None:
        with self._lock:
            session, users = self._shared[threads]
            if users > 1:
                self._shared[threads] = (session, users - 1)
            else:
                del self._shared[threads]


class StagedSuffix:
    """The stages after a place, with exits. A suffix for `CpuPool`."""

    def __init__(self, session: Session, place: int, *, close: Callable[[], None]) -> None:
        self._session = session
        self._place = place
        self._close = close

    def run(
        self, x: Array, *, arrival_s: float, deadline_s: float | None
    ) -> tuple[Array, int | None]:
        """Run until the policy answers; without a deadline to the exit it likes best."""
        answer = self._session.run(
            x,
            budget_s=NO_DEADLINE_S if deadline_s is None else deadline_s,
            arrival_s=min(arrival_s, self._session.clock.now_s()),
            position=self._place,
        )
        if answer.logits is None:  # a policy that may reject did
            raise ConfigError(f"the policy refused: {answer.reason}")
        return answer.logits[np.newaxis], answer.exit_index

    def close(self) -> None:
        """Give the program back; the last user frees it."""
        self._close()


def suffix_work(  # noqa: PLR0913 - what a request meets
    model: StagedModel,
    costs: CostTable,
    *,
    budget_s: float,
    spent_s: Sequence[float] | Float64 | None = None,
    policy: str = "edgewise",
    samples: int = 16,
    **policy_options: Any,
) -> tuple[Float64, Float64]:
    """Say what share of each suffix a policy runs under a budget, for `placement.problem.Tenant`.

    The policy itself is asked, through the executor, on a clock on which units take their costs,
    so that its margins for noise shrink: rather too much work is counted than too little.

    Args:
        model: With exits.
        costs: Of its stages and heads.
        budget_s: From arrival to answer, seconds.
        spent_s: Of that, gone before the suffix begins: waiting, the prefix and its transfers,
            [P + 1] or [P + 1, N] for N equally likely cases; none by default.
        policy: Its name.
        samples: Requests in each case, where logits make a difference; taken from the model's
            validation data in order.
        policy_options: Its own arguments.

    Returns:
        ``suffix_ratio`` and ``suffix_cv2``, [P + 1]: mean time of the suffix over that of all of
        it, and its squared coefficient of variation. 1 and 0 at place P.

    Raises:
        ConfigError: The policy cannot begin in the middle, or a budget is not above zero.
    """
    check_policy(policy)
    last = model.num_exits
    spent = np.zeros((last + 1, 1)) if spent_s is None else np.asarray(spent_s, dtype=np.float64)
    spent = spent.reshape(last + 1, -1)
    ratio, cv2 = np.ones(last + 1), np.zeros(last + 1)

    clock = VirtualClock()
    case = [0]  # whose logits the program gives
    program = NullProgram(
        model, clock=clock, cost_s=lambda unit: _unit_s(costs, unit), logits=_logits(model, case)
    )
    session = Session(program, costs, policy=policy, clock=clock, **policy_options)

    def suffix_s(place: int, gone_s: float, sample: int) -> float:
        case[0] = sample
        start_s = clock.now_s()
        x = np.zeros(_shape(model, place), dtype=np.float32)
        session.run(x, budget_s=budget_s, arrival_s=start_s - gone_s, position=place)
        return clock.now_s() - start_s

    for _ in range(_SETTLING):  # margins follow what requests take, as they do where it serves
        suffix_s(0, 0.0, 0)
    for place in range(last):
        whole_s = costs.remaining_s(place, last - 1)
        found = [
            suffix_s(place, gone_s, sample)
            for gone_s in spent[place].tolist()
            for sample in range(samples if model.validation is not None else 1)
        ]
        mean_s = float(np.mean(found))
        if whole_s > 0 and mean_s > 0:
            ratio[place] = mean_s / whole_s
            cv2[place] = float(np.var(found)) / mean_s**2
    return ratio, cv2


def check_policy(policy: str) -> None:
    """Refuse a policy that must have seen a request from its start.

    Raises:
        ConfigError: As said.
    """
    if policy in _FROM_THE_START:
        raise ConfigError(
            f"policy {policy!r} cannot begin in the middle of a network, behind a prefix",
            help="use 'edgewise', which asks for the time left only",
        )


def _unit_s(costs: CostTable, unit: str) -> float:
    kind, _, where = unit.partition(":")
    if kind == "head":
        return float(costs.head_s[int(where)])
    start, stop = map(int, where.split("-"))
    return float(costs.segment_s.get((start, stop), costs.stage_s[start:stop].sum()))


def _logits(model: StagedModel, case: Sequence[int]) -> Callable[[int, Any], Any] | None:
    validation = model.validation
    if validation is None:
        return None
    logits = validation.logits  # [E, N, C]
    return lambda exit_index, _: logits[exit_index, [case[0] % logits.shape[1]]]


def _shape(model: StagedModel, place: int) -> tuple[int, ...]:
    spec = model.input if place == 0 else model.stages[place - 1].stop
    return (1, *spec.shape[1:])

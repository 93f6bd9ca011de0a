"""A model, a backend, a policy and their costs, ready for requests from any number of threads."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from edgewise.clock import MonotonicClock
from edgewise.data import Preprocess, check_input
from edgewise.errors import ConfigError
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.predict.drift import DriftAlarm, DriftTest
from edgewise.runtime.batch import execute_batch, padded_size
from edgewise.runtime.executor import execute
from edgewise.runtime.request import Setting
from edgewise.units import check_budget_s, format_duration

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.clock import Clock
    from edgewise.device.state import StateSource
    from edgewise.predict import CostTable
    from edgewise.runtime.answer import Answer

Float32 = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)
# Fewer rounds say too little about noise to call anything else drift.
_LEAST_PROFILED = 8
# Smaller shifts come and go with whoever shares the caches; residuals correct them.
_LEAST_SHIFT_RATIO = 1.5


class Session:
    """Answers requests within their budgets.

    Args:
        program: A loaded model; several sessions may share it.
        costs: Of that program's model, on its backend.
        policy: A name, or a policy made by `make_policy`.
        clock: Tells time; the machine's monotonic clock by default.
        source: Who knows the device's state; answers carry it. `close` stops it, where it can be
            stopped.
        policy_options: The policy's own arguments.

    Example:
        See README.md, whose example runs as a test.
    """

    def __init__(
        self,
        program: Program,
        costs: CostTable,
        *,
        policy: str | Policy = "edgewise",
        clock: Clock | None = None,
        source: StateSource | None = None,
        **policy_options: Any,
    ) -> None:
        self.program = program
        self.model = program.model
        self.costs = costs
        self.clock: Clock = clock or MonotonicClock()
        inputs = PolicyInputs.of(program.model, costs, segments=program.segments)
        self.policy = (
            make_policy(policy, inputs, **policy_options) if isinstance(policy, str) else policy
        )
        self.source = source
        self._setting = Setting.of(
            program, policy=self.policy, costs=costs, clock=self.clock, source=source
        )
        self._shape = (1, *program.model.input.shape[1:])
        self._drift = _drift_test(costs, program.model.name)
        self._drift_lock = threading.Lock()

    @property
    def alarm(self) -> DriftAlarm | None:
        """Set once requests have lastingly taken another time than their costs say.

        The profile, or the predictor, is then of another state of affairs: a hot device, another
        power mode, a neighbour that stays. The router goes on correcting itself by residuals.
        ``None`` also where the profile holds no samples to tell noise from drift by.
        """
        return None if self._drift is None else self._drift.alarm

    def close(self) -> None:
        """Stop what watches the device for this session; without one, nothing is open."""
        stop = getattr(self.source, "stop", None)
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def preprocess(self, images: npt.NDArray[np.uint8]) -> Float32:
        """Turn images into inputs as the model's checkpoint says.

        Args:
            images: uint8 [N, H, W, C] of any size.

        Returns:
            float32 [N, C, h, w].

        Raises:
            ConfigError: The model does not say how.
            ShapeError: These are not such images.
        """
        if self.model.preprocess is None:
            raise ConfigError(
                f"model {self.model.name!r} does not say how images become inputs",
                help="pass arrays of the input's shape, or prepare it with `edgewise prepare`",
            )
        return Preprocess.from_json(self.model.preprocess)(images)

    def run(
        self,
        x: npt.ArrayLike,
        *,
        budget_s: float,
        arrival_s: float | None = None,
        position: int = 0,
    ) -> Answer:
        """Answer one request.

        Args:
            x: [1, ...] or [...], float32, float64 or uint8; taken as float32.
            budget_s: Time the answer may take, from the request's arrival, seconds.
            arrival_s: When it arrived, on the session's clock; now by default. Earlier means that
                it has waited, and the wait counts.
            position: Stages that ran elsewhere; ``x`` is then what they gave. Not for policies
                that look back over all stages.

        Returns:
            The answer with its exit, predicted and observed seconds, and the reason; or a refusal.

        Raises:
            ShapeError: ``x`` has another shape or type than the model takes.
            DataError: ``x`` holds a NaN or an infinity.
            ConfigError: The budget is not a finite time above zero, or the arrival lies ahead.
            BackendError: The runtime failed; later calls are not affected.
        """
        arrival_s = self._arrival_s(arrival_s)
        budget_s = check_budget_s(budget_s)
        array = check_input(x, expected_shape=self._shape_at(position))
        answer = execute(
            self._setting, array, budget_s=budget_s, arrival_s=arrival_s, position=position
        )
        self._watch_drift(answer)
        return answer

    def run_batch(
        self,
        xs: npt.ArrayLike,
        *,
        budgets_s: float | Sequence[float],
        arrival_s: float | None = None,
        max_batch: int = 8,
    ) -> list[Answer]:
        """Answer several requests together; each has its own budget.

        Samples that must stop are answered and leave; the others are regrouped and go on.

        Args:
            xs: [N, ...].
            budgets_s: One for all, or one per sample, seconds.
            arrival_s: When they arrived; now by default.
            max_batch: Samples run together; more are split and wait their turn.

        Returns:
            Answers in the order of ``xs``.

        Raises:
            As `run`; also ConfigError when the policy looks back (oracle), ``max_batch`` is below
            one, or the number of budgets is not the number of samples; BackendError when the
            model takes one sample only.
        """
        arrival_s = self._arrival_s(arrival_s)
        array = check_input(xs, expected_shape=(None, *self._shape[1:]))
        given = [budgets_s] * len(array) if np.ndim(budgets_s) == 0 else budgets_s
        budgets = [check_budget_s(b) for b in given]  # type: ignore[union-attr, arg-type]
        if len(budgets) != len(array):
            raise ConfigError(
                f"expected {len(array)} budgets, found {len(budgets)}",
                help="pass one number for all samples, or one for each",
            )
        if max_batch < 1:
            raise ConfigError(f"expected a batch of at least one sample, found {max_batch}")
        answers: list[Answer] = []
        for i in range(0, len(array), max_batch):
            part = slice(i, i + max_batch)
            answers += execute_batch(
                self._setting, array[part], budgets_s=budgets[part], arrival_s=arrival_s
            )
        return answers

    def warm_up(self, rounds: int = 3, *, max_batch: int = 1) -> float:
        """Run every exit a few times so that first requests find memory and caches ready.

        Args:
            rounds: How many times.
            max_batch: Also for batches up to this size.

        Returns:
            Seconds it took.
        """
        start_s = self.clock.now_s()
        for power in range(padded_size(max_batch).bit_length()):
            size = 1 << power
            zeros = np.zeros((size, *self._shape[1:]), dtype=np.float32)
            with self.program.context(size) as context:
                for _ in range(rounds):
                    context.set_boundary(0, zeros)
                    for k in range(self.model.num_exits):
                        context.run_segment(k, k + 1)
                        context.run_head(k)
                for start, stop in sorted(self.program.segments):
                    context.run_segment(start, stop)
        return self.clock.now_s() - start_s

    def _watch_drift(self, answer: Answer) -> None:
        drift = self._drift
        # Nobody waits for the other thread: one request more or less does not matter.
        if drift is None or not answer.steps or not self._drift_lock.acquire(blocking=False):
            return
        try:
            known = drift.alarm is not None
            alarm = drift.add(
                self.clock.now_s(),
                sum(step.predicted_s for step in answer.steps),
                sum(step.observed_s for step in answer.steps),
            )
        finally:
            self._drift_lock.release()
        if alarm is not None and not known:
            # Not a warning: neighbours may be expected, and who owns the session can ask `alarm`.
            _log.info("%s; %s", alarm.reason, alarm.help)

    def _shape_at(self, position: int) -> tuple[int, ...]:
        if position == 0:
            return self._shape
        if not 0 < position < len(self.model.stages) or self.policy.hindsight:
            raise ConfigError(
                f"expected a position from 0 to {len(self.model.stages) - 1} and a policy that"
                f" looks ahead only, found {position!r} and {self.policy.name!r}"
            )
        return self.program.boundary_shape(position, 1)

    def _arrival_s(self, given_s: float | None) -> float:
        now_s = self.clock.now_s()
        if given_s is None:
            return now_s
        if not -math.inf < given_s <= now_s:
            ahead = format_duration(given_s - now_s)
            raise ConfigError(
                f"expected an arrival in the past, found {given_s!r}, {ahead} ahead",
                help="read it from the session's clock: arrival_s=session.clock.now_s()",
            )
        return given_s


def _drift_test(costs: CostTable, name: str) -> DriftTest | None:
    """Judges whole requests, whose parts share their fate, by the profile's own spread."""
    if len(costs.samples) < _LEAST_PROFILED or not costs.medians.sum() > 0:
        return None
    ratios = costs.samples.sum(axis=1) / costs.medians.sum()
    test = DriftTest.calibrated(ratios.tolist(), help=f"edgewise profile {name}")
    return dataclasses.replace(test, least_shift_ratio=_LEAST_SHIFT_RATIO)

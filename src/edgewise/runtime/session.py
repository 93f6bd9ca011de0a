"""A model, a backend, a policy and their costs, ready for requests from any number of threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.clock import MonotonicClock
from edgewise.data.inputs import check_input
from edgewise.errors import ConfigError
from edgewise.exits.policy import Policy, PolicyInputs, make_policy
from edgewise.runtime.batch import execute_batch
from edgewise.runtime.executor import Answer, Labels, execute
from edgewise.units import check_budget_s

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.clock import Clock
    from edgewise.predict import CostTable

Float32 = npt.NDArray[np.float32]


class Session:
    """Answers requests within their budgets.

    Args:
        program: A loaded model; several sessions may share it.
        costs: Of that program's model, on its backend.
        policy: A name, or a policy made by `make_policy`.
        clock: Tells time; the machine's monotonic clock by default.
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
        **policy_options: Any,  # noqa: ANN401 - the policy's own
    ) -> None:
        self.program = program
        self.model = program.model
        self.costs = costs
        self.clock: Clock = clock or MonotonicClock()
        inputs = PolicyInputs.of(program.model, costs, segments=program.segments)
        self.policy = (
            make_policy(policy, inputs, **policy_options) if isinstance(policy, str) else policy
        )
        self._labels = Labels.of(costs, program.segments)
        self._shape = (1, *program.model.input.shape[1:])

    def run(
        self,
        x: npt.ArrayLike,
        *,
        budget_s: float,
        arrival_s: float | None = None,
    ) -> Answer:
        """Answer one request.

        Args:
            x: [1, ...] or [...], numbers; converted to float32.
            budget_s: Time the answer may take, from the request's arrival, seconds.
            arrival_s: When it arrived, on the session's clock; now by default. Earlier means that it
                has waited, and the wait counts.

        Returns:
            The answer with its exit, predicted and observed seconds, and the reason; or a refusal.

        Raises:
            ShapeError: ``x`` has another shape or type than the model takes.
            DataError: ``x`` holds a NaN or an infinity.
            ConfigError: The budget is not a finite time above zero.
            BackendError: The runtime failed; later calls are not affected.
        """
        arrived_s = self.clock.now_s() if arrival_s is None else arrival_s
        budget_s = check_budget_s(budget_s)
        array = check_input(x, expected_shape=self._shape)
        with self.program.context() as context:
            return execute(
                context,
                array,
                model=self.model,
                policy=self.policy,
                labels=self._labels,
                clock=self.clock,
                budget_s=budget_s,
                arrival_s=arrived_s,
                backend=self.program.backend,
            )

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
            max_batch: Samples run together; more are split.

        Returns:
            Answers in the order of ``xs``.

        Raises:
            As `run`; also ConfigError when the policy looks back (oracle) or the number of budgets
            is not the number of samples.
        """
        arrived_s = self.clock.now_s() if arrival_s is None else arrival_s
        array = check_input(xs, expected_shape=(None, *self._shape[1:]))
        given: Iterable[float] = (
            [budgets_s] * len(array) if isinstance(budgets_s, int | float) else budgets_s
        )
        budgets = [check_budget_s(b) for b in given]
        if len(budgets) != len(array):
            raise ConfigError(f"expected {len(array)} budgets, found {len(budgets)}")
        answers: list[Answer] = []
        for i in range(0, len(array), max_batch):
            answers += execute_batch(
                self.program,
                array[i : i + max_batch],
                policy=self.policy,
                costs=self.costs,
                labels=self._labels,
                clock=self.clock,
                budgets_s=budgets[i : i + max_batch],
                arrival_s=arrived_s,
            )
        return answers

    def warm_up(self, rounds: int = 3, *, max_batch: int = 1) -> float:
        """Run every exit a few times so that first requests find memory and caches ready.

        Returns:
            Seconds it took.
        """
        start_s = time.perf_counter()
        sizes = [b for b in (1, 2, 4, 8, 16, 32) if b <= max_batch]
        for size in sizes:
            shape = (size, *self._shape[1:])
            with self.program.context(size) as context:
                for _ in range(rounds):
                    context.set_boundary(0, np.zeros(shape, dtype=np.float32))
                    for k in range(len(self.model.stages)):
                        context.run_segment(k, k + 1)
                        context.run_head(k)
        for start, stop in sorted(self.program.segments):
            with self.program.context() as context:
                context.run_segment(start, stop)
        return time.perf_counter() - start_s

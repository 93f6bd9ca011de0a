"""One request from arrival to answer: asks a policy, runs what it says, records what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.exits import LOOK, REJECT
from edgewise.predict.state_costs import STATIC, UnitCosts
from edgewise.runtime.request import Request

if TYPE_CHECKING:
    from edgewise.backends import Context
    from edgewise.exits.policies.oracle import Oracle
    from edgewise.runtime.answer import Answer
    from edgewise.runtime.request import Setting

Float32 = npt.NDArray[np.float32]


def execute(  # noqa: PLR0913 - each is one property of the request
    setting: Setting,
    x: Float32,
    *,
    budget_s: float,
    arrival_s: float,
    position: int = 0,
    factor: float = 1.0,
) -> Answer:
    """Run one request.

    A head runs only where the policy says so, and no stage runs twice.

    Args:
        setting: The session's model, policy, costs and clock.
        x: [1, ...] input, or the tensor at ``position``; checked.
        budget_s: From arrival to answer, seconds.
        arrival_s: When the request arrived, on the setting's clock; waiting counts.
        position: Stages that ran elsewhere.
        factor: What its units cost relative to the setting's costs, for a request that is known to
            be larger: the policy is shown a clock that runs slower by it.

    Returns:
        The answer, or the refusal.
    """
    policy, now_s = setting.policy.begin(), setting.clock.now_s
    segments, heads = setting.segments, setting.heads
    last = len(heads)
    with setting.program.context() as context:
        start_s = now_s()
        deadline_s = arrival_s + budget_s
        if factor != 1.0:
            deadline_s = start_s + (deadline_s - start_s) / factor
        request = Request(
            policy=policy,
            budget_s=budget_s,
            arrival_s=arrival_s,
            start_s=start_s,
            # From the middle nobody has predicted whether any exit fits.
            feasible=None if position else policy.feasible(deadline_s - start_s),
        )
        action = policy.decide(position, start_s, start_s, deadline_s)
        if action == REJECT:
            return request.rejected(setting)
        context.set_boundary(position, x)
        while True:
            if action > position:
                context.run_segment(position, action)
                done_s = now_s()
                request.add(segments[position, action], done_s, factor=factor)
                position = action
                if factor != 1.0:
                    done_s = start_s + (done_s - start_s) / factor
                action = policy.decide(position, done_s, start_s, deadline_s)
            else:
                logits = context.run_head(position - 1)
                request.add(heads[position - 1], now_s(), factor=factor)
                # Asked at the last exit too: a policy may learn how sure the answer was.
                if action != LOOK or policy.accept(position - 1, logits) or position == last:
                    break
                action = position + 1
        if context.finish(position - 1):
            request.extend(now_s())
        if policy.hindsight:
            return _hindsight(setting, context, request, logits[0])
    answer = request.answered(setting, logits[0], position - 1, action)
    policy.observe(answer.steps, met=answer.met, feasible=answer.feasible)
    return answer


def _hindsight(
    setting: Setting, context: Context, request: Request, last_logits: Float32
) -> Answer:
    """Time the other heads too and take the best exit the request could have had."""
    policy: Oracle = setting.policy  # type: ignore[assignment]  # only it looks back
    *stages, last_head = request.ran
    ends_s = request.start_s + np.cumsum([spent_s for _, _, spent_s, _ in stages])
    answers: list[Float32] = []
    heads: list[tuple[str, float, float, UnitCosts]] = []
    for k in range(len(stages) - 1):
        before_s = setting.clock.now_s()
        answers.append(context.run_head(k)[0])
        heads.append((*setting.heads[k], setting.clock.now_s() - before_s, STATIC))
    answers.append(last_logits)
    heads.append(last_head)
    at_s = [float(end_s) + head[2] for end_s, head in zip(ends_s, heads, strict=True)]
    latency_s = [each_s - request.arrival_s for each_s in at_s]
    k = policy.choose(latency_s, request.budget_s)
    request.ran = [*stages[: k + 1], heads[k]]
    request.mark_s = at_s[k]
    request.feasible = min(latency_s) <= request.budget_s
    return request.answered(setting, answers[k], k, action=k)

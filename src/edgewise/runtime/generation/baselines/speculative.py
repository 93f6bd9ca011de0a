"""Drafted and verified tokens: exact as far as time allows, or as others do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgewise.errors import ConfigError
from edgewise.exits import Step
from edgewise.runtime.generation.baselines.routed import position_of
from edgewise.runtime.generation.drafters import draft_costs
from edgewise.runtime.generation.speculation import speculate
from edgewise.runtime.generation.stepping import (
    Decoded,
    RouterStepper,
    VerifyStepper,
)

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import StepperInputs


class LayerSkip:
    """Always the same number of drafts, and verification runs the early layers again.

    Shares weights between draft and model but none of the work, as transformers'
    ``assistant_early_exit`` does; knows no deadline.

    Args:
        inputs: Of the text.
        layer: Of the exit that drafts.
        drafts: In each cycle.

    Raises:
        ConfigError: There is no such exit, or another number of drafts than costs are known of.
    """

    def __init__(self, inputs: StepperInputs, *, layer: int, drafts: int = 4) -> None:
        self._inputs, self._drafts = inputs, drafts
        self._position = position_of(inputs, layer, before_last=True)
        self._costs = draft_costs(inputs.costs.table("verify"), inputs.rows, self._position)
        if not 0 <= drafts <= self._costs.longest:
            raise ConfigError(f"expected 0 to {self._costs.longest} drafts, found {drafts}")

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:  # noqa: ARG002
        """One to ``drafts + 1`` tokens."""
        inputs, text = self._inputs, self._inputs.text
        clock, costs = inputs.setting.clock, self._costs
        start_s, factor = clock.now_s(), inputs.costs.factor(text.length)
        cycle = speculate(
            text.decoder,
            text.cache,
            token,
            position=self._position,
            drafts=self._drafts,
            kind=inputs.head,
            drawing=inputs.drawing,
            stop_ids=inputs.stop_ids,
            recompute=True,
        )
        # The last draft is not run by itself; all of them are once more.
        again_s = costs.early_s * (inputs.rows.ratio(cycle.drafted + 1) - 1.0)
        predicted_s = (costs.cycle_s(cycle.drafted) + again_s) * factor
        observed_s = clock.now_s() - start_s
        step = Step(unit=f"cycle:{cycle.drafted}", predicted_s=predicted_s, observed_s=observed_s)
        return [
            Decoded(
                token=each,
                exit_layer=text.decoder.depth,
                feasible=None,
                predicted_s=0.0 if i else predicted_s,
                wait_s=0.0 if i else start_s - since_s,
                reason=f"full depth; {cycle.accepted} of {cycle.drafted} drafts held",
                steps=() if i else (step,),
            )
            for i, each in enumerate(cycle.tokens)
        ]


def speculation(inputs: StepperInputs, **options: Any) -> VerifyStepper:
    """As many drafts as pay and fit, verified with reuse: never a token that was not verified.

    Args:
        inputs: Of the text.
        options: As `VerifyStepper` takes them.
    """
    return VerifyStepper(inputs, **options)


class EdgewiseSpeculation:
    """Drafts and verifies where a whole cycle fits the deadline; else the router decides.

    The router goes to full depth too where that fits, and can leave where units take longer than
    was predicted, which a cycle cannot.

    Args:
        inputs: Of the text.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        self._exact, self._router = VerifyStepper(inputs), RouterStepper(inputs)

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """One token, or as many as were verified together."""
        verified = self._exact.step_if_drafted(token, since_s=since_s, due_s=due_s)
        if verified is not None:
            return verified
        decoded = self._router.step(token, since_s=since_s, due_s=due_s)
        self._exact.follow([each.token for each in decoded])
        return decoded

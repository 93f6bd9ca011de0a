from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.exits import Policy, PolicyInputs, make_policy, policy_names
from edgewise.frontends.outline import outline_model
from edgewise.model import Validation
from edgewise.predict import CostTable

COSTS = CostTable.from_costs([1.0] * 4, [1.0] * 4)


def inputs_of(*accuracy: float) -> PolicyInputs:
    return PolicyInputs(costs=COSTS, accuracy=accuracy or None)


def test_every_policy_of_the_folder_is_found_by_name() -> None:
    names = policy_names()

    assert {"branchynet", "edgewise", "fixed", "full_depth", "oracle", "static_table"} <= {*names}
    assert list(names) == sorted(names)
    assert all(not name.startswith("_") for name in names)


def test_an_unknown_policy_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'brachynet'") as caught:
        make_policy("brachynet", inputs_of())
    assert str(caught.value.help).startswith("did you mean 'branchynet'")


@pytest.mark.parametrize("name", policy_names())
def test_an_option_that_a_policy_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not take these options.*colour") as caught:
        make_policy(name, inputs_of(), colour="red")
    assert f"edgewise.exits.policies.{name}" in str(caught.value.help)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("edgewise", {"target_dsr": 1.0}, r"target DSR from 0\.5 up to 1, found 1\.0"),
        ("edgewise", {"target_dsr": float("nan")}, "target DSR"),
        ("edgewise", {"gain": -1.0}, "gain from 0 to 10"),
        ("edgewise", {"window": 0}, "at least one unit"),
        ("edgewise", {"on_infeasible": "rejct"}, "did you mean 'reject'"),
        ("fixed", {"exit_index": 4}, "from 0 to 3, found 4"),
        ("fixed", {"exit_index": -1}, "from 0 to 3, found -1"),
        ("fixed", {"exit_index": True}, "from 0 to 3, found True"),
        ("fixed", {"exit_index": 1.5}, "does not take"),
        ("branchynet", {"threshold": 1.5}, r"from 0 to 1, found 1\.5"),
        ("branchynet", {"threshold": -0.1}, "from 0 to 1"),
        ("branchynet", {"threshold": float("nan")}, "from 0 to 1, found nan"),
        ("branchynet", {"accuracy_loss": 2.0}, "accuracy loss from 0 to 1"),
        ("branchynet", {"accuracy_loss": float("nan")}, "accuracy loss from 0 to 1"),
    ],
)
def test_an_option_out_of_range_is_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(name, inputs_of(), **options)
    assert message.replace("\\", "") in str(caught.value)


def test_exits_are_ranked_by_accuracy_and_equals_by_depth() -> None:
    assert inputs_of(0.5, 0.7, 0.7, 0.6).ranked_exits() == (1, 2, 3, 0)


def test_without_validation_deeper_is_better() -> None:
    assert inputs_of().ranked_exits() == (3, 2, 1, 0)
    assert inputs_of().better_exits(2) == (3, 2)


@pytest.mark.parametrize(
    ("position", "better"),
    [(0, (1, 2, 3, 0)), (1, (1, 2, 3)), (2, ()), (3, ()), (4, ())],
)
def test_better_exits_are_ahead_and_beat_the_one_just_reached(
    position: int, better: tuple[int, ...]
) -> None:
    assert inputs_of(0.5, 0.7, 0.7, 0.6).better_exits(position) == better


def test_the_longest_step_does_not_pass_its_limit() -> None:
    inputs = PolicyInputs(costs=COSTS, segments=frozenset({(0, 1), (0, 2), (0, 4), (1, 2)}))

    assert [inputs.longest_step(0, limit) for limit in (1, 2, 3, 4)] == [1, 2, 2, 4]
    assert inputs.longest_step(3, 4) == 4


def test_a_model_tells_its_accuracy_temperatures_and_validation() -> None:
    model = outline_model(3)
    validation = Validation(logits=np.zeros((3, 2, 10)), labels=np.zeros(2, dtype=int))
    told = model.with_heads({}, accuracy={0: 0.5, 1: 0.6, 2: 0.7}, validation=validation)
    inputs = PolicyInputs.of(told, COSTS, segments=frozenset())

    assert inputs.accuracy == (0.5, 0.6, 0.7)
    assert inputs.temperatures == (1.0, 1.0, 1.0)
    assert inputs.validation is validation


def test_accuracy_known_for_some_exits_only_is_not_used() -> None:
    model = outline_model(3).with_heads({}, accuracy={0: 0.5})

    assert PolicyInputs.of(model, COSTS, segments=frozenset()).accuracy is None


def test_a_policy_that_says_nothing_more_has_no_opinion() -> None:
    class Silent(Policy):
        name = "silent"

        def decide(
            self,
            position: int,
            now_s: float,  # noqa: ARG002
            start_s: float,  # noqa: ARG002
            deadline_s: float,  # noqa: ARG002
        ) -> int:
            return position + 1

    policy = Silent()
    policy.observe((), met=True)

    assert policy.feasible(1.0) is None
    assert policy.expected_s(0.5) == 0.5
    assert policy.accept(0, np.zeros((1, 2), dtype=np.float32))
    assert policy.explain(0) == "as silent says"

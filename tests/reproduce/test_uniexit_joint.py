"""The two claims on joint training, on made-up runs and on a training of seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.frontends.zoo import small_resnet
from edgewise.reproduce import Setup, run_claim, uniexit_fig19, uniexit_table8
from edgewise.reproduce._joint_runs import LOSSES, Protocol, TrainedRun, paired


def _run(right: list[list[float]]) -> TrainedRun:
    """A run whose samples have class 0, with given probabilities [E, N] among two classes."""
    p = np.array(right)
    logits = np.log(np.stack([p, 1 - p], axis=2)).astype(np.float32)
    return TrainedRun(logits=logits, labels=np.zeros(p.shape[1], dtype=np.int64), elapsed_s=1.0)


def _values(**over_exits: list[float]) -> dict[str, np.ndarray]:
    methods = (*LOSSES, "product", "caching")
    return {m: np.array(over_exits.get(m, [0.5, 0.5, 0.5])) for m in methods}


def test_the_interval_of_paired_differences_is_students() -> None:
    mean, low, high = paired(np.array([1.0, 2.0, 3.0]))

    # t(0.975, 2) = 4.3027, standard error 1 / sqrt(3).
    assert mean == 2.0
    assert (low, high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert paired(np.array([1.0])) == (1.0, None, None)


@pytest.mark.parametrize(
    ("both", "holds"),
    [
        pytest.param([0.6, 0.61, 0.62], True, id="better"),
        pytest.param([0.4, 0.401, 0.402], False, id="worse"),
        pytest.param([0.4, 0.5, 0.59], None, id="cannot be told apart"),
        pytest.param([0.5, 0.5, 0.5], True, id="the same"),
    ],
)
def test_the_verdict_on_accuracy_follows_the_interval(
    both: list[float],
    holds: bool | None,  # noqa: FBT001 - a case, not a flag
) -> None:
    assert uniexit_table8.judge("small_resnet", _values(both=both)).holds is holds


def test_averaged_losses_are_judged_against_each_other() -> None:
    values = _values(both=[0.9, 0.9, 0.9], mean=[0.6, 0.6, 0.61])
    values["both-mean"] = np.array([0.7, 0.71, 0.72])

    found = uniexit_table8.judge("small_resnet", values, ours="both-mean", against="mean")

    assert found.holds is True
    assert "WEL+Mono as a mean is at least as accurate as Equal as a mean" in found.claim
    assert "+10.67 points" in found.detail


def test_one_seed_gives_no_verdict() -> None:
    one = {k: v[:1] for k, v in _values(both=[0.9, 0.9, 0.9]).items()}

    assert uniexit_table8.judge("small_resnet", one).holds is None


def test_a_training_free_win_is_said() -> None:
    found = uniexit_table8.free_wins("small_resnet", _values(product=[0.6, 0.6, 0.61]))
    none = uniexit_table8.free_wins("small_resnet", _values(both=[0.9, 0.9, 0.9]))

    assert "product anytime on Equal, which needs no training, beats" in found[0]
    assert none == ["small_resnet: no training-free method beats the best trained loss, WEL+Mono."]


def test_the_papers_difference_stands_beside_ours_and_not_in_its_column() -> None:
    figures = uniexit_table8.describe("small_resnet", _values(both=[0.6, 0.61, 0.62]))
    gain = next(f for f in figures if f.name == "small_resnet, WEL+Mono over Equal")

    assert gain.paper == pytest.approx(4.07)
    assert gain.ours == pytest.approx(11.0)
    assert gain.low is not None
    assert gain.low < 11.0


def test_drops_are_counted_per_threshold_and_judged_at_each() -> None:
    falling = [_run([[0.9, 0.9], [0.3, 0.88]])] * 2
    steady = [_run([[0.5, 0.5], [0.6, 0.6]])] * 2
    sums = {"ours": "both", "against": "equal"}
    dropped = uniexit_fig19.shares([falling if m == "equal" else steady for m in LOSSES])

    assert dropped["equal"][0].tolist() == [1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert uniexit_fig19.judge("small_resnet", dropped, **sums).holds is True
    swapped = uniexit_fig19.shares([falling if m == "both" else steady for m in LOSSES])
    assert uniexit_fig19.judge("small_resnet", swapped, **sums).holds is False


def test_an_unknown_net_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'small_resnet'"):
        run_claim("uniexit-table8", Setup(models=("small_resnt",), data="shapes", quick=True))


def test_the_quick_claims_train_once_and_share_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    # Two blocks instead of eight: each run exports its net anew.
    monkeypatch.setattr(small_resnet, "_WIDTHS", (48,))
    monkeypatch.setattr(small_resnet, "_DEPTHS", (2,))
    said: list[str] = []
    setup = Setup(
        models=("small_resnet",), data="shapes", limit=50, quick=True, out=tmp_path,
        say=said.append,
    )  # fmt: skip
    table = run_claim("uniexit-table8", setup)
    trained = len(said)
    again = run_claim("uniexit-table8", setup)
    drops = run_claim("uniexit-fig19", setup)

    assert trained > 0
    assert len(said) == trained
    assert table.figures == again.figures
    assert table.holds is None
    assert len(drops.figures) == 5 * len(uniexit_fig19.THRESHOLDS)
    assert not list(tmp_path.rglob("state.safetensors"))
    assert Protocol.of(setup).describe() in table.setting["ours"]

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.backends.base import Program
from edgewise.bench import state_campaign
from edgewise.bench.background import Load
from edgewise.bench.quota import CpuQuota, QuotaUnavailable
from edgewise.bench.state_campaign import measure_states
from edgewise.clock import VirtualClock
from edgewise.device.state import FEATURES, DeviceState, Quantity
from edgewise.errors import ConfigError, EdgeError
from edgewise.frontends.outline import outline_model
from edgewise.predict.fitting import fit_kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="co-runners need Linux")

QUOTA, UTILISATION = (FEATURES.index(f"cpu.{what}_ratio") for what in ("quota", "utilisation"))


class PretendedQuota(CpuQuota):
    """Steps a number instead of a control group."""

    def __init__(self) -> None:
        super().__init__()
        self.exempted: list[int] = []
        self.seen: list[float | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_ratio(self, ratio: float | None) -> None:
        self.ratio = ratio
        self.seen.append(ratio)

    def exempt(self, pids: Iterable[int]) -> None:
        self.exempted += pids


class PretendedSource:
    """Reads what a test wants it to read."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self.read = read

    def latest(self) -> DeviceState:
        quantities = {name: Quantity.ok(value) for name, value in self.read().items()}
        return DeviceState(at_s=0.0, quantities=quantities)


def gentle() -> Load:
    return Load("cpu", duty_ratio=0.1, engine="builtin")


def null_program(quota: CpuQuota | None = None, stages: int = 3) -> tuple[Program, VirtualClock]:
    """Stage k takes k + 1 ms, a head a tenth; a quota makes both longer, as a clock would."""
    clock = VirtualClock()

    def cost_s(unit: str) -> float:
        kind, _, place = unit.partition(":")
        k = int(place.split("-")[0])
        ratio = quota.ratio if quota is not None and quota.ratio is not None else 1.0
        return 1e-3 * (k + 1) * (1.0 if kind == "segment" else 0.1) / ratio

    return load_program(outline_model(stages), "null", clock=clock, cost_s=cost_s), clock


def test_every_unit_is_measured_in_every_state_and_the_quota_is_lifted_between() -> None:
    quota = PretendedQuota()
    program, clock = null_program(quota)

    found = measure_states(
        program, quotas=(1.0, 0.5), rounds=2, passes=3, clock=clock, quota=quota, settle_s=0.5
    )

    assert found.units == ("stage:0", "stage:1", "stage:2", "head:0", "head:1", "head:2")
    assert found.seconds.shape == (2, 2, 6)
    once = np.array([1e-3, 2e-3, 3e-3, 1e-4, 2e-4, 3e-4])
    assert found.seconds[0] == pytest.approx(np.stack([once] * 2))
    assert found.seconds[1] == pytest.approx(np.stack([2 * once] * 2))
    assert found.states[:, QUOTA].tolist() == [1.0, 0.5]
    assert sorted(r for r in quota.seen if r is not None) == [0.5, 1.0]
    assert quota.seen[1::2] == [None, None]
    assert found.provenance == "simulated"
    passes_s = 6 * 1.5 * once.sum() * 2 + once.sum()  # and one to warm up
    assert found.elapsed_s == pytest.approx(2 * 0.5 + passes_s)


def test_a_sample_is_a_mean_so_that_stalls_of_a_quota_are_in_it() -> None:
    clock = VirtualClock()
    calls = [0]

    def cost_s(unit: str) -> float:
        if unit != "segment:0-1":
            return 1e-4
        calls[0] += 1
        return 9e-3 if calls[0] % 4 == 0 else 1e-3  # a quarter of the runs stand still

    program = load_program(outline_model(2), "null", clock=clock, cost_s=cost_s)
    found = measure_states(program, quotas=(1.0,), rounds=5, passes=4, clock=clock)

    assert np.median(found.seconds[0, :, 0]) == pytest.approx((3 * 1e-3 + 9e-3) / 4)


def test_what_was_read_wins_and_what_was_imposed_stands_in_and_is_said() -> None:
    program, clock = null_program()
    said: list[str] = []
    source = PretendedSource(lambda: {"cpu.quota_ratio": 0.9, "cpu.frequency_ratio": 0.4})

    found = measure_states(
        program, quotas=(1.0,), loads=((), (gentle(),)), clock=clock, source=source, say=said.append
    )

    assert found.states[:, QUOTA].tolist() == [0.9, 0.9]
    assert found.states[:, FEATURES.index("cpu.frequency_ratio")].tolist() == [0.4, 0.4]
    assert found.states[0, UTILISATION] == 0.0
    assert 0.0 < found.states[1, UTILISATION] <= 0.1
    assert np.isnan(found.states[:, FEATURES.index("gpu.frequency_ratio")]).all()
    assert [s for s in said if "imposed" in s] == [
        "cpu.utilisation_ratio is what was imposed, not what was read"
    ]


def test_co_runners_run_only_in_their_states_and_are_exempt_from_the_quota() -> None:
    quota = PretendedQuota()
    program, clock = null_program(quota)
    load = gentle()
    running: list[bool] = []

    def read() -> dict[str, float]:
        running.append(load.is_running)
        return {}

    measure_states(
        program,
        quotas=(0.5,),
        loads=((), (load,)),
        rounds=1,
        clock=clock,
        quota=quota,
        source=PretendedSource(read),
    )

    assert sorted(running) == [False, True]
    assert len(quota.exempted) == 1
    assert not load.is_running


def test_a_co_runner_that_dies_spoils_the_campaign_and_nothing_keeps_running() -> None:
    program, clock = null_program()
    dying, other = gentle(), gentle()

    def read() -> dict[str, float]:
        if dying.is_running:
            dying._workers[0].kill()
            dying._workers[0].wait()
        return {}

    with pytest.raises(EdgeError, match="died while it was needed"):
        measure_states(
            program,
            quotas=(1.0,),
            loads=((other, dying),),
            clock=clock,
            source=PretendedSource(read),
        )
    assert not other.is_running


def test_a_quota_that_is_not_permitted_is_told() -> None:
    class Refused(PretendedQuota):
        def set_ratio(self, ratio: float | None) -> None:
            if ratio is not None:
                raise QuotaUnavailable("not here")

    program, clock = null_program()
    load = gentle()
    with pytest.raises(QuotaUnavailable, match="not here"):
        measure_states(program, quotas=(0.5,), loads=((load,),), clock=clock, quota=Refused())
    assert not load.is_running


def test_predictors_can_be_fitted_to_what_was_measured() -> None:
    quota = PretendedQuota()
    program, clock = null_program(quota)
    quotas = tuple(n / 10 for n in range(1, 11))
    found = measure_states(program, quotas=quotas, clock=clock, quota=quota)
    fitted = fit_kind("physical", found)

    state = DeviceState(at_s=0.0, quantities={"cpu.quota_ratio": Quantity.ok(0.35)})
    assert fitted.predict(state).stage_s == pytest.approx([1e-3 / 0.35, 2e-3 / 0.35, 3e-3 / 0.35])


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"passes": 0}, {"quotas": ()}, {"loads": ()}])
def test_an_argument_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    program, clock = null_program()
    with pytest.raises(ConfigError, match="expected at least one"):
        measure_states(program, clock=clock, **wrong)  # type: ignore[arg-type]


def test_without_permission_for_quotas_co_runners_alone_make_the_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NotPermitted(CpuQuota):
        def __enter__(self) -> Self:
            raise QuotaUnavailable("no control group can be written")

    monkeypatch.setattr(state_campaign, "CpuQuota", NotPermitted)
    monkeypatch.setattr(state_campaign, "_many_loads", lambda _: ((), (gentle(),)))
    said: list[str] = []
    program = load_program(outline_model(2), "null")

    samples = state_campaign.measure_this_machine(program, rounds=1, passes=1, say=said.append)

    assert samples.num_states == 2
    assert samples.units == ("stage:0", "stage:1", "head:0", "head:1")
    assert any("no control group can be written" in text for text in said)


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_there_are_states_enough_to_choose_a_predictor_by_cross_validation(cores: int) -> None:
    sets = state_campaign._many_loads(cores)
    assert sets[0] == ()
    assert len(sets) * len(state_campaign._MANY_QUOTAS) * 4 // 5 >= 13

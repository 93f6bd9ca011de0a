from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgewise.clock import VirtualClock
from edgewise.device.monitor import Monitor, read_state
from edgewise.device.sensor import Sensor
from edgewise.device.sensors.nvml import Nvml, make
from edgewise.device.state import Quantity


def _load(name: str) -> Any:
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trees = _load("energy_trees")

HERE = Path("/")
EVERY = {
    "gpu.frequency_hz",
    "gpu.frequency_ratio",
    "gpu.memory_frequency_hz",
    "gpu.memory_frequency_ratio",
    "gpu.utilisation_ratio",
    "power.gpu0_w",
    "energy.gpu0_j",
    "thermal.gpu0_celsius",
    "throttle.gpu0_thermal",
    "throttle.gpu0_power_brake",
    "throttle.gpu0_hw_slowdown",
}


def values(found: Mapping[str, Quantity]) -> dict[str, float | None]:
    return {name: each.value for name, each in found.items()}


def test_a_card_that_answers_everything_is_read_in_base_units() -> None:
    found = make(HERE, trees.NvmlStub()).read(0.0)

    assert {each.quality for each in found.values()} == {"ok"}
    assert values(found) == pytest.approx(
        {
            "gpu.frequency_hz": 990e6,
            "gpu.frequency_ratio": 0.5,
            "gpu.memory_frequency_hz": 2619e6,
            "gpu.memory_frequency_ratio": 1.0,
            "gpu.utilisation_ratio": 0.37,
            "power.gpu0_w": 71.5,
            "energy.gpu0_j": 0.0,
            "thermal.gpu0_celsius": 41.0,
            "throttle.gpu0_thermal": 0.0,
            "throttle.gpu0_power_brake": 0.0,
            "throttle.gpu0_hw_slowdown": 0.0,
        }
    )


def test_energy_counts_from_the_first_reading_and_goes_on_when_the_driver_is_loaded_again() -> None:
    stub = trees.NvmlStub()
    sensor = make(HERE, stub)
    seen: list[float | None] = []
    for count_mj in (5_000_000, 5_002_500, 1_000, 1_500):
        stub.values["nvmlDeviceGetTotalEnergyConsumption"] = count_mj
        seen.append(sensor.read(0.1 * len(seen))["energy.gpu0_j"].value)

    assert seen == pytest.approx([0.0, 2.5, 3.5, 4.0])


@pytest.mark.parametrize(
    ("mask", "throttled"),
    [
        pytest.param(0x0, set(), id="nothing"),
        pytest.param(0x1 | 0x2 | 0x10 | 0x100, set(), id="idle and set clocks"),
        pytest.param(0x4, set(), id="software power cap is normal"),
        pytest.param(0x20, {"thermal"}, id="software thermal"),
        pytest.param(0x48, {"thermal", "hw_slowdown"}, id="hardware thermal"),
        pytest.param(0x88, {"power_brake", "hw_slowdown"}, id="power brake"),
    ],
)
def test_only_heat_and_brakes_are_throttling(mask: int, throttled: set[str]) -> None:
    stub = trees.NvmlStub()
    stub.values["nvmlDeviceGetCurrentClocksEventReasons"] = mask

    found = make(HERE, stub).read(0.0)

    flags = {name: each.value for name, each in found.items() if name.startswith("throttle.")}
    assert {name.removeprefix("throttle.gpu0_") for name, on in flags.items() if on} == throttled


def test_a_driver_before_535_is_asked_for_throttle_reasons_by_their_old_name() -> None:
    stub = trees.NvmlStub()
    stub.errors["nvmlDeviceGetCurrentClocksEventReasons"] = 13
    stub.values["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x40

    assert make(HERE, stub).read(0.0)["throttle.gpu0_thermal"] == Quantity.ok(1.0)


def test_nvml_that_starts_and_supports_nothing_gives_no_value_and_is_not_started_again() -> None:
    stub = trees.NvmlStub()
    stub.errors["*"] = 3
    sensor = make(HERE, stub)
    for now_s in range(0, 100, 10):
        found = sensor.read(float(now_s))

    assert set(found) == EVERY
    assert {each.quality for each in found.values()} == {"unsupported"}
    assert {each.value for each in found.values()} == {None}
    assert all("Not Supported" in each.reason for each in found.values())
    assert stub.starts == 1


def test_useless_nvml_does_not_hide_what_devfreq_knows() -> None:
    class Devfreq(Sensor):
        name = "devfreq"

        def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: ARG002
            return {"gpu.frequency_ratio": Quantity.ok(0.25)}

    stub = trees.NvmlStub()
    stub.errors["*"] = 3
    state = read_state([make(HERE, stub), Devfreq()], 0.0)

    assert state.value("gpu.frequency_ratio") == 0.25


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("nvmlDeviceGetPowerUsage", "power.gpu0_w"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy.gpu0_j"),
        ("nvmlDeviceGetUtilizationRates", "gpu.utilisation_ratio"),
        ("nvmlDeviceGetTemperature", "thermal.gpu0_celsius"),
    ],
)
@pytest.mark.parametrize(("code", "quality"), [(3, "unsupported"), (4, "denied"), (15, "masked")])
def test_each_call_answers_for_itself(call: str, name: str, code: int, quality: str) -> None:
    stub = trees.NvmlStub()
    stub.errors[call] = code
    sensor = make(HERE, stub)

    found = sensor.read(0.0)
    del stub.errors[call]
    later = sensor.read(0.1)

    assert {each for each in found if found[each].quality != "ok"} == {name}
    assert found[name].quality == quality
    assert found[name].reason.startswith(f"{call} failed: error {code}")
    assert later[name].quality == "ok"


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("nvmlDeviceGetClockInfo 1", {"gpu.frequency_hz", "gpu.frequency_ratio"}),
        ("nvmlDeviceGetMaxClockInfo 1", {"gpu.frequency_ratio"}),
        ("nvmlDeviceGetPowerUsage", {"power.gpu0_w"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"energy.gpu0_j"}),
    ],
)
def test_a_zero_that_cannot_be_is_unknown(call: str, names: set[str]) -> None:
    stub = trees.NvmlStub()
    stub.values[call] = 0

    found = make(HERE, stub).read(0.0)

    assert {name for name, each in found.items() if each.value is None} == names
    assert all("is 0" in found[name].reason for name in names)


def test_an_idle_card_is_used_by_nobody_which_is_known() -> None:
    stub = trees.NvmlStub()
    stub.values["nvmlDeviceGetUtilizationRates"] = 0

    assert make(HERE, stub).read(0.0)["gpu.utilisation_ratio"] == Quantity.ok(0.0)


@pytest.mark.parametrize(
    ("code", "quality"),
    [(1, "unsupported"), (4, "denied"), (9, "unsupported"), (12, "unsupported")],
)
def test_nvml_that_does_not_start_is_tried_again_but_not_at_every_reading(
    code: int, quality: str
) -> None:
    stub = trees.NvmlStub()
    stub.errors["nvmlInit"] = code
    sensor = make(HERE, stub)
    first = sensor.read(0.0)
    del stub.errors["nvmlInit"]
    soon, later = sensor.read(1.0), sensor.read(6.0)

    assert set(first) == set(soon) == set(later) == EVERY
    assert {each.quality for each in [*first.values(), *soon.values()]} == {quality}
    assert all(f"nvmlInit failed: error {code}" in each.reason for each in first.values())
    assert {each.quality for each in later.values()} == {"ok"}


def test_a_card_that_vanishes_is_masked_and_is_found_again() -> None:
    stub = trees.NvmlStub(vanish_after=15)
    sensor = make(HERE, stub)
    seen = [sensor.read(0.1 * index) for index in range(3)]
    stub.vanish_after = None
    back = sensor.read(10.0)

    assert {each.quality for each in seen[0].values()} == {"ok"}
    assert {each.quality for each in seen[1].values()} == {"ok", "masked"}
    assert {each.quality for each in seen[2].values()} == {"masked"}
    assert set(seen[2]) == EVERY
    assert {each.quality for each in back.values()} == {"ok"}
    assert stub.running == 1


def test_nvml_that_somebody_else_shut_down_is_started_again() -> None:
    stub = trees.NvmlStub()
    sensor = make(HERE, stub)
    sensor.read(0.0)
    stub.nvmlShutdown()
    lost, back = sensor.read(1.0), sensor.read(7.0)

    assert all("error 1, Uninitialized" in each.reason for each in lost.values())
    assert {each.quality for each in back.values()} == {"ok"}


def test_the_monitor_outlives_a_card_that_vanishes() -> None:
    clock, stub = VirtualClock(), trees.NvmlStub(vanish_after=5)
    monitor = Monitor([make(HERE, stub)], clock=clock, period_s=0.1)
    for _ in range(20):
        monitor.step()
        clock.sleep_s(0.1)

    state = monitor.latest()
    assert set(state.quantities) == EVERY
    assert all(state.value(name) is None for name in EVERY)
    assert all("failed: error 15" in state.reason(name) for name in EVERY)


def test_further_cards_have_their_number_in_their_names() -> None:
    found = make(HERE, trees.NvmlStub(gpus=2)).read(0.0)

    assert len(found) == 2 * len(EVERY)
    assert {"gpu1.utilisation_ratio", "power.gpu1_w", "throttle.gpu1_thermal"} < set(found)


def test_no_card_is_said_and_looked_for_again() -> None:
    stub = trees.NvmlStub(gpus=0)
    sensor = make(HERE, stub)
    none = sensor.read(0.0)
    stub.gpus = 1
    some = sensor.read(6.0)

    assert none["power.gpu0_w"] == Quantity.missing("unsupported", "NVML lists 0 GPUs")
    assert some["power.gpu0_w"].quality == "ok"
    assert stub.running == 1


def test_without_the_library_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if not installed

    found = make(HERE).read(0.0)

    assert set(found) == EVERY
    assert all("pip install nvidia-ml-py" in each.reason for each in found.values())


def test_a_recorded_tree_does_not_show_this_machines_card(tmp_path: Path) -> None:
    found = make(tmp_path).read(0.0)

    assert {each.quality for each in found.values()} == {"unsupported"}
    assert "recorded tree" in found["gpu.frequency_hz"].reason


def test_closing_stops_the_library_and_reading_starts_it_again() -> None:
    stub = trees.NvmlStub()
    with make(HERE, stub) as sensor:
        sensor.read(0.0)
        assert stub.running == 1
        sensor.close()
        assert stub.running == 0
        assert sensor.read(0.1)["power.gpu0_w"].quality == "ok"

    assert stub.running == 0


def test_a_library_that_breaks_in_an_unforeseen_way_is_a_reason_too() -> None:
    def broken(_: object) -> int:
        raise OSError("symbol lookup error")

    stub = trees.NvmlStub()
    stub.nvmlDeviceGetPowerUsage = broken

    found = Nvml(stub).read(0.0)

    assert found["power.gpu0_w"].reason.endswith("OSError: symbol lookup error")
    assert found["gpu.frequency_hz"].quality == "ok"


def test_the_stub_has_the_names_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    stub = trees.NvmlStub
    for name in (each for each in vars(stub) if each.startswith("nvml")):
        ours = list(inspect.signature(getattr(stub, name)).parameters)[1:]
        assert list(inspect.signature(getattr(real, name)).parameters) == ours, name
    for name in (each for each in vars(stub) if each.startswith("NVML_")):
        assert getattr(real, name) == getattr(stub, name)
    assert {code: real.NVMLError(code).value for code in (1, 3, 4, 12)} == {
        1: 1,
        3: 3,
        4: 4,
        12: 12,
    }


def test_the_real_library_gives_values_or_reasons_here() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    with make(HERE) as sensor:
        found = sensor.read(0.0)

    assert set(found) >= EVERY
    assert all((each.value is None) == bool(each.reason) for each in found.values())

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from edgewise.clock import VirtualClock
from edgewise.profiling.operator_energy import (
    SAMPLES_PER_WINDOW,
    EnergyMeter,
    find_energy_meter,
    measure_energy,
)

CALL_S = 2e-3


class Board:
    """Draws 3 W idle and so much more while it works, on a virtual clock."""

    def __init__(self, work_w: float) -> None:
        self.clock = VirtualClock()
        self.work_w = work_w
        self.worked_s = 0.0
        self.called_s = -1.0

    def call(self) -> None:
        self.clock.sleep_s(CALL_S)
        self.worked_s += CALL_S
        self.called_s = self.clock.now_s()

    def joules(self) -> float:
        return 3 * self.clock.now_s() + self.work_w * self.worked_s

    def watts(self) -> float:
        return 3 + self.work_w * (self.called_s == self.clock.now_s())


def _meter(board: Board, kind: str, period_s: float = 0.01) -> EnergyMeter:
    read: Callable[[], float] = board.joules if kind == "counter" else board.watts
    return EnergyMeter(note="a meter", kind=kind, period_s=period_s, read=read)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["counter", "power"])
def test_energy_is_what_work_draws_above_idle(kind: str) -> None:
    board = Board(work_w=5.0)
    found = measure_energy(board.call, meter=_meter(board, kind), call_s=CALL_S, clock=board.clock)

    assert found.energy_j == pytest.approx(5.0 * CALL_S, rel=0.01)
    assert found.low_j is not None
    assert found.high_j is not None
    assert found.low_j <= 5.0 * CALL_S * 1.01
    assert found.high_j >= 5.0 * CALL_S * 0.99
    assert found.note == "a meter"


@pytest.mark.parametrize("work_w", [0.0, -1.0])
def test_work_that_draws_no_more_than_idling_has_no_known_energy(work_w: float) -> None:
    board = Board(work_w)
    found = measure_energy(
        board.call, meter=_meter(board, "power"), call_s=CALL_S, clock=board.clock
    )

    assert found.energy_j is None
    assert "idling" in found.note


def test_a_drifting_idle_power_cancels_because_windows_take_turns() -> None:
    board = Board(work_w=5.0)
    drifting = EnergyMeter(
        note="m",
        kind="counter",
        period_s=0.01,
        read=lambda: board.joules() + 0.5 * board.clock.now_s() ** 2,  # 1 W more every second
    )
    found = measure_energy(board.call, meter=drifting, call_s=CALL_S, clock=board.clock)

    assert found.energy_j == pytest.approx(5.0 * CALL_S, rel=0.06)


def test_windows_are_equally_long_and_hold_twenty_values_of_the_meter() -> None:
    board = Board(work_w=5.0)
    instants: list[float] = []

    def read() -> float:
        instants.append(board.clock.now_s())
        return board.joules()

    meter = EnergyMeter(note="m", kind="counter", period_s=0.05, read=read)
    measure_energy(board.call, meter=meter, call_s=CALL_S, pairs=2, clock=board.clock)
    lengths = [b - a for a, b in zip(instants[::2], instants[1::2], strict=True)]

    assert len(lengths) == 4
    assert lengths == pytest.approx([lengths[0]] * 4)
    assert lengths[0] >= SAMPLES_PER_WINDOW * 0.05


def test_a_meter_that_fails_meanwhile_gives_no_energy() -> None:
    board = Board(work_w=5.0)
    meter = EnergyMeter(note="m", kind="counter", period_s=0.01, read=lambda: math.nan)
    found = measure_energy(board.call, meter=meter, call_s=CALL_S, clock=board.clock)

    assert found.energy_j is None
    assert "could not be read" in found.note


def test_no_meter_is_none_with_the_reason(tmp_path: Path) -> None:
    for backend in ("torch:cpu", "torch:cuda"):
        meter, why = find_energy_meter(backend, root=tmp_path, clock=VirtualClock())

        assert meter is None
        assert why


def _zone(root: Path, name: str, energy_uj: int) -> Path:
    zone = root / "sys/class/powercap" / name
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"package-{name[-1]}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text("1000000000\n")
    return zone


def test_processor_packages_are_summed_and_wraps_do_not_count(tmp_path: Path) -> None:
    zones = [_zone(tmp_path, "intel-rapl:0", 999_000_000), _zone(tmp_path, "intel-rapl:1", 5)]
    clock = VirtualClock()
    meter, note = find_energy_meter("onnxruntime:CPU", root=tmp_path, clock=clock)
    assert meter is not None
    before_j = meter.read()
    clock.sleep_s(1.0)
    (zones[0] / "energy_uj").write_text("1000000\n")  # 2 J later, past its largest value
    (zones[1] / "energy_uj").write_text("3000005\n")
    after_j = meter.read()

    assert meter.kind == "counter"
    assert "package-0" in note
    assert "package-1" in note
    assert after_j - (0.0 if math.isnan(before_j) else before_j) == pytest.approx(5.0)


def test_a_boards_input_rail_is_found_by_its_label(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    folder.mkdir(parents=True)
    for channel, label in ((1, "VDD_IN"), (2, "VDD_SOC")):
        (folder / f"in{channel}_label").write_text(label)
        (folder / f"in{channel}_input").write_text("5000")
        (folder / f"curr{channel}_input").write_text(str(1000 * channel))
    meter, note = find_energy_meter("torch:cpu", root=tmp_path, clock=VirtualClock())

    assert meter is not None
    assert (meter.kind, meter.read()) == ("power", 5.0)
    assert "VDD_IN" in note

from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.bench.energy import package_energy

ZONE = "sys/class/powercap/intel-rapl:0"


def machine(root: Path, **files: str) -> Path:
    zone = root / ZONE
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    for name, text in files.items():
        (zone / name).write_text(text)
    return root


def test_without_a_meter_the_reason_is_given(tmp_path: Path) -> None:
    read, why = package_energy(tmp_path)

    assert read is None
    assert why == "no energy meter covers this machine"


def test_the_counter_is_read_in_joules_from_the_start(tmp_path: Path) -> None:
    root = machine(tmp_path, energy_uj="5000000\n", max_energy_range_uj="8000000\n")
    read, what = package_energy(root)
    assert read is not None

    (root / ZONE / "energy_uj").write_text("6500000\n")

    assert read() == pytest.approx(1.5)
    assert "idle" in what


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    root = machine(tmp_path, energy_uj="7000000\n", max_energy_range_uj="8000000\n")
    read, _ = package_energy(root)
    assert read is not None

    (root / ZONE / "energy_uj").write_text("500000\n")

    assert read() == pytest.approx(1.5)


def test_a_counter_that_cannot_be_read_is_no_meter(tmp_path: Path) -> None:
    read, why = package_energy(machine(tmp_path))

    assert read is None
    assert why.startswith("rapl package-0: ")

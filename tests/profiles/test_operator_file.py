from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgewise.errors import ProfileError
from edgewise.profiles.operator_file import (
    check_table,
    excluded_in_words,
    operator_table_text,
    parse_operator_table,
    read_operator_table,
    write_operator_table,
)
from edgewise.profiles.operator_tables import (
    SHIPPED,
    default_operator_table,
    load_operator_table,
    operator_table_names,
    operator_table_path,
)
from edgewise.profiles.operators import (
    AttentionShape,
    Correctness,
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

POLICY = ThreadPolicy(threads=1)
LINEAR = OperatorShape(kind="linear", m=1, k=8, n=8, bias=True)
LAYER = OperatorShape(
    kind="layer", m=1, k=8, n=8, attention=AttentionShape(heads=2, kv_heads=1, head_dim=4, past=3)
)
LATENCY = LatencySummary(
    mean_s=2e-5, median_s=1.9e-5, std_s=1e-6, min_s=1e-5, max_s=3e-5, p90_s=2.5e-5, p95_s=2.7e-5,
    p99_s=2.9e-5, median_low_s=1.8e-5, median_high_s=2.1e-5, calls=1500, samples=500,
)  # fmt: skip
RIGHT = Correctness(passed=True, max_abs=1e-7, mean_abs=1e-8, max_rel=1e-6, rtol=1e-4, atol=1e-3)


def _cost(shape: OperatorShape = LINEAR, backend: str = "torch:cpu", **f: Any) -> OperatorCost:
    fields: dict[str, Any] = {
        "latency": LATENCY,
        "correctness": RIGHT,
        "energy": Energy(energy_j=0.1, low_j=-0.01, high_j=0.2, note="rapl"),
        "thread_policy": POLICY,
    }
    return OperatorCost(shape=shape, backend=backend, **{**fields, **f})


def _table(**fields: Any) -> OperatorTable:
    wrong = dataclasses.replace(RIGHT, passed=False, max_abs=0.5)
    costs = [
        _cost(),
        _cost(LAYER, energy=Energy()),
        _cost(backend="b:x", latency=None, correctness=None, energy=Energy(), reason="refused"),
        _cost(LAYER, "b:x", latency=None, correctness=wrong, thread_policy=ThreadPolicy(threads=2)),
    ]
    switch = SwitchCost(
        source="torch:cpu", target="b:x", fixed_s=1e-5, per_byte_s=1e-11, interval_s=(0.0, 2e-5),
        typical_bytes=65536, samples=800,
    )  # fmt: skip
    rest: dict[str, Any] = {
        "name": "a table",
        "device_id": "0123",
        "device": {"cpu_model": "a CPU", "cores": 2},
        "thread_policy": POLICY,
        "provenance": "measured",
        "created_unix_s": 12.5,
        "notes": {"method": "by hand"},
    }
    return table_of(costs, [switch], **{**rest, **fields})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Write a file whose document was changed by a function."""

    def written(change: Callable[[dict[str, Any]], object]) -> Path:
        document = json.loads(operator_table_text(_table()))
        change(document)
        path = tmp_path / "t.json"
        path.write_text(json.dumps(document))
        return path

    return written


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "new/folder/t.json"])
def test_a_table_is_equal_after_a_file(name: str, tmp_path: Path) -> None:
    write_operator_table(_table(), tmp_path / name)

    assert read_operator_table(tmp_path / name) == _table()


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_operator_table(_table(), tmp_path / name)

    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_file_cut_anywhere_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = operator_table_text(_table())
    for length in range(0, len(text) - 2, 211):
        path.write_text(text[:length])
        with pytest.raises(ProfileError, match=r"t\.json"):
            read_operator_table(path)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    write_operator_table(_table(), path)
    data = path.read_bytes()
    for broken in (data[:-9], data[:40] + b"\0\0\0\0" + data[44:]):
        path.write_bytes(broken)
        with pytest.raises(ProfileError, match=r"t\.json\.gz"):
            read_operator_table(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(format="other"), "no table of operators"),
        (lambda d: d.update(version=2), "upgrade"),
        (lambda d: d.pop("costs"), "damaged"),
        (lambda d: d.update(provenance="guessed"), "guessed"),
        (lambda d: d.update(thread_policy={"threads": 0, "affinity": None}), "damaged"),
        (lambda d: d["costs"][0].update(shape="linear m=1"), "linear m=1"),
        (lambda d: d["costs"][0].pop("backend"), "backend"),
        (lambda d: d["costs"][0]["latency"].pop("p99_s"), "p99_s"),
        (lambda d: d["switches"][0].update(fixed_s=math.nan), "fixed_s"),
        (lambda d: d["switches"][0].update(per_byte_s=-1.0), "per_byte_s"),
        (lambda d: d["switches"][0].update(interval_s=[0.0]), "interval_s"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    change: Callable[[dict[str, Any]], object], said: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(ProfileError) as caught:
        read_operator_table(write(change))

    assert said in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, -1e-6, None, "fast", math.inf, True])
def test_a_latency_that_is_no_time_excludes_its_row_alone_and_says_so(
    value: object, write: Callable[..., Path]
) -> None:
    table = read_operator_table(write(lambda d: d["costs"][0]["latency"].update(median_s=value)))
    said = excluded_in_words(table.excluded())

    assert len(table.costs) == 4
    assert not table.costs[LINEAR, "torch:cpu"].usable
    assert any(LINEAR.key in line and "median_s" in line for line in said)


def test_an_energy_below_zero_is_unknown_and_its_latency_stays(write: Callable[..., Path]) -> None:
    table = read_operator_table(write(lambda d: d["costs"][0]["energy"].update(energy_j=-1.0)))
    cost = table.costs[LINEAR, "torch:cpu"]

    assert cost.usable
    assert cost.energy.energy_j is None
    assert "-1.0" in cost.energy.note


def test_excluded_rows_say_what_where_and_why() -> None:
    said = excluded_in_words(_table().excluded())

    assert said[0] == f"{LINEAR.key} on b:x: refused"
    assert "wrong by 0.5" in said[1]


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    table = _table(created_unix_s=math.nan)

    with pytest.raises(ProfileError, match="not finite"):
        write_operator_table(table, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_a_table_that_fits_the_situation_has_no_difference() -> None:
    assert check_table(_table(), device_id="0123", thread_policy=POLICY) == ()


def test_another_device_thread_policy_and_provenance_are_said_in_words() -> None:
    found = check_table(
        _table(provenance="simulated"), device_id="4567", thread_policy=ThreadPolicy(threads=2)
    )

    assert [
        word in line for word, line in zip(("4567", "2 threads", "simulated"), found, strict=True)
    ]
    assert "a CPU" in found[0]


def test_shipped_tables_load_and_are_small() -> None:
    for name in operator_table_names():
        table = load_operator_table(name)

        assert table.backends()
        assert table.provenance in {"measured", "simulated", "estimated"}


def test_the_measured_table_that_ships_covers_its_switches() -> None:
    table = load_operator_table(SHIPPED)
    names = table.backends()

    assert table.provenance == "measured"
    assert len(names) == 3
    assert all(table.switch(a, b).at_s(65536) >= 0 for a in names for b in names)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ProfileError, match=SHIPPED):
        load_operator_table(SHIPPED[:-1])


def test_the_devices_own_table_comes_before_the_shipped(tmp_path: Path) -> None:
    own = operator_table_path("0123", folder=tmp_path)
    write_operator_table(_table(), own)

    assert default_operator_table("0123", folder=tmp_path) == _table()
    assert default_operator_table("4567", folder=tmp_path).name == SHIPPED


def test_the_shipped_table_says_that_it_is_another_machines(tmp_path: Path) -> None:
    shipped = load_operator_table(SHIPPED)
    here = default_operator_table(shipped.device_id, folder=tmp_path)
    elsewhere = default_operator_table("no such device", folder=tmp_path)

    assert "device" not in here.notes
    assert "another machine" in elsewhere.notes["device"]


def test_text_that_is_not_an_object_is_no_table() -> None:
    with pytest.raises(ProfileError, match="no table"):
        parse_operator_table("[]", where="x")

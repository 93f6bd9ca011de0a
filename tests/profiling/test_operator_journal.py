from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.errors import ProfileError
from edgewise.profiles.operators import Energy, OperatorCost, OperatorShape, SwitchCost, table_of
from edgewise.profiles.records import ThreadPolicy
from edgewise.profiling.operator_journal import Journal

POLICY = ThreadPolicy(threads=1)
HEAD = table_of(
    (),
    (),
    name="t",
    device_id="0123",
    device={},
    thread_policy=POLICY,
    provenance="measured",
    notes={"method": "by hand", "versions": "torch 2.0, onnxruntime 1.0"},
)


def _cost(m: int) -> OperatorCost:
    return OperatorCost(
        shape=OperatorShape(kind="linear", m=m, k=8, n=8),
        backend="torch:cpu",
        latency=None,
        correctness=None,
        energy=Energy(),
        thread_policy=POLICY,
        reason="refused",
    )


def _fill(path: Path) -> Journal:
    journal = Journal(path, HEAD)
    for m in (1, 2, 3):
        journal.add_cost(_cost(m))
    journal.add_switch(SwitchCost(source="a:x", target="b:x", fixed_s=1e-6))
    return journal


def test_rows_are_there_after_opening_again(tmp_path: Path) -> None:
    filled = _fill(tmp_path / "new/rows")
    again = Journal(tmp_path / "new/rows", HEAD)

    assert again.costs == filled.costs
    assert again.switches == filled.switches
    assert not again.notes


def test_killed_at_any_byte_it_loses_one_row_at_most(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    _fill(path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for length in range(len(lines[0]), len(data), 7):
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n") - 1
        again = Journal(path, HEAD)
        again.add_cost(_cost(9))

        assert len(Journal(path, HEAD).costs) == min(whole, 3) + 1


def test_killed_before_its_first_line_was_whole_it_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'{"format": "edgew')
    Journal(path, HEAD).add_cost(_cost(1))

    assert len(Journal(path, HEAD).costs) == 1


def test_a_damaged_line_is_measured_again_and_said(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    _fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\xff\x00rubbish\n", b'{"cost": {}}\n', *lines[4:]]))
    again = Journal(path, HEAD)

    assert [shape.m for shape, _ in again.costs] == [1]
    assert len(again.switches) == 1
    assert ["line 3" in again.notes[0], "line 4" in again.notes[1]] == [True, True]


def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    for text in ("letters to nobody\n", '{"format": "other"}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(ProfileError, match="not what a campaign"):
            Journal(path, HEAD)
        assert path.read_text() == text


def test_another_version_of_a_runtime_is_refused_and_a_new_runtime_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    _fill(path)
    notes = {**HEAD.notes, "versions": "torch 2.0, onnxruntime 1.0, openvino 5"}
    with_more = table_of((), (), **{**_fields(), "notes": notes})
    notes = {**HEAD.notes, "versions": "torch 2.1, onnxruntime 1.0"}
    newer = table_of((), (), **{**_fields(), "notes": notes})

    assert len(Journal(path, with_more).costs) == 3
    with pytest.raises(ProfileError, match=r"torch 2\.0, this is 2\.1"):
        Journal(path, newer)


def _fields() -> dict[str, object]:
    names = ("name", "device_id", "device", "thread_policy", "provenance", "notes")
    return {name: getattr(HEAD, name) for name in names}


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ProfileError, match="cannot keep rows"):
        Journal(tmp_path / "file/rows", HEAD)


def test_without_a_file_rows_are_in_memory(tmp_path: Path) -> None:
    journal = Journal(None, HEAD)
    journal.add_cost(_cost(1))
    journal.remove()

    assert len(journal.costs) == 1
    assert not list(tmp_path.iterdir())

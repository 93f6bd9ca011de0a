"""Rows of a campaign over operators, kept as they come: one JSON line each, appended.

Killed at any moment, it loses the row that was being written at most.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgewise.errors import ProfileError
from edgewise.profiles.exchange import thread_policy_from_json
from edgewise.profiles.operator_file import (
    check_table,
    cost_from_json,
    cost_to_json,
    switch_from_json,
)
from edgewise.profiles.operators import OperatorCost, OperatorShape, OperatorTable, SwitchCost

FORMAT = "edgewise-operator-journal"
FORMAT_VERSION = 1

_AFRESH = "name another file with --out, or start again with --no-resume"
# What rows of one table must share besides device, threads and state, in the table's notes.
_SHARED_NOTES = {"method": "method", "weights": "choice of weights"}


class Journal:
    """Costs that a campaign has measured so far.

    Opening reads what an earlier run left, and cuts off a line that was written in part.

    Args:
        path: The file; made where there is none, ``None`` keeps rows in memory alone.
        head: The table that the rows are for; its own rows are there from the start.

    Attributes:
        costs: By shape and backend.
        switches: By source and target.
        notes: What was read and could not be used.

    Raises:
        ProfileError: The file is another kind of file, cannot be read or written, or has rows of
            another device, thread policy, state, method or version of a runtime.
    """

    def __init__(self, path: Path | None, head: OperatorTable) -> None:
        self.path = path
        self.costs: dict[tuple[OperatorShape, str], OperatorCost] = dict(head.costs)
        self.switches: dict[tuple[str, str], SwitchCost] = dict(head.switches)
        self.notes: list[str] = []
        self._policy = head.thread_policy
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read(path, head)
            self._append(_head_to_json(head))
        except OSError as error:
            raise ProfileError(
                f"cannot keep rows in {path}: {error.strerror or error}",
                help="choose a folder you may write to, with free space: --out",
            ) from error

    def add_cost(self, cost: OperatorCost) -> None:
        """Keep one row."""
        self.costs[cost.shape, cost.backend] = cost
        self._append({"cost": cost_to_json(cost, policy=self._policy)})

    def add_switch(self, switch: SwitchCost) -> None:
        """Keep one switch cost."""
        self.switches[switch.source, switch.target] = switch
        self._append({"switch": dataclasses.asdict(switch)})

    def remove(self) -> None:
        """Delete the file: its rows are in a table now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _read(self, path: Path, head: OperatorTable) -> None:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                if number == 1 or "format" in row:
                    self._check(row, head)
                elif "cost" in row:
                    cost = cost_from_json(row["cost"], policy=self._policy)
                    self.costs[cost.shape, cost.backend] = cost
                else:
                    switch = switch_from_json(row["switch"])
                    self.switches[switch.source, switch.target] = switch
            except (KeyError, TypeError, ValueError, AttributeError, _DamagedError) as error:
                if number == 1:
                    raise ProfileError(
                        f"{path} is not what a campaign over operators keeps: {error}", help=_AFRESH
                    ) from error
                self.notes.append(f"line {number} of {path.name} is damaged and measured again")
            except ProfileError as error:
                if error.help == _AFRESH:
                    raise
                self.notes.append(f"line {number} of {path.name} is damaged and measured again")

    def _check(self, row: Mapping[str, Any], head: OperatorTable) -> None:
        if row.get("format") != FORMAT or row.get("version") != FORMAT_VERSION:
            raise _DamagedError(f"its first line is no head of format {FORMAT} {FORMAT_VERSION}")
        kept = OperatorTable(
            name=str(self.path),
            device_id=row["device_id"],
            device=row["device"],
            thread_policy=thread_policy_from_json(row["thread_policy"]),
            provenance="measured",
            state=row["state"],
            costs={},
            switches={},
            notes=row["notes"],
        )
        refuse_mixing(kept, head)


class _DamagedError(Exception):
    """A head that is none."""


def refuse_mixing(kept: OperatorTable, head: OperatorTable) -> None:
    """Refuse to add rows to those of another situation.

    Args:
        kept: What was measured before.
        head: What is being measured.

    Raises:
        ProfileError: Device, thread policy, state, method or a runtime's version differ.
    """
    differences = list(
        check_table(kept, device_id=head.device_id, thread_policy=head.thread_policy)
    )
    if kept.state != head.state:
        differences.append(f"it was measured in state {kept.state!r}, this is {head.state!r}")
    for note, word in _SHARED_NOTES.items():
        if kept.notes.get(note) != head.notes.get(note):
            differences.append(
                f"its {word} was {kept.notes.get(note)!r}, this is {head.notes.get(note)!r}"
            )
    before, now = (_versions(each.notes.get("versions", "")) for each in (kept, head))
    differences += [
        f"it was measured with {name} {before[name]}, this is {now[name]}"
        for name in before.keys() & now.keys()
        if before[name] != now[name]
    ]
    if differences:
        raise ProfileError(
            f"rows of {kept.name!r} cannot be mixed with new ones: {'; '.join(differences)}",
            help=_AFRESH,
        )


def _head_to_json(head: OperatorTable) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "device_id": head.device_id,
        "device": head.device,
        "thread_policy": dataclasses.asdict(head.thread_policy),
        "state": head.state,
        "notes": dict(head.notes),
    }


def _versions(text: str) -> dict[str, str]:
    """Versions by package from the words of a note: ``"torch 2.13.0, onnxruntime 1.23.2"``."""
    pairs = (part.strip().partition(" ") for part in text.split(",") if part.strip())
    return {name: version for name, _, version in pairs}

"""A table of operators' costs as one JSON file, gzip-compressed where its name ends in .gz."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from edgewise.errors import ProfileError
from edgewise.profiles.exchange import thread_policy_from_json, write_whole
from edgewise.profiles.operators import (
    Correctness,
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorTable,
    SwitchCost,
    parse_shape,
    table_of,
)
from edgewise.profiles.records import Provenance, ThreadPolicy

FORMAT = "edgewise-operator-table"
FORMAT_VERSION = 1

_AGAIN = "edgewise dispatch measure --no-resume"
_COUNTS = ("calls", "samples")


def operator_table_text(table: OperatorTable) -> str:
    """Write a table as JSON, a line for each row."""
    head = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "name": table.name,
        "provenance": table.provenance,
        "state": table.state,
        "device_id": table.device_id,
        "device": table.device,
        "thread_policy": dataclasses.asdict(table.thread_policy),
        "created_unix_s": table.created_unix_s,
        "notes": dict(table.notes),
    }
    parts = [f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in head.items()]
    lists = {
        "costs": [cost_to_json(cost, policy=table.thread_policy) for cost in table.costs.values()],
        "switches": [dataclasses.asdict(switch) for switch in table.switches.values()],
    }
    for name, rows in lists.items():
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_operator_table(table: OperatorTable, path: str | Path) -> None:
    """Write a table to a file, whole or not at all.

    Raises:
        ProfileError: It cannot be written, or a number of it is not finite; what was there before
            stays.
    """
    path = Path(path)
    try:
        data = operator_table_text(table).encode()
    except ValueError as error:
        raise ProfileError(f"table {table.name!r} has a number that is not finite") from error
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # the same table gives the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    write_whole(path, data, what="the table of operators")


def read_operator_table(path: str | Path) -> OperatorTable:
    """Read a file that :func:`write_operator_table` wrote.

    A row with a latency that is not a number, or below zero, stays without one and says so in its
    reason: :meth:`OperatorTable.excluded` lists it and no plan uses it.

    Raises:
        ProfileError: The file is missing, damaged, of a newer format, or another kind of file.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ProfileError(
            f"cannot read the table of operators {path}: {error}", help="edgewise dispatch measure"
        ) from error
    return parse_operator_table(text, where=str(path))


def parse_operator_table(text: str, *, where: str) -> OperatorTable:
    """Read a table from JSON text.

    Args:
        text: One JSON document.
        where: The file, for messages.

    Raises:
        ProfileError: As :func:`read_operator_table`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{where} is not one whole JSON document: it is truncated or no table of operators:"
            f" {error}",
            help=_AGAIN,
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError(f'{where} is no table of operators: it lacks "format": "{FORMAT}"')
    if document.get("version") != FORMAT_VERSION:
        raise ProfileError(
            f"{where} has version {document.get('version')!r} of the format, this Edgewise reads"
            f" {FORMAT_VERSION}",
            help="pip install --upgrade edgewise",
        )
    try:
        if document["provenance"] not in get_args(Provenance):
            raise ValueError(f"unknown provenance {document['provenance']!r}")  # noqa: TRY301
        policy = thread_policy_from_json(document["thread_policy"])
        return table_of(
            [cost_from_json(row, policy=policy) for row in document["costs"]],
            [switch_from_json(row) for row in document["switches"]],
            name=str(document["name"]),
            device_id=str(document["device_id"]),
            device=dict(document["device"]),
            thread_policy=policy,
            provenance=document["provenance"],
            state=str(document["state"]),
            created_unix_s=float(document["created_unix_s"]),
            notes={str(k): str(v) for k, v in document["notes"].items()},
        )
    except ProfileError as error:
        raise ProfileError(f"{where} is damaged: {error.message}", help=_AGAIN) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(
            f"{where} is damaged: {type(error).__name__}: {error}", help=_AGAIN
        ) from error


def cost_to_json(cost: OperatorCost, *, policy: ThreadPolicy | None = None) -> dict[str, Any]:
    """One row as JSON; its thread policy only where it is not the given one."""
    row: dict[str, Any] = {"shape": cost.shape.key, "backend": cost.backend}
    if cost.latency is not None:
        row["latency"] = dataclasses.asdict(cost.latency)
    if cost.correctness is not None:
        row["correctness"] = dataclasses.asdict(cost.correctness)
    if cost.energy != Energy():
        row["energy"] = dataclasses.asdict(cost.energy)
    if cost.thread_policy != policy:
        row["thread_policy"] = dataclasses.asdict(cost.thread_policy)
    if cost.reason:
        row["reason"] = cost.reason
    return row


def cost_from_json(row: Mapping[str, Any], *, policy: ThreadPolicy) -> OperatorCost:
    """Read one row.

    Args:
        row: As :func:`cost_to_json` makes it.
        policy: Thread policy of a row that names none.

    Raises:
        ProfileError: Its shape cannot be read.
        KeyError, TypeError, ValueError: It lacks a member, or one is of the wrong kind.
    """
    latency, reason = _latency(row.get("latency"))
    said = row.get("correctness")
    own_policy = row.get("thread_policy")
    return OperatorCost(
        shape=parse_shape(row["shape"]),
        backend=str(row["backend"]),
        latency=latency,
        correctness=None
        if said is None
        else Correctness(**{**said, "passed": bool(said["passed"])}),
        energy=_energy(row.get("energy")),
        thread_policy=policy if own_policy is None else thread_policy_from_json(own_policy),
        reason=str(row.get("reason", "")) or reason,
    )


def switch_from_json(row: Mapping[str, Any]) -> SwitchCost:
    """Read one switch cost.

    Raises:
        TypeError, ValueError: A member is missing or unknown, or cannot be.
    """
    interval = row.get("interval_s")
    found = SwitchCost(**{**row, "interval_s": None if interval is None else tuple(interval)})
    pair = f"switch from {found.source!r} to {found.target!r}"
    for name in ("fixed_s", "per_byte_s", "fixed_j", "per_byte_j"):
        value = getattr(found, name)
        if value is None and name.endswith("_j"):
            continue
        if not _plain(value) or value < 0:
            raise ValueError(f"{pair}: {name} is {value!r}")
    if interval is not None and not (len(interval) == 2 and all(map(_plain, interval))):
        raise ValueError(f"{pair}: interval_s is {interval!r}")
    return found


def check_table(
    table: OperatorTable, *, device_id: str, thread_policy: ThreadPolicy
) -> tuple[str, ...]:
    """Say in words how the situation of a table differs from this one.

    Args:
        table: What plans shall be made with.
        device_id: Fingerprint of this device.
        thread_policy: Threads that backends have here.

    Returns:
        A sentence for each difference; empty where the table holds.
    """
    found = []
    if table.device_id != device_id:
        cpu = table.device.get("cpu_model") or "another machine"
        found.append(
            f"table {table.name!r} is of device {table.device_id or 'unknown'} ({cpu}), this is"
            f" device {device_id}"
        )
    if table.thread_policy != thread_policy:
        found.append(
            f"table {table.name!r} is for {table.thread_policy.key}, here programs have"
            f" {thread_policy.key}"
        )
    if table.provenance != "measured":
        found.append(f"table {table.name!r} is {table.provenance}, not measured")
    return tuple(found)


def excluded_in_words(costs: Iterable[OperatorCost]) -> list[str]:
    """A line for each row that no plan uses: what, where and why."""
    return [f"{cost.shape.key} on {cost.backend}: {_why(cost)}" for cost in costs]


def _why(cost: OperatorCost) -> str:
    wrong = cost.correctness
    if cost.reason or wrong is None:
        return cost.reason or "no latency"
    return f"wrong by {wrong.max_abs:.3g}, allowed {wrong.atol:.3g} + {wrong.rtol:.3g} of the value"


def _latency(row: Any) -> tuple[LatencySummary | None, str]:
    """A latency, or why it is none."""
    if row is None:
        return None, ""
    found = LatencySummary(**row)
    for each in dataclasses.fields(found):
        value = getattr(found, each.name)
        least = 1 if each.name in _COUNTS else 0
        if not _plain(value) or value < least:
            return None, f"its {each.name} is {value!r} in the file"
    return found, ""


def _energy(row: Any) -> Energy:
    """An energy; one that is no number or not above zero is unknown, with the reason."""
    if row is None:
        return Energy()
    found = Energy(**row)
    for name in ("energy_j", "low_j", "high_j"):
        value = getattr(found, name)
        if value is not None and not (_plain(value) and (value > 0 or name != "energy_j")):
            return Energy(note=f"its {name} is {value!r} in the file")
    return found


def _plain(value: object) -> bool:
    """Whether it is a number that counts."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

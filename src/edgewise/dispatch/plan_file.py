"""A plan as a file: JSON, written whole or not at all, and refused where it is damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from edgewise.dispatch.plan import REASONS, DispatchPlan, PhasePlan, Step
from edgewise.dispatch.problem import OBJECTIVES
from edgewise.dispatch.trace import Phase
from edgewise.errors import ConfigError, EdgeError
from edgewise.profiles.exchange import thread_policy_from_json, write_whole
from edgewise.profiles.operators import ALL_KINDS, parse_shape
from edgewise.profiles.records import Provenance

FORMAT = "edgewise-dispatch-plan"
FORMAT_VERSION = 1


def write_plan(plan: DispatchPlan, path: Path) -> None:
    """Write a plan, whole or not at all.

    Args:
        plan: What to write.
        path: Where; a file of that name is replaced when all is on disk.

    Raises:
        ProfileError: It cannot be written; what was there before stays.
    """
    text = json.dumps(plan_to_json(plan), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode(), what="the plan")


def read_plan(path: Path) -> DispatchPlan:
    """Read a plan.

    Raises:
        ConfigError: The file is missing, truncated, another kind of file, of a newer format, or
            a field is missing or wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not one whole JSON document, so it is truncated or no plan: {error}",
            help=_AGAIN,
        ) from error
    return plan_from_json(document, where=str(path))


_AGAIN = "make it again: edgewise dispatch plan MODEL --out FILE"


def plan_to_json(plan: DispatchPlan) -> dict[str, Any]:
    """A plan as one JSON object, with the format's name; an infinite number is ``None``."""
    document = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(plan)}
    for phase in document["phases"]:
        if math.isinf(phase["best_static_s"]):
            phase["best_static_s"] = None
    return document


def plan_from_json(document: Any, *, where: str = "the document") -> DispatchPlan:
    """Read a plan from what :func:`plan_to_json` gave.

    Args:
        document: The object.
        where: It is from, for messages.

    Raises:
        ConfigError: It is no plan, of a newer format, or a field is missing or wrong.
    """
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ConfigError(
            f'{where} is no plan of dispatch: it does not say "format": "{FORMAT}"', help=_AGAIN
        )
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{where} has plan format {version!r}; this Edgewise reads {FORMAT_VERSION}",
            help="pip install --upgrade edgewise",
        )
    try:
        return _plan(document)
    except KeyError as error:
        raise ConfigError(f"{where}: the plan has no field {error}", help=_AGAIN) from error
    except EdgeError as error:
        raise ConfigError(f"{where} is damaged: {error.message}", help=_AGAIN) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where} is damaged: {error}", help=_AGAIN) from error


def _plan(document: Mapping[str, Any]) -> DispatchPlan:
    phases = tuple(_phase(phase) for phase in document["phases"])
    if not phases:
        raise ConfigError("it has no phases")
    return DispatchPlan(
        model=_text(document, "model"),
        objective=_word(document, "objective", OBJECTIVES),
        method=_text(document, "method"),
        backends=_texts(document, "backends"),
        state=_text(document, "state"),
        device_id=_text(document, "device_id"),
        thread_policy=thread_policy_from_json(document["thread_policy"]),
        provenance=_word(document, "provenance", get_args(Provenance)),
        table=_text(document, "table"),
        phases=phases,
        home=_text(document, "home"),
        notes={str(k): str(v) for k, v in document["notes"].items()},
    )


def _phase(document: Mapping[str, Any]) -> PhasePlan:
    best_static_s = _number(document, "best_static_s")
    return PhasePlan(
        phase=_word(document, "phase", get_args(Phase)),
        length=_count(document, "length", least=1),
        past=_count(document, "past", least=0),
        steps=tuple(_step(step) for step in document["steps"]),
        predicted_s=_known(document, "predicted_s"),
        predicted_j=_number(document, "predicted_j"),
        best_static=_text(document, "best_static"),
        best_static_s=math.inf if best_static_s is None else best_static_s,
        switches=_count(document, "switches", least=0),
        switch_s=_known(document, "switch_s"),
        fixed_s=_known(document, "fixed_s"),
        static_s={str(k): _known(document["static_s"], k) for k in document["static_s"]},
        static_j={str(k): _known(document["static_j"], k) for k in document["static_j"]},
    )


def _step(document: Mapping[str, Any]) -> Step:
    shapes = _texts(document, "shapes")
    for shape in shapes:
        parse_shape(shape)
    covers = _texts(document, "covers")
    if not covers or not shapes:
        raise ConfigError(f"step {document['name']!r} covers no operator or has no shape")
    other = document["best_other"]
    return Step(
        name=_text(document, "name"),
        kind=_word(document, "kind", ALL_KINDS),
        backend=_text(document, "backend"),
        covers=covers,
        shapes=shapes,
        predicted_s=_known(document, "predicted_s"),
        switch_s=_known(document, "switch_s"),
        predicted_j=_number(document, "predicted_j"),
        best_other=None if other is None else _text(document, "best_other"),
        margin_s=_number(document, "margin_s"),
        margin_j=_number(document, "margin_j"),
        one_by_one_s=_number(document, "one_by_one_s"),
        tie=bool(document["tie"]),
        reason=_word(document, "reason", REASONS),
    )


def _text(document: Mapping[str, Any], field: str) -> str:
    value = document[field]
    if not isinstance(value, str):
        raise ConfigError(f"expected {field} as text, found {value!r}")
    return value


def _texts(document: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = document[field]
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"expected {field} as a list of text, found {value!r}")
    return tuple(value)


def _word(document: Mapping[str, Any], field: str, known: tuple[str, ...]) -> Any:
    value = _text(document, field)
    if value not in known:
        raise ConfigError(f"{field} is {value!r}, not one of {', '.join(known)}")
    return value


def _number(document: Mapping[str, Any], field: str) -> float | None:
    return None if document[field] is None else _known(document, field)


def _known(document: Mapping[str, Any], field: str) -> float:
    value = document[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"expected {field} as a finite number, found {value!r}")
    return float(value)


def _count(document: Mapping[str, Any], field: str, *, least: int) -> int:
    value = document[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"expected {field} as a whole number >= {least}, found {value!r}")
    return value

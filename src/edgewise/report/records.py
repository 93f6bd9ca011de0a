"""Plain records of a demo run, which the page, the tables and the figure are made from.

Nothing here measures or decides; whoever plays the scenes fills these in.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from edgewise.errors import DataError

SCHEMA_VERSION = 1
PROVENANCES = ("measured", "simulated", "estimated")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPoint:
    """One request as it was answered.

    Attributes:
        policy: Who decided how deep it ran.
        scene: The scene it belongs to.
        start_s: When it arrived, seconds since the scene's start.
        latency_s: From arrival to the answer, or to the refusal; seconds.
        budget_s: What it was allowed, seconds.
        exit_index: The exit that answered, from 0; ``None`` when the request was refused.
        num_exits: How many exits the model has.
        depth_ratio: Share of the full model's work that the exit needs, 0…1; ``None`` when refused.
        correct: Whether the answer was right; ``None`` when refused or without a label.
        predicted_s: What the policy expected, seconds; ``None`` if it predicts nothing.
        met: Answered within its budget.
        reason: Why this exit, in the policy's words.
    """

    policy: str
    scene: str
    start_s: float
    latency_s: float
    budget_s: float
    exit_index: int | None
    num_exits: int
    depth_ratio: float | None
    correct: bool | None
    predicted_s: float | None
    met: bool
    reason: str

    def __post_init__(self) -> None:
        for name in ("start_s", "latency_s", "budget_s"):
            _check_finite(self, name)
        if self.exit_index is not None and not 0 <= self.exit_index < self.num_exits:
            raise DataError(f"exit {self.exit_index} does not exist: there are {self.num_exits}")
        if self.exit_index is None and self.met:
            raise DataError(f"a refused request at {self.start_s:.3f} s is marked as in time")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpan:
    """A time in which something else kept the machine busy, seconds since the scene's start."""

    start_s: float
    stop_s: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneReport:
    """One scene: what was asked of the machine, and every request.

    Attributes:
        name: Short name, as in the requests.
        title: What a person reads.
        description: One or two sentences.
        duration_s: Length of the scene, seconds.
        budget_line: (seconds since the start, budget in seconds); each holds until the next.
        load_spans: When other processes competed.
        points: All requests of all policies.
    """

    name: str
    title: str
    description: str
    duration_s: float
    budget_line: tuple[tuple[float, float], ...]
    load_spans: tuple[LoadSpan, ...] = ()
    points: tuple[RequestPoint, ...] = ()

    def __post_init__(self) -> None:
        _check_finite(self, "duration_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy in one scene.

    Attributes:
        scene: Name of the scene.
        policy: Name of the policy.
        requests: How many were made; refused ones count.
        dsr: Deadline satisfaction ratio: share of all requests answered within their budget.
        accuracy: Share of right answers among the labelled requests that were answered.
        accuracy_in_time: Share of right answers within the budget among all labelled requests; a
            refused request is neither.
        mean_exit_depth_ratio: Mean share of the full model's work, over the answered requests.
        p50_s: Median latency of the answered requests, seconds.
        p99_s: 99th percentile of the same.

    Each is ``None`` where there is nothing to take it from: no requests, no answers, no labels.
    """

    scene: str
    policy: str
    requests: int
    dsr: float | None
    accuracy: float | None
    accuracy_in_time: float | None
    mean_exit_depth_ratio: float | None
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRow:
    """One exit of the model.

    Attributes:
        name: As in the model.
        depth_ratio: Share of the full model's work up to it, 0…1.
        accuracy: On the held-out sample; ``None`` where there were no labels.
        median_s: Median latency up to and with this exit on a calm machine, seconds.
        upper_s: The upper quantile that decisions are taken with, seconds.
    """

    name: str
    depth_ratio: float
    accuracy: float | None = None
    median_s: float | None = None
    upper_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Everything the page of a demo shows.

    Attributes:
        title: Heading of the page.
        created: When, ISO 8601 with the zone.
        device: What it ran on, as name and value.
        model: What was run, as name and value.
        backend: Runtime and device, for example ``"onnxruntime:CPU"``.
        thread_policy: How many threads, spinning or not.
        provenance: ``measured``, ``simulated`` or ``estimated``; printed with the numbers.
        command: What to type to get this again.
        scenes: In the order they were played.
        summaries: ``summarise`` of all points.
        exit_table: From the shallowest exit to the deepest.
        notes: What a reader must know to judge the numbers, the machine's noise among it.
    """

    title: str
    created: str
    device: Mapping[str, str]
    model: Mapping[str, str]
    backend: str
    thread_policy: str
    command: str
    scenes: tuple[SceneReport, ...]
    summaries: tuple[PolicySummary, ...]
    exit_table: tuple[ExitRow, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: str = "measured"
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise DataError(
                f"unknown provenance {self.provenance!r}; expected one of {', '.join(PROVENANCES)}"
            )

    def to_json(self) -> str:
        """Write the report as one JSON object; ``from_json`` reads it back unchanged."""
        return json.dumps(_plain(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> DemoReport:
        """Read what ``to_json`` wrote.

        Raises:
            DataError: Not JSON, not such a report, or written by a newer version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DataError(f"this demo report is not JSON: {error}") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise DataError(
                f"expected a demo report of schema {SCHEMA_VERSION}, found {version!r}",
                help="edgewise demo --json > report.json",
            )
        report = _read(cls, data, "report")
        assert isinstance(report, DemoReport)  # noqa: S101 - what _read was asked for
        return report


def summarise(points: Iterable[RequestPoint]) -> list[PolicySummary]:
    """Count each policy in each scene, in the order in which they first appear.

    Args:
        points: Requests of any number of scenes and policies.

    Returns:
        One summary for each scene and policy that has a request.
    """
    groups: dict[tuple[str, str], list[RequestPoint]] = {}
    for point in points:
        groups.setdefault((point.scene, point.policy), []).append(point)
    return [
        _summary(scene, policy, group)
        for scene in dict.fromkeys(scene for scene, _ in groups)
        for (of_scene, policy), group in groups.items()
        if of_scene == scene
    ]


def _summary(scene: str, policy: str, points: Sequence[RequestPoint]) -> PolicySummary:
    answered = [p for p in points if p.exit_index is not None]
    judged = [p for p in answered if p.correct is not None]
    # A refused request was not right in time; it counts where the answered ones have labels.
    due = len(judged) + (len(points) - len(answered) if judged else 0)
    depths = [p.depth_ratio for p in answered if p.depth_ratio is not None]
    latencies_s = [p.latency_s for p in answered]
    p50_s, p99_s = np.quantile(latencies_s, [0.5, 0.99]).tolist() if answered else (None, None)
    return PolicySummary(
        scene=scene,
        policy=policy,
        requests=len(points),
        dsr=_share(sum(p.met for p in points), len(points)),
        accuracy=_share(sum(p.correct is True for p in judged), len(judged)),
        accuracy_in_time=_share(sum(p.correct is True and p.met for p in judged), due),
        mean_exit_depth_ratio=sum(depths) / len(depths) if depths else None,
        p50_s=p50_s,
        p99_s=p99_s,
    )


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share seen in ``count`` independent trials.

    Wilson's score interval: stays within 0…1 and is sensible at 0 and at 1. It takes the trials as
    independent; requests that follow each other under one load are less so, and the true
    uncertainty is then larger.

    Args:
        share: Seen share, 0…1.
        count: Trials, at least 1.

    Returns:
        Lower and upper bound.

    Source:
        E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
        J. Am. Stat. Assoc. 22 (1927) 209-212.

    Example:
        >>> low, high = wilson_interval(0.5, 100)
        >>> round(low, 3), round(high, 3)
        (0.404, 0.596)
    """
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    spread *= z / (1 + z * z / count)
    return max(0.0, middle - spread), min(1.0, middle + spread)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _check_finite(record: object, name: str) -> None:
    value = getattr(record, name)
    if not math.isfinite(value) or value < 0:
        raise DataError(f"expected {name} to be a finite time of zero or more, found {value!r}")


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _read(kind: Any, data: object, where: str) -> object:
    """Build a value of a type expression used by the records above from parsed JSON."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_record(kind, data, where)
    if origin is types.UnionType:  # X | None
        return None if data is None else _read(arguments[0], data, where)
    if origin is tuple and isinstance(data, list):
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(data):
            pairs = zip(kinds, data, strict=True)
            return tuple(_read(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(pairs))
    if origin is Mapping and isinstance(data, dict):
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise DataError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {data!r:.80}")


def _read_record(kind: Any, data: object, where: str) -> object:
    if not isinstance(data, dict):
        raise DataError(f"{where}: expected an object, found {data!r:.80}")
    hints = typing.get_type_hints(kind)
    names = {f.name for f in fields(kind)}
    if names != set(data):
        odd = ", ".join(sorted(names ^ set(data), key=str))
        raise DataError(f"{where}: missing or unknown members of {kind.__name__}: {odd}")
    return kind(**{n: _read(hints[n], data[n], f"{where}.{n}") for n in names})

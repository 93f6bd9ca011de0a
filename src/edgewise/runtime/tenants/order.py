"""In which order the accelerator serves who waits: a pure queue, for one thread or under a lock."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from edgewise.errors import ConfigError, nearest_names
from edgewise.runtime.tenants.records import QueueRule

# A request without a deadline counts as due so long after it came: others cannot starve it.
NO_DEADLINE_S = 10.0
# A line that was passed over so often is next whatever its priority.
PATIENCE = 8

_DISCIPLINES = ("fcfs", "switch-aware")


class Waiting(Protocol):
    """What waits."""

    @property
    def number(self) -> int:
        """Unique, rising with arrival."""
        ...

    @property
    def queued_s(self) -> float:
        """When it joined."""
        ...

    @property
    def deadline_at_s(self) -> float:
        """When it is due; infinite for never."""
        ...

    @property
    def key(self) -> str:
        """Of the prefix that it needs."""
        ...

    @property
    def priority(self) -> int:
        """0 first."""
        ...


W = TypeVar("W", bound=Waiting)


@dataclass(slots=True)
class _Line(Generic[W]):
    key: str
    priority: int
    waiting: dict[int, W] = field(default_factory=dict)  # in order of arrival
    urgent: list[tuple[float, int]] = field(default_factory=list)  # heap; some may have left
    passed: int = 0  # turns that others had while it waited
    turn: int = -1  # of its own, the last one

    @property
    def oldest(self) -> W:
        return next(iter(self.waiting.values()))

    @property
    def head(self) -> tuple[float, int]:
        """Deadline and number of the most urgent one."""
        while self.urgent[0][1] not in self.waiting:
            heapq.heappop(self.urgent)
        return self.urgent[0]

    def add(self, waiting: W) -> None:
        if not self.waiting:
            self.passed = 0
            self.urgent.clear()
        self.waiting[waiting.number] = waiting
        heapq.heappush(self.urgent, _urgency(waiting))

    def take(self) -> W:
        """The most urgent one: earliest deadline first."""
        return self.waiting.pop(self.head[1])


def _urgency(waiting: Waiting) -> tuple[float, int]:
    return min(waiting.deadline_at_s, waiting.queued_s + NO_DEADLINE_S), waiting.number


class AcceleratorQueue(Generic[W]):
    """Requests by the prefix that they need.

    ``fcfs`` serves as they came. ``switch-aware`` goes on with the prefix that ran last while
    others wait for at most ``burst`` requests, then takes turns: within a priority whoever lies in
    the device's memory, then whoever has waited longest for a turn. Within a turn the earliest
    deadline is first. Nobody starves: a line that was passed over `PATIENCE` times is next, so
    with n lines the head of one waits for at most (`PATIENCE` + n) · ``burst`` requests.

    Where every prefix that is waited for lies in memory, switching costs nothing and a turn is one
    request.

    Raises:
        ConfigError: The rule has an unknown discipline, or a value out of range.

    Source:
        k-limited polling: H. Takagi, Queuing analysis of polling models, ACM Computing Surveys 20,
        1988. ``threshold``, ``timeout`` and priorities as HailoRT's model scheduler has them.
    """

    def __init__(self, rule: QueueRule) -> None:
        if rule.discipline not in _DISCIPLINES:
            raise ConfigError(
                f"unknown queue discipline {rule.discipline!r}",
                help=nearest_names(str(rule.discipline), _DISCIPLINES),
            )
        if rule.burst < 1 or rule.threshold < 1 or not rule.timeout_s >= 0:
            raise ConfigError(
                "expected a burst and a threshold of at least 1 and a timeout of zero or more,"
                f" found {rule}"
            )
        self._rule = rule
        self._lines: dict[str, _Line[W]] = {}
        self._current: str | None = None
        self._in_row = 0
        self._turn = 0

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def lengths(self) -> dict[str, int]:
        """How many wait for each prefix."""
        return {key: len(line.waiting) for key, line in self._lines.items() if line.waiting}

    @property
    def last_key(self) -> str | None:
        """The prefix that was served last."""
        return self._current

    def push(self, waiting: W) -> None:
        """Add a request at the end of its line."""
        line = self._lines.get(waiting.key)
        if line is None:
            line = self._lines[waiting.key] = _Line(waiting.key, waiting.priority)
        line.add(waiting)

    def remove(self, waiting: W) -> None:
        """Take a request out; one that does not wait is ignored."""
        line = self._lines.get(waiting.key)
        if line is not None:
            line.waiting.pop(waiting.number, None)

    def forget(self, key: str) -> None:
        """Drop an empty line that will not be used again."""
        line = self._lines.get(key)
        if line is not None and not line.waiting:
            del self._lines[key]

    def clear(self) -> list[W]:
        """Take all out, in the order of their numbers."""
        found = [w for line in self._lines.values() for w in line.waiting.values()]
        for line in self._lines.values():
            line.waiting.clear()
        return sorted(found, key=lambda w: w.number)

    def pop(self, now_s: float, resident: Container[str]) -> W | None:
        """Take the next request.

        Args:
            now_s: The present instant.
            resident: Keys of the prefixes whose parameters are in the device's memory.

        Returns:
            ``None`` where none waits or none is ready.
        """
        line = self._choose(now_s, resident)
        if line is None:
            return None
        if self._rule.discipline == "fcfs":
            found = line.waiting.pop(line.oldest.number)
            self._current = line.key
        else:
            found = line.take()
        return found

    def ready_in_s(self, now_s: float) -> float | None:
        """When a line becomes ready by age; ``None`` where none waits."""
        ages = [now_s - one.oldest.queued_s for one in self._lines.values() if one.waiting]
        return max(0.0, self._rule.timeout_s - max(ages)) if ages else None

    def _choose(self, now_s: float, resident: Container[str]) -> _Line[W] | None:
        lines = [one for one in self._lines.values() if one.waiting]
        if self._rule.discipline == "fcfs":
            return min(lines, key=lambda one: one.oldest.number, default=None)
        ready = [one for one in lines if self._is_ready(one, now_s)]
        if not ready:
            return None
        current = next((one for one in ready if one.key == self._current), None)
        tired = [one for one in ready if one.passed >= PATIENCE]
        if tired:
            chosen = max(tired, key=lambda one: one.passed)
        elif all(one.key in resident for one in ready):
            chosen = min(ready, key=lambda one: (one.priority, *one.head))
        elif current is not None and self._may_go_on(current, ready):
            chosen = current
        else:
            others = [one for one in ready if one is not current] or ready
            chosen = min(others, key=lambda one: (one.priority, one.key not in resident, one.turn))
        self._serve(chosen, ready)
        return chosen

    def _may_go_on(self, current: _Line[W], ready: Iterable[_Line[W]]) -> bool:
        if any(one.priority < current.priority for one in ready):
            return False
        return self._in_row < self._rule.burst

    def _is_ready(self, line: _Line[W], now_s: float) -> bool:
        return (
            line.key == self._current
            or len(line.waiting) >= self._rule.threshold
            or now_s - line.oldest.queued_s >= self._rule.timeout_s
        )

    def _serve(self, line: _Line[W], ready: Iterable[_Line[W]]) -> None:
        others = [one for one in ready if one is not line]
        if line.key != self._current or self._in_row >= self._rule.burst:
            self._current, self._in_row = line.key, 0
            self._turn += 1
            for one in others:
                one.passed += 1
        # Only what others had to wait for counts.
        self._in_row = self._in_row + 1 if others else 0
        line.passed, line.turn = 0, self._turn

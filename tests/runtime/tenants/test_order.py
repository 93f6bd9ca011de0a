"""The accelerator's queue alone: no thread, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from edgewise.runtime.tenants.order import PATIENCE, AcceleratorQueue
from edgewise.runtime.tenants.records import QueueRule


@dataclass(eq=False)
class Item:
    number: int
    key: str
    queued_s: float = 0.0
    deadline_at_s: float = float("inf")
    priority: int = 16


def queue_of(items: list[Item], **rule: object) -> AcceleratorQueue[Item]:
    queue: AcceleratorQueue[Item] = AcceleratorQueue(QueueRule(**rule))  # type: ignore[arg-type]
    for item in items:
        queue.push(item)
    return queue


def served(queue: AcceleratorQueue[Item], *, holds: int = 1, now_s: float = 0.0) -> list[Item]:
    """All, in order, on a device that holds so many models."""
    found: list[Item] = []
    resident: list[str] = []
    while (item := queue.pop(now_s, resident)) is not None:
        found.append(item)
        resident = [*(k for k in resident if k != item.key), item.key][-holds:]
    return found


def keys(items: list[Item]) -> str:
    return "".join(i.key for i in items)


def lines(pattern: str) -> list[Item]:
    return [Item(k, key) for k, key in enumerate(pattern)]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    assert keys(served(queue_of(lines("abcabcaab"), discipline="fcfs"))) == "abcabcaab"


def test_the_resident_line_goes_first_up_to_its_burst() -> None:
    assert keys(served(queue_of(lines("ababababab"), burst=3))) == "aaabbbaabb"
    assert keys(served(queue_of(lines("ababababab"), burst=100))) == "aaaaabbbbb"


def test_lines_take_turns() -> None:
    assert keys(served(queue_of(lines("abcabcabc"), burst=1))) == "abcabcabc"


def test_a_line_alone_uses_up_no_burst() -> None:
    queue = queue_of(lines("aaaaaa"), burst=2)
    for _ in range(4):
        queue.pop(0.0, ["a"])
    queue.push(Item(10, "b"))

    assert keys(served(queue)) == "aab"


def test_what_lies_in_memory_is_served_before_what_must_be_loaded() -> None:
    queue = queue_of(lines("abcabc"), burst=1)
    assert queue.pop(0.0, []).key == "a"  # type: ignore[union-attr]
    assert queue.pop(0.0, ["a", "c"]).key == "c"  # type: ignore[union-attr]


def test_without_switching_costs_the_most_urgent_is_first() -> None:
    items = [Item(0, "a", deadline_at_s=3), Item(1, "b", deadline_at_s=1), Item(2, "a")]
    queue = queue_of(items, burst=4)

    assert [queue.pop(0.0, "ab").number for _ in items] == [1, 0, 2]  # type: ignore[union-attr]


def test_within_a_turn_the_earliest_deadline_is_first() -> None:
    items = [Item(k, "a", deadline_at_s=d) for k, d in enumerate([5.0, 1.0, float("inf"), 3.0])]
    assert [i.number for i in served(queue_of(items))] == [1, 3, 0, 2]


def test_a_request_without_deadline_is_not_overtaken_for_ever() -> None:
    old = Item(0, "a", queued_s=0.0)
    queue = queue_of([old, Item(1, "a", queued_s=11.0, deadline_at_s=12.0)])
    assert queue.pop(11.0, "a") is old


def test_priority_interrupts_a_burst() -> None:
    items = [*lines("aaaa"), Item(8, "b", priority=0), Item(9, "b", priority=0)]
    queue = queue_of(items[:4])
    assert queue.pop(0.0, []).key == "a"  # type: ignore[union-attr]
    for item in items[4:]:
        queue.push(item)

    assert keys(served(queue)) == "bbaaa"


def test_a_line_becomes_ready_by_number_or_by_age() -> None:
    queue = queue_of(lines("b"), threshold=2, timeout_s=1.0)
    assert queue.pop(0.5, []) is None
    assert queue.ready_in_s(0.25) == 0.75
    queue.push(Item(1, "b"))
    assert queue.pop(0.5, []) is not None
    queue.push(Item(2, "c"))
    assert queue.pop(1.0, ["b"]).key == "b"  # type: ignore[union-attr]  # served last: ready
    assert queue.pop(1.0, ["b"]).key == "c"  # type: ignore[union-attr]
    assert queue.ready_in_s(5.0) is None


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("skewed", [False, True], ids=["equal priorities", "one is preferred"])
def test_nobody_waits_longer_than_the_bound_whatever_the_others_send(
    *, burst: int, skewed: bool
) -> None:
    rng = random.Random(1)  # noqa: S311
    names = "abcd"
    queue = queue_of([], burst=burst)
    heads: dict[str, int] = {}  # services since a line's head began to wait as such
    worst = number = 0
    resident: list[str] = []
    for _ in range(2000):
        for _ in range(rng.choice((1, 1, 2)) if len(queue) < 60 else 1):
            key = rng.choices(names, [90, 6, 3, 1])[0]
            queue.push(Item(number, key, priority=0 if skewed and key == "a" else 16))
            number += 1
        item = queue.pop(0.0, resident)
        assert item is not None
        resident = [item.key]
        for key in queue.lengths():
            heads[key] = 0 if key == item.key else heads.get(key, 0) + 1
            worst = max(worst, heads[key])
        heads = {k: v for k, v in heads.items() if k in queue.lengths()}

    assert worst <= (PATIENCE + len(names)) * burst


def test_removed_and_cleared_requests_are_not_served() -> None:
    items = lines("abab")
    queue = queue_of(items)
    queue.remove(items[0])
    queue.remove(items[0])
    assert len(queue) == 3
    assert [i.number for i in queue.clear()] == [1, 2, 3]
    assert queue.pop(0.0, []) is None
    queue.forget("a")
    assert queue.lengths() == {}

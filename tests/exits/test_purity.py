"""Deciders are pure, and a decision on the request path costs next to nothing."""

from __future__ import annotations

import ast
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import edgewise.exits
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.exits.policies.edgewise import Edgewise
from edgewise.predict import CostTable

FILES = sorted(Path(edgewise.exits.__file__).parent.rglob("*.py"))
FORBIDDEN = {
    "edgewise.backends",
    "edgewise.clock",
    "edgewise.data",
    "edgewise.device",
    "edgewise.runtime",
    "onnxruntime",
    "os",
    "pathlib",
    "random",
    "sqlite3",
    "time",
    "torch",
}


def imported(file: Path) -> set[str]:
    """Modules that a file names in its imports, packages above them included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names | {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_decider_imports_a_clock_a_runtime_or_a_file(file: Path) -> None:
    assert imported(file).isdisjoint(FORBIDDEN)


@pytest.fixture
def router() -> Edgewise:
    costs = CostTable.from_costs([1e-3] * 8, [1e-4] * 8)
    runs = frozenset({(0, 8), (0, 4), (4, 8), (0, 2)} | {(k, k + 1) for k in range(8)})
    policy = make_policy("edgewise", PolicyInputs(costs=costs, segments=runs))
    assert isinstance(policy, Edgewise)
    return policy


def decide_everywhere(policy: Policy) -> Callable[[], None]:
    """All positions with times left from hopeless to roomy; the loop itself calls nothing else."""
    cases = [(p, n * 1e-3) for p in range(9) for n in range(-1, 12)]
    decide = policy.decide

    def call() -> None:
        for position, left_s in cases:
            decide(position, 0.0, 0.0, left_s)

    return call


def test_a_decision_calls_no_function_outside_the_router(router: Edgewise) -> None:
    call = decide_everywhere(router)
    python_calls: set[str] = set()
    c_calls: set[str] = set()

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            python_calls.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        elif event == "c_call":
            c_calls.add(getattr(argument, "__name__", repr(argument)))

    sys.setprofile(profiler)
    try:
        call()
    finally:
        sys.setprofile(None)

    assert python_calls == {
        f"{Path(__file__).name}:call",
        "edgewise.py:decide",
        "router.py:decide",
        "router.py:soonest",
    }
    # No lock, file, library or container is touched: all of these are calls of C code.
    assert c_calls <= {"setprofile"}


def test_a_decision_keeps_no_memory_and_needs_less_than_a_hundred_floats(
    router: Edgewise,
) -> None:
    call = decide_everywhere(router)
    call()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # 117 decisions: what each of them uses, floats and iterators, is given back before the next.
    assert after - before <= 64
    assert peak - before < 100 * sys.getsizeof(0.0)


def test_a_decision_does_not_wait_for_a_table_that_is_being_published(router: Edgewise) -> None:
    with router._lock:
        assert router.decide(0, 0.0, 0.0, 1.0) == 8
        before = router.table
        router.observe((), met=True)  # who cannot publish leaves at once

    assert router.table is before


def test_a_decision_reads_one_table_even_if_another_is_published_meanwhile(
    router: Edgewise,
) -> None:
    table = router.table
    router.observe((), met=False)

    assert router.table is not table
    assert table.decide(0, 1.0) == 8

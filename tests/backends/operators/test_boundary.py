"""Tensors that must not reach a runtime, and lives that must be long enough: nothing crashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from edgewise.backends.operators import operator_backends  # noqa: E402 - needs torch
from edgewise.backends.operators.boundary import additive_mask  # noqa: E402

_PROGRAM = Path(__file__).with_name("hostile.py")
_NAMES = re.findall(r"^def (\w+)\(backend: str\)", _PROGRAM.read_text(), flags=re.MULTILINE)
_COMPILED = [b for b in operator_backends() if not b.startswith("torch:")]


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, str], int, str]:
    """Run all checks in a process of their own, so that a crash of it is a failed test of ours."""
    source = Path(__file__).parents[3] / "src"
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", _PROGRAM, *_COMPILED],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    found = {f"{backend} {name}": outcome for backend, name, outcome in lines}
    return found, done.returncode, done.stderr


@pytest.mark.parametrize("backend", _COMPILED)
@pytest.mark.parametrize("name", _NAMES)
def test_nothing_hostile_crashes_or_falsifies(
    said: tuple[dict[str, str], int, str], name: str, backend: str
) -> None:
    outcomes, code, stderr = said
    assert outcomes.get(f"{backend} {name}", f"no answer: exit code {code}, {stderr}") == "ok"


def test_the_process_of_hostile_checks_ends_well(
    said: tuple[dict[str, str], int, str],
) -> None:
    outcomes, code, stderr = said
    assert code == 0, stderr
    assert len(outcomes) == len(_NAMES) * len(_COMPILED)


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 4), (3, 0), (3, 4)])
def test_a_mask_shows_each_token_all_before_it_and_nobody_instead_of_no_past(
    rows: int, past: int
) -> None:
    seen = additive_mask(rows, past) == 0.0
    if past == 0:
        assert not seen[:, 0].any()
        seen = seen[:, 1:]
    assert seen.tolist() == [
        [key <= past + row for key in range(past + rows)] for row in range(rows)
    ]

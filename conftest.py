"""Keeps tests and the documentation's examples from the user's own profiles; counts processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_MOST_PROCESSES = 4
_PROCESS_BYTES = 2e9  # torch, onnxruntime and openvino in one; 1.1 GB were seen

# Set before anything reads it; the folder goes when the run ends.
_HOME = tempfile.TemporaryDirectory(prefix="edgewise-tests-")
os.environ["EDGEWISE_HOME"] = _HOME.name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes ``-n auto`` starts: one per core, as far as memory goes.

    Returns:
        0 where there is room for one only: then pytest runs the tests itself.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = int(min(_MOST_PROCESSES, cores or 1, _free_bytes() / _PROCESS_BYTES))
    return count if count > 1 else 0


def _free_bytes() -> float:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:  # no Linux: trust that there is enough
        return float("inf")
    free = dict(line.split(":", 1) for line in text.splitlines())
    return 1024.0 * int(free["MemAvailable"].split()[0])

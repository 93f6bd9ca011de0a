"""Fake machines: a tree of files under a root, with owner and mode where it matters."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Plant = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Write files under a root that every user may enter, and return the root."""
    # Not tmp_path: pytest's folders are closed to others, and as_somebody must get through.
    root = Path(tempfile.mkdtemp(prefix="edgewise-machine-"))
    root.chmod(0o755)

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return root

    yield write
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(0o755)
    shutil.rmtree(root)


@pytest.fixture
def as_somebody(plant: Plant) -> Iterator[Callable[[], None]]:  # noqa: ARG001 - undone before it
    """Become a user without privileges until the test ends: root may read whatever it likes."""
    privileged = os.geteuid() == 0

    def become() -> None:
        if privileged:
            os.seteuid(65534)

    yield become
    if privileged:
        os.seteuid(0)

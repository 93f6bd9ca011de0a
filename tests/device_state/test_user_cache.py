from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.device.user_cache import user_cache


def test_it_is_where_xdg_says_and_below_home_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert user_cache() == tmp_path / "there" / "edgewise"

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "edgewise"

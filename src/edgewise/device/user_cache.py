"""Where files are kept that can be made again: in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Edgewise's folder there; it may not exist yet.

    Source:
        XDG Base Directory Specification: ``XDG_CACHE_HOME``, by default ``~/.cache``.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "edgewise"

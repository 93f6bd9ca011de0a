"""Keeps the tests and the documentation's examples away from the user's own profile store."""

from __future__ import annotations

import os
import tempfile

# Set before anything reads it; the folder goes when the run ends.
_HOME = tempfile.TemporaryDirectory(prefix="edgewise-tests-")
os.environ["EDGEWISE_HOME"] = _HOME.name

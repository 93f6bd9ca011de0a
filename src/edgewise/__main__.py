"""Runs the command line as ``python -m edgewise``."""

from __future__ import annotations

import sys

from edgewise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

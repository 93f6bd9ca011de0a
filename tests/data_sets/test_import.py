from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_needs_numpy_only() -> None:
    code = (
        "import sys, edgewise.data; "
        "print([m for m in ('PIL', 'sklearn', 'torch', 'scipy') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"

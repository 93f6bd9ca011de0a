"""What all tests share: one thread for numeric work, since the machine may have two cores."""

from __future__ import annotations

import os

# Read when the libraries are first imported, hence here and not in a fixture.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

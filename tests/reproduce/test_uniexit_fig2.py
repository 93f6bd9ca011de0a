from __future__ import annotations

import pytest

from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce.uniexit_fig2 import _STATIC

pytest.importorskip("safetensors")


def test_every_static_profile_method_is_shown_at_both_clocks() -> None:
    found = run_claim("uniexit-fig2", Setup(quick=True, limit=12))

    assert {f.provenance for f in found.figures} == {"simulated"}
    for name in _STATIC:
        shown = [f for f in found.figures if f"of {name}," in f.name]
        assert [f.name.rsplit(", ", 1)[1] for f in shown] == ["static clocks", "dvfs clocks"]
        static, dvfs = (f.ours or 0.0 for f in shown)
        assert static > dvfs
    assert [c.kind for c in found.charts] == ["bars"]
    assert "simulated" in found.setting["ours"]

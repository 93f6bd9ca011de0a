from __future__ import annotations

import numpy as np
import pytest

from edgewise.bench import predict


def test_every_figure_that_is_promised_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predict.monitor_figures
    monkeypatch.setattr(predict, "monitor_figures", lambda **_: whole(duration_s=0.2))
    said: list[str] = []

    found = predict.run(quick=True, say=said.append)

    promised = ("predict_all_units_p50_s", "predictor_bytes", "decision_p50_s", "monitor_cpu_ratio")
    assert all(found[name] > 0 for name in promised)
    assert found["predictor_bytes"] <= 100 * 1024
    assert found["monitor"]["reads"] > 1
    assert set(found["predictors"]) == {"static", "physical", "mlp", "lut"}
    assert said


def test_predictors_are_timed_on_sixteen_stages_and_eight_heads() -> None:
    units = tuple(f"stage:{k}" for k in range(8)) + tuple(f"head:{k}" for k in range(8))
    seconds = np.ones((3, 2, 16))
    names, doubled = predict._as_many_units(units, seconds)
    assert len(names) == 24
    assert doubled.shape == (3, 2, 24)
    assert doubled[..., :16].sum() == seconds[..., :8].sum()

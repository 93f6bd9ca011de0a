from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from edgewise.bench import language_deadlines
from edgewise.bench.language_deadlines import (
    STATES,
    DeadlineSettings,
    at_equal_dsr,
    deadline_figures,
    deepest_that_fits,
)
from edgewise.model.decoding import AffineExit, LanguageExits
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts


def fitted(model: Any, layers: tuple[int, ...]) -> LanguageExits:
    width = model.architecture.hidden_size
    affine = {
        k: AffineExit(
            layer=k,
            weight=np.eye(width, dtype=np.float32),
            bias=np.zeros(width, dtype=np.float32),
            agreement=k / 10,
        )
        for k in layers
    }
    return LanguageExits(
        model=model.name, digest=model.digest, affine=affine, shortlist=np.arange(80)
    )


def row(name: str, dsr: float, accuracy: float, state: str = "calm") -> dict[str, Any]:
    return {
        "state": state,
        "share": 1.0,
        "name": name,
        "dsr": dsr,
        "relative_accuracy": accuracy,
    }


def test_only_those_that_keep_as_many_deadlines_are_rivals() -> None:
    rows = [
        row("edgewise", 0.99, 0.6),
        row("full-depth", 0.50, 1.0),
        row("fixed-exit", 0.985, 0.7),
        row("calm", 0.99, 0.5),
        row("calm", 1.0, 0.9, state="co-runner"),
        row("edgewise+psf", 0.40, 0.8),
    ]

    alone, psf = at_equal_dsr(rows)
    assert (alone["rivals"], alone["better"]) == (["fixed-exit", "calm"], ["fixed-exit"])
    assert psf["better"] == ["full-depth"]


def test_a_fixed_exit_is_the_deepest_that_fits_and_else_the_soonest() -> None:
    costs = LanguageCosts.same(CostTable.from_costs([1.0, 1.0, 1.0], [0.5, 0.5, 0.5]))
    session: Any = types.SimpleNamespace(
        costs=costs, decoder=types.SimpleNamespace(exit_layers=(1, 2, 3))
    )

    for budget_s, layer in ((3.5, 3), (3.4, 2), (0.1, 1)):
        assert deepest_that_fits(session, budget_s, length=0) == layer


def test_every_way_plays_in_every_state_under_every_budget(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class NoLoad:
        def __init__(self, kind: str) -> None:
            started.append(kind)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(language_deadlines, "Load", NoLoad)

    def costs(decoder: Any, **_: Any) -> LanguageCosts:
        num = len(decoder.exit_layers)
        return LanguageCosts.same(CostTable.from_costs([1e-4] * num, [1e-4] * num))

    monkeypatch.setattr(language_deadlines, "language_costs_of", costs)
    model = language.tiny(layers=6)
    rng = np.random.default_rng(0)
    notes: list[str] = []

    found = deadline_figures(
        model,
        fitted(model, (1, 2, 3, 4)),
        [[3, 1, 4], [9, 2, 6]],
        [rng.integers(0, 160, 24) for _ in range(2)],
        settings=DeadlineSettings(backend="torch:cpu", precision="fp32", max_tokens=4),
        notes=notes,
    )

    assert len(started) == 2  # once for each prompt
    names = {r["name"] for r in found["rows"]}
    assert names >= {
        "full-depth", "fixed-exit", "layer-wise", "calm", "layerskip", "specee",
        "edgewise", "edgewise, defer", "edgewise, window 8", "edgewise, whole head",
        "edgewise+speculation", "edgewise+psf",
    }  # fmt: skip
    assert {(r["state"], r["share"]) for r in found["rows"]} == {
        (state, share) for state in STATES for share in (1.0, 0.75, 0.5)
    }
    assert len(found["rows"]) == len(names) * 6
    full = [r for r in found["rows"] if r["name"] == "full-depth"]
    assert all(r["relative_accuracy"] == 1.0 and r["agreement"] == 1.0 for r in full)
    # The same texts, measured by three budgets.
    calm = {r["share"]: r["dsr"] for r in full if r["state"] == "calm"}
    assert calm[1.0] >= calm[0.75] >= calm[0.5]
    assert all(r["dsr"] is not None for r in found["rows"])
    assert [f["share"] for f in found["floors"]] == [1.0, 0.75, 0.5]
    assert any("learnt from 48 tokens" in note for note in notes)


def test_a_way_that_fails_is_left_out_and_noted(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_deadlines, "STATES", ("calm",))

    def costs(decoder: Any, **_: Any) -> LanguageCosts:
        num = len(decoder.exit_layers)
        return LanguageCosts.same(CostTable.from_costs([1e-4] * num, [1e-4] * num))

    monkeypatch.setattr(language_deadlines, "language_costs_of", costs)
    model = language.tiny()
    notes: list[str] = []

    found = deadline_figures(
        model,
        fitted(model, (2,)),  # too few exits for a predictor
        [[3, 1, 4]],
        [np.arange(20)],
        settings=DeadlineSettings(backend="torch:cpu", precision="fp32", max_tokens=3),
        notes=notes,
    )

    assert not {"specee", "edgewise+psf"} & {r["name"] for r in found["rows"]}
    assert any(note.startswith("shift predictor: expected a draft exit") for note in notes)

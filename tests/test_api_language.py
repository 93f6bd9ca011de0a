from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.errors import ConfigError, ModelError, ProfileError
from edgewise.model.decoding import AffineExit, LanguageExits


@pytest.fixture(scope="module")
def model(language: Any) -> Any:
    return language.tiny()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "profiles.sqlite"


def exits_of(model: Any, *, digest: str | None = None) -> LanguageExits:
    width = model.architecture.hidden_size
    affine = {
        k: AffineExit(
            layer=k,
            weight=np.eye(width, dtype=np.float32),
            bias=np.zeros(width, dtype=np.float32),
            agreement=k / 10,
        )
        for k in (1, 3)
    }
    return LanguageExits(model=model.name, digest=digest or model.digest, affine=affine)


def test_costs_are_measured_once_and_taken_from_the_store_after_that(
    model: Any, store: Path
) -> None:
    rounds: list[int] = []
    fitted = exits_of(model)
    with pytest.raises(ProfileError, match="tiny"):
        edgewise.load_language(model, exits=fitted, store=store, profile="stored")
    first = edgewise.load_language(
        model, exits=fitted, store=store, on_progress=lambda p: rounds.append(p.rounds)
    )
    again = edgewise.load_language(model, exits=fitted, store=store, profile="stored")

    assert rounds
    assert first.costs.propagate.provenance == "measured"
    assert (first.costs.propagate.stage_s > 0).all()
    np.testing.assert_array_equal(first.costs.propagate.stage_s, again.costs.propagate.stage_s)
    # Fitted exits are where one may leave, and their agreement is what the router goes by.
    assert [(e.name, e.accuracy) for e in again.model.exits] == [
        ("layer 1", 0.1),
        ("layer 3", 0.3),
        ("layer 4", 1.0),
    ]
    assert len(list(again.generate([1, 2, 3], max_tokens=3))) == 3


def test_exits_of_other_weights_and_unknown_profiles_are_refused(model: Any, store: Path) -> None:
    with pytest.raises(ModelError, match="fitted for"):
        edgewise.load_language(model, exits=exits_of(model, digest="f" * 64), store=store)
    with pytest.raises(ConfigError, match="'auto' or 'stored'"):
        edgewise.load_language(model, exits=None, store=store, profile="maybe")

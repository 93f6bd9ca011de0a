from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.api import open_decoder, predictor_facts
from edgewise.device.monitor import THREAD_NAME
from edgewise.errors import ConfigError, ModelError, ProfileError
from edgewise.model.decoding import AffineExit, LanguageExits
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.state_samples import StateSamples
from edgewise.profiles import ProfileStore, write_profile
from edgewise.runtime.generation.costs import probe_programs


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


def test_the_short_list_answers_at_exits_where_one_was_fitted(model: Any, tmp_path: Path) -> None:
    plain = exits_of(model)
    listed = dataclasses.replace(plain, shortlist=np.arange(20))

    def head(exits: LanguageExits, **options: Any) -> str:
        store = tmp_path / "profiles.sqlite"
        return edgewise.load_language(model, exits=exits, store=store, **options).head

    assert head(listed) == "shortlist"
    assert head(listed, head="affine") == "affine"
    assert head(plain) == "affine"


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


def test_exits_of_other_weights_are_refused(model: Any, store: Path) -> None:
    with pytest.raises(ModelError, match="fitted for"):
        edgewise.load_language(model, exits=exits_of(model, digest="f" * 64), store=store)


def test_a_stored_profile_that_is_not_there_is_told_with_the_command(
    model: Any, store: Path
) -> None:
    with pytest.raises(ProfileError, match="tiny") as refused:
        edgewise.load_language(model, exits=None, exit_layers=[2], store=store, profile="stored")
    assert refused.value.help == "edgewise profile tiny --backend torch:cpu --threads 1"


def test_an_exported_profile_is_used_and_one_of_other_exits_refused(
    model: Any, store: Path, tmp_path: Path
) -> None:
    kept, path = ProfileStore(store), tmp_path / "tiny.json"
    first = edgewise.load_language(model, exits=exits_of(model), store=store)
    version = first.model.version()
    own = next(p for p in kept.list() if p.finished and p.model_version == version)
    write_profile(kept.get(own.profile_id), path)
    empty = tmp_path / "none.sqlite"
    again = edgewise.load_language(model, exits=exits_of(model), store=empty, profile=path)

    np.testing.assert_array_equal(first.costs.mask.head_s, again.costs.mask.head_s)
    assert not empty.exists()
    with pytest.raises(ProfileError, match="another model version"):
        edgewise.load_language(model, exits=None, store=empty, profile=path)
    with pytest.raises(ProfileError, match="cannot read the profile"):
        edgewise.load_language(model, exits=None, store=empty, profile=tmp_path / "maybe")


def predictor_of(model: Any, **changed: Any) -> FittedPredictor:
    """A predictor of a token's units, as if fitted here."""
    decoder = open_decoder(model, exits=exits_of(model))
    program = next(iter(probe_programs(decoder).values()))
    num = changed.pop("stages", program.model.num_exits)
    quota = np.linspace(0.2, 1.0, 30)
    rng = np.random.default_rng(0)
    samples = StateSamples(
        features=("cpu.quota_ratio",),
        states=quota[:, None],
        units=(*(f"stage:{k}" for k in range(num)), *(f"head:{k}" for k in range(num))),
        seconds=1e-4 / quota[:, None, None] * rng.lognormal(0, 0.01, (30, 3, 2 * num)),
        provenance=changed.pop("provenance", "measured"),
    )
    return fit_kind("physical", samples, seed=0, facts=predictor_facts(program) | changed)


def watching() -> bool:
    return any(t.name == THREAD_NAME for t in threading.enumerate())


def test_a_session_follows_the_device_until_it_is_closed(
    model: Any, store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "predictor.npz"
    predictor_of(model).save(path)
    with edgewise.load_language(
        model, exits=exits_of(model), predictor=path, store=store
    ) as session:
        tokens = list(session.generate([1, 2, 3], tpot_budget_s=5.0, max_tokens=3))
        # By the predictor, not by the profile: about 0.1 ms a unit, five times at the lowest quota.
        units = session.policy().unit_costs().seconds
        assert all(0.8e-4 < units[f"segment:{k}-{k + 1}"] < 6e-4 for k in range(3))
        assert units["segment:0-1"] == pytest.approx(units["head:2"], rel=0.1)
        assert session.policy("mask").unit_costs().seconds["head:0"] <= units["head:0"]
        assert watching()
    assert [t.met for t in tokens] == [None, True, True]
    assert not watching()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"provenance": "simulated"}, "found a simulated one"),
        ({"device_id": "another"}, "another device id"),
        ({"model_version": "another"}, "another model version"),
        ({"precision": "int8"}, "another precision: expected 'fp32', found 'int8'"),
        ({"backend": "onnxruntime:CPU"}, "another backend"),
        ({"head": "raw"}, "another head"),
        ({"exit_layers": [1, 2, 4]}, "another exit layers"),
        ({"threads": 2}, "another threads"),
        ({"stages": 2}, "another stages"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_predictor_of_something_else_is_refused_and_no_thread_is_left(
    model: Any, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    empty = tmp_path / "profiles.sqlite"
    with pytest.raises(ProfileError, match=said) as refused:
        edgewise.load_language(
            model, exits=exits_of(model), predictor=predictor_of(model, **changed), store=empty
        )
    assert refused.value.help == "edgewise fit tiny --measure"
    assert not empty.exists()  # refused before anything was measured
    assert not watching()


def test_a_predictor_of_other_weights_is_refused(language: Any, model: Any, store: Path) -> None:
    other = language.tiny(seed=1)
    with pytest.raises(ProfileError, match="another model version"):
        edgewise.load_language(
            other, exits=exits_of(other), predictor=predictor_of(model), store=store
        )


def test_an_energy_budget_without_predicted_energy_is_refused(model: Any, store: Path) -> None:
    for predictor in (None, predictor_of(model)):
        with pytest.raises(ConfigError, match="needs a predictor that predicts energy"):
            edgewise.load_language(
                model, exits=None, predictor=predictor, energy_budget_j=0.1, store=store
            )


def test_a_start_for_which_memory_runs_out_says_so_and_leaves_no_thread(
    model: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("edgewise.runtime.generation.LanguageSession.warm_up", fail)
    with pytest.raises(ModelError, match="does not fit into the memory that is free") as told:
        edgewise.load_language(
            model, exits=exits_of(model), predictor=predictor_of(model), store=store
        )
    assert told.value.__context__ is None
    assert not watching()


def test_full_depth_is_no_exit_that_one_may_name(model: Any, store: Path) -> None:
    depth = model.architecture.num_hidden_layers
    with pytest.raises(ConfigError, match=f"1 to {depth - 1} layers, found {depth}"):
        edgewise.load_language(model, exit_layers=(1, depth), store=store)

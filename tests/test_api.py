from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.backends import load_program
from edgewise.device import device_fingerprint
from edgewise.device.monitor import THREAD_NAME
from edgewise.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    ProfileError,
    ShapeError,
)
from edgewise.frontends.checkpoint import save_checkpoint
from edgewise.model import StagedModel
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.state_samples import StateSamples
from edgewise.profiles import Profile, ProfileStore, ThreadPolicy, write_profile

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

BACKEND = "onnxruntime:CPU"
X = np.zeros((1, 3, 8, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StagedModel:
    """Three small convolutions and a classifier, staged from ONNX."""
    helper, rng = onnx.helper, np.random.default_rng(1)
    weights, nodes, channels, last = {}, [], 3, "x"
    for k in range(3):
        weights[f"w{k}"] = rng.normal(0, 0.3, (4, channels, 3, 3)).astype(np.float32)
        nodes += [
            helper.make_node("Conv", [last, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{k}"], [f"r{k}"]),
        ]
        channels, last = 4, f"r{k}"
    weights["linear"] = rng.normal(size=(4, 5)).astype(np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "linear"], ["logits"]),
    ]
    element = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", element, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", element, ["N", 5])],
        [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 10
    path = tmp_path_factory.mktemp("onnx") / "tiny.onnx"
    onnx.save(proto, path)
    return StagedModel.from_onnx(path, exits=2, name="tiny").with_random_heads(width=4)


@pytest.fixture(scope="module")
def measured(model: StagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a quick profile of the model, measured by loading it."""
    path = tmp_path_factory.mktemp("store") / "profiles.sqlite3"
    edgewise.load(model, backend=BACKEND, store=path)
    return path


@pytest.fixture
def store(measured: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copy(measured, tmp_path / "profiles.sqlite3"))


@pytest.fixture(scope="module")
def profile(measured: Path) -> Profile:
    kept = ProfileStore(measured)
    return kept.get(kept.list()[0].profile_id)


def counted() -> tuple[list[Any], Callable[[Any], None]]:
    seen: list[Any] = []
    return seen, seen.append


def test_a_model_without_a_profile_is_measured_once_and_then_known(
    model: StagedModel, tmp_path: Path
) -> None:
    path = tmp_path / "profiles.sqlite3"
    first, on_first = counted()
    second, on_second = counted()
    edgewise.load(model, backend=BACKEND, store=path, on_progress=on_first)
    edgewise.load(model, backend=BACKEND, store=path, on_progress=on_second)

    assert first
    assert second == []
    assert len(ProfileStore(path).list()) == 1


def test_a_session_answers_with_measured_costs(model: StagedModel, store: Path) -> None:
    session = edgewise.load(model, backend="onnxruntime", store=store)
    answer = session.run(X, budget_s=1.0)

    assert session.costs.provenance == "measured"
    assert (session.costs.stage_s > 0).all()
    assert (answer.met, answer.exit_index, answer.backend) == (True, 1, BACKEND)


def test_a_checkpoint_directory_is_loaded_by_its_path(model: StagedModel, tmp_path: Path) -> None:
    folder = save_checkpoint(model, tmp_path / "tiny", weights_dtype="float32")
    store = tmp_path / "profiles.sqlite3"
    from_path = edgewise.load(folder, backend=BACKEND, store=store)
    from_text = edgewise.load(str(folder), backend=BACKEND, store=store, policy="full_depth")
    direct = edgewise.load(model, backend=BACKEND, store=store, policy="full_depth")
    x = np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)

    assert from_path.model.name == "tiny"
    assert from_text.run(x, budget_s=1.0).logits == pytest.approx(
        direct.run(x, budget_s=1.0).logits, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("name", ["model.json", "graph.onnx", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "tampered", "missing"])
def test_a_damaged_checkpoint_is_refused_and_kept(
    model: StagedModel, tmp_path: Path, name: str, damage: str
) -> None:
    file = save_checkpoint(model, tmp_path / "tiny") / name
    data = file.read_bytes()
    middle = len(data) // 2
    if damage == "truncated":
        file.write_bytes(data[:middle])
    elif damage == "tampered":
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        file.unlink()
    before = {p.name: p.read_bytes() for p in file.parent.iterdir()}

    with pytest.raises(CheckpointError) as caught:
        edgewise.load(file.parent, backend=BACKEND, store=tmp_path / "profiles.sqlite3")
    assert caught.value.help
    assert {p.name: p.read_bytes() for p in file.parent.iterdir()} == before


def test_a_stored_profile_is_asked_for_and_not_there(model: StagedModel, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no profile of model 'tiny'") as caught:
        edgewise.load(model, backend=BACKEND, store=tmp_path / "profiles.sqlite3", profile="stored")
    assert caught.value.help == "edgewise profile tiny --backend onnxruntime:CPU --threads 1"


def test_a_stored_profile_is_asked_for_and_there(model: StagedModel, store: Path) -> None:
    session = edgewise.load(model, backend=BACKEND, store=store, profile="stored")

    assert session.run(X, budget_s=1.0).met


def test_an_exported_profile_is_used_and_nothing_is_stored(
    model: StagedModel, profile: Profile, tmp_path: Path
) -> None:
    write_profile(profile, tmp_path / "p.json")
    session = edgewise.load(
        model, backend=BACKEND, profile=tmp_path / "p.json", store=tmp_path / "none.sqlite3"
    )

    expected = profile.cost("segment:0-1", BACKEND).median_s
    assert session.costs.stage_s[0] == expected
    assert not (tmp_path / "none.sqlite3").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_id": "another"}, "for another device"),
        ({"thread_policy": ThreadPolicy(threads=4)}, "for another thread policy"),
        ({"model_version": "0" * 16}, "for another model version"),
    ],
    ids=["device", "threads", "model version"],
)
def test_a_profile_from_elsewhere_is_refused_with_the_reason(
    model: StagedModel, profile: Profile, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_profile(dataclasses.replace(profile, **changes), tmp_path / "p.json")

    with pytest.raises(ProfileError, match=reason) as caught:
        edgewise.load(model, backend=BACKEND, profile=tmp_path / "p.json")
    assert caught.value.help == "edgewise profile tiny"


def test_a_profile_of_other_threads_in_the_store_is_not_used(
    model: StagedModel, store: Path
) -> None:
    with pytest.raises(ProfileError, match="another thread policy"):
        edgewise.load(model, backend=BACKEND, store=store, profile="stored", threads=2)


def test_a_profile_without_the_backend_is_refused(
    model: StagedModel, profile: Profile, tmp_path: Path
) -> None:
    write_profile(profile, tmp_path / "p.json")

    with pytest.raises(ProfileError, match=f"on 'numpy:CPU'; it has {BACKEND}"):
        edgewise.load(model, backend="numpy", profile=tmp_path / "p.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not"), ("{", "not"), ('{"format": "something"}', "not a profile")],
    ids=["empty", "truncated", "something else"],
)
def test_a_file_that_is_no_profile_is_refused(
    model: StagedModel, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "p.json").write_text(text)

    with pytest.raises(ProfileError, match=message):
        edgewise.load(model, backend=BACKEND, profile=tmp_path / "p.json")


def test_a_profile_file_that_is_not_there_is_told(model: StagedModel, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read the profile"):
        edgewise.load(model, backend=BACKEND, profile=tmp_path / "p.json")


@pytest.mark.parametrize("choice", ["auto", "stored"])
@pytest.mark.parametrize("damage", ["truncated", "tampered", "something else"])
def test_a_damaged_store_is_refused_and_left_as_it_is(
    model: StagedModel, store: Path, damage: str, choice: str
) -> None:
    data = bytearray(store.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "tampered":
        data[4096:] = bytes(len(data) - 4096)
    else:
        data[:] = b"this is no database" * 100
    store.write_bytes(data)

    with pytest.raises(ProfileError) as caught:
        edgewise.load(model, backend=BACKEND, store=store, profile=choice)
    assert str(store) in str(caught.value)
    assert store.read_bytes() == bytes(data)


def test_an_unknown_policy_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'egdewise'"):
        edgewise.load("no such model", policy="egdewise")


def test_an_unknown_model_is_told() -> None:
    with pytest.raises(ConfigError, match="unknown model 'no such model'"):
        edgewise.load("no such model")


def test_an_unknown_backend_is_told_with_the_nearest_names(model: StagedModel) -> None:
    with pytest.raises(BackendUnavailable, match="unknown backend 'onnxrutime'") as caught:
        edgewise.load(model, backend="onnxrutime")
    assert "'onnxruntime:CPU'" in str(caught.value.help)


def test_options_reach_the_policy(model: StagedModel, store: Path) -> None:
    session = edgewise.load(model, backend=BACKEND, store=store, policy="fixed", exit_index=0)

    assert session.run(X, budget_s=1.0).exit_index == 0
    with pytest.raises(ConfigError, match="from 0 to 1, found 7"):
        edgewise.load(model, backend=BACKEND, store=store, policy="fixed", exit_index=7)


def test_by_default_the_best_installed_backend_runs(model: StagedModel, store: Path) -> None:
    assert edgewise.load(model, store=store).program.backend == BACKEND


def test_without_any_runtime_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, model: StagedModel
) -> None:
    monkeypatch.setattr("edgewise.api.available_backends", lambda: ())

    with pytest.raises(BackendUnavailable, match="no runtime is installed") as caught:
        edgewise.load(model)
    assert caught.value.help == "pip install 'edgewise[onnx]'"


def test_a_wrong_input_does_not_end_the_session(model: StagedModel, store: Path) -> None:
    session = edgewise.load(model, backend=BACKEND, store=store)
    with pytest.raises(ShapeError):
        session.run(np.zeros((1, 3, 9, 9)), budget_s=1.0)

    assert session.run(X, budget_s=1.0).met


def test_the_null_backend_gives_simulated_costs(model: StagedModel, tmp_path: Path) -> None:
    session = edgewise.load(model, backend="null", store=tmp_path / "profiles.sqlite3")

    assert session.costs.provenance == "simulated"
    assert load_program(model, "null").backend == session.program.backend


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = edgewise.lod
    assert "load" in dir(edgewise)


def predictor_of(model: StagedModel, **changed: Any) -> FittedPredictor:
    """A physical predictor of a model's stages and heads, as if measured here."""
    rng, num = np.random.default_rng(0), changed.pop("stages", len(model.stages))
    quota = np.linspace(0.2, 1.0, 30)
    samples = StateSamples(
        features=("cpu.quota_ratio",),
        states=quota[:, None],
        units=(*(f"stage:{k}" for k in range(num)), *(f"head:{k}" for k in range(num))),
        seconds=1e-4 / quota[:, None, None] * rng.lognormal(0, 0.01, (30, 3, 2 * num)),
        provenance=changed.pop("provenance", "measured"),
    )
    facts = {
        "model_version": model.version(),
        "device_id": device_fingerprint().id,
        "backend": BACKEND,
        "threads": 1,
    }
    return fit_kind("physical", samples, seed=0, facts=facts | changed)


def test_a_session_follows_the_device_until_it_is_closed(
    model: StagedModel, tmp_path: Path
) -> None:
    path = tmp_path / "predictor.npz"
    predictor_of(model).save(path)
    store = tmp_path / "store.sqlite"
    with edgewise.load(model, backend=BACKEND, predictor=path, store=store) as session:
        answer = session.run(X, budget_s=5.0)
        assert session.policy.unit_costs().seconds["head:0"] > 0
        assert answer.state["cpu.quota_ratio"] > 0
        assert any(t.name == THREAD_NAME for t in threading.enumerate())
    assert not any(t.name == THREAD_NAME for t in threading.enumerate())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"provenance": "simulated"}, "found a simulated one"),
        ({"device_id": "another"}, "another device id"),
        ({"model_version": "another"}, "another model version"),
        ({"threads": 2}, "another threads"),
        ({"stages": 3}, "another stages"),
    ],
    ids=["simulated", "device", "model", "threads", "stages"],
)
def test_a_predictor_of_something_else_is_refused_and_no_thread_is_left(
    model: StagedModel, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    store = tmp_path / "store.sqlite"
    with pytest.raises(ProfileError, match=said) as refused:
        edgewise.load(model, backend=BACKEND, predictor=predictor_of(model, **changed), store=store)
    assert "--measure" in (refused.value.help or "")
    assert not any(t.name == THREAD_NAME for t in threading.enumerate())


def test_an_energy_budget_without_predicted_energy_is_refused(model: StagedModel) -> None:
    for predictor in (None, predictor_of(model)):
        with pytest.raises(ConfigError, match="needs a predictor that predicts energy"):
            edgewise.load(model, backend=BACKEND, predictor=predictor, energy_budget_j=0.1)

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load, save

from edgewise.backends import load_program
from edgewise.backends.base import probe_input
from edgewise.data import Preprocess, load_dataset
from edgewise.errors import BackendError, CheckpointError, ConfigError
from edgewise.frontends.checkpoint import (
    CheckpointSource,
    Recorded,
    load_checkpoint,
    load_model,
    save_checkpoint,
    shipped_folder,
    shipped_names,
)
from edgewise.frontends.onnx_file import OnnxSource
from edgewise.model.staged import StagedModel
from edgewise.model.validation import Validation

PREPROCESS = Preprocess(size=(16, 16), mean=(127.0,), std=(128.0,), channels=1)


def _proto() -> onnx.ModelProto:
    """Two convolutions and a classifier of four classes on 1 x 16 x 16, any batch."""
    rng = np.random.default_rng(0)
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array
    shapes = {"a.weight": (16, 1, 5, 5), "b.weight": (24, 16, 3, 3), "b.bias": (24,), "c": (4, 24)}
    weights = [
        to_tensor(rng.standard_normal(s).astype(np.float32) / 4, n) for n, s in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "a.weight"], ["a"], strides=[2, 2], name="first"),
        helper.make_node("Relu", ["a"], ["early"], name="first_act"),
        helper.make_node("Conv", ["early", "b.weight", "b.bias"], ["b"], name="second"),
        helper.make_node("Relu", ["b"], ["late"], name="second_act"),
        helper.make_node("Identity", ["late"], ["same"], name="copy"),
        helper.make_node("GlobalAveragePool", ["same"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "c"], ["logits"], transB=1, name="classify"),
    ]
    nodes[0].metadata_props.add(key="stack_trace", value="File /home/me/secret.py")
    real = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("image", real, ["batch", 1, 16, 16])],
        [helper.make_tensor_value_info("logits", real, ["batch", 4])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    proto.ir_version = 10
    return proto


@pytest.fixture
def model() -> StagedModel:
    """A backbone without its classifier, with heads, validation and all."""
    source = OnnxSource(_proto(), name="two")
    staged = StagedModel.from_boundaries(source, ["early", "same"], name="two", num_classes=3)
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 5, 3)).astype(np.float32)
    validation = Validation(logits=logits, labels=np.array([0, 1, 2, 0, 1]), source="drawn")
    heads = {e.index: e.head for e in staged.with_random_heads().exits if e.head}
    return staged.with_heads(
        {k: replace(h, temperature=1.5 + k) for k, h in heads.items()},
        accuracy={0: 0.5, 1: 0.75},
        class_names=("cat", "dog", "newt"),
        validation=validation,
        preprocess=PREPROCESS.to_json(),
        provenance={"made_by": "a test", "license": "Apache-2.0"},
    )


@pytest.fixture
def saved(model: StagedModel, tmp_path: Path) -> Path:
    return save_checkpoint(model, tmp_path / "saved")


def _sign(path: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Change a manifest and sign everything again, as someone who knows the format would."""
    manifest = json.loads((path / "model.json").read_text())
    change(manifest)
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        facts = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        manifest["files"][name] = facts
    manifest.pop("digest")
    text = json.dumps(manifest, sort_keys=True)
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "model.json").write_text(json.dumps(manifest))


def _change_arrays(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    arrays = load((path / "weights.safetensors").read_bytes())
    change(arrays)
    (path / "weights.safetensors").write_bytes(save(arrays))
    _sign(path)


def test_a_loaded_model_is_the_saved_one(model: StagedModel, saved: Path) -> None:
    loaded = load_checkpoint(saved)

    assert loaded.name == "two"
    assert [e.name for e in loaded.exits] == [e.name for e in model.exits]
    assert [e.accuracy for e in loaded.exits] == [0.5, 0.75]
    assert [e.depth_ratio for e in loaded.exits] == pytest.approx(
        [e.depth_ratio for e in model.exits]
    )
    assert loaded.class_names == ("cat", "dog", "newt")
    assert loaded.preprocess is not None
    assert Preprocess.from_json(loaded.preprocess) == PREPROCESS
    assert loaded.provenance == model.provenance
    assert loaded.source.dynamic_batch
    for own, other in zip(loaded.exits, model.exits, strict=True):
        assert own.head is not None
        assert other.head is not None
        assert own.head.spec == other.head.spec
        assert own.head.temperature == other.head.temperature
        for name, array in own.head.weights.items():
            assert array.tobytes() == other.head.weights[name].tobytes()
    assert loaded.validation is not None
    assert model.validation is not None
    # Logits are kept as float16: 11 bits.
    np.testing.assert_allclose(loaded.validation.logits, model.validation.logits, rtol=1e-3)
    assert loaded.validation.labels.tolist() == model.validation.labels.tolist()


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float16", 5e-3)])
def test_the_backbone_computes_what_it_did(
    model: StagedModel, tmp_path: Path, dtype: Any, rtol: float
) -> None:
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "x", weights_dtype=dtype))
    x = probe_input(model, batch=3)
    logits = []
    for each in (model, loaded):
        with load_program(each, "numpy", check=False).context(batch=3) as context:
            context.set_boundary(0, x)
            context.run_segment(0, 1)
            context.run_segment(1, 2)
            logits.append(context.run_head(1))

    np.testing.assert_allclose(logits[1], logits[0], rtol=rtol, atol=rtol * 3)


def test_saving_what_was_loaded_changes_nothing(saved: Path, tmp_path: Path) -> None:
    loaded = load_checkpoint(saved)
    again = save_checkpoint(loaded, tmp_path / "again")

    assert load_checkpoint(again).version() == loaded.version()
    for name in ("graph.onnx", "weights.safetensors", "validation.safetensors"):
        assert (again / name).read_bytes() == (saved / name).read_bytes()


def test_only_what_runs_is_saved_and_no_path_of_the_machine(saved: Path) -> None:
    graph = onnx.load(saved / "graph.onnx").graph
    names = set(load((saved / "weights.safetensors").read_bytes()))

    assert [n.name for n in graph.node] == ["first", "first_act", "second", "second_act"]
    assert {n for n in names if n.startswith("backbone.")} == {
        "backbone.a.weight",
        "backbone.b.weight",
    }
    assert b"secret" not in (saved / "graph.onnx").read_bytes()


def test_values_that_float16_cannot_hold_stay_float32(tmp_path: Path) -> None:
    proto = _proto()
    tensor = next(t for t in proto.graph.initializer if t.name == "a.weight")
    array = onnx.numpy_helper.to_array(tensor) * np.float32(1e6)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, "a.weight"))
    source = OnnxSource(proto, name="two")
    model = StagedModel.from_boundaries(source, ["early"], name="two", num_classes=3)
    path = save_checkpoint(model, tmp_path / "x")

    kept = load((path / "weights.safetensors").read_bytes())["backbone.a.weight"]
    assert kept.dtype == np.float32
    assert kept.tobytes() == array.tobytes()


def test_recorded_values_are_kept_and_backends_are_held_to_them(
    model: StagedModel, tmp_path: Path
) -> None:
    names = [s.stop.name for s in model.stages]
    wrong = Recorded(
        indices={n: np.array([0, 3]) for n in names},
        values={n: np.array([123.0, 456.0], dtype=np.float32) for n in names},
        by="nobody",
    )
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "x", recorded=wrong))
    assert isinstance(loaded.source, CheckpointSource)
    assert loaded.source.recorded is not None

    assert loaded.source.recorded.by == "nobody"
    with pytest.raises(BackendError, match=r"computes stage 0 .* wrongly"):
        load_program(loaded, "numpy")


def test_recorded_values_of_another_tensor_are_not_made_up() -> None:
    empty = Recorded(indices={}, values={})

    with pytest.raises(CheckpointError, match="no reference values"):
        empty.sample("x", np.zeros(3, dtype=np.float32))


def test_loading_needs_no_torch(saved: Path) -> None:
    program = (
        "import sys\nfrom edgewise.frontends.checkpoint import load_checkpoint\n"
        f"load_checkpoint({str(saved)!r})\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"


# Bad checkpoints.


@pytest.mark.parametrize("name", ["graph.onnx", "weights.safetensors", "validation.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()

    with pytest.raises(CheckpointError, match=f"lacks its {name}"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["graph.onnx", "weights.safetensors", "validation.safetensors"])
def test_a_truncated_file_is_named_with_both_sizes(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[:-7])

    with pytest.raises(CheckpointError, match=rf"{len(data) - 7} bytes, {len(data)} were written"):
        load_checkpoint(saved)


def test_a_truncated_manifest_is_refused(saved: Path) -> None:
    file = saved / "model.json"
    file.write_bytes(file.read_bytes()[:-40])

    with pytest.raises(CheckpointError, match=r"model\.json is truncated or damaged"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["graph.onnx", "weights.safetensors", "validation.safetensors"])
def test_one_changed_bit_is_found(saved: Path, name: str) -> None:
    data = bytearray((saved / name).read_bytes())
    data[len(data) // 2] ^= 1
    (saved / name).write_bytes(data)

    with pytest.raises(CheckpointError, match=f"{name} was changed after it was written"):
        load_checkpoint(saved)


def test_a_changed_manifest_is_found(saved: Path) -> None:
    file = saved / "model.json"
    file.write_text(file.read_text().replace('"dog"', '"cow"'))

    with pytest.raises(CheckpointError, match="its digest does not match"):
        load_checkpoint(saved)


def test_a_newer_schema_is_refused_with_both_versions(saved: Path) -> None:
    _sign(saved, lambda m: m.update(schema_version=2))

    with pytest.raises(CheckpointError, match="schema version 2, this program reads 1") as caught:
        load_checkpoint(saved)
    assert caught.value.help == "install a newer Edgewise"


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no model\.json"):
        load_checkpoint(tmp_path)


def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"layers": 3}')

    with pytest.raises(CheckpointError, match="is something else"):
        load_checkpoint(tmp_path)


def test_nothing_at_the_path_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing"):
        load_checkpoint(tmp_path / "gone")


def _drop_a_row(arrays: dict[str, Any]) -> None:
    arrays["backbone.a.weight"] = arrays["backbone.a.weight"][:-1]


def test_weights_of_another_shape_are_refused(saved: Path) -> None:
    _change_arrays(saved, _drop_a_row)

    with pytest.raises(
        CheckpointError, match=r"'backbone.a.weight' of shape \[16, 1, 5, 5\], found shape \[15"
    ):
        load_checkpoint(saved)


def _drop_a_head_row(arrays: dict[str, Any]) -> None:
    arrays["head.1.linear.weight"] = arrays["head.1.linear.weight"][:-1]


def test_a_head_of_another_shape_is_refused(saved: Path) -> None:
    _change_arrays(saved, _drop_a_head_row)

    with pytest.raises(CheckpointError, match=r"head array 'linear.weight' has shape \(2, 128\)"):
        load_checkpoint(saved)


def _drop_an_array(arrays: dict[str, Any]) -> None:
    del arrays["backbone.b.weight"]


def test_a_missing_array_is_refused(saved: Path) -> None:
    _change_arrays(saved, _drop_an_array)

    with pytest.raises(CheckpointError, match=r"needs an array 'backbone.b.weight' .*, found none"):
        load_checkpoint(saved)


def _poison(arrays: dict[str, Any]) -> None:
    arrays["backbone.a.weight"] = np.full_like(arrays["backbone.a.weight"], np.nan)


def test_weights_that_are_no_numbers_are_refused(saved: Path) -> None:
    _change_arrays(saved, _poison)

    with pytest.raises(CheckpointError, match=r"400 of 400 values of 'backbone.a.weight' are NaN"):
        load_checkpoint(saved)


def test_a_model_with_nan_is_not_saved(model: StagedModel, tmp_path: Path) -> None:
    head = model.exits[0].head
    assert head is not None
    weights = {k: np.full_like(v, np.nan) for k, v in head.weights.items()}
    broken = model.with_heads({0: replace(head, weights=weights)})

    with pytest.raises(CheckpointError, match="are NaN or infinite"):
        save_checkpoint(broken, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_graph_that_is_no_graph_is_refused(saved: Path) -> None:
    (saved / "graph.onnx").write_bytes(b"\xff\xfe not a graph")
    _sign(saved)

    with pytest.raises(CheckpointError, match="cannot be used"):
        load_checkpoint(saved)


def test_a_graph_that_points_outside_is_refused(saved: Path) -> None:
    proto = onnx.load(saved / "graph.onnx")
    tensor = proto.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    (saved / "graph.onnx").write_bytes(proto.SerializeToString())
    _sign(saved)

    with pytest.raises(CheckpointError, match="refers to data outside the checkpoint"):
        load_checkpoint(saved)


def test_a_boundary_that_the_graph_lacks_is_refused(saved: Path) -> None:
    _sign(saved, lambda m: m["exits"][0].update(boundary="nowhere"))

    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        load_checkpoint(saved)


# Where checkpoints go.


def test_an_earlier_checkpoint_is_replaced_whole(
    model: StagedModel, saved: Path, tmp_path: Path
) -> None:
    save_checkpoint(replace(model, name="newer", validation=None), saved)

    assert load_checkpoint(saved).name == "newer"
    assert not (saved / "validation.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_what_is_no_checkpoint_is_not_overwritten(model: StagedModel, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"meow")
    (tmp_path / "file").write_bytes(b"text")

    with pytest.raises(ConfigError, match="holds something that is not a checkpoint"):
        save_checkpoint(model, tmp_path / "photos")
    with pytest.raises(ConfigError, match="is a file"):
        save_checkpoint(model, tmp_path / "file")
    assert (tmp_path / "photos/cat.jpg").read_bytes() == b"meow"


def test_a_file_beside_an_earlier_checkpoint_is_not_lost(model: StagedModel, saved: Path) -> None:
    (saved / "notes.txt").write_text("precious")

    with pytest.raises(ConfigError, match=r"holds notes\.txt beside a checkpoint"):
        save_checkpoint(model, saved)
    assert (saved / "notes.txt").read_text() == "precious"


def test_an_empty_directory_may_be_filled(model: StagedModel, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    save_checkpoint(model, tmp_path / "new")

    assert load_checkpoint(tmp_path / "new").name == "two"


# Finding a model.


def test_a_model_is_found_by_its_directory_or_onnx_file(saved: Path, tmp_path: Path) -> None:
    onnx.save(_proto(), tmp_path / "net.onnx")

    assert load_model(saved).name == "two"
    assert load_model(tmp_path / "net.onnx", exits=2).num_exits == 2


def test_an_unknown_model_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="unknown model 'fashoin'"):
        load_model("fashoin")


def test_a_backbone_without_heads_is_told_how_to_get_them() -> None:
    with pytest.raises(ConfigError, match="backbone without exit heads") as caught:
        load_model("resnet50")
    assert "edgewise prepare resnet50" in str(caught.value.help)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")

    with pytest.raises(ConfigError, match=r"neither a checkpoint directory nor an \.onnx file"):
        load_model(tmp_path / "x.txt")


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_model_is_whole_and_backends_agree_with_what_was_recorded(name: str) -> None:
    model = load_model(name)

    assert model.has_all_heads
    assert model.validation is not None
    assert isinstance(model.source, CheckpointSource)
    assert model.source.recorded is not None
    load_program(model, "onnxruntime", segments=())
    assert name in (shipped_folder() / "README.md").read_text()


def test_the_shipped_sample_is_labelled_and_says_its_licence() -> None:
    folder = shipped_folder() / "fashion-mnist-sample"
    data = load_dataset(folder / "sample.npz", split="test")

    assert data.images.shape == (1000, 28, 28, 1)
    assert data.labels is not None
    assert np.bincount(data.labels).tolist() == [100] * 10
    assert "Ankle boot" in data.class_names
    assert "Zalando" in (folder / "LICENSE").read_text()

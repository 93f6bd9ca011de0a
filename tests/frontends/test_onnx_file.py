from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends import available_backends, load_program
from edgewise.errors import BackendUnavailable, ConfigError, ModelError
from edgewise.frontends.onnx_file import OnnxSource
from edgewise.model import StagedModel

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT = onnx.TensorProto.FLOAT
Float32 = npt.NDArray[np.float32]


def weights(*shape: int, seed: int = 0) -> Float32:
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return np.asarray(values, dtype=np.float32)


def model(
    nodes: list[Any],
    arrays: dict[str, Any],
    *,
    inputs: dict[str, list[Any]] | None = None,
    outputs: dict[str, list[Any]] | None = None,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info(n, FLOAT, s)
            for n, s in (inputs or {"x": ["batch", 3, 8, 8]}).items()
        ],
        [
            helper.make_tensor_value_info(n, FLOAT, s)
            for n, s in (outputs or {"y": ["batch", 5]}).items()
        ],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    proto.ir_version = 10
    return proto


def shapely() -> Any:
    """Three convolutions; sizes are computed with Shape and Gather, as exporters of old do."""
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["early"]),  # asked of the input, used at the end
        node("Gather", ["early", "zero"], ["batch_size"], axis=0),
        node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        node("Add", ["c2", "r1"], ["a2"]),
        node("Relu", ["a2"], ["r2"]),
        node("Split", ["r2"], ["left", "right"], axis=1, num_outputs=2),
        node("Mul", ["left", "right"], ["m"]),
        node("Concat", ["m", "left", "right"], ["joined"], axis=1),
        node("Conv", ["joined", "w3"], ["c3"], pads=[1, 1, 1, 1]),
        node("Shape", ["c3"], ["late"], start=1, end=2),
        node("ReduceMean", ["c3", "axes"], ["pooled"], keepdims=1),
        node("Unsqueeze", ["batch_size", "zero_axis"], ["b"]),
        node("Concat", ["b", "late"], ["flat_shape"], axis=0),
        node("Reshape", ["pooled", "flat_shape"], ["flat"]),
        node("Gemm", ["flat", "w4", "b4"], ["y"], transB=1),
    ]
    arrays = {
        "w1": weights(4, 3, 3, 3),
        "w2": weights(4, 4, 3, 3, seed=1),
        "w3": weights(6, 6, 3, 3, seed=2),
        "w4": weights(5, 6, seed=3),
        "b4": weights(5, seed=4),
        "zero": np.array(0, np.int64),
        "zero_axis": np.array([0], np.int64),
        "axes": np.array([2, 3], np.int64),
    }
    return model(nodes, arrays)


def branching() -> Any:
    """An If whose branches read outer tensors; its condition depends on the data."""
    node = helper.make_node

    def branch(name: str, operation: str) -> Any:
        return helper.make_graph(
            [node(operation, ["r1", "scale"], [name])],
            name + "_branch",
            [],
            [helper.make_tensor_value_info(name, FLOAT, None)],
        )

    nodes = [
        node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("ReduceMax", ["r1"], ["peak"], keepdims=0),
        node("Greater", ["peak", "limit"], ["strong"]),
        node(
            "If",
            ["strong"],
            ["scaled"],
            then_branch=branch("divided", "Div"),
            else_branch=branch("multiplied", "Mul"),
        ),
        node("Conv", ["scaled", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["c2"], ["pooled"]),
        node("Flatten", ["pooled"], ["flat"]),
        node("MatMul", ["flat", "w3"], ["y"]),
    ]
    arrays = {
        "w1": weights(4, 3, 3, 3),
        "w2": weights(6, 4, 3, 3, seed=1),
        "w3": weights(6, 5, seed=2),
        "scale": np.array(2.0, np.float32),
        "limit": np.array(0.5, np.float32),
    }
    return model(nodes, arrays, inputs={"x": [1, 3, 8, 8]}, outputs={"y": [1, 5]})


def write(proto: Any, folder: Path, name: str = "net.onnx") -> Path:
    path = folder / name
    onnx.save(proto, path)
    return path


def evaluate(proto: Any, x: Float32) -> Float32:
    from onnx.reference import ReferenceEvaluator

    results: list[Any] = list(ReferenceEvaluator(proto).run(None, {"x": x}))
    return np.asarray(results[0], dtype=np.float32)


def images(batch: int) -> Float32:
    return weights(batch, 3, 8, 8, seed=7) * 10


def run(program: Any, x: Float32) -> Float32:
    last = len(program.model.stages)
    with program.context(len(x)) as context:
        context.set_boundary(0, x)
        for k in range(last):
            context.run_segment(k, k + 1)
        return np.asarray(context.run_head(last - 1))


def cut_names(path: Path) -> list[str]:
    return [c.tensor.name for c in StagedModel.from_onnx(path, exits=1).legal_cuts()]


def test_sizes_asked_of_early_tensors_forbid_no_cut(tmp_path: Path) -> None:
    path = write(shapely(), tmp_path)

    assert cut_names(path) == ["c1", "r1", "a2", "r2", "joined", "c3", "pooled", "flat"]


def test_a_branch_that_captures_a_tensor_reads_it(tmp_path: Path) -> None:
    assert cut_names(write(branching(), tmp_path)) == [
        "c1", "r1", "scaled", "c2", "pooled", "flat",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", [b for b in available_backends() if "torch" not in b])
@pytest.mark.parametrize(
    ("make", "exits", "batches"),
    [(shapely, ("r1", "r2", "c3"), (1, 2, 5)), (branching, ("r1", "scaled", "c2"), (1,))],
)
def test_the_chain_of_pieces_answers_as_the_whole_file(
    make: Any, exits: Any, batches: tuple[int, ...], backend: str, tmp_path: Path
) -> None:
    proto = make()
    staged = StagedModel.from_onnx(write(proto, tmp_path), exits=exits).with_random_heads(width=8)
    program = load_program(staged, backend)

    assert len(staged.stages) == 4
    for batch in batches:
        x = images(batch)
        np.testing.assert_allclose(run(program, x), evaluate(proto, x), rtol=1e-4, atol=1e-5)


def test_the_model_tells_its_sizes_and_work(tmp_path: Path) -> None:
    staged = StagedModel.from_onnx(write(shapely(), tmp_path), exits=["r1", "r2"])
    first = 2 * 4 * 64 * 27 + 4 * 64

    assert staged.name == "net"
    assert staged.input.shape == (1, 3, 8, 8)
    assert staged.num_classes == 5
    assert [s.stop.shape for s in staged.stages] == [(1, 4, 8, 8), (1, 4, 8, 8), (1, 5)]
    assert staged.stages[0].flops == first
    assert staged.stages[0].weight_bytes == 4 * 4 * 27
    contractions = 2 * 64 * (4 * 27 + 4 * 36 + 6 * 54) + 2 * 5 * 6
    assert sum(o.flops for o in staged.source.graph.ops if o.is_contraction) == contractions


def test_weight_bytes_follow_the_element_type() -> None:
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["q", "s"], ["w"]),
        node("Conv", ["x", "w"], ["c"]),
        node("GlobalAveragePool", ["c"], ["p"]),
        node("Flatten", ["p"], ["y"]),
    ]
    arrays = {"q": np.ones((5, 3, 3, 3), np.int8), "s": np.array(0.1, np.float32)}
    source = OnnxSource(model(nodes, arrays), name="quantised")

    assert sum(op.weight_bytes for op in source.graph.ops) == 5 * 27 + 4


def test_only_the_logits_are_computed_of_several_outputs(tmp_path: Path) -> None:
    proto = shapely()
    features = helper.make_tensor_value_info("r1", FLOAT, ["batch", 4, 8, 8])
    answer = proto.graph.output[0]
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(answer)
    del proto.graph.output[:]
    proto.graph.output.extend([features, copy])
    proto.graph.node.append(helper.make_node("Neg", ["x"], ["unused"]))

    path = write(proto, tmp_path)

    assert cut_names(path) == ["c1", "r1", "a2", "r2", "joined", "c3", "pooled", "flat"]


def test_the_version_does_not_depend_on_how_the_file_stores_things(tmp_path: Path) -> None:
    plain = write(shapely(), tmp_path)
    outside = tmp_path / "outside.onnx"
    onnx.save(
        shapely(), outside, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    commented = shapely()
    commented.producer_name = "somebody"
    for k, n in enumerate(commented.graph.node):
        n.doc_string, n.name = "a stack trace", f"renamed_{k}"
    for tensor in commented.graph.initializer:
        if tensor.data_type == FLOAT:
            values = numpy_helper.to_array(tensor)
            tensor.ClearField("raw_data")
            tensor.float_data.extend(values.ravel().tolist())
    paths = [plain, outside, write(commented, tmp_path, "commented.onnx")]

    versions = {StagedModel.from_onnx(p, exits=2).version() for p in paths}

    assert len(versions) == 1


def test_a_weight_an_attribute_a_branch_or_the_opset_changes_the_version(tmp_path: Path) -> None:
    weight, pads, opset = shapely(), shapely(), shapely()
    array = numpy_helper.to_array(weight.graph.initializer[1]).copy()
    array[0, 0, 0, 0] += 1e-3
    weight.graph.initializer[1].CopyFrom(numpy_helper.from_array(array, "w2"))
    pads.graph.node[9].input[:] = ["left", "m", "right"]
    opset.opset_import[0].version = 21
    branch, other = branching(), branching()
    other.graph.node[4].attribute[0].g.node[0].op_type = "Sub"
    protos = [shapely(), weight, pads, opset, branch, other]

    versions = [
        StagedModel.from_onnx(write(p, tmp_path, f"{k}.onnx"), exits=2).version()
        for k, p in enumerate(protos)
    ]

    assert len(set(versions)) == len(protos)


def test_names_choose_exits_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = write(shapely(), tmp_path)

    assert [s.stop.name for s in StagedModel.from_onnx(path, exits=["r2"]).stages] == ["r2", "y"]
    with pytest.raises(ConfigError, match="'r3'"):
        StagedModel.from_onnx(path, exits=["r3"])


def test_a_file_for_one_sample_stays_one(tmp_path: Path) -> None:
    staged = StagedModel.from_onnx(write(branching(), tmp_path), exits=2)

    assert not staged.source.dynamic_batch
    with pytest.raises(ModelError, match="exported for one sample"):
        staged.source.onnx_segment("x", "y", batch=2)


def test_an_onnx_model_has_no_torch_form(tmp_path: Path) -> None:
    staged = StagedModel.from_onnx(write(shapely(), tmp_path), exits=2)

    assert staged.source.torch_segment("x", "y") is None
    if "torch:cpu" in available_backends():
        with pytest.raises(Exception, match="no torch form"):
            load_program(staged.with_random_heads(), "torch")


def test_two_values_that_the_exporter_found_equal_are_still_two_cuts() -> None:
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Identity", ["c"], ["same"]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["y"]),
    ]
    outputs = {"same": ["batch", 5, 8, 8], "y": ["batch", 5]}
    proto = model(nodes, {"w": weights(5, 3, 3, 3)}, outputs=outputs)
    source = OnnxSource(proto, name="merged", answer="y")

    first = source.onnx_segment("x", "same", batch=2)
    second = source.onnx_segment("same", "y", batch=2)

    x = images(2)
    middle = evaluate(first, x)
    from onnx.reference import ReferenceEvaluator

    name = second.graph.input[0].name
    found = np.asarray(next(iter(ReferenceEvaluator(second).run(None, {name: middle}))))
    np.testing.assert_allclose(found, np.maximum(middle, 0).mean((2, 3)), rtol=1e-5, atol=1e-6)


def test_an_export_that_writes_a_value_twice_is_refused() -> None:
    node = helper.make_node
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("Neg", ["r"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["y"]),
    ]

    with pytest.raises(ModelError, match="writes 'r' twice"):
        OnnxSource(model(nodes, {}), name="doubled")


def damaged(kind: str) -> bytes:
    good: bytes = shapely().SerializeToString()
    return {
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "cut by one": good[:-1],
        "random": np.random.default_rng(0).bytes(4096),
        "text": b"<html>404 Not Found</html>",
        "picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "truncated", "cut by one", "random", "text", "picture"])
def test_a_damaged_file_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(damaged(kind))

    with pytest.raises(ModelError, match=r"damaged\.onnx is not a usable ONNX model: .") as caught:
        StagedModel.from_onnx(path)
    assert caught.value.__cause__ is not None


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found nothing"):
        StagedModel.from_onnx(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelError, match="not a usable ONNX model"):
        StagedModel.from_onnx(tmp_path)


def test_missing_external_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(shapely(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()

    with pytest.raises(ModelError, match="not a usable ONNX model") as caught:
        StagedModel.from_onnx(path)
    assert "external data" in str(caught.value.help)


def test_an_unknown_operator_is_refused(tmp_path: Path) -> None:
    proto = shapely()
    proto.graph.node[3].op_type = "Reluu"

    with pytest.raises(ModelError, match="Reluu"):
        StagedModel.from_onnx(write(proto, tmp_path))


def tail(given: str) -> list[Any]:
    return [
        helper.make_node("GlobalAveragePool", [given], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]


def test_two_inputs_are_refused(tmp_path: Path) -> None:
    inputs: dict[str, list[Any]] = {"x": ["b", 3, 8, 8], "z": ["b", 3, 8, 8]}
    proto = model(
        [helper.make_node("Add", ["x", "z"], ["s"]), *tail("s")],
        {},
        inputs=inputs,
        outputs={"y": ["b", 3]},
    )

    with pytest.raises(ModelError, match="one input tensor, found 2: x, z"):
        StagedModel.from_onnx(write(proto, tmp_path))


def test_a_weight_that_is_also_listed_as_an_input_is_no_input(tmp_path: Path) -> None:
    inputs: dict[str, list[Any]] = {"x": ["b", 3, 8, 8], "w": [5, 3, 3, 3]}
    proto = model(
        [helper.make_node("Conv", ["x", "w"], ["c"]), *tail("c")],
        {"w": weights(5, 3, 3, 3)},
        inputs=inputs,
        outputs={"y": ["b", 5]},
    )

    assert cut_names(write(proto, tmp_path)) == ["c", "p"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (["b", 3, "height", "width"], "fixed sizes"),
        ([8, 3, 8, 8], "one sample or a symbolic batch"),
        (["n"], "fixed sizes"),
    ],
)
def test_an_input_with_open_sizes_or_a_fixed_batch_is_refused(
    shape: list[Any], reason: str, tmp_path: Path
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    proto = model(nodes, {}, inputs={"x": shape}, outputs={"y": shape})

    with pytest.raises(ModelError, match=reason) as caught:
        StagedModel.from_onnx(write(proto, tmp_path))
    assert "export it" in str(caught.value.help)


def test_an_output_that_is_no_logits_is_refused(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        {"w": weights(5, 3, 3, 3)},
        outputs={"y": ["batch", 5, 6, 6]},
    )

    with pytest.raises(ModelError, match=r"logits \[B, classes\], found \(1, 5, 6, 6\)"):
        StagedModel.from_onnx(write(proto, tmp_path))


def test_a_model_without_a_legal_cut_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "x"], ["s"]),
        helper.make_node("ReduceMean", ["s", "axes"], ["m"], keepdims=0),
        helper.make_node("ReduceMax", ["x", "axes"], ["n"], keepdims=0),
        helper.make_node("Add", ["m", "n"], ["y"]),
    ]
    arrays = {"w": weights(3, 3, 3, 3), "axes": np.array([2, 3], np.int64)}
    proto = model(nodes, arrays, outputs={"y": ["batch", 3]})

    with pytest.raises(ModelError, match="no legal cut"):
        StagedModel.from_onnx(write(proto, tmp_path))


def test_onnx_missing_is_told_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(shapely(), tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)

    with pytest.raises(BackendUnavailable) as caught:
        StagedModel.from_onnx(path)
    assert caught.value.help == "pip install 'edgewise[onnx]'"


def test_a_file_that_torch_exported_is_staged_and_answers_as_the_module(
    nets: Any, tmp_path: Path
) -> None:
    torch = importlib.import_module("torch")
    from edgewise.frontends.torch_module import _quiet

    module, path = nets.make("residual").eval(), tmp_path / "residual.onnx"
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            module,
            (nets.example("residual", 2),),
            path,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    staged = StagedModel.from_onnx(path, exits=3).with_random_heads(width=8)
    program = load_program(staged, "numpy")
    x = nets.example("residual", 3)

    assert [s.stop.shape for s in staged.stages] == [(1, 8, 16, 16), (1, 8, 16, 16), (1, 7)]
    np.testing.assert_allclose(
        run(program, x.numpy()), nets.logits(module, x).numpy(), rtol=1e-3, atol=1e-4
    )

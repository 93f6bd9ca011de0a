from __future__ import annotations

import hashlib
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends.piece import Piece, load_piece
from edgewise.errors import BackendUnavailable, ConfigError, DataError, ModelError
from edgewise.frontends import quantise
from edgewise.frontends.partition import PartitionedModel, read_partitioned
from edgewise.frontends.quantise import quantise_onnx

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT = onnx.TensorProto.FLOAT
Float32 = npt.NDArray[np.float32]


def weights(*shape: int, seed: int) -> Float32:
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values / math.sqrt(math.prod(shape[1:])), dtype=np.float32)


def info(name: str, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, FLOAT, list(shape))


def net(*, batch: int | str = "batch", size: int | str = 8, shared: bool = False) -> Any:
    """A stem, a residual block of two convolutions, one more, and a classifier.

    Args:
        batch: Of the input.
        size: Of its sides.
        shared: The block's convolutions have the same weights.
    """
    node = helper.make_node
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], **pads),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], **pads),
        node("Relu", ["c2"], ["r2"]),
        node("Conv", ["r2", "w2" if shared else "w3", "b3"], ["c3"], **pads),
        node("Add", ["c3", "r1"], ["a3"]),
        node("Relu", ["a3"], ["r3"]),
        node("Conv", ["r3", "w4", "b4"], ["c4"], strides=[2, 2], **pads),
        node("Relu", ["c4"], ["r4"]),
        node("Constant", [], ["w5"], value=numpy_helper.from_array(weights(8, 12, 3, 3, seed=5))),
        node("Conv", ["r4", "w5"], ["c5"], **pads),
        node("GlobalAveragePool", ["c5"], ["pooled"]),
        node("Flatten", ["pooled"], ["flat"]),
        node("Gemm", ["flat", "w6", "b6"], ["y"], transB=1),
    ]
    arrays = {
        "w1": weights(16, 3, 3, 3, seed=1),
        "w2": weights(16, 16, 3, 3, seed=2),
        **({} if shared else {"w3": weights(16, 16, 3, 3, seed=3)}),
        "w4": weights(12, 16, 3, 3, seed=4),
        "w6": weights(5, 8, seed=6),
        **{
            f"b{k}": weights(n, seed=10 + k)
            for k, n in ((1, 16), (2, 16), (3, 16), (4, 12), (6, 5))
        },
    }
    graph = helper.make_graph(
        nodes,
        "net",
        [info("x", batch, 3, size, size)],
        [info("y", batch, 5)],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    proto.ir_version = 9
    return proto


def images(count: int = 1, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    onnx.save(net(), path)
    return path


@pytest.fixture(scope="module")
def quantised(path: Path) -> PartitionedModel:
    content = quantise_onnx(path, images(8))
    eight = path.with_name("eight.onnx")
    eight.write_bytes(content)
    return read_partitioned(eight)


def halves(model: PartitionedModel, place: int) -> tuple[Piece, Piece]:
    return load_piece(model.prefix(place), "onnx"), load_piece(model.suffix(place), "onnx")


def test_places_lie_after_the_activations_and_count_what_is_before_them(path: Path) -> None:
    model = read_partitioned(path)
    conv = 2 * 64 * 16 * 9 * 16
    block = 2 * (16 * 144 + 16)
    bytes_of = [4 * (16 * 27 + 16), 4 * block, 4 * (12 * 144 + 12), 4 * 8 * 108]

    assert [p.tensor for p in model.places] == ["x", "r1", "r3", "r4", "flat", "y"]
    assert [p.prefix_bytes for p in model.places] == [
        0, *np.cumsum([*bytes_of, 4 * (5 * 8 + 5)])
    ]  # fmt: skip
    assert model.places[2].flops - model.places[1].flops == 2 * conv + 3 * 64 * 16
    assert [p.nbytes for p in model.places] == [768, 4096, 4096, 768, 32, 20]
    assert model.places[-1].depth_ratio == 1.0
    assert model.version == hashlib.sha256(path.read_bytes()).hexdigest()


def test_weights_that_two_operators_share_count_once(path: Path, tmp_path: Path) -> None:
    onnx.save(net(shared=True), tmp_path / "shared.onnx")
    whole = read_partitioned(path).places[-1].prefix_bytes
    found = read_partitioned(tmp_path / "shared.onnx").places[-1].prefix_bytes
    assert whole - found == 4 * 16 * 144


def test_prefix_and_suffix_agree_with_the_whole_to_the_rounding_of_a_sum(path: Path) -> None:
    """Not to the bit: a sum is fused into its convolution only where both are in one piece."""
    model = read_partitioned(path)
    whole = load_piece(model.segment(0, model.last), "onnx")
    for place in range(1, model.last):
        prefix, suffix = halves(model, place)
        for seed in range(3):
            x = images(seed=seed)

            np.testing.assert_allclose(suffix.run(prefix.run(x)), whole.run(x), atol=1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
def test_a_quantised_model_is_cut_at_bytes_and_its_halves_equal_it(
    quantised: PartitionedModel, tmp_path: Path, *, shared: bool
) -> None:
    if shared:
        content = quantise_onnx(net(shared=True).SerializeToString(), images(8))
        (tmp_path / "shared.onnx").write_bytes(content)
        quantised = read_partitioned(tmp_path / "shared.onnx")
    whole = load_piece(quantised.segment(0, quantised.last), "onnx")
    for place in range(1, quantised.last):
        prefix, suffix = halves(quantised, place)
        for seed in range(3):
            x = images(seed=seed)
            answer = whole.run(x)

            assert len(np.unique(answer)) > 1
            np.testing.assert_array_equal(suffix.run(prefix.run(x)), answer)
        assert prefix.output.dtype == quantised.places[place].dtype

    assert [p.dtype for p in quantised.places] == ["float32", *["uint8"] * 4, "float32"]
    assert quantised.places[1].nbytes == 16 * 64
    assert quantised.places[0].dtype == "float32"


def test_quantised_parameters_are_a_quarter_and_answers_stay_near(
    quantised: PartitionedModel, path: Path
) -> None:
    model = read_partitioned(path)
    x = images(seed=9)
    found = load_piece(quantised.segment(0, quantised.last), "onnx").run(x)
    exact = load_piece(model.segment(0, model.last), "onnx").run(x)

    # Beyond the weights there are scales and zero points per channel.
    assert quantised.places[-1].prefix_bytes < 0.4 * model.places[-1].prefix_bytes
    # 0.027 here; 0.064 where products saturate, on x86 without VNNI.
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())


def test_the_float_beside_a_quantised_tensor_is_no_place(
    quantised: PartitionedModel, path: Path
) -> None:
    name = quantised.places[1].tensor
    found = read_partitioned(path.with_name("eight.onnx"), places=[name])
    assert [p.tensor for p in found.places] == ["x", name, "y"]
    with pytest.raises(ConfigError, match="no legal cut is named 'r1_DequantizeLinear_Output'"):
        read_partitioned(path.with_name("eight.onnx"), places=["r1_DequantizeLinear_Output"])


def test_shared_weights_of_eight_bits_load_although_the_runtime_refuses_them_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantise, "_shares_weights", lambda _: False)
    content = onnx.load_from_string(
        quantise_onnx(net(shared=True, batch=1).SerializeToString(), images(2))
    )
    piece = load_piece(content.SerializeToString(), "onnx")

    assert np.isfinite(piece.run(images())).all()


def test_quantising_warns_of_nothing_and_takes_content_as_well_as_a_path(
    path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        content = quantise_onnx(path.read_bytes(), images(2), per_channel=False)

    assert caplog.records == []
    assert capsys.readouterr() == ("", "")
    kinds = [n.op_type for n in onnx.load_from_string(content).graph.node]
    assert kinds.count("DequantizeLinear") > kinds.count("QuantizeLinear") > 0


def test_images_that_do_not_fit_are_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"shape \['N', 3, 8, 8\], found \[2, 8, 8, 3\]"):
        quantise_onnx(path, np.zeros((2, 8, 8, 3)))
    with pytest.raises(DataError, match=r"found \[0, 3, 8, 8\]"):
        quantise_onnx(path, np.zeros((0, 3, 8, 8)))


def test_what_is_no_model_is_not_quantised(tmp_path: Path) -> None:
    for model in (b"nothing", tmp_path / "none.onnx"):
        with pytest.raises(ModelError, match="not a usable ONNX file"):
            quantise_onnx(model, images())
    proto = net()
    proto.graph.input.append(info("z", 1, 5))
    with pytest.raises(ModelError, match="one input of the model to quantise, found 2"):
        quantise_onnx(proto.SerializeToString(), images())


def test_weights_in_a_file_beside_it_count_for_the_version(path: Path, tmp_path: Path) -> None:
    versions = []
    for factor in (1, 2):
        proto = net()
        first = proto.graph.initializer[0]
        first.CopyFrom(numpy_helper.from_array(factor * numpy_helper.to_array(first), "w1"))
        outside = tmp_path / "outside.onnx"
        onnx.save(
            proto, outside, save_as_external_data=True, location="weights.bin", size_threshold=0
        )
        model = read_partitioned(outside)
        versions.append(model.version)
        load_piece(model.prefix(1), "onnx").run(images())
        (tmp_path / "weights.bin").unlink()

    assert len({*versions, read_partitioned(path).version}) == 3
    assert [p.prefix_bytes for p in model.places] == [
        p.prefix_bytes for p in read_partitioned(path).places
    ]


def test_models_that_cannot_be_cut_are_refused(path: Path, tmp_path: Path) -> None:
    def refused(proto: Any, match: str) -> None:
        target = tmp_path / "odd.onnx"
        target.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
        with pytest.raises(ModelError, match=match):
            read_partitioned(target)

    two = net()
    two.graph.output.append(info("r4", "batch", 12, 4, 4))
    refused(two, "expected one answer of the model 'odd', found 2: y, r4")
    two = net()
    two.graph.node.append(helper.make_node("Add", ["y", "z"], ["sum"]))
    two.graph.input.append(info("z", "batch", 5))
    two.graph.output[0].name = "sum"
    refused(two, "expected one input of the model 'odd', found 2: x, z")
    refused(net(size="side"), "fixed sizes after the batch axis")
    refused(net(batch=4), "one sample or a symbolic batch")
    refused(path.read_bytes()[:500], "is not a usable ONNX model")
    refused(b"nothing", "is not a usable ONNX model")
    with pytest.raises(ModelError, match="found nothing"):
        read_partitioned(tmp_path / "none.onnx")


def test_a_missing_quantiser_names_the_extra(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(BackendUnavailable) as caught:
        quantise_onnx(path, images())
    assert caught.value.help == "pip install 'edgewise[onnx]'"

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends.piece import ArraySpec, load_piece
from edgewise.errors import BackendUnavailable, ConfigError, ModelError
from edgewise.frontends.partition import PartitionedModel, read_partitioned
from edgewise.frontends.tflite_file import TfliteSource

PLACES = ["x", "stem", "joined", "both", "late", "flat", "scores"]


def written(folder: Path, net: Any, name: str = "net") -> Path:
    path = folder / f"{name}.tflite"
    path.write_bytes(net if isinstance(net, bytes) else net.content())
    return path


def sample(spec: ArraySpec, seed: int = 0) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    if spec.dtype == "float32":
        return rng.standard_normal(spec.shape).astype(np.float32)
    return rng.integers(-128, 128, spec.shape).astype(spec.dtype)


@pytest.fixture(scope="module", params=["int8", "float32"])
def path(tflite: Any, request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return written(folder, tflite.residual(request.param), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> PartitionedModel:
    return read_partitioned(path)


def test_a_place_is_where_one_tensor_crosses_and_work_differs(model: PartitionedModel) -> None:
    assert [p.tensor for p in model.places] == PLACES
    assert {p.dtype for p in model.places} == {model.name}


def test_prefix_and_suffix_give_exactly_what_the_whole_file_gives(
    model: PartitionedModel, path: Path
) -> None:
    whole = load_piece(path.read_bytes(), "tflite")
    for place in range(1, model.last):
        prefix = load_piece(model.prefix(place), "tflite")
        suffix = load_piece(model.suffix(place), "tflite")
        found = model.places[place]
        for seed in range(3):
            x = sample(whole.input, seed)
            answer = whole.run(x)

            assert len(np.unique(answer)) > 1
            np.testing.assert_array_equal(suffix.run(prefix.run(x)), answer)
        assert prefix.output == ArraySpec(shape=found.shape, dtype=found.dtype)
        assert prefix.output.nbytes == found.nbytes


def test_a_piece_between_any_two_places_fits_its_neighbours(model: PartitionedModel) -> None:
    x = sample(load_piece(model.segment(0, 1), "tflite").input)
    answer = load_piece(model.segment(0, model.last), "tflite").run(x)
    for cuts in ([0, 1, 3, 6], [0, 2, 4, 5, 6]):
        y = x
        for start, stop in itertools.pairwise(cuts):
            y = load_piece(model.segment(start, stop), "tflite").run(y)

        np.testing.assert_array_equal(y, answer)


def test_work_and_parameters_are_those_counted_by_hand(model: PartitionedModel) -> None:
    conv = 2 * 64 * 8 * 9 * 8  # 8 x 8 pixels, 8 channels from 8 by 3 x 3
    added = 64 * 8
    work = [2 * 64 * 8 * 9 * 3]
    work.append(work[-1] + 2 * conv + added)
    work.append(work[-1] + conv // 2 + 2 * 64 * 4 * 8 + added)
    work.append(work[-1] + conv)
    work.append(work[-1] + 2 * 16 * 6 * 9 * 8)
    work.append(work[-1] + 2 * 5 * 96)
    item = 1 if model.name == "int8" else 4
    size = [item * 8 * 27 + 8 * 4]
    size.append(size[-1] + 2 * (item * 8 * 72 + 8 * 4))
    size.append(size[-1] + item * (4 * 72 + 4 * 8) + 2 * 4 * 4)
    size.append(size[-1])  # shares the weights of a layer before it
    size.append(size[-1] + item * 6 * 72 + 6 * 4 + 2 * 4)  # and the shape of the row
    size.append(size[-1] + item * 5 * 96 + 5 * 4)

    assert [p.flops for p in model.places] == [0, *work]
    assert [p.prefix_bytes for p in model.places] == [0, *size]
    assert [p.depth_ratio for p in model.places] == pytest.approx([0, *np.divide(work, work[-1])])
    assert [p.nbytes for p in model.places] == [
        n * item for n in (8 * 8 * 3, 8 * 64, 8 * 64, 8 * 64, 8 * 64, 96, 5)
    ]


def test_what_both_halves_read_is_in_both_and_nothing_else(
    model: PartitionedModel, path: Path, tflite: Any
) -> None:
    def constants(content: bytes) -> dict[str, bytes]:
        found = tflite.schema.ModelT.InitFromPackedBuf(content, 0)
        assert found.buffers[0].data is None
        assert len(found.buffers) == len({t.buffer for t in found.subgraphs[0].tensors} | {0})
        return {
            t.name.decode(): found.buffers[t.buffer].data.tobytes()
            for t in found.subgraphs[0].tensors
            if t.buffer
        }

    whole = constants(path.read_bytes())
    first, second = constants(model.prefix(3)), constants(model.suffix(3))

    assert first.keys() & second.keys() == {"shared/w", "shared/b"}
    assert {**first, **second} == whole
    assert len(model.prefix(3)) + len(model.suffix(3)) < 2 * path.stat().st_size


def test_constants_lie_at_multiples_of_16_bytes_as_the_schema_asks(
    model: PartitionedModel, tflite: Any
) -> None:
    content = model.suffix(1)
    found = tflite.schema.Model.GetRootAsModel(content, 0)
    starts = [
        b.Data(0) is not None and b._tab.Vector(b._tab.Offset(4))
        for b in map(found.Buffers, range(1, found.BuffersLength()))
    ]

    assert starts
    assert all(start % 16 == 0 for start in starts)


def test_a_number_takes_equal_steps_of_work_and_names_take_themselves(path: Path) -> None:
    def names(places: Any) -> list[str]:
        return [p.tensor for p in read_partitioned(path, places=places).places]

    assert names(0) == ["x", "scores"]
    assert names(1) == ["x", "joined", "scores"]
    assert names(2)[0] == "x"
    assert len(names(2)) == 4
    assert names(99) == PLACES
    assert names(["both", "stem"]) == ["x", "stem", "both", "scores"]
    assert names([]) == names(["x", "scores"]) == ["x", "scores"]
    assert names(PLACES) == PLACES


def test_the_version_is_the_files_own_hash(model: PartitionedModel, path: Path) -> None:
    assert model.version == hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_unknown_name_is_refused_with_the_nearest_and_a_number_below_zero_too(
    path: Path,
) -> None:
    with pytest.raises(ConfigError, match="no legal cut is named 'stam'") as caught:
        read_partitioned(path, places=["stam"])
    assert "did you mean 'stem'?" in str(caught.value)
    with pytest.raises(ConfigError, match="no legal cut is named 'left'"):
        read_partitioned(path, places=["left"])  # inside the residual block
    with pytest.raises(ConfigError, match="at least 0, found -1"):
        read_partitioned(path, places=-1)


@pytest.mark.parametrize(("start", "stop"), [(3, 1), (2, 2), (-1, 2), (0, 7)])
def test_places_out_of_order_or_range_are_refused(
    model: PartitionedModel, start: int, stop: int
) -> None:
    with pytest.raises(ModelError, match="has the places 0 to 6"):
        model.segment(start, stop)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.95])
def test_a_truncated_file_is_refused(path: Path, tmp_path: Path, share: float) -> None:
    content = path.read_bytes()
    with pytest.raises(ModelError, match="is damaged"):
        read_partitioned(written(tmp_path, content[: int(len(content) * share)]))


@pytest.mark.parametrize(
    "content", [b"", b"TFL3", b"hello, world" * 9], ids=["none", "mark", "text"]
)
def test_what_is_no_flatbuffer_is_refused(tflite: Any, tmp_path: Path, content: bytes) -> None:
    assert tflite
    with pytest.raises(ModelError, match="is not a TFLite model"):
        read_partitioned(written(tmp_path, content))


def test_a_missing_file_a_folder_and_another_format_are_refused(
    tflite: Any, tmp_path: Path
) -> None:
    assert tflite
    (tmp_path / "folder.tflite").mkdir()
    for name in ("none.tflite", "folder.tflite"):
        with pytest.raises(ModelError, match="cannot read the TFLite model"):
            read_partitioned(tmp_path / name)
    with pytest.raises(ModelError, match=r"expected one of .onnx, .tflite"):
        read_partitioned(tmp_path / "net.pt")


def test_several_inputs_or_answers_are_refused(tflite: Any, tmp_path: Path) -> None:
    net = tflite.Net()
    xs = [net.tensor(f"x{k}", (1, 4, 4, 2)) for k in range(2)]
    ys = [net.add(*xs, "y"), net.conv(xs[0], 2, "z")]
    with pytest.raises(ModelError, match="expected one input of the model 'net', found 2: x0, x1"):
        read_partitioned(written(tmp_path, net.ends(xs, ys[:1])))
    net.graph.operators[0].inputs = [xs[0], xs[0]]
    with pytest.raises(ModelError, match="expected one answer of the model 'net', found 2: y, z"):
        read_partitioned(written(tmp_path, net.ends(xs[:1], ys)))


def test_a_file_compiled_for_the_edge_tpu_is_named_as_such(tflite: Any, tmp_path: Path) -> None:
    net = tflite.Net()
    x, y = net.tensor("x", (1, 4)), net.tensor("y", (1, 4))
    net.op("CUSTOM", [x], [y], custom="edgetpu-custom-op")
    with pytest.raises(ModelError, match=r"compiled for the Edge TPU.*cannot be cut") as caught:
        read_partitioned(written(tmp_path, net.ends([x], [y])))
    assert "_edgetpu" in str(caught.value.help)


def test_a_model_with_a_state_or_control_flow_is_refused(tflite: Any, tmp_path: Path) -> None:
    stateful = tflite.residual()
    stateful.graph.tensors[4].isVariable = True
    with pytest.raises(ModelError, match="keeps a state"):
        read_partitioned(written(tmp_path, stateful))
    branching = tflite.residual()
    branching.model.subgraphs = [branching.graph, branching.graph]
    with pytest.raises(ModelError, match="found 2: control flow"):
        read_partitioned(written(tmp_path, branching))


def test_only_the_first_axis_may_be_open(tflite: Any, tmp_path: Path) -> None:
    net = tflite.residual()
    net.graph.tensors[0].shapeSignature = [-1, 8, 8, 3]
    assert read_partitioned(written(tmp_path, net)).last == 6
    net.graph.tensors[0].shapeSignature = [1, -1, 8, 3]
    with pytest.raises(ModelError, match="fixed sizes after the batch axis"):
        read_partitioned(written(tmp_path, net))


def test_tensors_without_a_name_or_with_the_same_are_told_apart(
    tflite: Any, tmp_path: Path
) -> None:
    net = tflite.Net()
    x = net.tensor(None, (1, 4, 4, 2))
    a = net.conv(x, 2, "same;one")
    b = net.conv(a, 2, "same;two")
    model = read_partitioned(written(tmp_path, net.ends([x], [net.conv(b, 2, "y")])))

    assert [p.tensor for p in model.places] == [f"tensor_{x}", f"same#{a}", f"same#{b}", "y"]
    assert len(load_piece(model.prefix(2), "tflite").output.shape) == 4


def test_a_model_without_an_inner_place_is_all_or_nothing(tflite: Any, tmp_path: Path) -> None:
    net = tflite.Net()
    x = net.tensor("x", (1, 4, 4, 2))
    path = written(tmp_path, net.ends([x], [net.conv(x, 2, "y")]))

    assert read_partitioned(path).last == read_partitioned(path, places=4).last == 1
    with pytest.raises(ConfigError, match="can only be used whole"):
        read_partitioned(path, places=["middle"])


def test_constants_behind_the_flatbuffer_are_read(tflite: Any, tmp_path: Path) -> None:
    net = tflite.residual()
    plain = read_partitioned(written(tmp_path, net))
    data = [b.data for b in net.model.buffers[1:]]
    for buffer, values in zip(net.model.buffers[1:], data, strict=True):
        buffer.data, buffer.offset, buffer.size = None, 2, len(values)
    start = len(net.content())
    for buffer, values in zip(net.model.buffers[1:], data, strict=True):
        buffer.offset = start
        start += len(values)
    content = net.content() + b"".join(values.tobytes() for values in data)
    model = read_partitioned(written(tmp_path, content))

    assert model.places == plain.places
    assert model.suffix(2) == plain.suffix(2)
    with pytest.raises(ModelError, match="is damaged"):
        read_partitioned(written(tmp_path, content[:-1]))


def test_work_of_the_other_contractions(tflite: Any) -> None:
    def flops(kind: str, inputs: list[Any], output: Any, options: Any = None) -> float:
        net = tflite.Net("float32")
        ids = [net.tensor(f"t{k}", shape) for k, shape in enumerate(inputs)]
        net.op(kind, ids, [net.tensor("y", output)], options)
        return TfliteSource(net.ends(ids, [len(ids)]).content(), name="net").graph.flops

    adjoint = tflite.schema.BatchMatMulOptionsT()
    adjoint.adjX = True

    assert flops("DEPTHWISE_CONV_2D", [(1, 8, 8, 4), (1, 3, 3, 4)], (1, 8, 8, 4)) == 2 * 256 * 9
    assert flops("TRANSPOSE_CONV", [(4,), (5, 2, 2, 3), (1, 4, 4, 3)], (1, 8, 8, 5)) == (
        2 * 48 * 5 * 4
    )
    assert flops("CONV_3D", [(1, 4, 4, 4, 2), (3, 3, 3, 2, 5)], (1, 4, 4, 4, 5)) == 2 * 320 * 54
    plain = tflite.schema.BatchMatMulOptionsT()
    assert flops("BATCH_MATMUL", [(1, 6, 7), (1, 7, 3)], (1, 6, 3), plain) == 2 * 18 * 7
    assert flops("BATCH_MATMUL", [(1, 7, 6), (1, 7, 3)], (1, 6, 3), adjoint) == 2 * 18 * 7
    assert flops("RESHAPE", [(1, 6)], (6,)) == 0
    assert flops("ABS", [(1, 6)], (1, 6)) == 6


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.schema_py_generated", None)
    with pytest.raises(BackendUnavailable, match="ai-edge-litert") as caught:
        read_partitioned(written(tmp_path, b"....TFL3"))
    assert caught.value.help == "pip install 'edgewise[litert]'"

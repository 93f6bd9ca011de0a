from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import ArraySpec, Piece, load_piece
from edgewise.errors import BackendError, BackendUnavailable, ConfigError, ShapeError


def onnx_model(*kinds: str, shape: tuple[Any, ...] = (1, 4), dtype: str = "FLOAT") -> bytes:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    element = getattr(onnx.TensorProto, dtype)
    names = ["x", *(f"t{k}" for k in range(len(kinds) - 1)), "y"]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, [names[k]], [names[k + 1]]) for k, kind in enumerate(kinds)],
        "net",
        [onnx.helper.make_tensor_value_info("x", element, shape)],
        [onnx.helper.make_tensor_value_info("y", element, shape)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 9
    content: bytes = model.SerializeToString()
    return content


@pytest.fixture(params=["onnx", "tflite"])
def piece(request: pytest.FixtureRequest) -> Piece:
    """A piece with one float input."""
    if request.param == "onnx":
        return load_piece(onnx_model("Relu", "Exp"), "onnx")
    tflite = request.getfixturevalue("tflite")
    return load_piece(tflite.residual("float32").content(), "tflite")


def ones(spec: ArraySpec) -> Any:
    return np.ones(spec.shape, dtype=spec.dtype)


def test_an_answer_is_a_fresh_array_that_the_next_call_leaves_alone(piece: Piece) -> None:
    x = ones(piece.input)
    first = piece.run(x)
    kept = first.copy()
    second = piece.run(-x)

    assert first.shape == piece.output.shape
    assert first.dtype.name == piece.output.dtype
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(x, ones(piece.input))


def test_an_array_laid_out_otherwise_gives_the_same(piece: Piece) -> None:
    x = np.random.default_rng(0).standard_normal(piece.input.shape).astype(np.float32)
    view = np.repeat(x, 2, axis=-1)[..., ::2]

    assert not view.flags.c_contiguous
    np.testing.assert_array_equal(piece.run(view), piece.run(x))


def test_an_array_that_does_not_fit_is_refused(piece: Piece) -> None:
    x = ones(piece.input)
    for wrong in (x.astype(np.float64), x[0], np.concatenate([x, x])):
        with pytest.raises(ShapeError, match="expected an array of float32"):
            piece.run(wrong)


def test_a_closed_piece_says_so(piece: Piece) -> None:
    piece.close()
    piece.close()
    with pytest.raises(BackendError, match="closed"):
        piece.run(ones(piece.input))


def test_pieces_run_beside_each_other_in_threads(tflite: Any) -> None:
    content = tflite.residual().content()
    pieces = [load_piece(content, "tflite", threads=1 + k % 2) for k in range(4)]
    x = np.random.default_rng(0).integers(-128, 128, (1, 8, 8, 3)).astype(np.int8)
    expected = pieces[0].run(x)
    answers: list[Any] = []

    def work(piece: Piece) -> None:
        answers.extend(piece.run(x) for _ in range(20))

    threads = [threading.Thread(target=work, args=(p,)) for p in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 80
    assert all(np.array_equal(found, expected) for found in answers)
    assert [p.threads for p in pieces] == [1, 2, 1, 2]


def test_a_model_that_fails_when_it_runs_gives_an_error_and_can_be_used_again(
    tflite: Any,
) -> None:
    piece = load_piece(tflite.failing().content(), "tflite")
    with pytest.raises(BackendError, match=r"LiteRT failed: .*index out of bounds"):
        piece.run(np.array([[0, 99]], np.int32))

    np.testing.assert_array_equal(piece.run(np.array([[2, 0]], np.int32)), [[2.5, 0.5]])


def test_an_unknown_operator_is_an_error_not_a_crash(tflite: Any) -> None:
    net = tflite.Net("float32")
    x, y = net.tensor(None, (1, 3)), net.tensor(None, ())
    net.op("CUSTOM", [x], [y], custom="nobody-knows")
    with pytest.raises(BackendError, match=r"refuses the model: .*nobody-knows"):
        load_piece(net.ends([x], [y]).content(), "tflite")
    with pytest.raises(BackendError, match="ONNX Runtime refuses the model"):
        load_piece(onnx_model("NobodyKnows"), "onnx")


@pytest.mark.parametrize("format", ["onnx", "tflite"])
@pytest.mark.parametrize("content", [b"", b"nothing" * 20], ids=["empty", "text"])
def test_what_is_no_model_is_refused(tflite: Any, format: Any, content: bytes) -> None:  # noqa: A002
    assert tflite
    with pytest.raises(BackendError, match="refuses the model"):
        load_piece(content, format)


def test_a_damaged_flatbuffer_is_refused(tflite: Any) -> None:
    content = tflite.residual().content()
    for damaged in (content[: len(content) // 2], content[:8] + b"\xff" * 400):
        with pytest.raises(BackendError, match="refuses the model"):
            load_piece(damaged, "tflite")


def test_a_piece_has_one_end_on_each_side(tflite: Any) -> None:
    net = tflite.Net("float32")
    xs = [net.tensor(f"x{k}", (1, 2, 2, 2)) for k in range(2)]
    net.ends(xs, [net.add(*xs, "y")])
    with pytest.raises(BackendError, match="one input and one output, found 2 and 1"):
        load_piece(net.content(), "tflite")


def test_an_open_size_or_a_type_without_arrays_is_refused() -> None:
    with pytest.raises(BackendError, match="expected 'x' to be an array of fixed size"):
        load_piece(onnx_model("Relu", shape=("n", 4)), "onnx")
    with pytest.raises(BackendError, match="expected 'x' to be an array of fixed size"):
        load_piece(onnx_model("Identity", dtype="STRING"), "onnx")


@pytest.mark.parametrize("dtype", ["INT8", "UINT8", "INT64", "FLOAT16", "DOUBLE", "BOOL"])
def test_every_element_type_passes(dtype: str) -> None:
    piece = load_piece(onnx_model("Identity", dtype=dtype), "onnx")
    x = np.array([[0, 1, 0, 1]]).astype(piece.input.dtype)

    np.testing.assert_array_equal(piece.run(x), x)
    assert piece.output.nbytes == x.nbytes


def test_unknown_formats_and_no_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown format of a piece 'gguf'"):
        load_piece(b"", "gguf")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one thread, found 0"):
        load_piece(b"", "onnx", threads=0)


@pytest.mark.parametrize(
    ("format", "module", "extra"),
    [("tflite", "ai_edge_litert.interpreter", "litert"), ("onnx", "onnxruntime", "onnx")],
)
def test_a_missing_runtime_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
    format: Any,  # noqa: A002
    module: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable) as caught:
        load_piece(b"", format)
    assert caught.value.help == f"pip install 'edgewise[{extra}]'"

"""ONNX form of exit heads, and the reference values that ONNX-based backends are checked with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import check_close, probe_input
from edgewise.errors import BackendUnavailable

if TYPE_CHECKING:
    from edgewise.backends.base import Program
    from edgewise.model.heads import ExitHead

Float32 = npt.NDArray[np.float32]

# Above this the onnx package's own numpy evaluator takes minutes; an unoptimised runtime stands in.
_REFERENCE_FLOPS = 2e8


def head_proto(head: ExitHead, *, batch: int = 1) -> Any:
    """Write a head down as an ONNX model ``features`` → ``logits``."""
    onnx = importlib.import_module("onnx")
    helper, spec = onnx.helper, head.spec
    shape = [batch, *spec.feature_shape[1:]]
    weights = dict(head.weights)
    axes = np.array([1] if spec.kind == "token" else [2, 3], dtype=np.int64)
    if spec.kind == "conv":
        weights["hidden.weight"] = weights["hidden.weight"].reshape(spec.width, spec.channels, 1, 1)
        nodes = [
            helper.make_node("Conv", ["features", "hidden.weight", "hidden.bias"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("ReduceMean", ["active", "axes"], ["pooled"], keepdims=0),
        ]
    else:
        nodes = [
            helper.make_node("ReduceMean", ["features", "axes"], ["mean"], keepdims=0),
            helper.make_node(
                "Gemm", ["mean", "hidden.weight", "hidden.bias"], ["hidden"], transB=1
            ),
            helper.make_node("Relu", ["hidden"], ["pooled"]),
        ]
    nodes.append(
        helper.make_node("Gemm", ["pooled", "linear.weight", "linear.bias"], ["logits"], transB=1)
    )
    element = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info("features", element, shape)],
        [helper.make_tensor_value_info("logits", element, [batch, spec.num_classes])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in weights.items()]
        + [onnx.numpy_helper.from_array(axes, "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    return model


def verify(program: Program) -> None:
    """Compare every stage and head of a loaded program with the reference.

    The reference is torch where the model came from torch, the values recorded at preparation
    where a checkpoint carries them, else ONNX's numpy evaluator, or ONNX Runtime with every
    optimisation off where that would take minutes.

    Raises:
        BackendError: A stage or head differs by more than the tolerance.
    """
    model = program.model
    x = probe_input(model)
    recorded = getattr(model.source, "recorded", None)
    with program.context() as context:
        context.set_boundary(0, x)
        for k, stage in enumerate(model.stages):
            if recorded is not None:
                context.run_segment(k, k + 1)
                found = recorded.sample(stage.stop.name, context.boundary(k + 1))
                expected = recorded.values[stage.stop.name]
            else:
                expected = reference_stage(program, k, context.boundary(k))
                context.run_segment(k, k + 1)
                found = context.boundary(k + 1)
            what = f"stage {k} ({stage.name})"
            check_close(found, expected, what=what, backend=program.backend)
            head = model.exits[k].head
            if head is not None:
                features = context.boundary(k + 1)
                check_close(
                    context.run_head(k),
                    head(features),
                    what=f"the head of exit {k}",
                    backend=program.backend,
                )
        for start, stop in sorted(program.segments):
            if stop - start > 1:
                expected = context.boundary(stop)
                context.run_segment(start, stop)
                what = f"the fused stages {start} to {stop - 1}"
                found = context.boundary(stop)
                check_close(found, expected, what=what, backend=program.backend)


def reference_stage(program: Program, index: int, x: Float32) -> Float32:
    """One stage's output by the most independent means at hand."""
    stage = program.model.stages[index]
    source = program.model.source
    piece = source.torch_segment(stage.start.name, stage.stop.name)
    if piece is not None:
        torch = importlib.import_module("torch")
        with torch.inference_mode():
            return np.asarray(piece(torch.from_numpy(x.copy())).numpy(), dtype=np.float32)
    proto = source.onnx_segment(stage.start.name, stage.stop.name, batch=x.shape[0])
    name = proto.graph.input[0].name
    if stage.flops <= _REFERENCE_FLOPS or program.backend.startswith("numpy"):
        evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(proto)
        return np.asarray(evaluator.run(None, {name: x})[0], dtype=np.float32)
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BackendUnavailable(
            f"no reference for {program.model.name!r}: neither torch nor onnxruntime is installed",
            help="pip install 'edgewise[onnx]'",
        ) from error
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {name: x})[0], dtype=np.float32)

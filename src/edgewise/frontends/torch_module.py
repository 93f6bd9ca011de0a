"""Torch modules, through ``torch.export``: the graph for cuts, callables and ONNX for backends."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import logging
import math
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from edgewise.errors import BackendUnavailable, ModelError, ShapeError
from edgewise.frontends.onnx_file import OnnxSource, rename_values
from edgewise.model.cuts import legal_cuts
from edgewise.model.graph import Graph, Op, TensorSpec, einsum_flops

# These return another shape of their operand, or pass it on as it is: no work.
_VIEWS = frozenset({
    "view", "reshape", "flatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand",
    "expand_as", "slice", "select", "contiguous", "alias", "detach", "unflatten", "_unsafe_view",
    "chunk", "split", "split_with_sizes", "unbind", "getitem", "movedim", "narrow", "view_as",
    "unfold", "swapaxes", "swapdims", "numpy_T", "mT", "broadcast_to", "tensor_split", "to",
    "ravel", "diagonal", "lift_fresh", "dropout", "sym_size",
})  # fmt: skip
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_MATRIX_OPERAND = {  # where the operand stands whose last axis is summed over
    "linear": 0, "mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1,
}  # fmt: skip
_ATTENTION = "scaled_dot_product_attention"
_CONTRACTIONS = _CONVOLUTIONS | _TRANSPOSED | set(_MATRIX_OPERAND) | {_ATTENTION, "einsum"}
# In evaluation mode these return their operand.
_IDENTITIES = frozenset({
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "detach", "alias",
    "lift_fresh",
})  # fmt: skip
# Marks our names in an ONNX export: the exporter also names values, and does not look whether a
# name is taken.
_OURS = "@edgewise"
_IN_PLACE_WHEN_FRESH = {"relu": "relu_", "hardtanh": "hardtanh_", "silu": "silu_"}
_FRESH = (_CONTRACTIONS - {"einsum"}) | {"batch_norm", "add", "layer_norm"}


def import_torch() -> Any:
    """Import torch, or say which extra to install."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise BackendUnavailable(
            f"torch is not installed ({error})", help="pip install 'edgewise[torch]'"
        ) from error


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Put a module in evaluation mode and give every submodule its own mode back afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def _op_name(node: Any) -> str:
    target = node.target
    if target is operator.getitem:
        return "getitem"
    packet = getattr(target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(target, "__name__", target))


def _shape_for_one(value: Any, batch: Any) -> tuple[int, ...]:
    """Shape of a fake tensor when the batch symbol is 1.

    Raises:
        TypeError: A size depends on the data.
    """

    def size(dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        expression = dim.node.expr
        return int(expression.subs({batch: 1}) if batch is not None else expression)

    return tuple(size(d) for d in value.shape)


class TorchSource:
    """A functional copy of an exported module.

    Weights are shared with the user's module, which is not changed. Segments are built when first
    asked for and kept; asking from several threads is safe.

    Attributes:
        graph: Operators, for cuts and costs.
        dynamic_batch: Whether any batch size runs.
    """

    def __init__(self, module: Any, *, dynamic_batch: bool, batch: Any) -> None:
        self._module = module
        self.dynamic_batch = dynamic_batch
        self._batch = batch
        self.graph = self._describe(batch)
        self._lock = threading.Lock()
        self._segments: dict[tuple[str, str], Callable[[Any], Any]] = {}
        self._onnx: OnnxSource | None = None

    @classmethod
    def export(cls, module: Any, example_inputs: Any) -> TorchSource:
        """Export a module for any batch size, or for one sample where that is all it allows.

        Raises:
            BackendUnavailable: torch is not installed.
            ShapeError: There is not exactly one example tensor with a batch axis.
            ModelError: ``torch.export`` refuses the module; its reason is the cause.
        """
        torch = import_torch()
        example = (
            example_inputs[0]
            if isinstance(example_inputs, tuple | list) and len(example_inputs) == 1
            else example_inputs
        )
        if not isinstance(example, torch.Tensor) or example.ndim < 2 or example.shape[0] < 1:
            raise ShapeError(
                f"expected one example tensor [B, ...], found {_describe_example(example)}",
                help="pass torch.zeros(1, 3, 224, 224), or whatever the module takes",
            )
        one = example[:1].detach()
        with _evaluating(module), torch.no_grad():
            source = cls._try_dynamic(torch, module, one)
            if source is None:
                try:
                    exported = torch.export.export(module, (one,), strict=False)
                except Exception as error:
                    raise ModelError(
                        f"torch.export refuses {type(module).__name__}: {_first_line(error)}",
                        help="make the forward free of data-dependent branches, or export it to"
                        " ONNX yourself and use StagedModel.from_onnx",
                    ) from error
                source = cls(_functional(torch, exported), dynamic_batch=False, batch=None)
                wrong = source._differs_from(torch, module, one)
                if wrong is not None:
                    raise ModelError(
                        f"the exported form of {type(module).__name__} answers otherwise than the"
                        f" module itself: {wrong}",
                        help="a forward that is random, keeps state or writes through views is the"
                        " usual cause",
                    )
        return source

    @classmethod
    def _try_dynamic(cls, torch: Any, module: Any, one: Any) -> TorchSource | None:
        """Export for any batch size; ``None`` where that fails or answers one sample wrongly."""
        two = torch.cat([one, one])
        try:
            exported = torch.export.export(
                module, (two,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False
            )
        except Exception:  # noqa: BLE001 - any refusal means: try the static export, which reports
            return None
        placeholder = next(
            n for n in exported.graph.nodes if n.op == "placeholder" and _is_user(exported, n)
        )
        size = placeholder.meta["val"].shape[0]
        if isinstance(size, int):
            return None
        source = cls(_functional(torch, exported), dynamic_batch=True, batch=size.node.expr)
        # Some forwards branch on the batch size, as a bare squeeze() does.
        wrong = [source._differs_from(torch, module, x) for x in (one, torch.cat([two, one]))]
        return source if wrong == [None, None] else None

    def _differs_from(self, torch: Any, module: Any, like: Any) -> str | None:
        """How our copy's answer differs from the module's on made-up input, ``None`` if not."""
        generator = torch.Generator().manual_seed(0)
        x = like
        if like.is_floating_point():
            noise = torch.rand(like.shape, generator=generator, dtype=torch.float32)
            x = (noise * 2 - 1).to(like.dtype)
        answer = self.graph.outputs[0]
        if answer not in self.graph.tensors:
            return None  # no logits, which is said where the model is staged
        try:
            found = self._cut_out(self.graph.inputs[0], (answer,), reinplace=False)(x.clone())
            expected = self._find_answer(torch, module(x.clone()), found)
        except Exception as error:  # noqa: BLE001 - whatever it is, the copy cannot be used
            return f"it fails with {_first_line(error)}"
        shape = (like.shape[0], *self.graph.tensors[answer].shape[1:])
        if expected is None or tuple(found.shape) != shape:
            return f"it answers with shape {tuple(found.shape)} where {shape} was expected"
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
            return f"the largest difference is {float((found - expected).abs().max()):.3g}"
        return None

    @staticmethod
    def _find_answer(torch: Any, results: Any, like: Any) -> Any:
        """The module's output that our answer stands for: the first matrix, else the first."""
        leaves = torch.utils._pytree.tree_leaves(results)  # noqa: SLF001 - what torch.export uses
        flat = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        matrices = [t for t in flat if t.ndim == 2]
        answer = next(iter(matrices or flat), None)
        return answer if answer is not None and answer.shape == like.shape else None

    def _describe(self, batch: Any) -> Graph:
        """Write the fx graph down as our graph."""
        tensors: dict[str, TensorSpec] = {}
        inputs: list[str] = []
        outputs: tuple[str, ...] = ()
        weights: dict[str, int] = {}
        ops: list[Op] = []
        for node in self._module.graph.nodes:
            spec = _spec_for_one(node, batch)
            if spec is not None:
                tensors[node.name] = spec
            if node.op == "placeholder":
                inputs.append(node.name)
            elif node.op == "get_attr":
                array = self._attribute(node.target)
                weights[node.name] = array.nbytes
                tensors[node.name] = TensorSpec(
                    name=node.name,
                    shape=tuple(array.shape),
                    dtype=str(array.dtype).removeprefix("torch."),
                )
                ops.append(Op(name=node.name, kind="constant", inputs=(), outputs=(node.name,)))
            elif node.op == "output":
                outputs = (node.args[0].name,)
            else:
                op = _describe_op(node, tensors, weights)
                # Each piece asks its own input for the batch size; otherwise one size(0) at the
                # start would be alive to the end and forbid every cut.
                ops.append(replace(op, inputs=()) if _is_batch_size(node, batch) else op)
        by_sample = {
            n.name: tensors[n.name]
            for n in self._module.graph.nodes
            if n.name in tensors and n.op != "get_attr" and _leads_with(n.meta["val"].shape, batch)
        }
        return Graph(inputs=tuple(inputs), outputs=outputs, ops=tuple(ops), tensors=by_sample)

    def _attribute(self, path: str) -> Any:
        """A parameter, buffer or constant of the exported module."""
        return functools.reduce(getattr, path.split("."), self._module)

    def torch_segment(self, start: str, stop: str) -> Callable[[Any], Any]:
        """Return the piece between two tensors as a module of its own; weights are shared."""
        key = (start, stop)
        with self._lock:
            if key not in self._segments:
                self._segments[key] = self._cut_out(start, (stop,), reinplace=True)
            return self._segments[key]

    def _cut_out(self, start: str, stops: Sequence[str], *, reinplace: bool) -> Any:
        torch = import_torch()
        nodes = {n.name: n for n in self._module.graph.nodes}
        indices = sorted({i for stop in stops for i in self.graph.between(start, stop)})
        piece = torch.fx.Graph()
        first = piece.placeholder("x")
        first.meta = dict(nodes[start].meta)
        copies = {nodes[start]: first}
        size: Any = None
        for i in indices:
            node = nodes[self.graph.ops[i].name]
            if _is_batch_size(node, self._batch):
                if size is None:
                    size = piece.call_function(torch.ops.aten.sym_size.int, (first, 0))
                copies[node] = size
                continue
            copies[node] = piece.node_copy(node, lambda n: copies[n])
        if reinplace:
            _reinplace(torch, piece, keep=first)
        results = [copies[nodes[s]] for s in stops]
        piece.output(results[0] if len(results) == 1 else tuple(results))
        return torch.fx.GraphModule(self._module, piece)

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        """Return the piece as an ONNX model for a batch of that size."""
        return self.as_onnx().onnx_segment(start, stop, batch=batch)

    def as_onnx(self) -> OnnxSource:
        """Return the whole graph as ONNX, exported once.

        Every legal cut is an output of the export, so that its name survives; pieces are sliced
        from it.
        """
        with self._lock:
            if self._onnx is None:
                self._onnx = self._export_onnx()
            return self._onnx

    def _export_onnx(self) -> OnnxSource:
        torch = import_torch()
        stops = [c.tensor.name for c in legal_cuts(self.graph)] + [self.graph.outputs[0]]
        start = self.graph.inputs[0]
        whole = self._cut_out(start, stops, reinplace=False)
        spec = self.graph.tensors[start]
        batch = 2 if self.dynamic_batch else 1
        example = torch.zeros((batch, *spec.shape[1:]), dtype=getattr(torch, spec.dtype))
        shapes = ({0: torch.export.Dim("batch")},) if self.dynamic_batch else None
        try:
            with torch.no_grad(), _quiet():
                program = torch.onnx.export(
                    whole,
                    (example,),
                    dynamo=True,
                    input_names=[start + _OURS],
                    output_names=[stop + _OURS for stop in stops],
                    dynamic_shapes=shapes,
                    verbose=False,
                    opset_version=20,
                )
        except ImportError as error:
            raise BackendUnavailable(
                f"exporting to ONNX needs a package that is missing ({error})",
                help="pip install 'edgewise[onnx]'",
            ) from error
        except Exception as error:
            raise ModelError(
                f"the ONNX exporter refuses this model: {_first_line(error)}",
                help="run it on the 'torch' backend, or export it to ONNX yourself",
            ) from error
        proto = program.model_proto
        rename_values(proto.graph, functools.partial(_our_name, ours={start, *stops}))
        return OnnxSource(proto, name="export", answer=stops[-1])

    def weights_digest(self) -> str:
        """SHA-256 over the operators, their arguments and every array they read."""
        torch = import_torch()
        digest = hashlib.sha256()
        for node in self._module.graph.nodes:
            digest.update(f"{node.op}|{node.target}|{node.name}|{node.args}|".encode())
            digest.update(f"{sorted(node.kwargs.items())}\n".encode())
            if node.op == "get_attr":
                array = self._attribute(node.target).detach().cpu().contiguous()
                digest.update(f"{array.dtype}|{tuple(array.shape)}|".encode())
                digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _our_name(name: str, *, ours: set[str]) -> str:
    """Undo the marks that keep our names apart from those the exporter makes up."""
    if name.endswith(_OURS):
        return name.removesuffix(_OURS)
    return name + "'" if name in ours else name


def _describe_example(example: object) -> str:
    shape = getattr(example, "shape", None)
    return type(example).__name__ if shape is None else f"shape {tuple(shape)}"


def _is_user(exported: Any, node: Any) -> bool:
    return node.name in exported.graph_signature.user_inputs


def _answer_node(output: Any) -> Any:
    """The result that is the logits: the first of rank two, else the first."""
    flat: list[Any] = []
    pending = list(output.args)
    while pending:
        item = pending.pop(0)
        if isinstance(item, tuple | list):
            pending = list(item) + pending
        elif isinstance(item, dict):
            pending = list(item.values()) + pending
        elif hasattr(item, "name"):
            flat.append(item)
    if not flat:
        raise ModelError("the exported module returns no tensor")
    matrices = [n for n in flat if len(getattr(n.meta.get("val"), "shape", ())) == 2]
    return (matrices or flat)[0]


def _functional(torch: Any, exported: Any) -> Any:
    """A graph module that returns the logits, without in-place operators, checks or dropout.

    An in-place operator whose operand has no other live name becomes its functional twin, and
    later readers of the operand read the result. Where views of a written tensor are read later,
    torch's own functionalisation is asked instead.
    """
    module = exported.module(check_guards=False)
    if not _replace_in_place(torch, module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own
            module = exported.run_decompositions({}).module(check_guards=False)
        if not _replace_in_place(torch, module):
            raise ModelError(
                "the exported graph writes to a tensor in a way that cannot be undone",
                help="let the forward return new tensors instead of keeping state in buffers",
            )
    graph = module.graph
    output = next(iter(reversed(graph.nodes)))
    output.args = (_answer_node(output),)
    graph.set_codegen(torch.fx.graph.CodeGen())  # the module's own result had more to it
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        name = _op_name(node) if node.op == "call_function" else ""
        same = _same_as(name, node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif not node.users and (node.op == "call_module" or _is_a_check(name)):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _is_a_check(name: str) -> bool:
    """Whether an operator only asserts what `Context.set_boundary` checks before anything runs."""
    return name.startswith(("_assert", "sym_constrain", "_check"))


def _same_as(name: str, node: Any) -> Any:
    """The operand that an operator returns unchanged, ``None`` where it does something."""
    if name in _IDENTITIES or (name == "pad" and not any(node.args[1])):
        return node.args[0]
    if name == "to":
        source, result = node.args[0].meta.get("val"), node.meta.get("val")
        known = source is not None and result is not None
        if known and source.dtype == result.dtype and source.device == result.device:
            return node.args[0]
    where = {"slice": 1, "slice_scatter": 2}.get(name)
    if where is not None and node.kwargs == {}:
        bounds = [*node.args[where + 1 :], None, sys.maxsize, 1]
        given = max(len(node.args) - where - 1, 0)
        start, stop, step = [*bounds[:given], *bounds[2 * given :]]
        if start in (None, 0) and stop in (None, sys.maxsize) and step == 1:
            return node.args[where - 1]
    return None


def _shares_memory(node: Any) -> bool:
    """Whether a node's result may be its first operand's memory: by schema, or by name."""
    if node.op != "call_function" or not node.args:
        return False
    schema = getattr(node.target, "_schema", None)
    by_schema = schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    return by_schema or _op_name(node) in _VIEWS


def _replace_in_place(torch: Any, module: Any) -> bool:
    """Give in-place operators their functional twins; ``False`` where that would be wrong."""
    order = {n: i for i, n in enumerate(module.graph.nodes)}

    def base(node: Any) -> Any:
        while _shares_memory(node) and hasattr(node.args[0], "op"):
            node = node.args[0]
        return node

    for node in list(module.graph.nodes):
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is None or not schema.is_mutable:
            continue
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        twin = getattr(torch.ops.aten, _op_name(node).removesuffix("_"), None)
        overload = getattr(twin, getattr(node.target, "_overloadname", "default"), None)
        operand: Any = node.args[0] if node.args else None
        if overload is None or not hasattr(operand, "op") or written.index(True) != 0:
            return False
        root = base(operand)
        if root.op == "get_attr" and _op_name(node) == "copy_":
            return False
        for other in module.graph.nodes:
            if (
                other is not node
                and other is not operand
                and base(other) is root
                and any(order[u] > order[node] for u in other.users)
            ):
                return False
        node.target = overload
        for user in [u for u in operand.users if u is not node and order[u] > order[node]]:
            user.replace_input_with(operand, node)
    return True


def _leads_with(shape: Any, batch: Any) -> bool:
    """Whether the first axis is the batch and no other depends on it: what may cross a cut."""
    if not shape or not all(isinstance(size, int) for size in shape[1:]):
        return False
    if batch is None:
        return bool(shape[0] == 1)
    return not isinstance(shape[0], int) and bool(shape[0].node.expr == batch)


def _is_batch_size(node: Any, symbol: Any) -> bool:
    """Whether a node asks some tensor for the batch size."""
    if node.op != "call_function" or _op_name(node) != "sym_size":
        return False
    value = node.meta.get("val")
    return not isinstance(value, int) and value is not None and value.node.expr == symbol


def _reinplace(torch: Any, graph: Any, *, keep: Any) -> None:
    """Let activations overwrite a freshly made operand that nobody else reads, as modules do."""
    for node in graph.nodes:
        if node.op != "call_function" or _op_name(node) not in _IN_PLACE_WHEN_FRESH:
            continue
        operand = node.args[0]
        if (
            operand is not keep
            and operand.op == "call_function"
            and len(operand.users) == 1
            and _op_name(operand) in _FRESH
        ):
            twin = getattr(torch.ops.aten, _IN_PLACE_WHEN_FRESH[_op_name(node)])
            node.target = getattr(twin, node.target._overloadname)  # noqa: SLF001 - no public name


def _spec_for_one(node: Any, batch: Any) -> TensorSpec | None:
    """A node's tensor for one sample, ``None`` where it is no tensor or its size is not known."""
    value = node.meta.get("val")
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    try:
        shape = _shape_for_one(value, batch)
    except TypeError:
        return None
    return TensorSpec(name=node.name, shape=shape, dtype=str(value.dtype).removeprefix("torch."))


def _describe_op(node: Any, tensors: dict[str, TensorSpec], weights: dict[str, int]) -> Op:
    name = _op_name(node)
    stack = node.meta.get("nn_module_stack") or {}
    scope = list(stack.values())[-1][0] if stack else ""
    reads = [n.name for n in node.all_input_nodes]
    return Op(
        name=node.name,
        kind=name,
        inputs=tuple(reads),
        outputs=(node.name,),
        flops=_flops(name, node, tensors),
        weight_bytes=sum(weights.get(r, 0) for r in reads),
        scope=scope if isinstance(scope, str) else "",
        is_view=name in _VIEWS,
        is_contraction=name in _CONTRACTIONS,
    )


def _flops(name: str, node: Any, tensors: dict[str, TensorSpec]) -> float:
    """Work for one sample: 2 per multiply-add, 1 per element of anything else, 0 for views."""
    out = tensors.get(node.name)
    if out is None or name in _VIEWS:
        return 0.0
    size = float(math.prod(out.shape))

    def shape(i: int) -> tuple[int, ...]:
        spec = tensors.get(getattr(node.args[i], "name", ""))
        return spec.shape if spec is not None else ()

    flops = size
    if name in _CONVOLUTIONS:
        flops = 2.0 * size * math.prod(shape(1)[1:])
    elif name in _TRANSPOSED:
        flops = 2.0 * math.prod(shape(0)) * math.prod(shape(1)[1:])
    elif name in _MATRIX_OPERAND:
        flops = 2.0 * size * (shape(_MATRIX_OPERAND[name]) or (1,))[-1]
    elif name == _ATTENTION:
        keys, width = shape(1)[-2], shape(0)[-1]
        flops = 2.0 * size * keys + 2.0 * size / out.shape[-1] * keys * width
    elif name == "einsum":
        operands = [tensors[n.name].shape for n in node.args[1] if n.name in tensors]
        flops = einsum_flops(str(node.args[0]), operands) or size
    return flops


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress text and warnings out of a user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

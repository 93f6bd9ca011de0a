"""Torch modules, through ``torch.export``: the graph for cuts, callables and ONNX for backends."""

from __future__ import annotations

import hashlib
import importlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from edgewise.errors import BackendUnavailable, ModelError, ShapeError
from edgewise.frontends.onnx_file import OnnxSource
from edgewise.model.cuts import legal_cuts
from edgewise.model.graph import Graph, Op, TensorSpec

_VIEWS = frozenset({
    "view", "reshape", "flatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand",
    "expand_as", "slice", "select", "contiguous", "alias", "detach", "unflatten", "_unsafe_view",
    "chunk", "split", "split_with_sizes", "unbind", "getitem", "movedim", "narrow", "view_as",
})  # fmt: skip
_CONTRACTIONS = frozenset({
    "conv1d", "conv2d", "conv3d", "convolution", "linear", "mm", "bmm", "matmul", "addmm", "baddbmm",
    "scaled_dot_product_attention", "einsum",
})  # fmt: skip
# In evaluation mode these return their operand.
_IDENTITIES = frozenset({"dropout", "feature_dropout", "alpha_dropout", "detach", "alias"})
_IN_PLACE_WHEN_FRESH = {"relu": "relu_", "hardtanh": "hardtanh_", "silu": "silu_"}
_FRESH = _CONTRACTIONS | {"batch_norm", "_native_batch_norm_legit_no_training", "add", "layer_norm"}


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
    """Shape of a fake tensor when the batch symbol is 1."""

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
                        f"torch.export refuses {type(module).__name__}:"
                        f" {str(error).strip().splitlines()[0]}",
                        help="make the forward free of data-dependent branches, or export it to"
                        " ONNX yourself and use StagedModel.from_onnx",
                    ) from error
                source = cls(_functional(torch, exported), dynamic_batch=False, batch=None)
        return source

    @classmethod
    def _try_dynamic(cls, torch: Any, module: Any, one: Any) -> TorchSource | None:
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
        return cls(_functional(torch, exported), dynamic_batch=True, batch=size.node.expr)

    def _describe(self, batch: Any) -> Graph:
        """Write the fx graph down as our graph."""
        attributes = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        tensors: dict[str, TensorSpec] = {}
        inputs: list[str] = []
        outputs: tuple[str, ...] = ()
        weights: dict[str, int] = {}
        ops: list[Op] = []
        for node in self._module.graph.nodes:
            value = node.meta.get("val")
            if hasattr(value, "shape") and hasattr(value, "dtype") and node.op != "get_attr":
                tensors[node.name] = TensorSpec(
                    name=node.name,
                    shape=_shape_for_one(value, batch),
                    dtype=str(value.dtype).removeprefix("torch."),
                )
            if node.op == "placeholder":
                inputs.append(node.name)
            elif node.op == "get_attr":
                attribute = attributes.get(node.target)
                size = attribute.numel() * attribute.element_size() if attribute is not None else 0
                weights[node.name] = size
                ops.append(Op(name=node.name, kind="constant", inputs=(), outputs=(node.name,)))
            elif node.op == "output":
                outputs = _output_names(node)
            else:
                op = _describe_op(node, tensors, weights)
                # Each piece asks its own input for the batch size; otherwise one size(0) at the
                # start would be alive to the end and forbid every cut.
                ops.append(replace(op, inputs=()) if _is_batch_size(node, batch) else op)
        by_sample = {
            n.name: tensors[n.name]
            for n in self._module.graph.nodes
            if n.name in tensors and _leads_with(n.meta["val"].shape, batch)
        }
        return Graph(inputs=tuple(inputs), outputs=outputs, ops=tuple(ops), tensors=by_sample)

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
        """Return the piece as an ONNX model for a batch of that size.

        The whole graph is exported once, with every legal cut as an output so that its name
        survives; pieces are then sliced from that export.
        """
        with self._lock:
            if self._onnx is None:
                self._onnx = self._export_onnx()
        return self._onnx.onnx_segment(start, stop, batch=batch)

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
                    input_names=[start],
                    output_names=stops,
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
                f"the ONNX exporter refuses this model: {str(error).strip().splitlines()[0]}",
                help="run it on the 'torch' backend, or export it to ONNX yourself",
            ) from error
        return OnnxSource(program.model_proto, name="export")

    def weights_digest(self) -> str:
        """SHA-256 over the operators and every parameter and buffer."""
        digest = hashlib.sha256()
        for op in self.graph.ops:
            digest.update(f"{op.kind}|{op.inputs}|{op.outputs}".encode())
        for name, tensor in sorted(self._module.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def _describe_example(example: object) -> str:
    shape = getattr(example, "shape", None)
    return type(example).__name__ if shape is None else f"shape {tuple(shape)}"


def _is_user(exported: Any, node: Any) -> bool:
    return node.name in exported.graph_signature.user_inputs


def _output_names(node: Any) -> tuple[str, ...]:
    """Flatten the outputs; logits come first: the first float [B, C], as a classifier's."""
    flat: list[Any] = []
    pending = list(node.args)
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
    answer = (matrices or flat)[0]
    return (answer.name,)


def _functional(torch: Any, exported: Any) -> Any:
    """A graph module without in-place operators, dead code or dropout.

    An in-place operator whose operand has no other live name becomes its functional twin, and
    later readers of the operand read the result. Where views of a written tensor are read later,
    torch's own functionalisation is asked instead.
    """
    module = exported.module(check_guards=False)
    if not _replace_in_place(torch, module):
        module = exported.run_decompositions({}).module(check_guards=False)
        if not _replace_in_place(torch, module):
            raise ModelError("the exported graph writes to a tensor in a way that cannot be undone")
    graph = module.graph
    for node in list(graph.nodes):
        name = _op_name(node) if node.op == "call_function" else ""
        if name in _IDENTITIES or (name == "pad" and not any(node.args[1])):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_module":  # guards on input sizes, checked by us
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _replace_in_place(torch: Any, module: Any) -> bool:
    order = {n: i for i, n in enumerate(module.graph.nodes)}

    def base(node: Any) -> Any:
        while node.op == "call_function" and _op_name(node) in _VIEWS and node.args:
            node = node.args[0]
        return node

    for node in list(module.graph.nodes):
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is None or not schema.is_mutable:
            continue
        twin = getattr(torch.ops.aten, _op_name(node).removesuffix("_"), None)
        overload = getattr(twin, getattr(node.target, "_overloadname", "default"), None)
        operand = node.args[0]
        if overload is None or (operand.op in ("placeholder", "get_attr") and _op_name(node) == "copy_"):
            return False
        root = base(operand)
        same_storage = [n for n in module.graph.nodes if n is not node and base(n) is root]
        for other in same_storage:
            later = [u for u in other.users if order[u] > order[node]]
            if other is not operand and later:
                return False
        node.target = overload
        for user in [u for u in operand.users if u is not node and order[u] > order[node]]:
            user.replace_input_with(operand, node)
    return True


def _leads_with(shape: Any, batch: Any) -> bool:
    """Whether the first axis is the batch: what may cross a cut."""
    if not shape:
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


def _describe_op(node: Any, tensors: dict[str, TensorSpec], weights: dict[str, int]) -> Op:
    name = _op_name(node)
    stack = node.meta.get("nn_module_stack") or {}
    scope = list(stack.values())[-1][0] if stack else ""
    reads = [n.name for n in node.all_input_nodes]
    out = tensors.get(node.name)
    return Op(
        name=node.name,
        kind=name,
        inputs=tuple(reads),
        outputs=(node.name,),
        flops=_flops(name, node, out),
        weight_bytes=sum(weights.get(r, 0) for r in reads),
        scope=scope if isinstance(scope, str) else "",
        is_view=name in _VIEWS,
        is_contraction=name in _CONTRACTIONS,
    )


def _flops(name: str, node: Any, out: TensorSpec | None) -> float:
    """Work for one sample: 2 per multiply-add, 1 per element of anything else, 0 for views."""
    if out is None or name in _VIEWS:
        return 0.0
    size = float(math.prod(out.shape))
    shapes = [tuple(n.meta["val"].shape) for n in node.all_input_nodes if "val" in n.meta]
    if name in ("conv1d", "conv2d", "conv3d", "convolution"):
        return 2.0 * size * math.prod(shapes[1][1:])
    if name == "linear":
        return 2.0 * size * shapes[1][-1]
    if name in ("mm", "bmm", "matmul"):
        return 2.0 * size * shapes[0][-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * size * shapes[1][-1]
    if name == "scaled_dot_product_attention":
        length, width = shapes[1][-2], shapes[0][-1]
        return 2.0 * size * length + 2.0 * size / out.shape[-1] * length * width
    return size


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress text and warnings out of a user's terminal."""
    import contextlib
    import io
    import logging
    import warnings

    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

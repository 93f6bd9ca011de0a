"""ONNX Runtime on the CPU: one session per group of layers, keys and values bound where they lie.

In full precision sessions read the model's own arrays, so that nothing is copied. With 8 or 4 bits
each matrix is kept once, packed; with 4, the model's own head has 8, and affine exits have one of
4. Projections for the keys and values that an early exit leaves to make are kept a second time.
Each session has its own threads; between calls none spins, so they do not compete for cores.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import import_runtime
from edgewise.backends.decoder.base import DecoderProgram, Precision
from edgewise.backends.decoder.graphs import (
    DecoderGraph,
    head_graph,
    layers_graph,
    projection_graph,
)
from edgewise.backends.decoder.layers import form_of, layer_weights
from edgewise.backends.decoder.packed import Part, packed_folder, packed_matrices
from edgewise.backends.decoder.quantise import Packed
from edgewise.backends.decoder.rotary import rotary_tables
from edgewise.backends.threads import onnxruntime_options
from edgewise.errors import BackendError, OpUnsupported
from edgewise.model.decoding import AffineExit, KvCache, LanguageExits

if TYPE_CHECKING:
    from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
NAME = "onnxruntime:CPU"

# With 4 bits the head changes one in ten of SmolLM2-135M's answers, all layers together one in 20.
_HEAD: dict[Precision, Precision] = {"fp32": "fp32", "int8": "int8", "int4": "int8"}

# Calls of so few rows are repeated: single tokens and drafts that are verified. Their bindings are
# kept with the cache.
_KEPT_ROWS = 16


def load(  # noqa: PLR0913 - each is one property of the program
    model: LanguageModel,
    *,
    backend: str = NAME,
    threads: int = 1,
    precision: Precision = "fp32",
    exit_layers: Sequence[int] = (),
    exits: LanguageExits | None = None,
) -> DecoderProgram:
    """Load a model on ONNX Runtime.

    Args:
        model: Weights and sizes.
        backend: ``"onnxruntime:CPU"``.
        threads: Of each call.
        precision: Of the weights; below full precision a large model is packed once, for some
            seconds, and kept so in the user's cache.
        exit_layers: Where one may leave.
        exits: Fitted heads.

    Raises:
        BackendUnavailable: onnxruntime, onnx or the quantiser is not installed.
        BackendError: The runtime refuses a graph.
        OpUnsupported: It cannot rotate heads of this width.
        ConfigError: An exit is out of range.
        ModelError: The exits are of other weights, or a weight is missing.
    """
    return OnnxRuntimeDecoder(
        model,
        backend=backend,
        threads=threads,
        precision=precision,
        exit_layers=exit_layers,
        exits=exits,
        folder=packed_folder(model),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """Buffers of calls of so many rows on one cache, and each group's names for them.

    Attributes:
        keys: The cache's.
        values: The cache's.
        states: At each position, [S + 1, 1, M, H].
        places: In the text, [1, M].
        before: Cells attended to by the last token in each layer, less one, [L].
        total: The same, all of them.
        bindings: By group.
        left: Where an early exit was taken, [1, M, 1, H].
        fillings: Of the projections of each group, and what they make of ``left``, [M, layers * 2 *
            kv_heads * head_dim].
    """

    keys: Float32
    values: Float32
    states: Float32
    places: npt.NDArray[np.int64]
    before: npt.NDArray[np.int32]
    total: npt.NDArray[np.int32]
    left: Float32
    bindings: dict[int, Any] = field(default_factory=dict)
    fillings: dict[int, tuple[Any, Float32]] = field(default_factory=dict)


class OnnxRuntimeDecoder(DecoderProgram):
    """Sessions of the layers between exits, of the heads, and of what early exits leave to do.

    Args:
        model: Weights and sizes.
        backend: ``"onnxruntime:CPU"``.
        folder: Where packed weights are kept; ``None`` keeps none.
        properties: As :class:`DecoderProgram` has them.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        backend: str = NAME,
        folder: Path | None = None,
        **properties: Any,
    ) -> None:
        self._runtime = import_runtime("onnxruntime", backend=backend, extra="onnx")
        import_runtime("onnx", backend=backend, extra="onnx")
        super().__init__(model, backend=backend, **properties)
        if model.architecture.head_dim % 16:
            raise OpUnsupported(
                f"backend {backend!r} rotates heads whose width is a multiple of 16, found"
                f" {model.architecture.head_dim}",
                help="use 'torch:cpu'",
            )
        self._folder = folder
        self._groups = tuple(itertools.pairwise((0, *self.exit_layers)))
        self._read_in_place: list[Any] = []  # what sessions point to
        self.weight_bytes = 0
        packed = self._packed("layers", self.precision)
        self._layers = [self._session(layers_graph(model, *g, packed=packed)) for g in self._groups]
        head = self._packed_head(_HEAD[self.precision])
        self._head = self._session(head_graph(model, packed=head))
        read_bytes = self.weight_bytes  # the rest is read instead of these, or on an early exit
        self._projections = [
            self._session(projection_graph(model, *g, packed=packed)) for g in self._groups
        ]
        self._exit_head, self._short = self._head, None
        if self.exits is not None and self.exits.affine and self.precision == "int4":
            # Exits are coarser than its rounding, and it is read in half the time.
            coarse = self._packed_head("int4")
            self._exit_head = self._session(head_graph(model, packed=coarse))
        if self.exits is not None and self.exits.shortlist is not None:
            graph = head_graph(model, packed=head, tokens=self.exits.shortlist)
            self._short = self._session(graph)
        self.weight_bytes = read_bytes
        self._cos, self._sin = rotary_tables(model.architecture, model.context_length)
        width = model.architecture.hidden_size
        self._no_map = np.zeros((width, width), np.float32), np.zeros(width, np.float32)
        layers = [layer_weights(model, i) for i in range(self.depth)]
        self._key_bias, self._value_bias, self._key_norm = (
            None if found[0] is None else np.stack(found)
            for found in zip(*[(w.k_bias, w.v_bias, w.k_norm) for w in layers], strict=True)
        )
        self._calls: weakref.WeakKeyDictionary[KvCache, dict[int, _Call]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def _packed(self, part: Part, precision: Precision) -> dict[str, Packed] | None:
        if precision == "fp32":
            return None
        return packed_matrices(
            self.model, part, precision, backend=self.backend, folder=self._folder
        )

    def _packed_head(self, precision: Precision) -> Packed | None:
        found = self._packed("head", precision)
        return None if found is None else found["head"]

    def _session(self, graph: DecoderGraph) -> Any:
        """Compile a graph; counts what it reads."""
        proto = graph.proto
        inside = (w.ByteSize() for w in proto.graph.initializer)
        self.weight_bytes += sum(inside) + sum(w.nbytes for w in graph.outside.values())
        # Waking a thread for each product takes a fifth of a token.
        options = onnxruntime_options(self.threads, spin_in_calls=True)
        if graph.outside:
            # One row is multiplied as fast without a packed copy, which would be the model again.
            options.add_session_config_entry("session.disable_prepacking", "1")
            values = [self._runtime.OrtValue.ortvalue_from_numpy(w) for w in graph.outside.values()]
            options.add_external_initializers(list(graph.outside), values)
            self._read_in_place.append((values, graph.outside))
        try:
            return self._runtime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime refuses layers of {self.model.name!r}: {error}"
            ) from error

    def _run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        call = self._call(cache, len(hidden))
        call.states[start][0] = hidden
        call.places[0] = np.arange(first, first + len(hidden))
        call.before[:] = first + len(hidden) - 1
        call.total[:] = first + len(hidden)
        for group in range(start, stop):
            begin, end = self._groups[group]
            if cache.present[begin:end, :first].all():
                self._layers[group].run_with_iobinding(self._bound(group, call))
            else:
                self._run_compacted(group, cache, call, first)
        return np.array(call.states[stop][0])

    def _run_compacted(self, group: int, cache: KvCache, call: _Call, first: int) -> None:
        """Attend to present cells only: they are copied together for this call."""
        begin, end = self._groups[group]
        rows = call.places.shape[1]
        kept = [np.flatnonzero(cache.present[i, :first]) for i in range(begin, end)]
        most = max(map(len, kept)) + rows
        heads, width = cache.keys.shape[1], cache.keys.shape[3]
        keys, values = np.zeros((2, end - begin, heads, most, width), np.float32)
        for i, cells in enumerate(kept):
            keys[i, :, : len(cells)] = cache.keys[begin + i][:, cells]
            values[i, :, : len(cells)] = cache.values[begin + i][:, cells]
            call.before[begin + i] = len(cells) + rows - 1
            call.total[begin + i] = len(cells) + rows
        self._layers[group].run_with_iobinding(self._bind(group, call, keys, values))
        for i, cells in enumerate(kept):
            new = slice(len(cells), len(cells) + rows)
            cache.keys[begin + i, :, first : first + rows] = keys[i, :, new]
            cache.values[begin + i, :, first : first + rows] = values[i, :, new]

    def _fill(self, hidden: Float32, cache: KvCache, *, layer: int, first: int) -> None:
        last, call = first + len(hidden), self._call(cache, len(hidden))
        groups = [n for n, (begin, _) in enumerate(self._groups) if begin >= layer]
        call.left[0, :, 0] = hidden
        made = []
        for n in groups:
            binding, out = self._filling(n, call)
            self._projections[n].run_with_iobinding(binding)
            made.append(out)
        both = np.concatenate(made, axis=1)
        both = both.reshape(len(hidden), self.depth - layer, 2, -1)
        key, value = both[:, :, 0], both[:, :, 1]  # [M, layers, kv_heads * head_dim]
        if self._value_bias is not None:
            value = value + self._value_bias[layer:]
        shape = (*key.shape[:2], cache.keys.shape[1], cache.keys.shape[3])
        key = self._normed_keys(key, layer).reshape(shape)
        key = _turn(key, self._cos[first:last], self._sin[first:last])
        cache.keys[layer:, :, first:last] = key.transpose(1, 2, 0, 3)
        cache.values[layer:, :, first:last] = value.reshape(shape).transpose(1, 2, 0, 3)

    def _normed_keys(self, key: Float32, layer: int) -> Float32:
        """Add biases and norm keys [M, layers, kv_heads * head_dim] as the family does."""
        if self._key_bias is not None:
            key = key + self._key_bias[layer:]
        if self._key_norm is None:
            return key
        norm = self._key_norm[layer:]
        if form_of(self.model).qk_norm == "head":
            key, norm = key.reshape(*key.shape[:2], -1, norm.shape[1]), norm[:, None]
        mean = np.square(key).mean(axis=-1, keepdims=True)
        eps = np.float32(self.model.architecture.rms_norm_eps)
        return np.asarray(key / np.sqrt(mean + eps) * norm, dtype=np.float32)

    def _logits(self, hidden: Float32, *, affine: AffineExit | None, shortlist: bool) -> Float32:
        whole = self._head if affine is None else self._exit_head
        session: Any = self._short if shortlist else whole
        weight, bias = self._no_map if affine is None else (affine.weight, affine.bias)
        width = len(self._shortlist()) if shortlist else len(self._embedding)
        binding = session.io_binding()
        result = np.empty((len(hidden), width), np.float32)
        mapped = np.array(affine is not None)
        inputs: dict[str, npt.NDArray[Any]] = {
            "hidden": hidden[None],
            "mapped": mapped,
            "weight": weight,
            "bias": bias,
        }
        for name, x in inputs.items():
            _name(binding.bind_input, name, x)
        _name(binding.bind_output, "logits", result[None])
        session.run_with_iobinding(binding)
        return result

    def _call(self, cache: KvCache, rows: int) -> _Call:
        """What calls of so many rows on this cache need; kept where they are likely to return."""
        with self._lock:
            known = self._calls.setdefault(cache, {})
        call = known.get(rows)
        if call is None or call.keys is not cache.keys or call.values is not cache.values:
            a, positions = self.model.architecture, len(self._groups) + 1
            call = _Call(
                keys=cache.keys,
                values=cache.values,
                states=np.empty((positions, 1, rows, a.hidden_size), np.float32),
                places=np.empty((1, rows), np.int64),
                before=np.empty(self.depth, np.int32),
                total=np.empty(self.depth, np.int32),
                left=np.empty((1, rows, 1, a.hidden_size), np.float32),
            )
            if rows <= _KEPT_ROWS:
                known[rows] = call
        return call

    def _bound(self, group: int, call: _Call) -> Any:
        binding = call.bindings.get(group)
        if binding is None:
            cells = slice(*self._groups[group])
            binding = self._bind(group, call, call.keys[cells], call.values[cells])
            call.bindings[group] = binding
        return binding

    def _filling(self, group: int, call: _Call) -> tuple[Any, Float32]:
        found = call.fillings.get(group)
        if found is None:
            (begin, end), a = self._groups[group], self.model.architecture
            width = (end - begin) * 2 * a.num_key_value_heads * a.head_dim
            out = np.empty((call.left.shape[1], width), np.float32)
            binding = self._projections[group].io_binding()
            _name(binding.bind_input, "hidden", call.left)
            _name(binding.bind_output, "out", out[None, :, None])
            found = call.fillings[group] = binding, out
        return found

    def _bind(self, group: int, call: _Call, keys: Float32, values: Float32) -> Any:
        """Name the memory that a group reads and writes; whoever runs it keeps that alive."""
        binding = self._layers[group].io_binding()
        inputs = {
            "hidden": call.states[group],
            "places": call.places,
            "cos": self._cos,
            "sin": self._sin,
        }
        begin, end = self._groups[group]
        for i, layer in enumerate(range(begin, end)):
            inputs[f"before_{layer}"] = call.before[layer : layer + 1]
            inputs[f"total_{layer}"] = call.total[layer : layer + 1]
            for name, cells in (("key", keys), ("value", values)):
                inputs[f"{name}_{layer}"] = cells[i : i + 1]
                _name(binding.bind_output, f"new_{name}_{layer}", cells[i : i + 1])
        for name, x in inputs.items():
            _name(binding.bind_input, name, x)
        _name(binding.bind_output, "out", call.states[group + 1])
        return binding


def _name(bind: Any, name: str, x: npt.NDArray[Any]) -> None:
    """Bind the memory of an array, as it lies."""
    bind(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)


def _turn(heads: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate [M, layers, heads, head_dim] by angles [M, head_dim / 2]."""
    half = heads.shape[-1] // 2
    x, y = heads[..., :half], heads[..., half:]
    cos, sin = cos[:, None, None], sin[:, None, None]
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)

"""torch: a plain forward as the reference, and one with fused operators that is faster."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import import_runtime
from edgewise.backends.decoder.base import DecoderProgram, Precision, attention_masks
from edgewise.backends.decoder.layers import (
    LayerWeights,
    QkNorm,
    form_of,
    head_weight,
    layer_weights,
)
from edgewise.backends.decoder.rotary import rotary_tables
from edgewise.backends.threads import set_torch_threads
from edgewise.model.decoding import AffineExit, KvCache, LanguageExits

if TYPE_CHECKING:
    from torch import Tensor

    from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

_PAIR, _ODD = 2, 3  # three rows take longer than four


def load(  # noqa: PLR0913 - each is one property of the program
    model: LanguageModel,
    *,
    backend: str = "torch:cpu",
    threads: int = 1,
    precision: Precision = "fp32",
    exit_layers: Sequence[int] = (),
    exits: LanguageExits | None = None,
) -> DecoderProgram:
    """Load a model on torch.

    Torch has one thread count per process: every call sees to it that it is the program's.

    Args:
        model: Weights and sizes; the plain forward shares the weights, the fused one copies most.
        backend: ``"torch:cpu"`` is fused, ``"torch-eager:cpu"`` the plain reference.
        threads: Intra-op threads of each call.
        precision: Full only.
        exit_layers: Where one may leave.
        exits: Fitted heads.

    Raises:
        BackendUnavailable: torch is not installed.
        ConfigError: An exit is out of range.
        ModelError: The exits are of other weights, or a weight is missing.
    """
    make = EagerDecoder if backend == "torch-eager:cpu" else FusedDecoder
    return make(
        model,
        backend=backend,
        threads=threads,
        precision=precision,
        exit_layers=exit_layers,
        exits=exits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the layers of one call share.

    Attributes:
        keys: The request's cells, [L, kv_heads, C, head_dim].
        values: The same.
        cos: Of the call's positions, as the forward wants them.
        sin: The same.
        causal: [M, last], true where attended to if all cells before are present; ``None`` for one
            token, which attends to all.
        first: Cell of the first token.
        last: Cell after the last.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    causal: Tensor | None
    first: int
    last: int


class TorchDecoder(DecoderProgram):
    """What both forwards share: cells, heads and threads."""

    def __init__(self, model: LanguageModel, *, backend: str, **properties: Any) -> None:
        self.torch = import_runtime("torch", backend=backend, extra="torch")
        super().__init__(model, backend=backend, **properties)
        a = model.architecture
        self._eps = a.rms_norm_eps
        self._form = form_of(model)
        self._heads, self._kv_heads = a.num_attention_heads, a.num_key_value_heads
        self._group = self._heads // self._kv_heads
        self._width = a.head_dim
        gelu, silu = self.torch.nn.functional.gelu, self.torch.nn.functional.silu
        self._activate = gelu if a.hidden_act == "gelu" else silu
        layers = [layer_weights(model, i) for i in range(self.depth)]
        self._load_layers(layers)
        cos, sin = rotary_tables(a, model.context_length)
        self._load_rotary(self.torch.from_numpy(cos), self.torch.from_numpy(sin))
        head = head_weight(model)
        self._norm_weight = self._shared(self._norm)
        kept = {} if self.exits is None else self.exits.affine
        self._affine_maps = {
            k: (self._shared(kept[k].weight), self._shared(kept[k].bias))
            for k in self.exit_layers
            if k in kept
        }
        columns = None if self.exits is None else self.exits.shortlist
        self._load_heads(head, None if columns is None else head[columns])
        sizes = [
            w.nbytes
            for name, w in model.weights.items()
            if name not in {"model.embed_tokens.weight", "lm_head.weight"}
        ]
        self.weight_bytes = sum(sizes) + head.nbytes

    def _run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        begin, end = self.layers_at(start), self.layers_at(stop)
        masks = attention_masks(cache, start=begin, stop=end, first=first, count=len(hidden))
        self._set_threads()
        with self.torch.inference_mode():
            call = self._call(cache, first, len(hidden))
            state = self._shared(hidden)
            for layer, mask in zip(range(begin, end), masks, strict=True):
                seen = None if mask is None else self.torch.from_numpy(mask)
                state = self._layer(layer, state, call, seen)
            return np.asarray(state.numpy())

    def _fill(self, hidden: Float32, cache: KvCache, *, layer: int, first: int) -> None:
        self._set_threads()
        with self.torch.inference_mode():
            call = self._call(cache, first, len(hidden))
            self._fill_from(layer, self._shared(hidden), call)

    def _logits(self, hidden: Float32, *, affine: AffineExit | None, shortlist: bool) -> Float32:
        self._set_threads()
        linear = self.torch.nn.functional.linear
        with self.torch.inference_mode():
            state = self._rms_norm(self._shared(hidden), self._norm_weight)
            if affine is not None:
                state = linear(state, *self._affine_maps[affine.layer])
            head = self._short_head if shortlist else self._head
            return np.asarray(self._answer(state, head).numpy())

    def _call(self, cache: KvCache, first: int, count: int) -> Call:
        last = first + count
        return Call(
            keys=self.torch.from_numpy(cache.keys),
            values=self.torch.from_numpy(cache.values),
            cos=self._cos[first:last],
            sin=self._sin[first:last],
            causal=None if count == 1 else self._causal(count, last),
            first=first,
            last=last,
        )

    def _causal(self, count: int, last: int) -> Tensor:
        ones: Tensor = self.torch.ones(count, last, dtype=self.torch.bool)
        return ones.tril_(last - count)

    def _set_threads(self) -> None:
        if self.torch.get_num_threads() != self.threads:
            set_torch_threads(self.threads)

    def _shared(self, array: Float32) -> Tensor:
        """A tensor on an array's memory; torch warns of arrays that are read-only."""
        found: Tensor = self.torch.from_numpy(np.asarray(_Writable(np.ascontiguousarray(array))))
        return found

    @abstractmethod
    def _load_layers(self, layers: Sequence[LayerWeights]) -> None:
        """Take the weights."""

    @abstractmethod
    def _load_heads(self, head: Float32, short: Float32 | None) -> None:
        """Set ``_head`` and ``_short_head`` from [V, H] and [S, H]."""

    def _answer(self, state: Tensor, head: Any) -> Tensor:
        """Multiply by a head as it was loaded."""
        found: Tensor = state @ head
        return found

    @abstractmethod
    def _load_rotary(self, cos: Tensor, sin: Tensor) -> None:
        """Set ``_cos`` and ``_sin`` of every position from [T, head_dim / 2]."""

    @abstractmethod
    def _layer(self, layer: int, state: Tensor, call: Call, mask: Tensor | None) -> Tensor:
        """Run one layer: [M, H] to a fresh [M, H]; ``mask`` stands in for the causal one."""

    @abstractmethod
    def _fill_from(self, layer: int, state: Tensor, call: Call) -> None:
        """Write keys and values of the layers from ``layer`` on."""

    @abstractmethod
    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last axis."""

    _head: Any
    _short_head: Any  # None where no short list was fitted, which is refused before
    _cos: Tensor
    _sin: Tensor


class EagerDecoder(TorchDecoder):
    """Plain operators one by one, on the model's own arrays: the reference of all others."""

    def _load_layers(self, layers: Sequence[LayerWeights]) -> None:
        self._layers: list[dict[str, Any]] = [
            {
                name: None if array is None else self._shared(array)
                for name in LayerWeights.__slots__
                for array in [getattr(weights, name)]
            }
            for weights in layers
        ]

    def _load_heads(self, head: Float32, short: Float32 | None) -> None:
        self._head = self._shared(head).t()
        self._short_head = None if short is None else self._shared(short).t()

    def _load_rotary(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = (self.torch.cat((x, x), dim=-1) for x in (cos, sin))

    def _layer(self, layer: int, state: Tensor, call: Call, mask: Tensor | None) -> Tensor:
        w = self._layers[layer]
        linear, first = self.torch.nn.functional.linear, self._form.norms_first
        read = self._rms_norm(state, w["attention_norm"]) if first else state
        query = self._by_head(linear(read, w["q"], w["q_bias"]), w["q_norm"])
        self._write(layer, read, call)
        attended = self._attend(layer, self._turn(query, call), call, mask)
        out = linear(attended, w["o"])
        state = state + (out if first else self._rms_norm(out, w["attention_norm"]))
        read = self._rms_norm(state, w["mlp_norm"]) if first else state
        inner = self._activate(linear(read, w["gate"])) * linear(read, w["up"])
        out = linear(inner, w["down"])
        return state + (out if first else self._rms_norm(out, w["mlp_norm"]))

    def _fill_from(self, layer: int, state: Tensor, call: Call) -> None:
        for i in range(layer, self.depth):
            norm = self._layers[i]["attention_norm"]
            self._write(i, self._rms_norm(state, norm) if self._form.norms_first else state, call)

    def _write(self, layer: int, read: Tensor, call: Call) -> None:
        w, linear = self._layers[layer], self.torch.nn.functional.linear
        key = self._by_head(linear(read, w["k"], w["k_bias"]), w["k_norm"])
        value = self._by_head(linear(read, w["v"], w["v_bias"]), None)
        call.keys[layer, :, call.first : call.last] = self._turn(key, call)
        call.values[layer, :, call.first : call.last] = value

    def _by_head(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[M, N * head_dim] to [N, M, head_dim], normed as the family does."""
        if norm is not None and self._form.qk_norm == "width":
            x = self._rms_norm(x, norm)
        x = x.view(len(x), -1, self._width)
        if norm is not None and self._form.qk_norm == "head":
            x = self._rms_norm(x, norm)
        return x.transpose(0, 1)

    def _turn(self, x: Tensor, call: Call) -> Tensor:
        half = self._width // 2
        turned: Tensor = self.torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * call.cos + turned * call.sin

    def _attend(self, layer: int, query: Tensor, call: Call, mask: Tensor | None) -> Tensor:
        keys, values = (
            x[layer, :, : call.last].repeat_interleave(self._group, dim=0)
            for x in (call.keys, call.values)
        )
        scores = query @ keys.mT / self._width**0.5  # [heads, M, T]
        seen = call.causal if mask is None else mask
        if seen is not None:
            scores = scores.masked_fill(~seen, -self.torch.inf)
        attended: Tensor = self.torch.softmax(scores, dim=-1) @ values
        return attended.transpose(0, 1).reshape(len(query[0]), -1)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean: Tensor = x.pow(2).mean(-1, keepdim=True)
        return x * (mean + self._eps).rsqrt() * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix as calls of one row read it, and as calls of several do.

    Attributes:
        columns: [in, out].
        parts: [out, in] each, one below the other: the model's own arrays.
    """

    columns: Tensor
    parts: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """Weights of one layer as the fused forward reads them.

    Attributes:
        qkv: H to (heads + 2 kv_heads) * head_dim; its columns are a copy.
        qkv_bias: ``None`` where the family has none.
        o: heads * head_dim to H.
        gate_up: H to 2 I; its columns are a copy.
        down: I to H.
        attention_norm: [H].
        mlp_norm: [H].
        qk_norm: By head [heads + kv_heads, head_dim]; over the width that of the queries and that
            of the keys, one after the other.
    """

    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None


class FusedDecoder(TorchDecoder):
    """Few and large operators, on matrices that are laid together when the model is loaded.

    One row times a matrix is quickest where the matrix lies by columns, a copy for the wide ones.
    Several rows, such as drafts that are verified, are one product of the model's own arrays with
    the rows as columns: it reads each weight once, so that four rows take little longer than one.
    """

    def _load_layers(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = [self._fuse(w) for w in layers]
        self._both = self._heads + self._kv_heads
        # Keys and values of all layers from one state: one matrix, with each layer's norm in it.
        first = self._form.norms_first
        stacked = [m * w.attention_norm if first else m for w in layers for m in (w.k, w.v)]
        self._fill_weight = self._columns(np.concatenate(stacked))
        self._fill_bias = self._join(*[b for w in layers for b in (w.k_bias, w.v_bias)])
        norms = [w.k_norm for w in layers if w.k_norm is not None]
        self._fill_norm = self._join(*[x[None] for x in norms])

    def _fuse(self, w: LayerWeights) -> FusedLayer:
        qk_norm = self._join(w.q_norm, w.k_norm)
        if w.q_norm is not None and w.k_norm is not None and self._form.qk_norm == "head":
            norms = [w.q_norm[None]] * self._heads + [w.k_norm[None]] * self._kv_heads
            qk_norm = self._join(*norms)
        return FusedLayer(
            qkv=self._wide(w.q, w.k, w.v),
            qkv_bias=self._join(w.q_bias, w.k_bias, w.v_bias),
            o=self._narrow(w.o),
            gate_up=self._wide(w.gate, w.up),
            down=self._narrow(w.down),
            attention_norm=self._shared(w.attention_norm),
            mlp_norm=self._shared(w.mlp_norm),
            qk_norm=qk_norm,
        )

    def _join(self, *arrays: Float32 | None) -> Tensor | None:
        some = [x for x in arrays if x is not None]
        return self.torch.from_numpy(np.concatenate(some)) if some else None

    def _columns(self, matrix: Float32) -> Tensor:
        """Transpose: one row times a matrix with many columns is up to twice as fast so."""
        found: Tensor = self.torch.from_numpy(np.ascontiguousarray(matrix.T))
        return found

    def _wide(self, *parts: Float32) -> Matrix:
        columns = self._columns(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return Matrix(columns=columns, parts=tuple(self._shared(part) for part in parts))

    def _narrow(self, matrix: Float32) -> Matrix:
        rows = self._shared(matrix)
        return Matrix(columns=rows.t(), parts=(rows,))

    def _times(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Multiply [M, in] to a fresh [M, out]."""
        rows = len(x)
        # One row times columns runs on one thread, and two as one after the other.
        if rows == 1 or (rows == _PAIR and self.threads == 1):
            return x @ matrix.columns
        torch = self.torch
        if rows == _ODD:
            x = torch.nn.functional.pad(x, (0, 0, 0, 1))
        found = [part @ x.t() for part in matrix.parts]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        return joined.t()[:rows].contiguous()

    def _load_heads(self, head: Float32, short: Float32 | None) -> None:
        self._head = self._wide(head)
        self._short_head = None if short is None else self._wide(short)

    def _answer(self, state: Tensor, head: Matrix) -> Tensor:
        return self._times(state, head)

    def _load_rotary(self, cos: Tensor, sin: Tensor) -> None:
        # For [M, heads, 2, head_dim / 2]: the halves of a head lie behind each other.
        self._cos = cos[:, None, None]
        self._sin = self.torch.stack((-sin, sin), dim=1)[:, None]

    def _layer(self, layer: int, state: Tensor, call: Call, mask: Tensor | None) -> Tensor:
        w, first = self._layers[layer], self._form.norms_first
        read = self._rms_norm(state, w.attention_norm) if first else state
        qkv = self._times(read, w.qkv)
        if w.qkv_bias is not None:
            qkv += w.qkv_bias
        out = self._times(self._attend(layer, qkv, call, mask), w.o)
        if first:
            state = out.add_(state)
            read = self._rms_norm(state, w.mlp_norm)
        else:
            state = read = state + self._rms_norm(out, w.attention_norm)
        gate, up = self._times(read, w.gate_up).chunk(2, dim=1)
        out = self._times(self._activate(gate).mul_(up), w.down)
        return out.add_(state) if first else state + self._rms_norm(out, w.mlp_norm)

    def _attend(self, layer: int, qkv: Tensor, call: Call, mask: Tensor | None) -> Tensor:
        """Turn, write keys and values, and attend: [M, (heads + 2 kv_heads) * head_dim] to q's."""
        rows, kv, group, width = len(qkv), self._kv_heads, self._group, self._width
        split = qkv.view(rows, -1, width)
        turned = self._turn(self._norm_heads(layer, split[:, : self._both]), call.cos, call.sin)
        query, key = turned[:, : self._heads], turned[:, self._heads :]
        call.keys[layer, :, call.first : call.last].copy_(key.transpose(0, 1))
        call.values[layer, :, call.first : call.last].copy_(split[:, self._both :].transpose(0, 1))
        keys, values = call.keys[layer, :, : call.last], call.values[layer, :, : call.last]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        if rows == 1:  # the queries of a group are as rows of one head
            one = attend(query.reshape(1, kv, group, width), keys[None], values[None], mask)
            return one.view(1, -1)  # type: ignore[no-any-return]
        query = query.view(rows, kv, group, width).permute(1, 2, 0, 3)
        wide = (kv, group, call.last, width)
        keys, values = keys[:, None].expand(wide), values[:, None].expand(wide)
        square = mask is None and call.first == 0  # the kernel then skips half
        seen = None if square else call.causal if mask is None else mask
        some = attend(query, keys, values, seen, is_causal=square)  # [kv, group, M, head_dim]
        return some.permute(2, 0, 1, 3).reshape(rows, -1)  # type: ignore[no-any-return]

    def _norm_heads(self, layer: int, heads: Tensor) -> Tensor:
        weight, kind = self._layers[layer].qk_norm, self._form.qk_norm
        if weight is None:
            return heads
        if kind == "head":
            return self._norm_keys(heads, weight, kind)
        flat, middle = heads.flatten(1), self._heads * self._width
        query = self._rms_norm(flat[:, :middle], weight[:middle])
        key = self._rms_norm(flat[:, middle:], weight[middle:])
        return self.torch.cat((query, key), dim=1).view(heads.shape)  # type: ignore[no-any-return]

    def _norm_keys(self, heads: Tensor, weight: Tensor, kind: QkNorm) -> Tensor:
        """Norm [..., N, head_dim] by head or over both axes, by weights that broadcast."""
        axes = (self._width,) if kind == "head" else heads.shape[-2:]
        normed = self.torch.nn.functional.rms_norm(heads, axes, eps=self._eps)
        return normed * weight  # type: ignore[no-any-return]

    def _turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [..., N, head_dim] by angles that broadcast to [..., N, 2, head_dim / 2]."""
        halves = heads.reshape(*heads.shape[:-1], 2, self._width // 2)
        turned = self.torch.addcmul(halves * cos, halves.flip(-2), sin)
        return turned.flatten(-2)  # type: ignore[no-any-return]

    def _fill_from(self, layer: int, state: Tensor, call: Call) -> None:
        functional, kv, width = self.torch.nn.functional, self._kv_heads, self._width
        if self._form.norms_first:
            state = functional.rms_norm(state, state.shape[-1:], eps=self._eps)
        skip = layer * 2 * kv * width
        both = state @ self._fill_weight[:, skip:]
        if self._fill_bias is not None:
            both += self._fill_bias[skip:]
        both = both.view(len(state), self.depth - layer, 2, kv, width)
        key, value = both[:, :, 0], both[:, :, 1]  # [M, layers, kv_heads, head_dim]
        if self._fill_norm is not None:
            weight = self._fill_norm[layer:].view(len(both[0]), -1, width)
            key = self._norm_keys(key, weight, self._form.qk_norm)
        key = self._turn(key, call.cos[:, None], call.sin[:, None])
        for cells, new in ((call.keys, key), (call.values, value)):
            cells[layer:, :, call.first : call.last].copy_(new.permute(1, 2, 0, 3))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self.torch.nn.functional.rms_norm(x, weight.shape, weight, self._eps)
        return normed


class _Writable:
    """Lends an array's memory as if it could be written to; nobody here does."""

    def __init__(self, array: Float32) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface

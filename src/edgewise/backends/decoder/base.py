"""What a runtime promises for a decoder: depth, cache and position are arguments of each call."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.layers import embedding, final_norm, form_of, head_weight
from edgewise.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    OpUnsupported,
    ShapeError,
    nearest_names,
)
from edgewise.model.decoding import AffineExit, KvCache, LanguageExits, check_exit_layers

if TYPE_CHECKING:
    from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Precision = Literal["fp32", "int8", "int4"]
HeadKind = Literal["raw", "affine", "shortlist"]
HeadChoice = HeadKind | Literal["auto"]

# Name → (module here, package that must be installed, precisions of the weights).
_RUNTIMES: dict[str, tuple[str, str, tuple[Precision, ...]]] = {
    "torch:cpu": ("torch", "torch", ("fp32",)),
    "torch-eager:cpu": ("torch", "torch", ("fp32",)),
    "onnxruntime:CPU": ("onnxruntime", "onnxruntime", ("fp32", "int8", "int4")),
}


class DecoderProgram(ABC):
    """A language model loaded on one backend; shared by all threads, changed by none.

    Positions count groups: position 0 is the embedded input, position p the state after the layers
    up to ``exit_layers[p - 1]``. Layers between two exits are one compiled piece.

    A backend writes :meth:`_run_layers`, :meth:`_fill` and :meth:`_logits`, which may trust their
    arguments; what is present, and what an error leaves behind, is settled here.

    Args:
        model: Weights and sizes.
        backend: ``runtime:device``.
        threads: Of each call.
        precision: Of the weights.
        exit_layers: Where one may leave; the whole depth is always one.
        exits: Fitted heads.

    Attributes:
        model: What was loaded.
        backend: ``"torch:cpu"`` or ``"onnxruntime:CPU"``.
        threads: Of each call.
        precision: Of the weights; activations, keys and values are float32.
        exit_layers: How many layers have run at each candidate exit, rising; the last is L.
        exits: Affine heads, gates and short list; ``None`` where only raw heads exist.
        weight_bytes: What one token at full depth reads of the weights, head included.

    Raises:
        ConfigError: An exit is out of range, or there is no thread.
        ModelError: The exits are of other weights, or a weight is missing.
    """

    weight_bytes: int

    def __init__(  # noqa: PLR0913 - each is one property of the program
        self,
        model: LanguageModel,
        *,
        backend: str,
        threads: int = 1,
        precision: Precision = "fp32",
        exit_layers: Sequence[int] = (),
        exits: LanguageExits | None = None,
    ) -> None:
        if threads < 1:
            raise ConfigError(f"expected at least one thread, found {threads}")
        form_of(model)
        depth = model.architecture.num_hidden_layers
        self.exit_layers = check_exit_layers(tuple(exit_layers), depth=depth)
        if exits is not None:
            exits.check(model.digest)
        self.model, self.backend, self.threads = model, backend, threads
        self.precision: Precision = precision
        self.exits = exits
        self._embedding = embedding(model)
        self._norm = final_norm(model)
        head_weight(model)

    @property
    def depth(self) -> int:
        """L."""
        return self.exit_layers[-1]

    def layers_at(self, position: int) -> int:
        """How many layers have run at a position."""
        return self.exit_layers[position - 1] if position else 0

    def exit_head(self, choice: HeadChoice = "auto") -> HeadKind:
        """What answers at exits: ``"auto"`` is the short list where one was fitted, else affine.

        The time that the short list saves buys more agreement in further layers than it costs.
        """
        if choice != "auto":
            return choice
        listed = self.exits is not None and self.exits.shortlist is not None
        return "shortlist" if listed else "affine"

    def new_cache(self, capacity: int) -> KvCache:
        """A cache for one request of at most that many tokens.

        Raises:
            ConfigError: No token, or more than the model was trained for.
        """
        a, most = self.model.architecture, self.model.context_length
        if capacity > most:
            raise ConfigError(
                f"model {self.model.name!r} reads at most {most} tokens, found {capacity}",
                help="shorten the prompt or ask for fewer tokens",
            )
        return KvCache(
            layers=a.num_hidden_layers,
            kv_heads=a.num_key_value_heads,
            head_dim=a.head_dim,
            capacity=capacity,
        )

    def embed(self, tokens: Sequence[int] | Int64) -> Float32:
        """Embed tokens: [M] to [M, H].

        Raises:
            ShapeError: No token, or one is outside the vocabulary.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise ShapeError(f"expected token ids [M], found {ids.dtype} of shape {ids.shape}")
        size = len(self._embedding)
        if ids.min() < 0 or ids.max() >= size:
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise ShapeError(f"expected token ids of 0 to {size - 1}, found {wrong}")
        return np.asarray(self._embedding[ids])

    def run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        """Run the groups from one position to another for M tokens.

        Writes keys and values of those layers at cells ``first`` to ``first + M`` and marks them
        present; attends to present cells before each token and to the token itself. The cache's
        length is not changed: the caller moves it on when the token is done.

        Args:
            hidden: [M, H] at position ``start``.
            cache: Of this request.
            start: Position to start from.
            stop: Position to stop at, at most the number of exits.
            first: Place of the first of the tokens in the text.

        Returns:
            [M, H] at position ``stop``, a fresh array.

        Raises:
            ShapeError: The states are not [M, H] float32.
            ConfigError: Positions out of order, or the cache is too small or of another model.
            BackendError: The runtime failed; the cells in question are then absent.
        """
        if not 0 <= start < stop <= len(self.exit_layers):
            raise ConfigError(
                f"expected positions 0 <= start < stop <= {len(self.exit_layers)}, found {start}"
                f" and {stop}"
            )
        hidden = self._check_states(hidden)
        self._check_cells(cache, first, len(hidden))
        present = cache.present[
            self.layers_at(start) : self.layers_at(stop), first : first + len(hidden)
        ]
        present[:] = False  # whatever ends the call early leaves them so
        try:
            result = self._run_layers(hidden, cache, start=start, stop=stop, first=first)
        except Exception as error:
            raise self._failed(f"positions {start} to {stop}", error) from error
        present[:] = True
        return result

    def fill(self, hidden: Float32, cache: KvCache, *, start: int, first: int) -> None:
        """Give the layers after a position keys and values made from that position's state.

        The ``propagate`` policy: each deeper layer's norm and K and V projections read the state of
        the exit, as if the layers between were skipped. Marks the cells present.

        Args:
            hidden: [M, H] at position ``start``.
            cache: Of this request.
            start: Position of the exit; at the last there is nothing to do.
            first: Place of the first of the tokens in the text.

        Raises:
            ShapeError: The states are not [M, H] float32.
            ConfigError: No such position, or the cache is too small or of another model.
            BackendError: The runtime failed; the cells in question are then absent.
        """
        if not 0 <= start <= len(self.exit_layers):
            raise ConfigError(f"expected position 0 to {len(self.exit_layers)}, found {start}")
        hidden = self._check_states(hidden)
        self._check_cells(cache, first, len(hidden))
        layer = self.layers_at(start)
        if layer == self.depth:
            return
        present = cache.present[layer:, first : first + len(hidden)]
        present[:] = False
        try:
            self._fill(hidden, cache, layer=layer, first=first)
        except Exception as error:
            raise self._failed(f"filling from position {start}", error) from error
        present[:] = True

    def logits(self, hidden: Float32, *, position: int, kind: HeadKind = "affine") -> Float32:
        """Answer at an exit: [M, H] to [M, V].

        Args:
            hidden: State at that position.
            position: 1 to the number of exits; at the last every kind is the model's own head.
            kind: ``"raw"`` norm and head; ``"affine"`` the fitted map between them, raw where there
                is none; ``"shortlist"`` the same as affine for the short list's columns only, -inf
                elsewhere.

        Returns:
            A fresh array, not divided by the exit's temperature.

        Raises:
            ShapeError: The states are not [M, H] float32.
            ConfigError: No such position or kind, or no short list was fitted.
            BackendError: The runtime failed.
        """
        if kind not in {"raw", "affine", "shortlist"}:
            raise ConfigError(f"expected a raw, affine or shortlist head, found {kind!r}")
        affine, columns = None, None
        if self._check_exit(position) < self.depth and kind != "raw":
            affine = self._affine(position)
            columns = self._shortlist() if kind == "shortlist" else None
        hidden = self._check_states(hidden)
        try:
            found = self._logits(hidden, affine=affine, shortlist=columns is not None)
        except Exception as error:
            raise self._failed(f"the head at position {position}", error) from error
        if columns is None:
            return found
        every = np.full((len(hidden), len(self._embedding)), -np.inf, dtype=np.float32)
        every[:, columns] = found
        return every

    def gate(self, hidden: Float32, *, position: int) -> float | None:
        """Chance that the exit agrees with full depth, last row; ``None`` without a gate.

        Raises:
            ShapeError: The states are not [M, H] float32.
            ConfigError: No such position.
        """
        layer = self._check_exit(position)
        gate = None if self.exits is None else self.exits.gates.get(layer)
        if gate is None:
            return None
        normed = self.normed(self._check_states(hidden)[-1])
        return float(1.0 / (1.0 + np.exp(-np.float64(gate.weight @ normed + gate.bias))))

    def normed(self, hidden: Float32) -> Float32:
        """The last norm of states [..., H]: what heads, affine maps and gates read."""
        mean = np.square(hidden).mean(axis=-1, keepdims=True)
        eps = np.float32(self.model.architecture.rms_norm_eps)
        return np.asarray(hidden / np.sqrt(mean + eps) * self._norm, dtype=np.float32)

    @abstractmethod
    def _run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        """Compute; ``hidden`` is only read, the cells are not yet marked present."""

    @abstractmethod
    def _fill(self, hidden: Float32, cache: KvCache, *, layer: int, first: int) -> None:
        """Write keys and values of the layers from ``layer`` on."""

    @abstractmethod
    def _logits(self, hidden: Float32, *, affine: AffineExit | None, shortlist: bool) -> Float32:
        """Norm, affine map where there is one, and the head or the short list's rows of it."""

    def _affine(self, position: int) -> AffineExit | None:
        return None if self.exits is None else self.exits.affine.get(self.layers_at(position))

    def _shortlist(self) -> Int64:
        if self.exits is None or self.exits.shortlist is None:
            raise ConfigError(
                "no short list was fitted for this model", help="edgewise fit-exits MODEL"
            )
        return self.exits.shortlist

    def _check_exit(self, position: int) -> int:
        """How many layers have run at an exit."""
        if not 1 <= position <= len(self.exit_layers):
            raise ConfigError(
                f"expected an exit's position, 1 to {len(self.exit_layers)}, found {position}"
            )
        return self.layers_at(position)

    def _check_states(self, hidden: Any) -> Float32:
        width = self.model.architecture.hidden_size
        if (
            not isinstance(hidden, np.ndarray)
            or hidden.dtype != np.float32
            or hidden.ndim != 2
            or not len(hidden)
            or hidden.shape[1] != width
        ):
            found = f"{getattr(hidden, 'dtype', '')} {getattr(hidden, 'shape', type(hidden))}"
            raise ShapeError(f"expected states [M, {width}] of float32, found {found.strip()}")
        return np.ascontiguousarray(hidden)

    def _check_cells(self, cache: KvCache, first: int, count: int) -> None:
        a = self.model.architecture
        layers, heads, capacity, width = cache.keys.shape
        if (layers, heads, width) != (a.num_hidden_layers, a.num_key_value_heads, a.head_dim):
            raise ConfigError(
                f"the cache is of another model: {layers} layers, {heads} heads of {width}",
                help="program.new_cache(capacity) makes one that fits",
            )
        room = min(capacity, self.model.context_length)
        if first < 0 or first + count > room:
            raise ConfigError(
                f"expected cells within 0 to {room}, found {first} to {first + count}",
                help="ask for a larger cache, at most the model's context length",
            )

    def _failed(self, what: str, error: Exception) -> BackendError:
        return BackendError(f"backend {self.backend!r} failed in {what}: {error}")


def attention_masks(
    cache: KvCache, *, start: int, stop: int, first: int, count: int
) -> list[npt.NDArray[np.bool_] | None]:
    """Who attends to whom in each layer, for tokens at cells ``first`` to ``first + count``.

    Args:
        cache: Of the request.
        start: First layer.
        stop: Layer after the last.
        first: Cell of the first token.
        count: Tokens, M.

    Returns:
        For each layer [M, first + M], true where attended to: cells present before the tokens, and
        the tokens up to each itself. ``None`` where every cell before is present: purely causal.
    """
    before = cache.present[start:stop, :first]
    if before.all():
        return [None] * (stop - start)
    causal = np.tri(count, dtype=bool)
    return [
        None if row.all() else np.hstack([np.broadcast_to(row, (count, first)), causal])
        for row in before
    ]


def decoder_names() -> tuple[tuple[str, Precision], ...]:
    """Decoder backends whose package is installed here, with each precision they have."""
    return tuple(
        (name, precision)
        for name, (_, package, precisions) in _RUNTIMES.items()
        if importlib.util.find_spec(package) is not None
        for precision in precisions
    )


def load_decoder(  # noqa: PLR0913 - each is one property of the program
    model: LanguageModel,
    backend: str = "torch:cpu",
    *,
    threads: int = 1,
    precision: Precision = "fp32",
    exit_layers: Sequence[int] = (),
    exits: LanguageExits | None = None,
) -> DecoderProgram:
    """Load a model on a backend.

    Args:
        model: Weights and sizes.
        backend: ``runtime:device``, or the runtime alone.
        threads: Of each call.
        precision: Of the weights.
        exit_layers: Where one may leave; the whole depth is always one.
        exits: Fitted heads.

    Raises:
        BackendUnavailable: Not installed, or no such device here.
        OpUnsupported: The backend cannot have this precision.
        ConfigError: An exit is out of range.
        ModelError: The exits are of other weights.
    """
    name = next((n for n in _RUNTIMES if backend in {n, n.partition(":")[0]}), None)
    if name is None:
        raise BackendUnavailable(
            f"no backend {backend!r} runs language models", help=nearest_names(backend, _RUNTIMES)
        )
    module, _, precisions = _RUNTIMES[name]
    if precision not in precisions:
        raise OpUnsupported(
            f"backend {name!r} has no weights of {precision}, only {', '.join(precisions)}",
            help="use 'onnxruntime:CPU'",
        )
    loader = importlib.import_module(f"edgewise.backends.decoder.{module}")
    program: DecoderProgram = loader.load(
        model,
        backend=name,
        threads=threads,
        precision=precision,
        exit_layers=exit_layers,
        exits=exits,
    )
    return program

"""A decoder as the staged program that requests, policies and profiles know.

A token is a request: its stages are the groups of layers between candidate exits, its heads the
exits. A head's price is the answer there and what the KV policy asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Context, Program
from edgewise.errors import ModelError
from edgewise.model.decoding import KvPolicy
from edgewise.model.graph import Graph, TensorSpec
from edgewise.model.staged import Exit, Stage, StagedModel
from edgewise.runtime.generation.state import TextState

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind

Float32 = npt.NDArray[np.float32]


def staged_decoder(decoder: DecoderProgram, *, head: HeadKind = "affine") -> StagedModel:
    """A decoder's outline: what is executed, profiled and decided about, without its operators.

    Args:
        decoder: The loaded model.
        head: What answers at exits.
    """
    layers = (0, *decoder.exit_layers)
    width = decoder.model.architecture.hidden_size
    bounds = [TensorSpec(name=f"layer:{k}", shape=(1, width), dtype="float32") for k in layers]
    sizes = [_layer_bytes(decoder, k) for k in range(decoder.depth)]
    stages = tuple(
        Stage(
            index=i,
            name=f"layers {layers[i]}-{layers[i + 1]}",
            start=bounds[i],
            stop=bounds[i + 1],
            flops=sum(sizes[layers[i] : layers[i + 1]]) / 2.0,  # two for each weight of four bytes
            weight_bytes=sum(sizes[layers[i] : layers[i + 1]]),
            num_ops=layers[i + 1] - layers[i],
        )
        for i in range(len(layers) - 1)
    )
    exits = tuple(
        Exit(
            index=i,
            name=f"layer {k}",
            depth_ratio=k / decoder.depth,
            head=None,
            accuracy=agreement_at(decoder, k),
        )
        for i, k in enumerate(decoder.exit_layers)
    )
    return StagedModel(
        name=decoder.model.name,
        source=_Weights(decoder, head),
        stages=stages,
        exits=exits,
        num_classes=decoder.model.architecture.vocab_size,
    )


def agreement_at(decoder: DecoderProgram, layer: int) -> float | None:
    """Share of tokens on which an exit was found to agree with full depth; ``None`` unknown."""
    if layer == decoder.depth:
        return 1.0
    fitted = None if decoder.exits is None else decoder.exits.affine.get(layer)
    return None if fitted is None else fitted.agreement


def _layer_bytes(decoder: DecoderProgram, layer: int) -> int:
    prefix = f"model.layers.{layer}."
    return sum(w.nbytes for name, w in decoder.model.weights.items() if name.startswith(prefix))


class _Weights:
    """Identifies what was measured; a decoder's operators are its backend's own matter."""

    dynamic_batch = False

    def __init__(self, decoder: DecoderProgram, head: HeadKind) -> None:
        affine = () if decoder.exits is None or head == "raw" else sorted(decoder.exits.affine)
        told = (decoder.model.digest, decoder.precision, head, list(affine))
        self._digest = hashlib.sha256(repr(told).encode()).hexdigest()

    @property
    def graph(self) -> Graph:
        raise ModelError("a language model is staged by layers; it has no graph of operators")

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        raise ModelError(f"layers {start} to {stop} have no ONNX piece of a batch of {batch}")

    def torch_segment(self, start: str, stop: str) -> None:  # noqa: ARG002 - the protocol's
        return None

    def weights_digest(self) -> str:
        return self._digest


class TokenContext(Context):
    """The newest token of one text on its way through the model."""

    batch = 1

    def __init__(self, text: TextState, head: HeadKind) -> None:
        self.text, self._head = text, head
        self._states: list[Float32 | None] = [None] * (1 + len(text.decoder.exit_layers))

    def set_boundary(self, position: int, values: Float32) -> None:
        """Take a state [1, H]; at position 0 the embedded token."""
        self._states[position] = values

    def boundary(self, position: int) -> Float32:
        """Return a copy of a state that has been computed."""
        return self._at(position).copy()

    def run_segment(self, start: int, stop: int) -> None:
        """Run groups of layers."""
        self._states[stop] = self.text.run(self._at(start), start=start, stop=stop)

    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit: [1, V]."""
        position = exit_index + 1
        return self.text.decoder.logits(self._at(position), position=position, kind=self._head)

    def finish(self, exit_index: int) -> bool:
        """Settle the deeper layers as the KV policy says, and move on to the next token."""
        spent = self.settle(exit_index)
        self.text.advance()
        return spent

    def settle(self, exit_index: int) -> bool:
        """Settle the deeper layers."""
        return self.text.leave(self._at(exit_index + 1), position=exit_index + 1)

    def _at(self, position: int) -> Float32:
        state = self._states[position]
        assert state is not None  # noqa: S101 - positions are reached in order
        return state


class TokenProgram(Program):
    """A decoder with one text's state: what a token of that text runs on.

    Args:
        text: The text.
        model: The decoder's outline.
        head: What answers at exits.
    """

    def __init__(self, text: TextState, *, model: StagedModel, head: HeadKind = "affine") -> None:
        # Not the base class's: heads are the decoder's, and a context is the text's own.
        decoder = text.decoder
        self.backend, self.threads, self.model = decoder.backend, decoder.threads, model
        self.segments = frozenset((k, k + 1) for k in range(len(decoder.exit_layers)))
        self._text, self._head = text, head

    @property
    def facts(self) -> Mapping[str, object]:
        """What costs depend on and a staged model does not say, as JSON."""
        decoder = self._text.decoder
        return {
            "precision": decoder.precision,
            "head": self._head,
            "exit_layers": list(decoder.exit_layers),
        }

    def _make_context(self, batch: int) -> Context:  # noqa: ARG002 - a token is one
        return TokenContext(self._text, self._head)

    @contextmanager
    def context(self, batch: int = 1) -> Iterator[Context]:
        """Lend the newest token's context; a token that fails leaves nothing in the text."""
        try:
            yield self._make_context(batch)
        except BaseException:
            self._text.drop_unfinished()
            raise


class _ProbeContext(TokenContext):
    """Does the same token again and again, its KV policy's work counted with the head."""

    def run_head(self, exit_index: int) -> Float32:
        logits = super().run_head(exit_index)
        self.settle(exit_index)
        return logits


class ProbeProgram(TokenProgram):
    """A token after a text of a stated length, for measuring what its units cost.

    Args:
        decoder: The loaded model.
        length: Tokens before it.
        model: The decoder's outline.
        head: What answers at exits.
        kv: Whose work heads include.
    """

    def __init__(
        self,
        decoder: DecoderProgram,
        length: int,
        *,
        model: StagedModel,
        head: HeadKind = "affine",
        kv: KvPolicy = "propagate",
    ) -> None:
        text = TextState(decoder, length + 1, kv=kv)
        rng = np.random.default_rng(0)
        for cells in (text.cache.keys, text.cache.values):
            cells[...] = rng.standard_normal(cells.shape, dtype=np.float32)
        text.cache.present[:, :length] = True
        text.cache.length = length
        super().__init__(text, model=model, head=head)

    def _make_context(self, batch: int) -> Context:  # noqa: ARG002 - a token is one
        return _ProbeContext(self._text, self._head)

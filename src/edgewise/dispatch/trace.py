"""What a forward pass computes, in order: operators, the tensors between them, and segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgewise.errors import ModelError
from edgewise.profiles.operators import OperatorShape, SegmentKind

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value between operators.

    Attributes:
        name: Of its producer, or ``"input"``.
        size_bytes: How large it is.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator instance.

    Attributes:
        name: Path of the module, such as ``"model.layers.3.mlp.gate_proj"``; of an operator that is
            no module, its layer's path and what it does: ``"model.layers.3.add_attention"``.
        shape: What it costs by; a fixed kind for what stays on torch.
        inputs: Numbers of the tensors it reads, weights left out.
        output: Number of the tensor it makes.
        layer: Which layer it is in; ``None`` outside of layers.
    """

    name: str
    shape: OperatorShape
    inputs: tuple[int, ...]
    output: int
    layer: int | None = None

    @property
    def supported(self) -> bool:
        """Whether dispatch may choose its backend."""
        return not self.shape.is_fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Several nodes in a row that can be compiled as one piece, or a few pieces.

    Attributes:
        kind: What sort of segment.
        start: Number of the first node.
        stop: Number after the last node. Fixed nodes inside belong to the segment.
        parts: What is run in their place, one after the other. A norm that several linears read
            is computed within each of them, so that no piece keeps anything between calls.
        name: Path of the module that it replaces, or of its first node.
    """

    kind: SegmentKind
    start: int
    stop: int
    parts: tuple[OperatorShape, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One forward pass.

    Attributes:
        model: Name of the model.
        phase: Prefill, or decode of one token.
        length: Tokens that go in: 1 for decode.
        past: Tokens in the cache before; 0 for the paper's decode call.
        nodes: In the order they run.
        tensors: What they read and make; number 0 is the model's input.
        candidates: Segments that could replace runs of nodes.

    Raises:
        ModelError: A node reads what was not made before it, or a candidate is outside.
    """

    model: str
    phase: Phase
    length: int
    past: int
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    candidates: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        made = {0}
        for node in self.nodes:
            if not made.issuperset(node.inputs) or node.output in made:
                raise ModelError(
                    f"trace of {self.model!r}: {node.name!r} reads tensors {node.inputs} and makes"
                    f" {node.output}, but {len(made)} were made before it"
                )
            made.add(node.output)
        for c in self.candidates:
            if not 0 <= c.start < c.stop <= len(self.nodes):
                raise ModelError(
                    f"trace of {self.model!r}: segment {c.name!r} covers nodes {c.start} to"
                    f" {c.stop} of {len(self.nodes)}"
                )

    @property
    def operators(self) -> tuple[Node, ...]:
        """The nodes whose backend is chosen, in order."""
        return tuple(node for node in self.nodes if node.supported)

    @property
    def what(self) -> str:
        """Phase and length in words."""
        return say_pass(self.phase, self.length, self.past)


def say_pass(phase: Phase, length: int, past: int) -> str:
    """Write which forward pass is meant.

    Example:
        >>> say_pass("prefill", 16, 0), say_pass("decode", 1, 64)
        ('prefill 16', 'decode, 64 in the cache')
    """
    if phase == "prefill":
        return f"prefill {length}" + (f", {past} in the cache" if past else "")
    return f"decode, {past} in the cache" if past else "decode"

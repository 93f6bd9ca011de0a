"""A model as an ordered list of operators with the tensors between them.

Both frontends (a torch export, an ONNX file) build this graph, so that cuts, FLOPs and bytes are
computed by one piece of code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgewise.errors import ModelError

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and type of a tensor that flows between operators.

    Attributes:
        name: Unique in its graph.
        shape: For one sample: the batch axis comes first and is 1.
        dtype: numpy's name of the element type, for example ``"float32"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of one sample, bytes."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator.

    Attributes:
        name: Unique in its graph.
        kind: The frontend's name of the operation, for people.
        inputs: Names of the tensors read; weights and constants are not listed.
        outputs: Names of the tensors written.
        flops: Floating-point operations for one sample; a multiply-add counts two.
        weight_bytes: Size of the parameters it reads, bytes.
        scope: Dotted path of the module it came from, ``""`` where unknown.
        is_view: The output is the first input under another shape: no data is computed.
        is_contraction: A convolution or matrix product: the work that exits are spaced by.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: float = 0.0
    weight_bytes: int = 0
    scope: str = ""
    is_view: bool = False
    is_contraction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operators in an order in which they can run.

    Attributes:
        inputs: Names of the tensors the user passes.
        outputs: Names of the tensors the user gets; the first is the answer.
        ops: In topological order.
        tensors: Every tensor by name. A value that is not one tensor (the tuple that a split
            returns) is absent, so it can never be a cut.

    Raises:
        ModelError: An operator reads a tensor before it is written.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[Op, ...]
    tensors: Mapping[str, TensorSpec]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for op in self.ops:
            missing = [name for name in op.inputs if name not in known]
            if missing:
                raise ModelError(
                    f"operator {op.name!r} ({op.kind}) reads {missing[0]!r} before it is written"
                )
            known.update(op.outputs)
        for name in self.outputs:
            if name not in known:
                raise ModelError(f"the graph output {name!r} is written by no operator")

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole graph for one sample."""
        return math.fsum(op.flops for op in self.ops)

    def between(self, start: str, stop: str) -> tuple[int, ...]:
        """Which operators compute one tensor from another.

        Operators that depend on no input (constants) and views of ``start`` are included where
        they are needed, so a slice is complete on its own.

        Args:
            start: Name of the tensor the slice is given.
            stop: Name of the tensor it returns.

        Returns:
            Indices into ``ops``, ascending.

        Raises:
            ModelError: ``stop`` also depends on something that does not pass through ``start``.
        """
        writer = {name: i for i, op in enumerate(self.ops) for name in op.outputs}
        needed: set[int] = set()
        pending = [stop]
        while pending:
            name = pending.pop()
            if name == start:
                continue
            index = writer.get(name)
            if index is None:
                raise ModelError(
                    f"{stop!r} cannot be computed from {start!r} alone: it also reads the"
                    f" model input {name!r}"
                )
            if index not in needed:
                needed.add(index)
                pending.extend(self.ops[index].inputs)
        return tuple(sorted(needed))


def einsum_flops(equation: str, shapes: Sequence[tuple[int, ...]]) -> float | None:
    """Work of a contraction of two tensors; a multiply-add counts two.

    Returns:
        Twice the product of all index sizes, or ``None`` where that is not the count: other than
        two tensors, an ellipsis, nothing summed over.

    Example:
        >>> einsum_flops("bik,bkj->bij", [(1, 3, 4), (1, 4, 5)])
        120.0
    """
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(shapes) != 2 or "." in equation or set(left) - {","} <= set(right):
        return None
    sizes = {
        letter: size
        for term, shape in zip(terms, shapes, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return 2.0 * math.prod(sizes.values())

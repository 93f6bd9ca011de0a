"""Costs of transformer operators by exact shape: on each backend, and of going between backends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from edgewise.errors import ProfileError, nearest_names
from edgewise.profiles.records import Provenance, ThreadPolicy

# Supported by every dispatcher; a segment is several of them compiled as one piece; what is fixed
# stays on torch and is only paid for.
OperatorKind = Literal["linear", "activation", "rmsnorm", "layernorm"]
SegmentKind = Literal["norm_linear", "mlp", "norm_mlp", "layer"]
FixedKind = Literal["attention", "rope", "add", "multiply", "embedding"]
Kind = Literal[OperatorKind, SegmentKind, FixedKind]

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttentionShape:
    """What attention inside a layer, or alone, is computed with.

    Attributes:
        heads: Of the queries.
        kv_heads: Of keys and values.
        head_dim: Width of one head.
        past: Tokens that are in the cache already; 0 in prefill.
        qk_norm: ``"head"`` normalises each head of q and k, ``"full"`` all heads at once.
        post_norm: Norms stand after attention and MLP instead of before.
    """

    heads: int
    kv_heads: int
    head_dim: int
    past: int = 0
    qk_norm: Literal["", "head", "full"] = ""
    post_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OperatorShape:
    """Everything that decides what an operator or segment costs; batch size 1, FP32.

    Attributes:
        kind: What is computed.
        m: Rows: tokens, or tokens times heads for a norm of each head.
        k: Width of the input; for attention the width of the queries.
        n: Width of the output; for ``mlp``, ``norm_mlp`` and ``layer`` the intermediate width,
            their output is as wide as their input.
        bias: A linear or layer norm adds one; in a layer: q, k and v do.
        function: ``"silu"`` or ``"gelu"`` of an activation; of an MLP ``"silu-gated"`` (gate and
            up are two matrices) or ``"gelu-packed"`` (one matrix gives both halves); the norm's
            kind of a ``norm_linear``.
        attention: Of ``layer``, ``attention`` and ``rope``; ``None`` for all others.
        dtype: Of everything.
    """

    kind: Kind
    m: int
    k: int
    n: int
    bias: bool = False
    function: str = ""
    attention: AttentionShape | None = None
    dtype: Literal["float32"] = "float32"

    def __post_init__(self) -> None:
        if self.kind not in ALL_KINDS:
            raise ValueError(
                f"unknown kind of operator {self.kind!r}; {nearest_names(self.kind, ALL_KINDS)}"
            )
        if self.m < 0 or self.k < 1 or self.n < 1:
            raise ValueError(f"an operator has m >= 0 and k, n >= 1, found {self}")
        if (self.attention is None) == (self.kind in {"layer", "attention", "rope"}):
            raise ValueError(
                f"layer, attention and RoPE have an attention shape, others none: {self}"
            )

    @property
    def key(self) -> str:
        """The shape in one line; two shapes are equal exactly when their keys are.

        Example:
            >>> OperatorShape(kind="linear", m=16, k=576, n=1536).key
            'linear m=16 k=576 n=1536'
            >>> OperatorShape(kind="mlp", m=1, k=576, n=1536, function="silu-gated").key
            'mlp m=1 k=576 n=1536 silu-gated'
        """
        words = [self.kind, f"m={self.m}", f"k={self.k}", f"n={self.n}"]
        if self.function:
            words.append(self.function)
        if self.bias:
            words.append("bias")
        if self.attention is not None:
            a = self.attention
            words += [f"heads={a.heads}/{a.kv_heads}x{a.head_dim}", f"past={a.past}"]
            words += [f"qk-norm={a.qk_norm}"] if a.qk_norm else []
            words += ["post-norm"] if a.post_norm else []
        return " ".join(words)

    @property
    def is_segment(self) -> bool:
        """Whether several operators are compiled as this one piece."""
        return self.kind in get_args(SegmentKind)

    @property
    def is_fixed(self) -> bool:
        """Whether it stays on torch."""
        return self.kind in get_args(FixedKind)

    @property
    def input_bytes(self) -> int:
        """Of the activations that go in, bytes; without what is in a cache."""
        return self.m * self.k * FLOAT32_BYTES

    @property
    def output_bytes(self) -> int:
        """Of what comes out, bytes; for a layer with the new keys and values."""
        if self.kind in {"mlp", "norm_mlp"}:
            return self.input_bytes
        if self.kind == "layer":
            return self.m * (self.k + 2 * self._widths()[1]) * FLOAT32_BYTES
        return self.m * self.n * FLOAT32_BYTES

    @property
    def weight_bytes(self) -> int:
        """Of the parameters, bytes: what a backend keeps a copy of."""
        return self._weights() * FLOAT32_BYTES

    @property
    def flops(self) -> int:
        """Twice the multiply-accumulates of its matrices; 0 for what has none."""
        return 2 * self.m * self._matrices()

    def _widths(self) -> tuple[int, int]:
        """Width of the queries, and of the keys, over all heads."""
        a = self.attention
        return (a.heads * a.head_dim, a.kv_heads * a.head_dim) if a is not None else (0, 0)

    def _matrices(self) -> int:
        """Elements of the weight matrices."""
        match self.kind:
            case "linear" | "norm_linear":
                return self.k * self.n
            case "mlp" | "norm_mlp":
                return 3 * self.k * self.n
            case "layer":
                q, kv = self._widths()
                return 3 * self.k * self.n + self.k * (2 * q + 2 * kv)
            case _:
                return 0

    def _weights(self) -> int:
        vectors = {
            "linear": self.n * self.bias,
            "norm_linear": self.k + self.n * self.bias,
            "norm_mlp": self.k,
            "rmsnorm": self.n,
            "layernorm": self.n * (1 + self.bias),
            "layer": 2 * self.k + self._beside_matrices(),
        }
        return self._matrices() + vectors.get(self.kind, 0)

    def _beside_matrices(self) -> int:
        """Elements of a layer's biases, and of the norms of q and k."""
        if self.attention is None:
            return 0
        q, kv = self._widths()
        norms = {"head": 2 * self.attention.head_dim, "full": q + kv}
        return (q + 2 * kv) * self.bias + norms.get(self.attention.qk_norm, 0)


ALL_KINDS: tuple[str, ...] = (
    *get_args(OperatorKind),
    *get_args(SegmentKind),
    *get_args(FixedKind),
)


def parse_shape(key: str) -> OperatorShape:
    """Read a shape from its key.

    Raises:
        ProfileError: It is no key of a shape.

    Example:
        >>> parse_shape("linear m=16 k=576 n=1536 bias").bias
        True
    """
    words = key.split()
    numbers: dict[str, int] = {}
    fields: dict[str, object] = {}
    attention: dict[str, object] = {}
    try:
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name in {"m", "k", "n"}:
                numbers[name] = int(value)
            elif name == "heads":
                found = map(int, re.split("[/x]", value))
                attention |= dict(zip(("heads", "kv_heads", "head_dim"), found, strict=True))
            elif name == "past":
                attention["past"] = int(value)
            elif name == "qk-norm":
                attention["qk_norm"] = value
            elif word == "post-norm":
                attention["post_norm"] = True
            elif word == "bias":
                fields["bias"] = True
            else:
                fields["function"] = word
        if attention:
            fields["attention"] = AttentionShape(**attention)  # type: ignore[arg-type]
        return OperatorShape(kind=words[0], **numbers, **fields)  # type: ignore[arg-type]
    except (IndexError, TypeError, ValueError) as error:
        raise ProfileError(f"{key!r} is no key of an operator's shape: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Statistics of one call's wall time within a run, seconds.

    Attributes:
        mean_s: Arithmetic mean.
        median_s: What plans are made with.
        std_s: Standard deviation of single samples.
        min_s: Least.
        max_s: Largest.
        p90_s: 90 % of calls stay under it.
        p95_s: 95 %.
        p99_s: 99 %.
        median_low_s: Lower end of the 95 % interval of the median.
        median_high_s: Upper end.
        calls: Calls in all: samples times calls in each.
        samples: How many samples; short operators are called several times within one.
    """

    mean_s: float
    median_s: float
    std_s: float
    min_s: float
    max_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    median_low_s: float
    median_high_s: float
    calls: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Correctness:
    """How far outputs are from torch on the CPU.

    Attributes:
        passed: Every element within rtol and atol.
        max_abs: Largest absolute error.
        mean_abs: Mean absolute error.
        max_rel: Largest error over the reference's magnitude.
        rtol: Allowed, relative.
        atol: Allowed, absolute.
    """

    passed: bool
    max_abs: float
    mean_abs: float
    max_rel: float
    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of one call above idle, joules.

    Attributes:
        energy_j: The estimate; ``None`` where it is not known.
        low_j: Lower end of its 95 % interval; ``None`` where not known.
        high_j: Upper end.
        note: Which meter, or why there is none.
    """

    energy_j: float | None = None
    low_j: float | None = None
    high_j: float | None = None
    note: str = "no energy meter was read"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One shape on one backend.

    Attributes:
        shape: What was run.
        backend: Runtime on device, e.g. ``"onnxruntime:CPU"``.
        latency: Wall time of one call; ``None`` where it could not run or gave wrong answers.
        correctness: Against torch on the CPU; ``None`` where it did not run, or is simulated.
        energy: Of one call.
        thread_policy: Threads the backend had.
        reason: Why there is no latency; empty where there is.
    """

    shape: OperatorShape
    backend: str
    latency: LatencySummary | None
    correctness: Correctness | None
    energy: Energy
    thread_policy: ThreadPolicy
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether a plan may use it."""
        passed = self.correctness is None or self.correctness.passed
        return self.latency is not None and passed


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """What going from one backend to another costs, affine in the bytes that are handed over.

    Attributes:
        source: Backend that ran before.
        target: Backend that runs next.
        fixed_s: Seconds whatever the size.
        per_byte_s: Seconds per byte.
        fixed_j: Joules; ``None`` where no meter covers it.
        per_byte_j: Joules per byte.
        interval_s: 95 % interval of the cost at ``typical_bytes``, seconds.
        typical_bytes: Where the interval is of.
        samples: Pairs measured.
    """

    source: str
    target: str
    fixed_s: float
    per_byte_s: float = 0.0
    fixed_j: float | None = None
    per_byte_j: float | None = None
    interval_s: tuple[float, float] | None = None
    typical_bytes: int = 0
    samples: int = 0

    def at_s(self, size_bytes: float) -> float:
        """Seconds for a tensor of that many bytes; never negative."""
        return max(0.0, self.fixed_s + self.per_byte_s * size_bytes)

    def at_j(self, size_bytes: float) -> float | None:
        """Joules for a tensor of that many bytes; ``None`` where not known."""
        if self.fixed_j is None:
            return None
        return max(0.0, self.fixed_j + (self.per_byte_j or 0.0) * size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """All costs of operators on one device under one thread policy in one state.

    Attributes:
        name: What it is called in output.
        device_id: Fingerprint of the device.
        device: What the fingerprint stands for.
        thread_policy: Threads the backends had.
        provenance: Measured, simulated or estimated; printed with every number.
        state: ``"calm"``, or what ran beside, in words.
        created_unix_s: When the campaign began.
        costs: By shape and backend.
        switches: By source and target; a pair that is missing costs nothing on paper and is
            refused by plans unless both are one backend.
        notes: How it was made: facts for people; versions of the runtimes among them.
    """

    name: str
    device_id: str
    device: Mapping[str, object]
    thread_policy: ThreadPolicy
    provenance: Provenance
    state: str = "calm"
    created_unix_s: float = 0.0
    costs: Mapping[tuple[OperatorShape, str], OperatorCost]
    switches: Mapping[tuple[str, str], SwitchCost]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", MappingProxyType(dict(self.costs)))
        object.__setattr__(self, "switches", MappingProxyType(dict(self.switches)))

    def backends(self) -> tuple[str, ...]:
        """Backends with at least one usable cost, in the order they were measured."""
        return tuple(dict.fromkeys(b for (_, b), cost in self.costs.items() if cost.usable))

    def shapes(self) -> tuple[OperatorShape, ...]:
        """Shapes with at least one row, in the order they were measured."""
        return tuple(dict.fromkeys(shape for shape, _ in self.costs))

    def excluded(self) -> tuple[OperatorCost, ...]:
        """Rows that no plan uses, with the reason in each."""
        return tuple(cost for cost in self.costs.values() if not cost.usable)

    def cost(self, shape: OperatorShape, backend: str) -> OperatorCost:
        """Look up one row.

        Raises:
            ProfileError: It was not measured.
        """
        found = self.costs.get((shape, backend))
        if found is None:
            known = [s.key for s in self.shapes()]
            raise ProfileError(
                f"table {self.name!r} has no cost of {shape.key!r} on {backend!r};"
                f" {nearest_names(shape.key, known)}",
                help="edgewise dispatch measure adds what is missing",
            )
        return found

    def switch(self, source: str, target: str) -> SwitchCost:
        """Look up what going from one backend to another costs; nothing within one backend.

        Raises:
            ProfileError: That pair was not measured.
        """
        if source == target:
            return SwitchCost(source=source, target=target, fixed_s=0.0, fixed_j=0.0)
        found = self.switches.get((source, target))
        if found is None:
            raise ProfileError(
                f"table {self.name!r} has no switch cost from {source!r} to {target!r}",
                help="edgewise dispatch measure adds what is missing",
            )
        return found


def table_of(
    costs: Iterable[OperatorCost], switches: Iterable[SwitchCost], **fields: object
) -> OperatorTable:
    """Make a table from rows; ``fields`` are the rest of :class:`OperatorTable`."""
    return OperatorTable(
        costs={(c.shape, c.backend): c for c in costs},
        switches={(s.source, s.target): s for s in switches},
        **fields,  # type: ignore[arg-type]
    )

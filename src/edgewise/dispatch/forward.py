"""A forward pass of a transformer as a trace: operators in order, and who reads whose output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from edgewise.dispatch.trace import Candidate, Node, Phase, Tensor, Trace
from edgewise.errors import ConfigError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import (
    FLOAT32_BYTES,
    AttentionShape,
    Kind,
    OperatorShape,
    SegmentKind,
)

Rule = Literal["clean", "paper"]
RULES: tuple[Rule, ...] = ("clean", "paper")
PAPER_LENGTHS = (16, 32, 64, 128)


def trace_forward(  # noqa: PLR0913 - each is one property of the call
    architecture: Architecture,
    *,
    phase: Phase = "prefill",
    length: int = 1,
    past: int = 0,
    rule: Rule = "clean",
    all_logits: bool = True,
) -> Trace:
    """Trace one forward pass, batch size 1.

    Args:
        architecture: The model.
        phase: Decode is a pass of one token.
        length: Tokens that go in; 1 for decode.
        past: Tokens in the cache before.
        rule: ``"paper"`` counts the whole MLP module once more as an activation, as the paper's
            numbers of operators do; such a node has no part in the data flow.
        all_logits: The head answers for every token, as the paper counts; else for the last alone,
            as generation needs.

    Raises:
        ConfigError: A length below 1, a cache in an encoder, or a decode of more than one token.
    """
    if length < 1 or past < 0:
        raise ConfigError(f"expected a length of at least 1, found {length} after {past}")
    if phase == "decode" and length != 1:
        raise ConfigError(f"decode is a pass of one token, found {length}")
    if not architecture.causal and (past or phase == "decode"):
        raise ConfigError(f"{architecture.name!r} is an encoder: it has no cache and no decode")
    build = _Builder(architecture, length=length, past=past, rule=rule)
    (build.causal if architecture.causal else build.encoder)(1 if not all_logits else length)
    return Trace(
        model=architecture.name,
        phase=phase,
        length=length,
        past=past,
        nodes=tuple(build.nodes),
        tensors=tuple(build.tensors),
        candidates=tuple(build.candidates),
    )


def paper_traces(
    architecture: Architecture, *, rule: Rule = "clean", lengths: Sequence[int] = PAPER_LENGTHS
) -> tuple[Trace, ...]:
    """The forward passes that make up one model's trace: prefills, then one decode call.

    The decode call has one token and an empty cache; an encoder has none.
    """
    found = [trace_forward(architecture, length=n, rule=rule) for n in lengths]
    if architecture.causal:
        found.append(trace_forward(architecture, phase="decode", rule=rule))
    return tuple(found)


def group_key(architecture: Architecture, trace: Trace, node: Node) -> tuple[object, ...]:
    """What two operators must share to be measured once, by the paper's count.

    The model's hidden and intermediate sizes belong to it: without them the published number of
    groups does not come out. Bias does not.
    """
    shape = node.shape
    sizes = (architecture.hidden_size, architecture.intermediate_size)
    # The paper's decode is length 1, and a prefill of one token would be the same group.
    return (shape.kind, shape.m, shape.k, shape.n, trace.length, trace.phase, *sizes)


class _Builder:
    """Nodes in the order transformers runs them; numbers of tensors are their places."""

    def __init__(self, a: Architecture, *, length: int, past: int, rule: Rule) -> None:
        self.a, self.rows, self.past, self.rule = a, length, past, rule
        self.nodes: list[Node] = []
        self.candidates: list[Candidate] = []
        self.tensors = [Tensor(name="input", size_bytes=8 * length)]
        self.layer: int | None = None
        self.norm: Kind = "rmsnorm" if a.causal else "layernorm"
        self.queries = a.num_attention_heads * a.head_dim
        self.keys = a.num_key_value_heads * a.head_dim

    def add(
        self, kind: Kind, name: str, inputs: Sequence[int], k: int, n: int, **fields: Any
    ) -> int:
        """Append a node; returns the number of its tensor."""
        shape = OperatorShape(kind=kind, m=fields.pop("m", self.rows), k=k, n=n, **fields)
        self.tensors.append(Tensor(name=name, size_bytes=shape.m * shape.n * FLOAT32_BYTES))
        output = len(self.tensors) - 1
        self.nodes.append(
            Node(name=name, shape=shape, inputs=tuple(inputs), output=output, layer=self.layer)
        )
        return output

    def segment(self, kind: SegmentKind, name: str, start: int, *parts: OperatorShape) -> None:
        """What could replace the nodes from a place to the last."""
        self.candidates.append(
            Candidate(kind=kind, start=start, stop=len(self.nodes), parts=parts, name=name)
        )

    def fused(self, kind: SegmentKind, k: int, n: int, **fields: Any) -> OperatorShape:
        return OperatorShape(kind=kind, m=fields.pop("m", self.rows), k=k, n=n, **fields)

    def norm_linears(self, start: int) -> tuple[OperatorShape, ...]:
        """Parts of a norm and the linears behind it: each linear computes the norm itself."""
        return tuple(
            self.fused(
                "norm_linear",
                node.shape.k,
                node.shape.n,
                m=node.shape.m,
                bias=node.shape.bias,
                function=self.norm,
            )
            if node.shape.kind == "linear"
            else node.shape
            for node in self.nodes[start + 1 :]
        )

    # --- decoders: Llama, SmolLM2, TinyLlama, Qwen2, Qwen3, OLMo2 ---

    def causal(self, answers: int) -> None:
        a, h = self.a, self.a.hidden_size
        x = self.add("embedding", "model.embed_tokens", [0], h, h)
        for layer in range(a.num_hidden_layers):
            self.layer = layer
            x = self.causal_layer(f"model.layers.{layer}", x)
        self.layer = None
        # Not joined: what this norm gives is an answer of the model by itself.
        x = self.add("rmsnorm", "model.norm", [x], h, h)
        self.add("linear", "lm_head", [x], h, a.vocab_size, m=answers)

    def causal_layer(self, path: str, x: int) -> int:
        h, start = self.a.hidden_size, len(self.nodes)
        post = self.a.model_type == "olmo2"
        head_norm = {"qwen3": "head", "olmo2": "full"}.get(self.a.model_type, "")
        y = x if post else self.add("rmsnorm", f"{path}.input_layernorm", [x], h, h)
        y = self.attention(f"{path}.self_attn", y, start=start)
        if post:
            y = self.add("rmsnorm", f"{path}.post_attention_layernorm", [y], h, h)
        x = self.add("add", f"{path}.add_attention", [x, y], h, h)
        before = len(self.nodes)
        y = x if post else self.add("rmsnorm", f"{path}.post_attention_layernorm", [x], h, h)
        y = self.gated_mlp(f"{path}.mlp", y, norm_at=None if post else before)
        if post:
            y = self.add("rmsnorm", f"{path}.post_feedforward_layernorm", [y], h, h)
        x = self.add("add", f"{path}.add_mlp", [x, y], h, h)
        whole = AttentionShape(
            heads=self.a.num_attention_heads,
            kv_heads=self.a.num_key_value_heads,
            head_dim=self.a.head_dim,
            past=self.past,
            qk_norm=head_norm,  # type: ignore[arg-type]
            post_norm=post,
        )
        shape = self.fused(
            "layer",
            h,
            self.a.intermediate_size,
            bias=self.a.model_type == "qwen2",
            function=f"{self.a.hidden_act}-gated",
            attention=whole,
        )
        self.segment("layer", path, start, shape)
        return x

    def attention(self, path: str, y: int, *, start: int) -> int:
        a, h, family = self.a, self.a.hidden_size, self.a.model_type
        bias = family == "qwen2"

        def projected(letter: str, width: int, heads: int) -> int:
            z = self.add("linear", f"{path}.{letter}_proj", [y], h, width, bias=bias)
            if letter == "v" or family not in {"qwen3", "olmo2"}:
                return z
            name = f"{path}.{letter}_norm"
            if family == "olmo2":
                return self.add("rmsnorm", name, [z], width, width)
            return self.add("rmsnorm", name, [z], a.head_dim, a.head_dim, m=self.rows * heads)

        q = projected("q", self.queries, a.num_attention_heads)
        k = projected("k", self.keys, a.num_key_value_heads)
        v = projected("v", self.keys, a.num_key_value_heads)
        if family != "olmo2":
            self.segment("norm_linear", f"{path}.q_proj", start, *self.norm_linears(start))
        q = self.rope(f"{path}.rope_q", q, a.num_attention_heads)
        k = self.rope(f"{path}.rope_k", k, a.num_key_value_heads)
        y = self.attend(path, [q, k, v])
        return self.add("linear", f"{path}.o_proj", [y], self.queries, h)

    def rope(self, name: str, x: int, heads: int) -> int:
        width = heads * self.a.head_dim
        shape = AttentionShape(heads=heads, kv_heads=heads, head_dim=self.a.head_dim)
        return self.add("rope", name, [x], width, width, attention=shape)

    def attend(self, path: str, inputs: Sequence[int]) -> int:
        shape = AttentionShape(
            heads=self.a.num_attention_heads,
            kv_heads=self.a.num_key_value_heads,
            head_dim=self.a.head_dim,
            past=self.past,
        )
        name = f"{path}.attention"
        return self.add("attention", name, inputs, self.queries, self.queries, attention=shape)

    def gated_mlp(self, path: str, y: int, *, norm_at: int | None) -> int:
        a, h, i = self.a, self.a.hidden_size, self.a.intermediate_size
        function = f"{a.hidden_act}-gated"
        start = len(self.nodes)
        gate = self.add("linear", f"{path}.gate_proj", [y], h, i)
        gate = self.add("activation", f"{path}.act_fn", [gate], i, i, function=a.hidden_act)
        up = self.add("linear", f"{path}.up_proj", [y], h, i)
        both = self.add("multiply", f"{path}.multiply", [gate, up], i, i)
        out = self.add("linear", f"{path}.down_proj", [both], i, h)
        self.segment("mlp", path, start, self.fused("mlp", h, i, function=function))
        if norm_at is not None:
            self.segment("norm_mlp", path, norm_at, self.fused("norm_mlp", h, i, function=function))
        self.phantom(path)
        return out

    def phantom(self, path: str) -> None:
        """The paper's second count of an MLP; reads the model's input, and nobody reads it."""
        if self.rule == "paper":
            h = self.a.hidden_size
            self.add("activation", path, [0], h, h, function=self.a.hidden_act)

    # --- ModernBERT, as a masked language model ---

    def encoder(self, answers: int) -> None:
        a, h = self.a, self.a.hidden_size
        x = self.add("embedding", "model.embeddings.tok_embeddings", [0], h, h)
        x = self.add("layernorm", "model.embeddings.norm", [x], h, h)
        for layer in range(a.num_hidden_layers):
            self.layer = layer
            x = self.encoder_layer(f"model.layers.{layer}", x, first=layer == 0)
        self.layer = None
        x = self.add("layernorm", "model.final_norm", [x], h, h)
        x = self.add("linear", "head.dense", [x], h, h)
        x = self.add("activation", "head.act", [x], h, h, function=a.hidden_act)
        x = self.add("layernorm", "head.norm", [x], h, h)
        self.add("linear", "decoder", [x], h, a.vocab_size, bias=True, m=answers)

    def encoder_layer(self, path: str, x: int, *, first: bool) -> int:
        h, i, start = self.a.hidden_size, self.a.intermediate_size, len(self.nodes)
        y = x if first else self.add("layernorm", f"{path}.attn_norm", [x], h, h)
        y = self.add("linear", f"{path}.attn.Wqkv", [y], h, 3 * h)
        if not first:
            self.segment("norm_linear", f"{path}.attn.Wqkv", start, *self.norm_linears(start))
        y = self.attend(f"{path}.attn", [y])
        y = self.add("linear", f"{path}.attn.Wo", [y], h, h)
        x = self.add("add", f"{path}.add_attention", [x, y], h, h)
        before = len(self.nodes)
        y = self.add("layernorm", f"{path}.mlp_norm", [x], h, h)
        wide = self.add("linear", f"{path}.mlp.Wi", [y], h, 2 * i)
        z = self.add("activation", f"{path}.mlp.act", [wide], i, i, function=self.a.hidden_act)
        z = self.add("multiply", f"{path}.mlp.multiply", [z, wide], i, i)
        y = self.add("linear", f"{path}.mlp.Wo", [z], i, h)
        function = f"{self.a.hidden_act}-packed"
        mlp = f"{path}.mlp"
        self.segment("mlp", mlp, before + 1, self.fused("mlp", h, i, function=function))
        self.segment("norm_mlp", mlp, before, self.fused("norm_mlp", h, i, function=function))
        self.phantom(mlp)
        return self.add("add", f"{path}.add_mlp", [x, y], h, h)

# ruff: noqa: ARG002 - a backend is told more than a fake needs
"""A decoder whose layers and heads cost what a test says, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.base import DecoderProgram
from edgewise.clock import VirtualClock
from edgewise.frontends.language.weights import weight_shapes
from edgewise.model.decoding import AffineExit, KvCache, LanguageExits
from edgewise.model.language import LanguageModel, Tokenizer
from edgewise.model.transformer import Architecture
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession, RowCosts

Float32 = npt.NDArray[np.float32]
VOCABULARY = 300
DEPTH = 4
LAYER_S, HEAD_S, FILL_S = 0.010, 0.004, 0.001
# Each row beyond the first adds this share.
ROW_RATIO = 0.25


class Bytes:
    """Token n is the byte n; above are an end and nothing."""

    stop_ids = frozenset({256})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Any]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))


def outline(*, context: int = 128, tokenizer: Tokenizer | None = None) -> LanguageModel:
    architecture = Architecture(
        name="fake",
        model_type="llama",
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=DEPTH,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=VOCABULARY,
    )
    weights = {
        name: np.ones(shape, dtype=np.float32)
        for name, shape in weight_shapes(architecture).items()
    }
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return LanguageModel(
        name="fake",
        architecture=architecture,
        weights=weights,
        digest="0" * 64,
        context_length=context,
        tokenizer=tokenizer,
    )


class FakeDecoder(DecoderProgram):
    """Charges a clock; answers with a script, by place in the text.

    Attributes:
        ran: Units that ran, with their rows.
        slower: What everything is multiplied by; may be changed on the way.
    """

    def __init__(
        self, answers: Sequence[int], *, exit_layers: Sequence[int] = (1, 2, 3), context: int = 128
    ) -> None:
        affine = {
            k: AffineExit(
                layer=k,
                weight=np.eye(4, dtype=np.float32),
                bias=np.zeros(4, dtype=np.float32),
                agreement=0.5 + k / 10,
            )
            for k in exit_layers
        }
        model = outline(context=context, tokenizer=Bytes())
        super().__init__(
            model,
            backend="fake",
            exit_layers=exit_layers,
            exits=LanguageExits(model="fake", digest=model.digest, affine=affine),
        )
        self.clock = VirtualClock()
        self.answers = list(answers)
        self.ran: list[tuple[str, int]] = []
        self.slower: Callable[[str], float] = lambda _: 1.0
        self.fails_at: str | None = None
        self.answered = 0

    def charge(self, unit: str, seconds: float, rows: int) -> None:
        self.ran.append((unit, rows))
        if unit == self.fails_at:
            raise RuntimeError("out of luck")
        self.clock.sleep_s(seconds * (1 + ROW_RATIO * (rows - 1)) * self.slower(unit))

    def _run_layers(
        self, hidden: Float32, cache: KvCache, *, start: int, stop: int, first: int
    ) -> Float32:
        layers = self.layers_at(stop) - self.layers_at(start)
        self.charge(f"layers:{start}-{stop}", LAYER_S * layers, len(hidden))
        return hidden + 1

    def _fill(self, hidden: Float32, cache: KvCache, *, layer: int, first: int) -> None:
        self.charge(f"fill:{layer}", FILL_S, len(hidden))

    def _logits(self, hidden: Float32, *, affine: AffineExit | None, shortlist: bool) -> Float32:
        self.charge("head", HEAD_S, len(hidden))
        logits = np.zeros((len(hidden), VOCABULARY), dtype=np.float32)
        for row in logits:
            row[self.answers[self.answered % len(self.answers)]] = 9.0
            self.answered += 1
        return logits


def table(layers: Sequence[int], *, fill_s: float) -> CostTable:
    ends = [*layers, DEPTH]
    stages = [LAYER_S * (b - a) for a, b in zip([0, *layers], ends, strict=True)]
    heads = [HEAD_S + fill_s * (k < DEPTH) for k in ends]
    return CostTable.from_costs(stages, heads)


def session(
    answers: Sequence[int] = (97,),
    *,
    exit_layers: Sequence[int] = (1, 2, 3),
    context: int = 128,
    policy: Any = "edgewise",
    growth_ratio: float = 0.0,
    **options: Any,
) -> LanguageSession:
    decoder = FakeDecoder(answers, exit_layers=exit_layers, context=context)
    rows = {m: 1 + ROW_RATIO * (m - 1) for m in (1, 2, 4, 8, 32)}
    return LanguageSession(
        decoder,
        LanguageCosts(
            propagate=table(exit_layers, fill_s=FILL_S),
            mask=table(exit_layers, fill_s=0.0),
            growth_ratio=growth_ratio,
        ),
        policy=policy,
        rows=RowCosts(
            layers_s={m: LAYER_S * DEPTH * r for m, r in rows.items()},
            head_s={m: HEAD_S * r for m, r in rows.items()},
        ),
        clock=decoder.clock,
        **options,
    )


def decoder_of(session: LanguageSession) -> FakeDecoder:
    assert isinstance(session.decoder, FakeDecoder)
    return session.decoder

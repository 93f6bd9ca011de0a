"""UniExit, Table 6: how much work exits add to a backbone, and what head width explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgewise.errors import ConfigError, EdgeError
from edgewise.model import HeadSpec, StagedModel
from edgewise.model.accounting import (
    llama_layer_weights,
    run_chosen_head_ratio,
    run_every_head_ratio,
)
from edgewise.model.transformer import load_architecture
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "FLOPs of a network that runs every head on its way, and of one that runs the chosen head"

_NUM_EXITS = 8
_MOST = 1.02  # of the backbone, at full depth
# Classes of the paper's larger data set; the widths below change by a few channels with 100.
_PAPER = {"resnet50": (133.9, 101.4), "mobilenet_v2": (145.7, 111.6)}
# LLaMA 3.2-1B, from its published configuration.
_LLAMA_LAYERS = 16
_LLAMA_LAYER = {
    "hidden": 2048,
    "intermediate": 8192,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
}
_LLAMA_HEAD = 2048 * 128_256  # hidden times vocabulary
_SMALL = "smollm2-135m"
# Those that stand for different layers of the paper's 16, see uniexit-fig8; and `fit-exits`' list.
_SMALL_EXITS = (2, 3, 6, 9, 12, 18, 24, 27, 29)
_SHORT_LIST = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthFit:
    """The width of convolutional heads that gives a ratio.

    Attributes:
        width: Hidden channels, not rounded.
        every_head: Work with every head over the backbone's, at that width.
        chosen_head: The same with the last head alone.
    """

    width: float
    every_head: float
    chosen_head: float


def run(setup: Setup) -> Reproduction:
    """Count; nothing is timed.

    Args:
        setup: ``models`` are counted beside the paper's; ``quick`` leaves out the paper's two CNNs,
            which must be exported first.
    """
    own, own_verdict = smollm2_figures()
    figures = [*llama_figures(), *own]
    verdicts = [
        Verdict(
            claim="LLaMA 3.2-1B: the paper's ratios follow from its configuration",
            holds=all(f.ours == f.paper for f in llama_figures()),
            detail=", ".join(f"{f.ours:.1f} %" for f in llama_figures()),
        ),
        own_verdict,
    ]
    notes = ["FLOPs are counted from shapes; a multiply-add counts two; nothing is timed."]
    for net in () if setup.quick else tuple(_PAPER):
        setup.say(f"{net}: exporting and counting")
        try:
            found, verdict = _paper_net(net)
        except EdgeError as error:
            notes.append(f"{net} left out: {error.message}")
            continue
        figures += found
        verdicts.append(verdict)
    models = _models(setup.models, notes)
    for model in models:
        setup.say(f"{model.name}: counting")
        every = model.flops_to(model.num_exits - 1, every_head=True) / model.flops
        chosen = model.flops_to(model.num_exits - 1) / model.flops
        figures += [
            _figure(f"{model.name}, its own heads: every head", ours=every),
            _figure(f"{model.name}, its own heads: chosen head", ours=chosen),
        ]
        verdicts.append(
            Verdict(
                claim=f"{model.name}: at full depth at most {_MOST:.2f} of the backbone",
                holds=chosen <= _MOST,
                detail=f"{chosen:.4f}",
            )
        )
    if setup.quick:
        notes.append("--quick leaves out ResNet-50 and MobileNetV2, which must be exported first.")
    return Reproduction(
        title=TITLE,
        source="UniExit, Table 6",
        setting={"paper": "counted by its authors", "ours": "counted from shapes"},
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
    )


def llama_figures() -> tuple[Figure, ...]:
    """The paper's two figures of LLaMA 3.2-1B from its configuration alone."""
    layer = llama_layer_weights(**_LLAMA_LAYER)
    full = _LLAMA_LAYERS * layer + _LLAMA_HEAD
    share = _LLAMA_HEAD / layer
    note = f"a head is {share:.2f} layers of weights"
    return tuple(
        _figure(
            f"LLaMA 3.2-1B, every head, {exits} exits",
            paper=paper,
            ours=run_every_head_ratio(full, [_LLAMA_HEAD] * (exits - 1)),
            note=note,
        )
        for exits, paper in ((16, 418.8), (8, 248.8))
    )


def smollm2_figures() -> tuple[list[Figure], Verdict]:
    """SmolLM2-135M from its configuration: each kind of head at every exit, and the chosen one.

    A multiply-add for each weight that a token reads; attention over the cache is left out, as in
    the paper's figures.
    """
    sizes = load_architecture(_SMALL)
    width, depth = sizes.hidden_size, sizes.num_hidden_layers
    layer = llama_layer_weights(
        hidden=width,
        intermediate=sizes.intermediate_size,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
    )
    fill = 2 * width * sizes.num_key_value_heads * sizes.head_dim  # keys and values of a layer
    head, mapping, short = width * sizes.vocab_size, width * width, width * _SHORT_LIST
    full = depth * layer + head
    few = len(_SMALL_EXITS)
    note = f"a head is {head / layer:.2f} layers of weights"
    every = (
        (f"raw heads, {depth} exits", [head] * (depth - 1), note),
        (f"raw heads, {few + 1} exits", [head] * few, ""),
        (f"affine heads, {few + 1} exits", [head + mapping] * few, ""),
        (
            f"heads of {_SHORT_LIST} tokens, {few + 1} exits",
            [short + mapping] * few,
            "affine; the last head is whole",
        ),
    )
    figures = [
        _figure(f"{_SMALL}, every head: {what}", ours=run_every_head_ratio(full, heads), note=said)
        for what, heads, said in every
    ]
    chosen = {depth: 1.0} | {
        k: (k * layer + mapping + head + (depth - k) * fill) / full for k in _SMALL_EXITS
    }
    figures += [
        _figure(
            f"{_SMALL}, chosen head alone: after {k} of {depth} layers",
            ours=chosen[k],
            note="" if k == depth else "affine; keys and values behind it filled",
        )
        for k in (_SMALL_EXITS[0], _SMALL_EXITS[-1], depth)
    ]
    dearest = max(chosen, key=chosen.__getitem__)
    return figures, Verdict(
        claim=f"{_SMALL}: at most {_MOST:.2f} of the backbone, whichever exit is chosen",
        holds=chosen[dearest] <= _MOST,
        detail=f"{chosen[dearest]:.4f} after {dearest} layers",
    )


def fit_width(
    backbone_flops: float,
    feature_shapes: Sequence[tuple[int, ...]],
    *,
    num_classes: int,
    every_head: float,
) -> WidthFit:
    """Find the width of convolutional heads at which running them all costs a ratio.

    Args:
        backbone_flops: Work without heads.
        feature_shapes: [1, C, H, W] at each exit, the last one's last.
        num_classes: Classes each head answers.
        every_head: The ratio to reach, above 1.
    """

    def heads(width: int) -> list[float]:
        return [
            HeadSpec(kind="conv", feature_shape=shape, width=width, num_classes=num_classes).flops
            for shape in feature_shapes
        ]

    # The work of these heads is proportional to their width.
    width = (every_head - 1.0) * backbone_flops / sum(heads(1))
    last = width * heads(1)[-1]
    return WidthFit(
        width=width,
        every_head=run_every_head_ratio(backbone_flops, [width * h for h in heads(1)]),
        chosen_head=run_chosen_head_ratio(backbone_flops, last),
    )


def _paper_net(net: str) -> tuple[list[Figure], Verdict]:
    from edgewise.frontends.zoo import build_backbone

    every, chosen = _PAPER[net]
    model = build_backbone(net).stage(_NUM_EXITS)
    fit = fit_width(
        model.flops,
        feature_shapes(model),
        num_classes=model.num_classes,
        every_head=every / 100,
    )
    pooled = model.with_random_heads()
    ours_every = pooled.flops_to(_NUM_EXITS - 1, every_head=True) / model.flops
    ours_chosen = max(pooled.flops_to(k) for k in range(_NUM_EXITS)) / model.flops
    figures = [
        _figure(
            f"{net}, the paper's heads, width fitted: every head",
            paper=every,
            ours=fit.every_head,
            note=f"convolutional heads {fit.width:.0f} channels wide",
        ),
        _figure(
            f"{net}, the paper's heads, that width: chosen head",
            paper=chosen,
            ours=fit.chosen_head,
            note="foretold by the width alone",
        ),
        _figure(
            f"{net}, our heads: every head",
            ours=ours_every,
            note="pooled first, 128 wide; the last exit is the network's own classifier",
        ),
        _figure(f"{net}, our heads: chosen head", ours=ours_chosen),
    ]
    verdict = Verdict(
        claim=f"{net}: at most {_MOST:.2f} of the backbone, whichever exit is chosen",
        holds=ours_chosen <= _MOST,
        detail=f"{ours_chosen:.4f}",
    )
    return figures, verdict


def feature_shapes(model: StagedModel) -> list[tuple[int, ...]]:
    """Shapes [1, C, H, W] at each exit; for one that ends in logits, the last map before them.

    Raises:
        ConfigError: There is no map.
    """
    maps = [c.tensor.shape for c in model.legal_cuts() if len(c.tensor.shape) == 4]
    shapes = [s.stop.shape for s in model.stages]
    if len(shapes[-1]) != 4:
        # The last map that is not pooled yet.
        spread = [shape for shape in maps if shape[2] * shape[3] > 1]
        if not spread:
            raise ConfigError(f"model {model.name!r} has no feature map to put a head on")
        shapes[-1] = spread[-1]
    return shapes


def _models(names: Sequence[str], notes: list[str]) -> list[StagedModel]:
    from edgewise.frontends.checkpoint import load_model, shipped_names

    found = []
    for name in names or shipped_names():
        model = load_model(name)
        if model.has_all_heads:
            found.append(model)
        else:
            notes.append(f"{model.name} left out: it has no heads")
    return found


def _figure(name: str, *, ours: float, paper: float | None = None, note: str = "") -> Figure:
    return Figure(
        name=name,
        unit="% of the backbone",
        paper=paper,
        ours=round(100 * ours, 1),
        provenance="estimated",
        note=note,
    )

"""UniExit's Table 6, FLOPs relative to the backbone, from configurations alone.

ResNet-50: 133.9 % with every head, 101.4 % with the chosen one. LLaMA-3.2-1B: 418.8 % with 16 exits
(the reference's count; 248.8 % with 8).
"""

from __future__ import annotations

from typing import Any

import pytest

from edgewise.model.accounting import (
    BlockWork,
    bottleneck_blocks,
    llama_layer_weights,
    run_chosen_head_ratio,
    run_every_head_ratio,
)

HIDDEN, VOCABULARY, LAYERS = 2048, 128256, 16
LLAMA_HEAD = HIDDEN * VOCABULARY
LLAMA_LAYER = llama_layer_weights(
    hidden=HIDDEN, intermediate=8192, num_heads=32, num_kv_heads=8, head_dim=64
)
LLAMA = LAYERS * LLAMA_LAYER + LLAMA_HEAD


@pytest.mark.parametrize(("exits", "percent"), [(16, 418.8), (8, 248.8)])
def test_llama_with_every_head_costs_what_the_paper_says(exits: int, percent: float) -> None:
    ratio = run_every_head_ratio(LLAMA, [LLAMA_HEAD] * (exits - 1))

    assert 100 * ratio == pytest.approx(percent, abs=0.1)


def test_llama_with_the_chosen_head_costs_its_backbone() -> None:
    """Its own head answers at full depth, so nothing is added: the paper's 100.0 %."""
    assert run_chosen_head_ratio(LLAMA, 0.0) == 1.0
    assert pytest.approx(4.32, abs=0.01) == LLAMA_HEAD / LLAMA_LAYER


def every_second(blocks: tuple[BlockWork, ...]) -> tuple[BlockWork, ...]:
    return blocks[1::2]


def width_that_explains(percent: float, num_classes: int) -> float:
    """Head width at which eight heads cost what Table 6 says; their work is linear in it."""
    blocks = bottleneck_blocks()
    backbone = sum(b.macs for b in blocks) + blocks[-1].channels * num_classes
    per_width = sum(b.head_macs(1, num_classes) for b in every_second(blocks))
    return (percent / 100 - 1) * backbone / per_width


@pytest.mark.parametrize("num_classes", [100, 1000])
def test_a_fixed_head_width_explains_both_resnet_figures(num_classes: int) -> None:
    width = width_that_explains(133.9, num_classes)
    blocks = bottleneck_blocks()
    heads = every_second(blocks)
    backbone = sum(b.macs for b in blocks) + blocks[-1].channels * num_classes
    assert len(heads) == 8
    assert 556 <= width <= 576

    every = [b.head_macs(round(width), num_classes) for b in heads]

    assert 100 * run_every_head_ratio(backbone, every) == pytest.approx(133.9, abs=0.1)
    assert 100 * run_chosen_head_ratio(backbone, every[-1]) == pytest.approx(101.4, abs=0.1)


def test_a_head_as_wide_as_its_features_does_not_explain_them() -> None:
    heads = every_second(bottleneck_blocks())
    extras = [b.head_macs(b.channels, 1000) for b in heads]

    assert sum(extras) / extras[-1] == pytest.approx(8.0, abs=0.1)  # the paper has 33.9 / 1.4
    fixed = [b.head_macs(566, 1000) for b in heads]
    assert sum(fixed) / fixed[-1] == pytest.approx(33.9 / 1.4, rel=0.04)


def test_the_formula_counts_what_a_staged_resnet_counts(nets: Any) -> None:
    """Independent: convolutions of transformers' own implementation, by the cut finder's graph."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from edgewise.frontends.torch_module import TorchSource

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2], num_labels=7
    )
    source = TorchSource.export(
        transformers.ResNetForImageClassification(config), nets.torch.zeros(1, 3, 64, 64)
    )
    counted = sum(op.flops for op in source.graph.ops if op.kind == "conv2d")

    blocks = bottleneck_blocks(depths=(1, 2), stem_channels=8, image_size=64)

    assert counted == 2 * sum(b.macs for b in blocks)


def test_running_every_head_costs_at_least_as_much_as_running_one() -> None:
    heads = [3.0, 1.0, 2.0]

    assert run_every_head_ratio(10.0, heads) >= max(run_chosen_head_ratio(10.0, h) for h in heads)
    assert run_every_head_ratio(10.0, []) == 1.0

from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.frontends.outline import outline_model
from edgewise.model import HeadSpec, StagedModel
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce.uniexit_table6 import feature_shapes, fit_width, llama_figures


def test_the_papers_figures_of_llama_follow_from_its_configuration() -> None:
    assert [(f.paper, f.ours) for f in llama_figures()] == [(418.8, 418.8), (248.8, 248.8)]


# Boundaries of ResNet-50 after every second of its 16 bottlenecks, at 224 x 224.
RESNET_SHAPES = [
    *[(1, 256, 56, 56)],
    *[(1, 512, 28, 28)] * 2,
    *[(1, 1024, 14, 14)] * 4,
    *[(1, 2048, 7, 7)],
]


def test_one_head_width_explains_both_of_the_papers_figures_of_resnet50() -> None:
    fit = fit_width(2 * 4.09e9, RESNET_SHAPES, num_classes=1000, every_head=1.339)

    assert fit.every_head == pytest.approx(1.339)
    assert 500 < fit.width < 650
    # 101.4 in the paper; this outline places exits a little differently.
    assert fit.chosen_head == pytest.approx(1.014, abs=0.002)


def test_heads_of_the_fitted_width_cost_what_was_asked() -> None:
    shapes = [(1, 16, 8, 8), (1, 32, 4, 4)]
    fit = fit_width(1e6, shapes, num_classes=10, every_head=1.2)

    heads = [
        fit.width * HeadSpec(kind="conv", feature_shape=s, width=1, num_classes=10).flops
        for s in shapes
    ]

    assert (1e6 + sum(heads)) / 1e6 == pytest.approx(1.2)
    assert fit.chosen_head == pytest.approx((1e6 + heads[-1]) / 1e6)


def test_a_net_that_ends_in_logits_is_given_its_last_map(tiny: StagedModel) -> None:
    assert feature_shapes(tiny)[-1] == (1, 8, 16, 16)


def test_a_net_without_maps_to_the_end_keeps_its_earlier_ones() -> None:
    assert feature_shapes(outline_model(3)) == [(1, 4, 4, 4)] * 3


def test_the_claim_counts_checkpoints_and_judges_them(checkpoint: Path) -> None:
    found = run_claim("uniexit-table6", Setup(models=(str(checkpoint),), quick=True))

    assert {f.provenance for f in found.figures} == {"estimated"}
    own = {f.name: f.ours for f in found.figures if f.name.startswith("tiny")}
    assert own["tiny, its own heads: every head"] > own["tiny, its own heads: chosen head"]  # type: ignore[operator]
    assert found.holds is True
    assert any("--quick" in note for note in found.notes)

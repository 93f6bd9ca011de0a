"""The larger networks of the zoo are the published ones: their parameter counts say so."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from edgewise.errors import BackendUnavailable
from edgewise.frontends.zoo import build_backbone

# Trainable parameters with 1,000 classes, as their papers and reference implementations have them.
_PUBLISHED = {
    "densenet201": 20_013_928,
    "inception_v4": 42_679_816,
    "mnasnet": 4_383_312,
    "resnet50_v2": 25_568_360,
    "squeezenet": 1_235_496,
    "xception": 22_855_952,
}


@pytest.mark.parametrize(("name", "published"), _PUBLISHED.items())
def test_a_network_has_the_published_number_of_parameters(name: str, published: int) -> None:
    file = importlib.import_module(f"edgewise.frontends.zoo.{name}")

    with torch.device("meta"):
        module = file._module()

    assert sum(p.numel() for p in module.parameters()) == published


@pytest.mark.parametrize(
    ("name", "size"), [("inception_v4", 107), ("xception", 96), ("densenet201", 64)]
)
def test_a_network_answers_with_a_thousand_classes(name: str, size: int) -> None:
    file = importlib.import_module(f"edgewise.frontends.zoo.{name}")

    with torch.device("meta"):
        answer = file._module().eval()(torch.empty(1, 3, size, size))

    assert answer.shape == (1, 1000)


def test_the_same_seed_gives_the_same_squeezenet_and_noise_passes_through_it() -> None:
    nets = [build_backbone("squeezenet", size_pixels=64, seed=s).module for s in (0, 0, 1)]
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        first, again, other = (net(image) for net in nets)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 1e-3 < float(first.std()) < 1e3


def test_without_torch_the_zoo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(BackendUnavailable, match="torch") as raised:
        build_backbone("mnasnet")

    assert "edgewise[torch]" in str(raised.value)

from __future__ import annotations

import json
from types import ModuleType

import pytest

from edgewise.device.simulated import full_depth, load_work, work_names
from edgewise.model.accounting import bottleneck_blocks


def test_every_network_has_a_head_at_the_end_of_each_stage() -> None:
    assert work_names() == ("llama-3.2-1b", "mobilenet_v2", "resnet50")
    for name, count in (("llama-3.2-1b", 16), ("mobilenet_v2", 8), ("resnet50", 8)):
        expected = [f"{kind}:{k}" for kind in ("stage", "head") for k in range(count)]
        assert [unit.name for unit in load_work(name)] == expected
        assert full_depth(load_work(name)) == (*expected[:count], f"head:{count - 1}")
        assert all(u.launches > 0 and u.flops > 0 for u in load_work(name))


def flops(model: str, kind: str) -> list[float]:
    return [u.flops for u in load_work(model) if u.name.startswith(kind)]


def test_the_stages_of_resnet_50_have_its_well_known_flops() -> None:
    known = 2 * sum(block.macs for block in bottleneck_blocks())
    assert sum(flops("resnet50", "stage")) == pytest.approx(known, rel=0.005)


def test_exits_of_networks_of_images_lie_about_evenly() -> None:
    for model in ("resnet50", "mobilenet_v2"):
        stages = flops(model, "stage")
        assert max(stages) < 0.19 * sum(stages)


@pytest.mark.parametrize(("model", "paper"), [("resnet50", 1.014), ("mobilenet_v2", 1.116)])
def test_one_head_of_576_channels_adds_what_the_paper_says(model: str, paper: float) -> None:
    whole = sum(flops(model, "stage"))
    assert (whole + flops(model, "head")[-1]) / whole == pytest.approx(paper, abs=0.005)


def test_all_heads_of_the_language_model_cost_what_the_paper_says() -> None:
    work = load_work("llama-3.2-1b")
    every = sum(u.traffic_bytes for u in work)
    chosen = sum(u.traffic_bytes for u in work if u.name in full_depth(work))
    assert every / chosen == pytest.approx(4.188, rel=0.01)  # in weights, cached keys apart


def test_a_token_reads_every_weight_of_the_language_model_once() -> None:
    units = {u.name: u.traffic_bytes for u in load_work("llama-3.2-1b")}
    total = sum(units[name] for name in full_depth(load_work("llama-3.2-1b")))
    assert total == pytest.approx(2.47e9, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "mobilenet_v2"])
def test_the_work_files_of_images_can_be_made_anew(make_work: ModuleType, model: str) -> None:
    shipped = json.loads((make_work.FOLDER / f"{model}.json").read_text(encoding="utf-8"))
    assert make_work.cnn_work(model) == shipped


def test_the_work_file_of_the_language_model_can_be_made_anew(make_work: ModuleType) -> None:
    shipped = json.loads((make_work.FOLDER / "llama-3.2-1b.json").read_text(encoding="utf-8"))
    assert make_work.llama_work() == shipped


@pytest.mark.slow
def test_a_small_llama_launches_as_many_operators_as_the_file_says(make_work: ModuleType) -> None:
    one, two, three = (make_work.count_llama_launches(n) for n in (1, 2, 3))
    assert two - one == three - two == make_work.LLAMA_LAYER_LAUNCHES
    copies = 2  # the answer's index and its probability, to the host
    ends = make_work.LLAMA_EMBEDDING_LAUNCHES + make_work.LLAMA_HEAD_LAUNCHES - copies
    assert one - make_work.LLAMA_LAYER_LAUNCHES == ends

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from edgewise.device.accelerator import Accelerator, load_accelerator
from edgewise.errors import ModelError
from edgewise.model.graph import Graph, Op, TensorSpec
from edgewise.profiling.accelerator_model import (
    ComputeModel,
    PublishedLatency,
    Work,
    edge_tpu,
    fit_compute,
    prefix_work,
    published_latencies,
)


def _op(kind: str, inputs: Sequence[str], output: str, *, flops: float = 0.0) -> Op:
    return Op(
        name=output,
        kind=kind,
        inputs=tuple(inputs),
        outputs=(output,),
        flops=flops,
        is_contraction=kind in {"Conv", "DEPTHWISE_CONV_2D", "Gemm"},
        is_view=kind == "Flatten",
    )


def _graph(ops: Sequence[Op], shapes: dict[str, tuple[int, ...]]) -> Graph:
    return Graph(
        inputs=("x",),
        outputs=(ops[-1].outputs[0],),
        ops=tuple(ops),
        tensors={n: TensorSpec(name=n, shape=s, dtype="float32") for n, s in shapes.items()},
    )


def _block(*, quantised: bool = False) -> Graph:
    """3x3 convolution 4 to 16, norm, 3x3 depthwise, addition of the two, doubled, and a norm."""
    shapes: dict[str, tuple[int, ...]] = {"x": (1, 4, 8, 8)}
    shapes |= dict.fromkeys(("full", "folded", "relu", "deep", "sum"), (1, 16, 8, 8))
    shapes |= dict.fromkeys(("twice", "kept"), (1, 32, 8, 8))
    shapes["thrice"] = (1, 48, 8, 8)
    ops = [
        _op("Conv", ["x"], "full", flops=2.0 * 16 * 64 * 9 * 4),
        _op("BatchNormalization", ["full"], "folded", flops=1024),
        _op("Relu", ["folded"], "relu", flops=1024),
        _op("Conv", ["relu"], "deep", flops=2.0 * 16 * 64 * 9),
        _op("Add", ["deep", "relu"], "sum", flops=1024),
        _op("Concat", ["sum", "relu"], "twice", flops=2048),
        _op("BatchNormalization", ["twice"], "kept", flops=2048),
        _op("Concat", ["twice", "sum"], "thrice", flops=3072),
    ]
    if quantised:
        between, last = [], {"x": "x"}
        for op in ops:
            name = op.outputs[0]
            inputs = tuple(last[each] for each in op.inputs)
            between += [
                dataclasses.replace(op, inputs=inputs),
                _op("QuantizeLinear", [name], f"{name}_q", flops=9),
                _op("DequantizeLinear", [f"{name}_q"], f"{name}_d", flops=9),
            ]
            shapes |= {f"{name}_q": shapes[name], f"{name}_d": shapes[name]}
            last[name] = f"{name}_d"
        ops = between
    return _graph(ops, shapes)


def test_work_of_a_block_is_what_a_hand_counts() -> None:
    work = prefix_work(_block(), "thrice")

    assert work == Work(
        macs=16 * 64 * 9 * 4,
        depthwise_macs=16 * 64 * 9,
        moved_elements=3 * 1024 + 2 * 2048,  # the sum, the first concatenation
        copied_elements=2 * 3072,  # the one that reads a concatenation
        layers=5,
    )


def test_a_norm_that_follows_no_convolution_is_work_of_its_own() -> None:
    before, after = (prefix_work(_block(), name) for name in ("twice", "kept"))

    assert after.moved_elements - before.moved_elements == 2 * 2048
    assert after.layers - before.layers == 1


def test_quantisers_between_operators_are_no_work() -> None:
    assert prefix_work(_block(quantised=True), "thrice") == prefix_work(_block(), "thrice")


def test_the_input_itself_takes_no_work() -> None:
    assert prefix_work(_block(), "x") == Work()


def test_depthwise_convolutions_of_tflite_are_told_by_their_name() -> None:
    graph = _graph(
        [_op("DEPTHWISE_CONV_2D", ["x"], "y", flops=2.0 * 64 * 9 * 4)],
        {"x": (1, 8, 8, 4), "y": (1, 8, 8, 4)},
    )

    assert prefix_work(graph, "y") == Work(depthwise_macs=64 * 9 * 4, layers=1)


def test_a_tensor_from_elsewhere_is_refused() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        prefix_work(_block(), "nowhere")


def test_a_fit_finds_the_prices_that_made_the_latencies() -> None:
    rng = np.random.default_rng(1)
    prices = (5e-13, 4e-11, 6e-11, 5e-10, 2e-5)
    sizes = np.array([1e9, 1e7, 1e7, 1e6, 100.0])
    device = load_accelerator("coral-usb")
    model = ComputeModel(prices_s=prices)
    rows = []
    for values in rng.uniform(0.1, 2.0, (12, 5)) * sizes:
        work = Work(**dict(zip(Work.__slots__, values.tolist(), strict=True)))
        weights = float(rng.uniform(1e6, 3e7))
        latency_s = device.fixed_s + device.stream_s(weights) + model.compute_s(work)
        rows.append(
            PublishedLatency(model="made up", work=work, weight_bytes=weights, latency_s=latency_s)
        )

    assert fit_compute(rows, device).prices_s == pytest.approx(prices, rel=1e-6)


@pytest.fixture(scope="module")
def device() -> Accelerator:
    return load_accelerator("coral-usb")


def _error_ratios(device: Accelerator) -> dict[str, float]:
    model = edge_tpu()
    return {
        row.model: (device.fixed_s + device.stream_s(row.weight_bytes) + model.compute_s(row.work))
        / row.latency_s
        - 1
        for row in published_latencies()
    }


def test_published_latencies_are_met_as_well_as_the_docstring_says(device: Accelerator) -> None:
    errors = np.abs(list(_error_ratios(device).values()))

    assert len(errors) == 15
    assert errors.max() < 0.15
    assert np.median(errors) < 0.04


def test_no_row_decides_its_own_latency_but_densenets(device: Accelerator) -> None:
    """Left out one by one, the others still foretell it; DenseNet's copies are its own."""
    rows = published_latencies()
    for row in rows:
        if row.model.startswith("densenet"):
            continue
        model = fit_compute([each for each in rows if each is not row], device)
        foretold_s = device.fixed_s + device.stream_s(row.weight_bytes) + model.compute_s(row.work)

        rel = 0.45 if row.model.startswith("mobilenet_v2") else 0.25
        assert foretold_s == pytest.approx(row.latency_s, rel=rel), row.model


def test_the_fitted_device_is_not_faster_than_its_data_sheet() -> None:
    """Edge TPU: 4 TOPS, two operations for each multiply-add."""
    assert edge_tpu().prices_s[0] >= 1 / 2e12


def test_counted_work_agrees_with_closed_forms_of_the_architectures() -> None:
    found = {row.model.split()[0]: row.work for row in published_latencies()}
    sides = [(224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256)]
    sides += [(56, 256, 256)] * 2 + [(28, 256, 512)] + [(28, 512, 512)] * 2 + [(14, 512, 512)] * 3
    vgg16 = sum(9 * side**2 * a * b for side, a, b in sides)
    vgg16 += 25088 * 4096 + 4096 * 4096 + 4096 * 1000
    blocks = [(112, 32, 64), (56, 64, 128), (56, 128, 128), (28, 128, 256), (28, 256, 256)]
    blocks += [(14, 256, 512)] + [(14, 512, 512)] * 5 + [(7, 512, 1024), (7, 1024, 1024)]
    pointwise = sum(side**2 * a * b for side, a, b in blocks)
    pointwise += 112**2 * 27 * 32 + 1024 * 1000

    assert found["vgg16"].macs == vgg16
    assert found["vgg16"].depthwise_macs == 0
    assert found["mobilenet_v1"].macs == pointwise
    assert found["mobilenet_v1"].depthwise_macs == sum(9 * side**2 * a for side, a, _ in blocks)

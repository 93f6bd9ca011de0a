"""How long an Edge TPU computes a prefix: a stated model, for devices that are simulated.

    compute = a·MACs + b·depthwise MACs + c·moved elements + d·copied elements + e·layers

The five prices are fitted here to Coral's public latencies of whole models, together with what
`edgewise.device.accelerator` says of the rest: a fixed cost of each call, and the streaming of
parameters that do not fit. Only the sizes of tensors count; what a compiler does with them is not
known.

What it cannot:

- A DenseNet copies its growing concatenation again and again. The price of that comes from one
  model alone (DenseNet-121), so nothing checks it.
- Inception-ResNet v2 is not in the fit: 57 ms for 56 MB would need more than USB 3 carries.
- Small models of the table contradict each other: MobileNet v2 is slower than v1 with half the
  work. Fitted models are met within 15 %, half of them within 4 %; a model left out of the fit is
  foretold within 25 %, but MobileNet v2 only within 45 %.
- The prices are of whole models; that they hold for a prefix is an assumption.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from edgewise.device.accelerator import Accelerator, load_accelerator
from edgewise.model.graph import Graph, Op

Float64 = npt.NDArray[np.float64]

EDGE_TPU = "Edge TPU, fitted to Coral's public latencies"

_QUANTISERS = frozenset({"quantizelinear", "dequantizelinear", "quantize", "dequantize"})
_CONCATENATIONS = frozenset({"concat", "concatenation"})
_JOINS = frozenset({"add", "sub", "mul", "sum"})
_MOVERS = _CONCATENATIONS | {
    "batchnormalization", "pad", "padv2", "mirror_pad",
    "maxpool", "averagepool", "globalaveragepool", "globalmaxpool", "reducemean",
    "max_pool_2d", "average_pool_2d", "mean",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an accelerator has to do, as far as its time depends on it.

    Attributes:
        macs: Multiply-adds of ordinary convolutions and matrix products.
        depthwise_macs: Those of convolutions that read only some of the channels.
        moved_elements: Elements read and written by additions and products of two tensors,
            pooling, padding, concatenations, and norms that fold into no convolution.
        copied_elements: Those of concatenations that read a concatenation.
        layers: Operators of any of these kinds.
    """

    macs: float = 0.0
    depthwise_macs: float = 0.0
    moved_elements: float = 0.0
    copied_elements: float = 0.0
    layers: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLatency:
    """One model of Coral's table.

    Attributes:
        model: Its name and the side of its image, pixels.
        work: Of the published architecture, by `prefix_work`.
        weight_bytes: Parameters as int8, bytes.
        latency_s: Of one call on a desktop with the USB accelerator, USB 3, seconds.
    """

    model: str
    work: Work
    weight_bytes: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Prices of each kind of work.

    Attributes:
        prices_s: Seconds for one unit, in the order of `Work`.
    """

    prices_s: tuple[float, ...]

    def compute_s(self, work: Work) -> float:
        """Time of computing alone: no fixed cost, no transfers, no streaming."""
        return math.fsum(p * w for p, w in zip(self.prices_s, astuple(work), strict=True))


def prefix_work(graph: Graph, tensor: str) -> Work:
    """Count what it takes to compute a tensor from the model's input.

    Args:
        graph: With one input.
        tensor: The answer, or where a prefix ends; the input itself takes nothing.

    Raises:
        ModelError: The tensor depends on something else than the first input.
    """
    source = _sources(graph)
    return _total(
        _op_work(graph, graph.ops[i], source) for i in graph.between(graph.inputs[0], tensor)
    )


@functools.cache
def published_latencies() -> tuple[PublishedLatency, ...]:
    """Coral's table, as far as the architectures are known.

    Source:
        coral.ai/docs/edgetpu/benchmarks and coral.ai/models/all; sizes of the files there or
        parameter counts.
    """
    file = resources.files("edgewise.profiling") / "edge_tpu_latencies.json"
    return tuple(
        PublishedLatency(
            model=row["model"],
            work=Work(**row["work"]),
            weight_bytes=row["weight_bytes"],
            latency_s=row["latency_s"],
        )
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
    )


def fit_compute(rows: Iterable[PublishedLatency], device: Accelerator) -> ComputeModel:
    """Fit prices that are not negative, by least squares of the relative errors.

    Args:
        rows: A kind of work that none of them has gets no price: it is free.
        device: Gives the fixed cost and the streaming, which are taken off first.
    """
    from scipy.optimize import nnls

    rows = tuple(rows)
    works = np.array([astuple(row.work) for row in rows])  # [N, 5]
    latency_s = np.array([row.latency_s for row in rows])
    rest_s = np.array([device.fixed_s + device.stream_s(row.weight_bytes) for row in rows])
    scale = works.max(axis=0)
    scale[scale == 0] = 1.0
    prices, _ = nnls(works / scale / latency_s[:, None], (latency_s - rest_s) / latency_s)
    return ComputeModel(prices_s=tuple((prices / scale).tolist()))


@functools.cache
def edge_tpu() -> ComputeModel:
    """The model that the shipped profiles use: prices fitted to `published_latencies`."""
    return fit_compute(published_latencies(), load_accelerator("coral-usb"))


def _total(works: Iterable[Work]) -> Work:
    sums = np.sum([astuple(Work()), *map(astuple, works)], axis=0).tolist()
    return Work(**dict(zip(Work.__slots__, sums, strict=True)))


def _sources(graph: Graph) -> Mapping[str, Op | None]:
    """Who wrote each tensor that depends on the input; quantisers and views are looked through."""
    found: dict[str, Op | None] = dict.fromkeys(graph.inputs)
    for op in graph.ops:
        read = [name for name in op.inputs if name in found]
        if read:
            through = op.is_view or op.kind.lower() in _QUANTISERS
            found.update(dict.fromkeys(op.outputs, found[read[0]] if through else op))
    return found


def _op_work(graph: Graph, op: Op, source: Mapping[str, Op | None]) -> Work:
    out = graph.tensors.get(op.outputs[0]) if op.outputs else None
    read = [name for name in op.inputs if name in source and name in graph.tensors]
    if out is None or not read:
        return Work()
    kind, size = op.kind.lower(), float(math.prod(out.shape))
    if op.is_contraction:
        macs = op.flops / 2
        # An ordinary convolution multiplies every channel at least once.
        channels = graph.tensors[read[0]].shape[1:2] or (1,)
        partial = kind.startswith("depthwise") or (
            len(out.shape) == 4 and kind in {"conv", "qlinearconv"} and macs / size < channels[0]
        )
        return Work(
            macs=0.0 if partial else macs, depthwise_macs=macs if partial else 0.0, layers=1.0
        )
    writer: Callable[[str], Op | None] = source.get
    if kind == "batchnormalization" and (before := writer(read[0])) and before.is_contraction:
        return Work()
    if kind not in _MOVERS and not (kind in _JOINS and len(read) > 1):
        return Work()
    moved = size + sum(math.prod(graph.tensors[name].shape) for name in read)
    again = kind in _CONCATENATIONS and any(
        (before := writer(name)) is not None and before.kind.lower() in _CONCATENATIONS
        for name in read
    )
    return Work(
        moved_elements=0.0 if again else moved, copied_elements=moved if again else 0.0, layers=1.0
    )

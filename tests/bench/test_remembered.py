from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.bench.remembered import RememberedModel, make_inputs, remembered_loader
from edgewise.errors import ShapeError
from edgewise.frontends.partition import Place

SPEC = ArraySpec(shape=(1, 4), dtype="float32")
RUNS: Counter[bytes] = Counter()


class Adder(Piece):
    """Adds one for each place between its ends."""

    def __init__(self, content: bytes) -> None:
        self.backend, self.threads = "fake", 1
        self.input = self.output = SPEC
        self.content = content

    def run(self, x: Array) -> Array:
        RUNS[self.content] += 1
        _, start, stop = self.content.decode().split()
        return np.asarray(x + (int(stop) - int(start)))


def load(content: bytes, format: Any, *, threads: int = 1) -> Piece:  # noqa: A002
    assert (format, threads) == ("onnx", 1)
    return Adder(content)


class Model:
    last, format = 3, "onnx"

    def __init__(self, name: str = "net", dtype: str = "float32") -> None:
        self.name = name
        self.places = tuple(
            Place(
                tensor=f"t{n}",
                shape=(1, 4),
                dtype=dtype,
                nbytes=16,
                prefix_bytes=n,
                flops=n,
                depth_ratio=n / 3,
            )
            for n in range(4)
        )

    def segment(self, start: int, stop: int) -> bytes:
        return f"{self.name} {start} {stop}".encode()


def test_prefixes_answer_the_pool_without_computing_and_everything_else_with() -> None:
    pool = make_inputs(Model(), count=3, rng=np.random.default_rng(0))
    model = RememberedModel(Model(), pool, load=load)
    loader = remembered_loader([RememberedModel(Model("other"), pool, load=load), model], load=load)
    prefix = loader(model.segment(0, 2), "onnx", threads=1)
    RUNS.clear()
    np.testing.assert_array_equal(prefix.run(pool[1]), pool[1] + 2)
    assert not RUNS
    np.testing.assert_array_equal(prefix.run(pool[1] + 1), pool[1] + 3)
    suffix = loader(model.segment(2, 3), "onnx", threads=1)
    np.testing.assert_array_equal(suffix.run(pool[1]), pool[1] + 1)
    assert sum(RUNS.values()) == 2


def test_an_answer_may_be_changed_without_harm() -> None:
    pool = make_inputs(Model(), count=1, rng=np.random.default_rng(0))
    model = RememberedModel(Model(), pool, load=load)
    prefix = remembered_loader([model], load=load)(model.segment(0, 1), "onnx")
    prefix.run(pool[0])[:] = 0
    np.testing.assert_array_equal(prefix.run(pool[0]), pool[0] + 1)
    with pytest.raises(ShapeError):
        prefix.run(pool[0][0])


@pytest.mark.parametrize(("dtype", "low", "high"), [("int8", -128, 127), ("float32", 0, 1)])
def test_inputs_have_the_models_type_and_range(dtype: str, low: float, high: float) -> None:
    (x,) = make_inputs(Model(dtype=dtype), count=1, rng=np.random.default_rng(0))
    assert (x.shape, x.dtype.name) == ((1, 4), dtype)
    assert low <= x.min() <= x.max() <= high

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.partition import PartitionedModel, Place
from edgewise.model.graph import Graph, Op, TensorSpec
from edgewise.profiles.partition import parse_partition_profile, partition_profile_text
from edgewise.profiling.accelerator_model import ComputeModel
from edgewise.profiling.segments import (
    SegmentProgress,
    SegmentTimes,
    example_input,
    is_quantised,
    measure_segments,
    partition_profile,
)

SEGMENT_S = (0.004, 0.003, 0.002, 0.001)
PRICE_OF_A_CUT_S = 0.0005
WIDTH = 8


class FakeCutter:
    """Four layers in a row; a piece's file is the names of its ends."""

    def __init__(self) -> None:
        names = [f"t{k}" for k in range(len(SEGMENT_S) + 1)]
        self.graph = Graph(
            inputs=("t0",),
            outputs=(names[-1],),
            ops=tuple(
                Op(
                    name=f"layer{k}",
                    kind="Gemm",
                    inputs=(names[k],),
                    outputs=(names[k + 1],),
                    flops=2e6,
                    is_contraction=True,
                )
                for k in range(len(SEGMENT_S))
            ),
            tensors={n: TensorSpec(name=n, shape=(1, WIDTH), dtype="float32") for n in names},
        )

    def segment(self, start: str, stop: str) -> bytes:
        return f"{start} {stop}".encode()


def fake_model() -> PartitionedModel:
    count = len(SEGMENT_S)
    return PartitionedModel(
        name="fake",
        version="0" * 64,
        format="onnx",
        places=tuple(
            Place(
                tensor=f"t{k}",
                shape=(1, WIDTH),
                dtype="float32",
                nbytes=4 * WIDTH,
                prefix_bytes=1000 * k,
                flops=2e6 * k,
                depth_ratio=k / count,
            )
            for k in range(count + 1)
        ),
        cutter=FakeCutter(),
    )


@dataclass
class FakeRuntime:
    """Loads pieces that take a known time of a virtual clock: half as much on two threads.

    Attributes:
        slow_calls: The first calls of each piece that take ten times as long.
        slow_from_s: From this instant on, everything takes three times as long.
    """

    clock: VirtualClock = field(default_factory=VirtualClock)
    slow_calls: int = 0
    slow_from_s: float = float("inf")
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    loaded: int = 0
    most_loaded: int = 0

    def load(self, model: bytes, file_format: str, *, threads: int = 1) -> Piece:
        assert file_format == "onnx"
        self.loaded += 1
        self.most_loaded = max(self.most_loaded, self.loaded)
        start, stop = model.decode().split()
        return FakePiece(self, start, stop, threads)


class FakePiece(Piece):
    backend = "fake:CPU"
    input = output = ArraySpec(shape=(1, WIDTH), dtype="float32")

    def __init__(self, runtime: FakeRuntime, start: str, stop: str, threads: int) -> None:
        self.runtime, self.start, self.stop, self.threads = runtime, start, stop, threads
        self.count = 0

    def run(self, x: Array) -> Array:
        self.check(x)
        runtime = self.runtime
        runtime.calls.append((self.start, self.stop, self.threads))
        layers = SEGMENT_S[int(self.start[1:]) : int(self.stop[1:])]
        slow = 10 if self.count < runtime.slow_calls else 1
        slow *= 3 if runtime.clock.now_s() >= runtime.slow_from_s else 1
        self.count += 1
        runtime.clock.sleep_s(slow * (sum(layers) + PRICE_OF_A_CUT_S) / self.threads)
        return x + 1

    def close(self) -> None:
        self.runtime.loaded -= 1


def measure(runtime: FakeRuntime, **knobs: Any) -> SegmentTimes:
    return measure_segments(fake_model(), clock=runtime.clock, load=runtime.load, **knobs)


def rests_s(threads: int) -> list[float]:
    left = [sum(SEGMENT_S[k:]) + PRICE_OF_A_CUT_S for k in range(len(SEGMENT_S))]
    return [each / threads for each in left] + [0.0]


def test_each_segment_and_each_rest_cost_what_they_take() -> None:
    times = measure(FakeRuntime(), threads=(1, 2), rounds=5)

    segments = np.array(SEGMENT_S) + PRICE_OF_A_CUT_S
    assert times.segment_median_s == pytest.approx(np.stack([segments, segments / 2], axis=1))
    assert times.rest_median_s == pytest.approx(np.array([rests_s(1), rests_s(2)]).T)
    assert times.rest_cv2 == pytest.approx(np.zeros(5), abs=1e-12)
    assert times.backend == "fake:CPU"
    assert times.rounds == 5


def test_the_sum_of_the_segments_is_compared_with_the_whole() -> None:
    times = measure(FakeRuntime(), rounds=3)

    assert times.sum_to_whole_ratio == pytest.approx([(0.010 + 4 * 0.0005) / (0.010 + 0.0005)])


def test_a_round_calls_every_piece_once_and_not_always_in_one_order() -> None:
    runtime = FakeRuntime()
    measure(runtime, threads=(1, 2), rounds=4, warmup_rounds=1)
    pieces = 2 * (4 + 3)
    calls = runtime.calls[3:]  # the first three made the inputs

    rounds = [calls[k : k + pieces] for k in range(0, len(calls), pieces)]
    assert len(rounds) == 5
    assert all(set(Counter(each).values()) == {1} for each in rounds)
    assert len({tuple(each) for each in rounds}) == 5


def test_warm_up_rounds_do_not_count() -> None:
    times = measure(FakeRuntime(slow_calls=2), rounds=3, warmup_rounds=2, kept_ratio=1.0)

    assert times.rest_median_s[:, 0] == pytest.approx(rests_s(1))
    assert times.rest_cv2 == pytest.approx(np.zeros(5), abs=1e-12)


def test_rounds_in_which_the_machine_was_busy_do_not_count() -> None:
    round_s = sum(SEGMENT_S) + sum(rests_s(1)) + 4 * PRICE_OF_A_CUT_S
    busy = FakeRuntime(slow_from_s=8 * round_s)

    times = measure(busy, rounds=20, warmup_rounds=0, kept_ratio=0.25)

    assert times.kept_rounds == 5
    assert times.rest_median_s[:, 0] == pytest.approx(rests_s(1))
    assert measure(
        FakeRuntime(slow_from_s=8 * round_s), rounds=20, warmup_rounds=0, kept_ratio=1.0
    ).rest_median_s[:, 0] == pytest.approx(3 * np.array(rests_s(1)))


def test_pieces_are_closed_and_loaded_in_groups_that_fit_the_memory() -> None:
    # Segments weigh 4000 bytes, rests 4000 + 3000 + 2000 + 1000, each twice: 28 kB a group.
    roomy, tight = FakeRuntime(), FakeRuntime()
    alike = [
        measure(roomy, threads=(1, 2, 3), rounds=3),
        measure(tight, threads=(1, 2, 3), rounds=3, memory_bytes=60e3),
    ]

    assert (roomy.most_loaded, tight.most_loaded) == (21, 14)
    assert (roomy.loaded, tight.loaded) == (0, 0)
    assert alike[0].rest_median_s == pytest.approx(alike[1].rest_median_s)


def test_pieces_that_fit_no_memory_are_refused_before_any_is_loaded() -> None:
    runtime = FakeRuntime()
    with pytest.raises(ModelError, match="of memory") as caught:
        measure(runtime, memory_bytes=20e3)

    assert runtime.most_loaded == 0
    assert "--places" in (caught.value.help or "")


def test_pieces_are_closed_when_one_fails() -> None:
    runtime = FakeRuntime()

    def load(model: bytes, file_format: str, *, threads: int = 1) -> Piece:
        if model == b"t1 t4":
            raise ModelError("refused")
        return runtime.load(model, file_format, threads=threads)

    with pytest.raises(ModelError, match="refused"):
        measure_segments(fake_model(), clock=runtime.clock, load=load)
    assert runtime.loaded == 0


def test_a_time_cap_ends_a_campaign_after_three_rounds_at_the_earliest() -> None:
    assert measure(FakeRuntime(), rounds=50, time_cap_s=0.001).rounds == 3
    assert 3 < measure(FakeRuntime(), rounds=50, time_cap_s=0.5).rounds < 50


def test_progress_says_how_many_rounds_and_how_long() -> None:
    told: list[SegmentProgress] = []
    measure(FakeRuntime(), rounds=4, warmup_rounds=1, on_progress=told.append)

    assert [each.rounds for each in told] == [0, 1, 2, 3, 4]
    assert told[0].remaining_s is None
    left = [each.remaining_s or 0.0 for each in told[1:]]
    assert left == pytest.approx([left[0], left[0] * 2 / 3, left[0] / 3, 0.0], abs=1e-9)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"threads": ()}, id="no threads"),
        pytest.param({"threads": (2,)}, id="one thread left out"),
        pytest.param({"threads": (1, 3, 2)}, id="threads that fall"),
        pytest.param({"rounds": 2}, id="too few rounds"),
        pytest.param({"warmup_rounds": -1}, id="negative warm-up"),
        pytest.param({"kept_ratio": 0.0}, id="no round kept"),
    ],
)
def test_numbers_out_of_range_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        measure(FakeRuntime(), **knobs)


def test_a_profile_holds_both_kinds_of_cost_and_says_which_is_which() -> None:
    model = fake_model()
    times = measure(FakeRuntime(), threads=(1, 2), rounds=3)
    compute = ComputeModel(prices_s=(1e-9, 0.0, 0.0, 0.0, 1e-3))

    profile = partition_profile(
        model, times, accelerator=load_accelerator("coral-usb"), compute=compute, cpu="a machine"
    )

    assert profile.accelerator_s == pytest.approx([0.0, 0.002, 0.004, 0.006, 0.008])
    assert profile.cpu_s == pytest.approx(times.rest_median_s)
    assert profile.prefix_bytes.tolist() == [0, 1000, 2000, 3000, 4000]
    assert profile.boundary_bytes.tolist() == [32] * 5
    assert (profile.cpu_provenance, profile.accelerator_provenance) == ("measured", "simulated")
    assert (profile.accelerator, profile.cpu) == ("coral-usb", "a machine")
    assert "1.143 on 1 thread" in profile.notes["sum_to_whole"]
    again = parse_partition_profile(partition_profile_text(profile), where="here")
    assert np.array_equal(again.cpu_s, profile.cpu_s)


def test_inputs_are_of_the_declared_type_and_repeatable() -> None:
    for dtype in ("float32", "int8", "uint8"):
        spec = ArraySpec(shape=(1, 3, 16, 16), dtype=dtype)
        first, second = (example_input(spec, np.random.default_rng(3)) for _ in range(2))

        assert first.dtype.name == dtype
        assert np.array_equal(first, second)
        assert len(np.unique(first)) > 100


def test_a_model_in_floating_point_is_told_from_a_quantised_one() -> None:
    assert not is_quantised(fake_model())

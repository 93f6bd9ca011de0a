from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.accelerator import AcceleratorLost, Prefix
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.backends.simulated_accelerator import Fault, SimulatedAccelerator
from edgewise.clock import MonotonicClock, VirtualClock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError, ConfigError, ShapeError

MB = 1_000_000
DEVICE = Accelerator(
    name="small",
    sram_bytes=8 * MB,
    in_bytes_per_s=400e6,
    out_bytes_per_s=50e6,
    fixed_s=1e-3,
    switch_s=0.5e-3,
    can_pin=True,
)
INPUT = ArraySpec(shape=(1, 4), dtype="float32")
OUTPUT = ArraySpec(shape=(1, 500), dtype="float32")
X = np.arange(4, dtype=np.float32).reshape(1, 4)
# t₀ + 16 B in + 5 ms + 2,000 B out, on the device above.
ALONE_S = 1e-3 + 16 / 400e6 + 5e-3 + 2000 / 50e6


class Repeats(Piece):
    """Repeats its first number, and counts how often it had to."""

    backend = "repeats"
    threads = 1
    input = INPUT
    output = OUTPUT
    runs = 0

    def run(self, x: Array) -> Array:
        self.check(x)
        type(self).runs += 1
        if x[0, 0] < 0:
            raise BackendError("negative")
        return np.full(OUTPUT.shape, x[0, 0], dtype=np.float32)


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Repeats.runs = 0


def prefix(key: str, megabytes: float, **other: Any) -> Prefix:
    usual = {"compute_s": 5e-3, "input": INPUT, "output": OUTPUT}
    return Prefix(
        key=key,
        model=b"",
        format="onnx",
        weight_bytes=int(megabytes * MB),
        **{**usual, **other},
    )


def device_with(
    *prefixes: Prefix, description: Accelerator = DEVICE, clock: Any = None, **other: Any
) -> SimulatedAccelerator:
    device = SimulatedAccelerator(
        description,
        clock=clock or VirtualClock(),
        piece_loader=lambda _model, _format, **_: Repeats(),
        **other,
    )
    for each in prefixes:
        device.load(each)
    return device


def misses(device: SimulatedAccelerator, keys: str) -> str:
    """Run keys in order; a letter for each: m for a miss, h for a hit."""
    return "".join("m" if device.run(key, X).missed else "h" for key in keys)


def test_a_call_takes_the_fixed_cost_transfers_computing_and_what_has_to_be_loaded() -> None:
    device = device_with(prefix("a", 4))

    first, second = device.run("a", X), device.run("a", X)

    load_s = 4 * MB / 400e6 + 0.5e-3
    assert first.service_s == pytest.approx(ALONE_S + load_s)
    assert first.load_s == pytest.approx(load_s)
    assert first.missed
    assert second.service_s == pytest.approx(ALONE_S)
    assert (second.load_s, second.missed) == (0.0, False)
    assert (second.output == 0).all()
    assert device.provenance == "simulated"


def test_what_does_not_fit_streams_with_every_call_and_is_loaded_never() -> None:
    device = device_with(prefix("a", 10), prefix("b", 10, sram_bytes=3 * MB))

    missed, hit = device.run("a", X), device.run("a", X)
    other = device.run("b", X)

    assert hit.service_s == pytest.approx(ALONE_S + 2 * MB / 400e6)
    assert missed.load_s == pytest.approx(8 * MB / 400e6 + 0.5e-3)
    assert other.load_s == pytest.approx(3 * MB / 400e6 + 0.5e-3)
    assert other.service_s == pytest.approx(ALONE_S + 7 * MB / 400e6 + 3 * MB / 400e6 + 0.5e-3)


def test_the_last_model_alone_stays_under_token_even_where_both_would_fit() -> None:
    device = device_with(prefix("a", 3), prefix("b", 3))

    assert misses(device, "aabbab") == "mhmhmm"
    assert device.resident == ("b",)
    assert (device.calls, device.misses) == (6, 4)


def test_whole_models_stay_under_lru_and_the_least_recently_used_goes_first() -> None:
    device = device_with(
        prefix("a", 3),
        prefix("b", 3),
        prefix("c", 2.5),
        prefix("huge", 20),
        description=replace(DEVICE, cache_policy="lru"),
    )

    assert misses(device, "abab") == "mmhh"
    assert misses(device, "cb") == "mh"  # a was the oldest
    assert device.resident == ("c", "b")
    assert misses(device, "abc") == "mhm"  # c went, then b stayed and a came
    assert device.run("huge", X).missed
    assert list(device.resident) == ["huge"]
    assert not device.run("huge", X).missed  # a model larger than the memory keeps what fits


def brute_force_lru(keys: str, sizes: dict[str, float], capacity: float) -> str:
    """A model is there where it and all that were used since fit together."""
    found = ""
    for k, key in enumerate(keys):
        before = keys[:k].rfind(key)
        since = set(keys[before + 1 : k])
        fits = sizes[key] + sum(sizes[other] for other in since) <= capacity
        found += "h" if before >= 0 and fits else "m"
    return found


def test_lru_agrees_with_recency_counted_by_hand_on_random_requests() -> None:
    sizes = {"a": 1.5, "b": 2.0, "c": 3.0, "d": 4.5, "e": 0.5}
    device = device_with(
        *(prefix(k, f) for k, f in sizes.items()),
        description=replace(DEVICE, cache_policy="lru"),
    )
    keys = "".join(np.random.default_rng(1).choice(list(sizes), size=600))

    found = misses(device, keys)

    assert found == brute_force_lru(keys, sizes, 8.0)
    assert 100 < found.count("m") < 500


def test_a_pinned_device_gives_memory_in_the_order_of_loading_and_the_rest_streams() -> None:
    device = device_with(
        prefix("a", 5), prefix("b", 5), description=replace(DEVICE, cache_policy="pinned")
    )

    assert misses(device, "abababba") == "mmhhhhhh"
    assert device.run("a", X).service_s == pytest.approx(ALONE_S)
    assert device.run("b", X).service_s == pytest.approx(ALONE_S + 2 * MB / 400e6)


def test_models_pinned_together_stay_and_a_stranger_displaces_them_all_on_a_token_device() -> None:
    device = device_with(prefix("a", 4), prefix("b", 4), prefix("stranger", 1))
    device.pin({"a": 4 * MB, "b": 3 * MB})

    assert misses(device, "abab") == "mmhh"
    assert device.run("b", X).service_s == pytest.approx(ALONE_S + 1 * MB / 400e6)
    assert device.run("stranger", X).missed
    assert misses(device, "abab") == "mmhh"

    device.pin({})
    assert misses(device, "abab") == "mmmm"


def test_pinned_shares_stay_under_lru_and_others_share_what_is_left() -> None:
    device = device_with(
        prefix("a", 4),
        prefix("b", 3),
        prefix("c", 3),
        description=replace(DEVICE, cache_policy="lru"),
    )
    device.pin({"a": 4 * MB})

    assert misses(device, "abcbca") == "mmmmmh"


def test_shares_beyond_the_memory_or_on_a_device_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8000000 bytes together, found 9000000"):
        device_with(prefix("a", 9)).pin({"a": 9 * MB})
    with pytest.raises(ConfigError, match="no fixed shares"):
        device_with(description=replace(DEVICE, can_pin=False)).pin({"a": 1})


def test_two_models_in_turn_become_slower_together_by_their_reloading() -> None:
    """The public report behind this project (placement.md 5, problem 1)."""
    device = device_with(prefix("a", 4.4, compute_s=2e-3), prefix("b", 7, compute_s=3e-3))

    alone_s = [device.run(k, X).service_s for k in "aabb"][1::2]
    together_s = [device.run(k, X).service_s for k in "abab"][2:]

    slower = [t / a for t, a in zip(together_s, alone_s, strict=True)]
    assert min(slower) > 4


def test_outputs_are_those_of_the_cpu_remembered_within_bounds_and_never_shared() -> None:
    device = device_with(prefix("a", 1), remember_bytes=2 * OUTPUT.nbytes)
    device.prepare("a", [X, X + 1])
    assert Repeats.runs == 2

    one = device.run("a", X + 1).output
    one += 5
    again = device.run("a", X + 1).output

    assert Repeats.runs == 2
    assert (again == 1).all()
    device.run("a", X + 2)
    device.run("a", X)  # the oldest of three: it was forgotten
    assert Repeats.runs == 4


def test_loading_a_key_again_forgets_its_outputs_and_its_parameters() -> None:
    device = device_with(prefix("a", 1))
    device.run("a", X)
    device.load(prefix("a", 2))

    answer = device.run("a", X)

    assert answer.missed
    assert Repeats.runs == 2
    device.unload("a")
    device.unload("a")
    assert device.resident == ()
    with pytest.raises(BackendError, match="no prefix 'a' is loaded"):
        device.run("a", X)


def test_computing_that_outlasts_the_simulated_time_is_counted() -> None:
    clock = VirtualClock()

    class Slow(Repeats):
        def run(self, x: Array) -> Array:
            clock.sleep_s(1.0)
            return super().run(x)

    device = SimulatedAccelerator(DEVICE, clock=clock, piece_loader=lambda *_, **__: Slow())
    device.load(prefix("a", 1))

    first, second = device.run("a", X), device.run("a", X)

    assert device.overruns == 1
    assert first.service_s == pytest.approx(1.0)
    assert second.service_s == pytest.approx(ALONE_S)


def test_on_a_real_clock_a_call_never_answers_before_its_time() -> None:
    clock = MonotonicClock()
    device = device_with(prefix("a", 0.4), clock=clock)
    device.prepare("a", [X])

    for _ in range(5):
        start_s = clock.now_s()
        answer = device.run("a", X)
        assert clock.now_s() - start_s >= ALONE_S + (answer.load_s or 0.0)
        assert answer.service_s >= ALONE_S


def test_what_does_not_fit_or_fails_is_refused_and_leaves_the_device_usable() -> None:
    device = device_with(prefix("a", 1))

    with pytest.raises(ShapeError, match="expected an array"):
        device.run("a", X.astype(np.float64))
    with pytest.raises(BackendError, match="negative"):
        device.run("a", X - 1)
    with pytest.raises(BackendError, match="has no compute_s"):
        device.load(prefix("b", 1, compute_s=None))
    with pytest.raises(BackendError, match="its model file has"):
        device.load(prefix("b", 1, input=OUTPUT))
    assert device.run("a", X).missed


def test_a_call_that_fails_by_injection_leaves_the_device() -> None:
    device = device_with(prefix("a", 1))
    device.inject("fails", calls=2)

    for _ in range(2):
        with pytest.raises(BackendError, match="failed at invocation") as caught:
            device.run("a", X)
        assert not isinstance(caught.value, AcceleratorLost)
    assert device.run("a", X).missed


@pytest.mark.parametrize(("fault", "takes_s"), [("lost", 0.0), ("hangs", 1.0)])
def test_a_lost_device_answers_nothing_until_it_is_restarted_with_all_that_was_loaded(
    fault: Fault, takes_s: float
) -> None:
    clock = VirtualClock()
    device = device_with(prefix("a", 1), clock=clock)
    device.run("a", X)
    start_s = clock.now_s()
    device.inject(fault)

    with pytest.raises(AcceleratorLost):
        device.run("a", X)
    assert clock.now_s() - start_s == pytest.approx(takes_s)
    with pytest.raises(AcceleratorLost):
        device.run("a", X)
    with pytest.raises(AcceleratorLost):
        device.load(prefix("b", 1))
    device.restart()

    assert device.run("a", X).missed


def test_a_device_that_is_gone_comes_back_only_when_it_is_there_and_the_budget_allows() -> None:
    clock = VirtualClock()
    device = device_with(prefix("a", 1), clock=clock, restarts=2, within_s=60.0)
    device.inject("gone")
    with pytest.raises(AcceleratorLost):
        device.run("a", X)

    for message in ("is not there", "is not there", "the next try is in 60 s"):
        with pytest.raises(AcceleratorLost, match=message):
            device.restart()
    assert device.restart_wait_s == 60.0
    device.come_back()
    clock.sleep_s(60.0)
    device.restart()

    assert (device.run("a", X).output == 0).all()
    device.close()
    with pytest.raises(AcceleratorLost, match="was closed"):
        device.run("a", X)

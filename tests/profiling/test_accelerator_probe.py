from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.accelerator import AcceleratorAnswer, AcceleratorDevice, Prefix
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.backends.simulated_accelerator import SimulatedAccelerator
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import Accelerator, load_accelerator, parse_accelerator
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiling.accelerator_probe import (
    AcceleratorProbe,
    accelerator_text,
    probe_accelerator,
)

TRUE = Accelerator(
    name="true",
    sram_bytes=7_864_320,
    in_bytes_per_s=454e6,
    out_bytes_per_s=76e6,
    fixed_s=0.3e-3,
)
# What the user wrote down before the probe: wrong in everything that is to be found.
GUESSED = replace(
    TRUE, name="guessed", in_bytes_per_s=100e6, out_bytes_per_s=10e6, fixed_s=0.0, switch_s=0.0
)
INPUT = ArraySpec(shape=(1, 64), dtype="int8")


class Zeros(Piece):
    backend = "zeros"
    threads = 1
    input = INPUT

    def __init__(self, model: bytes) -> None:
        self.output = ArraySpec(shape=(1, int(model)), dtype="int8")

    def run(self, x: Array) -> Array:
        self.check(x)
        return np.zeros(self.output.shape, dtype=np.int8)


class Noisy(AcceleratorDevice):
    """A device that was described wrongly, and whose times differ from call to call."""

    provenance = "simulated"
    description = GUESSED

    def __init__(self, true: Accelerator, *, noise: float) -> None:
        self.clock = VirtualClock()
        self.inner = SimulatedAccelerator(
            true, clock=self.clock, piece_loader=lambda model, _format, **_: Zeros(model)
        )
        self.noise = noise
        self.rng = np.random.default_rng(7)

    def load(self, prefix: Prefix) -> None:
        self.inner.load(prefix)

    def unload(self, key: str) -> None:
        self.inner.unload(key)

    def restart(self) -> None:
        self.inner.restart()

    @property
    def resident(self) -> tuple[str, ...]:
        return self.inner.resident

    def run(self, key: str, x: Array) -> AcceleratorAnswer:
        answer = self.inner.run(key, x)
        factor = 1.0 + self.noise * self.rng.standard_normal()
        if self.noise and self.rng.random() < 0.01:
            factor = 5.0  # a disturbed call
        return replace(answer, service_s=answer.service_s * factor)


def prefix(key: str, megabytes: float, *, output: int, **other: Any) -> Prefix:
    return Prefix(
        key=key,
        model=str(output).encode(),
        format="onnx",
        weight_bytes=int(megabytes * 1e6),
        input=INPUT,
        output=ArraySpec(shape=(1, output), dtype="int8"),
        **{"compute_s": 0.5e-3, **other},
    )


PREFIXES = (
    prefix("a", 1.0, output=1_000),
    prefix("b", 2.5, output=150_000),
    prefix("c", 3.5, output=50_000),
    prefix("d", 4.2, output=250_000, compute_s=1.0e-3),
)


def probed(
    true: Accelerator, *, noise: float, prefixes: tuple[Prefix, ...] = PREFIXES
) -> AcceleratorProbe:
    device = Noisy(true, noise=noise)
    inputs = {p.key: np.zeros(INPUT.shape, dtype=np.int8) for p in prefixes}
    found = probe_accelerator(device, prefixes, inputs, clock=device.clock)
    assert device.resident == ()  # all were unloaded
    return found


@pytest.mark.parametrize(
    ("noise", "switch_s"),
    [(0.0, 2e-3), (0.05, 0.0)],
    ids=["exact times, switches cost", "5 % noise and outliers"],
)
@pytest.mark.parametrize("policy", ["token", "lru", "pinned"])
def test_policy_and_bandwidths_are_recovered_within_two_per_cent(
    policy: Any, noise: float, switch_s: float
) -> None:
    true = replace(TRUE, cache_policy=policy, switch_s=switch_s)

    found = probed(true, noise=noise)

    assert found.accelerator.cache_policy == policy
    assert found.pair_share == pytest.approx(float(policy == "token"), abs=0.05)
    assert found.round_share == pytest.approx(float(policy != "pinned"), abs=0.05)
    assert found.accelerator.in_bytes_per_s == pytest.approx(true.in_bytes_per_s, rel=0.02)
    assert found.accelerator.out_bytes_per_s == pytest.approx(true.out_bytes_per_s, rel=0.02)
    assert found.accelerator.fixed_s == pytest.approx(true.fixed_s, abs=2e-5)
    assert found.accelerator.switch_s == pytest.approx(switch_s, abs=1e-4)
    assert found.accelerator.provenance == "simulated"
    assert found.notes == ()
    # Blocks are whole, so the limit may be passed by one.
    assert found.elapsed_s < 65
    assert found.in_error_ratio < 0.005


def test_without_known_computing_the_bandwidth_out_stays_as_it_was_and_is_said_to() -> None:
    unknown = tuple(replace(p, output=PREFIXES[0].output, model=b"1000") for p in PREFIXES)

    found = probed(TRUE, noise=0.0, prefixes=unknown)

    assert found.accelerator.out_bytes_per_s == GUESSED.out_bytes_per_s
    assert found.out_error_ratio is None
    assert found.fixed_error_s is None
    assert "out_bytes_per_s" in found.notes[0]


def test_models_that_all_fit_cannot_tell_lru_from_pinned() -> None:
    small = tuple(replace(p, weight_bytes=p.weight_bytes // 2) for p in PREFIXES)

    with pytest.raises(ConfigError, match="lru and pinned look the same"):
        probed(replace(TRUE, cache_policy="lru"), noise=0.0, prefixes=small)
    assert probed(TRUE, noise=0.0, prefixes=small).accelerator.cache_policy == "token"


def test_too_few_prefixes_a_missing_input_and_models_too_large_are_refused() -> None:
    device = Noisy(TRUE, noise=0.0)
    x = {p.key: np.zeros(INPUT.shape, dtype=np.int8) for p in PREFIXES}

    with pytest.raises(ConfigError, match="at least three prefixes"):
        probe_accelerator(device, PREFIXES[:2], x, clock=device.clock)
    with pytest.raises(ConfigError, match="no input for prefix 'd'"):
        probe_accelerator(device, PREFIXES, {k: x[k] for k in "abc"}, clock=device.clock)
    large = [replace(p, weight_bytes=7_000_000) for p in PREFIXES]
    with pytest.raises(ConfigError, match="no two of the prefixes fit"):
        probe_accelerator(device, large, x, clock=device.clock)
    same = [replace(p, weight_bytes=3_000_000) for p in PREFIXES]
    with pytest.raises(ProfileError, match="do not grow with the bytes"):
        probe_accelerator(device, same, x, clock=device.clock)


def test_a_description_survives_being_written_and_read() -> None:
    odd = replace(TRUE, name='a "b" \\ c\n\x7f ü', switch_s=1e-05, can_pin=True, source="tests")

    for known in (odd, load_accelerator("coral-usb"), probed(TRUE, noise=0.0).accelerator):
        assert parse_accelerator(accelerator_text(known), where="here") == known

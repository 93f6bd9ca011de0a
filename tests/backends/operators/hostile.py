"""What must not crash a process: run as a program of its own, with backends as arguments.

It says one line per check: backend, name, and ``ok`` or what went wrong. A crash ends the output,
and the tests of the checks that did not answer fail.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from edgewise.backends.operators import (
    Weights,
    load_operator,
    random_inputs,
    random_weights,
)
from edgewise.backends.operators.boundary import KEPT
from edgewise.errors import BackendError, ShapeError
from edgewise.profiles.operators import parse_shape

Check = Callable[[str], None]
LINEAR = "linear m=3 k=64 n=96 bias"
LAYER = "layer m=3 k=48 n=80 silu-gated heads=4/2x12 past=2"


def load(key: str, backend: str) -> tuple[Any, Any]:
    """A program, and the same in torch."""
    shape = parse_shape(key)
    weights = random_weights(shape, np.random.default_rng(0))
    return load_operator(shape, weights, backend), load_operator(shape, weights, "torch:cpu")


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def refused(program: Any, *inputs: Any) -> None:
    try:
        program(*inputs)
    except ShapeError:
        return
    raise AssertionError("expected a ShapeError")


def churn() -> None:
    """Overwrite memory that has just been freed."""
    for size in (64, 96, 192, 288, 6144):
        del [torch.full((size,), float("nan")) for _ in range(8)][:]


def dropped_weights(backend: str) -> None:
    shape = parse_shape(LINEAR)
    weights = random_weights(shape, np.random.default_rng(0))
    copy = {role: tensor.clone() for role, tensor in weights.tensors.items()}
    program = load_operator(shape, weights, backend)
    del weights
    gc.collect()
    churn()
    x = torch.randn(1, 3, 64)
    close(program(x), torch.nn.functional.linear(x, copy["weight"], copy["bias"]))


def dropped_temporaries(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    for seed in range(KEPT + 8):
        generator = torch.Generator().manual_seed(seed)
        found = program(torch.randn(1, 3, 64, generator=generator))
        churn()
        expected = reference(torch.randn(1, 3, 64, generator=generator.manual_seed(seed)))
        close(found, expected)


def dropped_cache_of_a_layer(backend: str) -> None:
    program, reference = load(LAYER, backend)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        found = program(*random_inputs(program.shape, rng))
        churn()
        expected = reference(*random_inputs(program.shape, np.random.default_rng(seed)))
        close(found, expected)


def dropped_program(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    x = torch.randn(1, 3, 64)
    found = program(x)
    del program
    gc.collect()
    churn()
    close(found, reference(x))


def outputs_kept(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    inputs = [torch.randn(1, 3, 64) for _ in range(KEPT + 8)]
    found = [program(x) for x in inputs]
    assert len({y.data_ptr() for y in found}) == len(found)
    for x, y in zip(inputs, found, strict=True):
        close(y, reference(x))


def same_address_other_values(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    x = torch.empty(1, 3, 64)
    for _ in range(5):
        x.normal_()
        close(program(x), reference(x))


def same_address_other_size(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    memory = torch.randn(8, 64)
    for rows in (3, 1, 8, 3):
        close(program(memory[:rows]), reference(memory[:rows]))
    activation, expected = load("activation m=1 k=8 n=8 gelu", backend)
    for x in (memory, memory[:2], memory[0], memory[0, 0], memory.view(2, 4, 64)):
        close(activation(x), expected(x))


def aligned_to_four_bytes_only(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    x = torch.randn(3 * 64 + 1)[1:].view(3, 64)
    close(program(x), reference(x))


def non_contiguous(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    wide = torch.randn(6, 128)
    for x in (
        torch.randn(64, 3).T,
        wide[::2, :64],
        wide[:3, ::2],
        torch.randn(1, 1, 64).expand(2, 3, 64),
        torch.randn(1, 64).as_strided((1, 1, 64), (999, 7, 1)),
        torch.complex(torch.randn(1, 64), torch.randn(1, 64)).conj().imag,
    ):
        close(program(x), reference(x))


def zero_length(backend: str) -> None:
    program, _ = load(LINEAR, backend)
    assert program(torch.empty(1, 0, 64)).shape == (1, 0, 96)
    assert program(torch.empty(0, 64)).shape == (0, 96)
    activation, _ = load("activation m=1 k=8 n=8 silu", backend)
    assert activation(torch.empty(0)).shape == (0,)
    layer, reference = load(LAYER, backend)
    nothing, angle = torch.empty(1, 0, 48), torch.empty(1, 0, 12)
    cache = torch.randn(1, 2, 2, 12)
    found = layer(nothing, angle, angle, cache, cache)
    assert [tuple(y.shape) for y in found] == [(1, 0, 48), (1, 2, 0, 12), (1, 2, 0, 12)]
    empty = torch.empty(1, 2, 0, 12)
    prefill = random_inputs(layer.shape, np.random.default_rng(0))[:3]
    close(layer(*prefill, empty, empty), reference(*prefill, empty, empty))


def no_tensor(backend: str) -> None:
    program, _ = load(LINEAR, backend)
    x = torch.randn(1, 3, 64)
    for wrong in (x.numpy(), x.__dlpack__(), x.data_ptr(), None, x.tolist()):
        refused(program, wrong)
    refused(program)
    refused(program, x, x)


def wrong_type_size_or_place(backend: str) -> None:
    program, _ = load(LINEAR, backend)
    x = torch.randn(1, 3, 64)
    for wrong in (
        x.double(),
        x.half(),
        x.int(),
        x[..., :63],
        x.to("meta"),
        x[0].to_sparse(),
        torch.tensor(1.0),
    ):
        refused(program, wrong)
    layer, _ = load(LAYER, backend)
    good = random_inputs(layer.shape, np.random.default_rng(0))
    for place in range(5):
        x = good[place]
        for other in (x[..., :-1], x[0], x.double(), None):
            refused(layer, *good[:place], other, *good[place + 1 :])
    refused(layer, *good[:4])
    refused(layer, *good[:3], good[3], good[4][:, :, :1])


def no_memory_of_its_own(backend: str) -> None:
    class Wrapper(torch.Tensor):
        pass

    program, _ = load(LINEAR, backend)
    refused(program, torch.randn(1, 3, 64).as_subclass(Wrapper))
    refused(program, torch._efficientzerotensor((3, 64)))
    try:
        torch.vmap(program)(torch.randn(2, 3, 64))
    except ShapeError:
        return
    raise AssertionError("expected a ShapeError")


def gradients_and_defaults(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    x = torch.randn(1, 3, 64, requires_grad=True)
    found = program(x)
    assert not found.requires_grad
    with torch.inference_mode():
        close(program(x), reference(x))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        again = program(x)
        close(again, found)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def concurrent(backend: str) -> None:
    for key in (LINEAR, LAYER):
        program, reference = load(key, backend)
        rng = np.random.default_rng(0)
        cases = [random_inputs(program.shape, rng) for _ in range(8)]
        expected = [reference(*case) for case in cases]
        places = [(2 * thread + i) % len(cases) for thread in range(4) for i in range(40)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i, run=program, of=cases: run(*of[i]), places))
        for place, y in zip(places, found, strict=True):
            close(y, expected[place])


def works_after_a_failure(backend: str) -> None:
    program, reference = load(LINEAR, backend)
    x = torch.randn(1, 3, 64)
    program(x)
    real = program._execute

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    program._execute = fail
    said = ""
    try:
        program(x)
    except BackendError as error:
        said = f"{error}, because of {error.__cause__!r}"
    program._execute = real
    assert "out of memory, because of RuntimeError" in said, said
    close(program(x), reference(x))


def unusual_weights(backend: str) -> None:
    """Parameters, and weights that are views into a larger tensor, as those of a file are."""
    shape = parse_shape("linear m=3 k=64 n=96")
    memory = torch.randn(96 * 64 + 1)
    x = torch.randn(3, 64)
    for weight in (torch.nn.Parameter(torch.randn(96, 64)), memory[1:].view(96, 64)):
        program = load_operator(shape, Weights(tensors={"weight": weight}), backend)
        close(program(x), (x @ weight.T).detach())


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        dropped_weights,
        dropped_temporaries,
        dropped_cache_of_a_layer,
        dropped_program,
        outputs_kept,
        same_address_other_values,
        same_address_other_size,
        aligned_to_four_bytes_only,
        non_contiguous,
        zero_length,
        no_tensor,
        wrong_type_size_or_place,
        no_memory_of_its_own,
        gradients_and_defaults,
        concurrent,
        works_after_a_failure,
        unusual_weights,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    for backend in sys.argv[1:]:
        for name, check in CHECKS.items():
            try:
                check(backend)
                said = "ok"
            except Exception:  # noqa: BLE001 - told to the test that waits for it
                said = repr(traceback.format_exc())
            sys.stdout.write(f"{backend} {name} {said}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Weights of 8 and 4 bits, by ONNX Runtime's own quantiser, and what its rounding leaves behind."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.base import Precision
from edgewise.errors import BackendUnavailable

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
BITS: dict[Precision, int] = {"int8": 8, "int4": 4}
BLOCK = 32
"""Weights that share a scale."""
# A zero point for each block costs a tenth of the speed and is worth it where levels are few.
SYMMETRIC: dict[Precision, bool] = {"int8": True, "int4": False}
# Blocks' mean errors are given back where they are more than this share of the squared error.
_WORTH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A matrix in few bits, as the operator com.microsoft.MatMulNBits reads it.

    Attributes:
        bits: Of each weight.
        inputs: Inputs of the operator.
        means: How many of these are means of the blocks of the inputs before them; 0 for none.
        steps: Weights, the first in the lowest bits, [out, blocks, BLOCK * bits / 8].
        scales: [out, blocks].
        zero_points: [out, blocks * bits / 8]; ``None`` where each is the middle step.
    """

    bits: int
    inputs: int
    means: int
    steps: UInt8
    scales: Float32
    zero_points: UInt8 | None

    def rows(self, which: slice | npt.NDArray[np.int64]) -> Packed:
        """The same for some of the outputs: each has steps and scales of its own."""
        zeros = self.zero_points
        return Packed(
            bits=self.bits,
            inputs=self.inputs,
            means=self.means,
            steps=self.steps[which],
            scales=self.scales[which],
            zero_points=None if zeros is None else zeros[which],
        )


def pack(weight: Float32, precision: Precision, *, backend: str) -> Packed:
    """Round a matrix to few bits.

    Weights are rounded to nearest in blocks of :data:`BLOCK` along a matrix's inputs. The runtime
    multiplies in integers: activations are rounded to 8 bits, by block, in each call.

    A block's zero point is a whole number of steps. Weights that were stored in 4 bits with a real
    offset before (GGUF's Q4_1, Q4_K) come out with the right steps, each block shifted by up to
    half of one. Where that is most of the error, the shifts become weights themselves, again of 4
    bits: of further inputs, which are the means of the blocks of the inputs.

    Args:
        weight: [out, in].
        precision: ``"int8"`` or ``"int4"``.
        backend: Who asks, for messages.

    Raises:
        BackendUnavailable: The quantiser, or a package that it needs, is not installed.
    """
    found = _rounded(weight, precision, backend)
    if precision == "int8" or weight.shape[1] % BLOCK:
        return found
    shifts = _shifts(weight, found)
    if shifts is None:
        return found
    more = _rounded(BLOCK * shifts, precision, backend)
    zeros = [_halves(p.zero_points)[:, : p.steps.shape[1]] for p in (found, more)]
    return Packed(
        bits=found.bits,
        inputs=found.inputs + more.inputs,
        means=more.inputs,
        steps=np.concatenate([found.steps, more.steps], axis=1),
        scales=np.concatenate([found.scales, more.scales], axis=1),
        zero_points=_joined(np.concatenate(zeros, axis=1)),
    )


def _rounded(weight: Float32, precision: Precision, backend: str) -> Packed:
    symmetric = SYMMETRIC[precision]
    quantiser = _quantiser(backend, bits=BITS[precision], symmetric=symmetric)
    steps, scales, zeros = quantiser.qbits_block_quant(np.ascontiguousarray(weight.T))
    return Packed(
        bits=BITS[precision],
        inputs=weight.shape[1],
        means=0,
        steps=steps,
        scales=scales.reshape(len(weight), -1),
        zero_points=None if symmetric else zeros.reshape(len(weight), -1),
    )


def _shifts(weight: Float32, packed: Packed) -> Float32 | None:
    """Mean error of each block, [out, blocks]; ``None`` where errors have next to no mean.

    Source:
        ONNX Runtime, operator com.microsoft.MatMulNBits.
    """
    blocks = packed.steps.shape[1]
    errors = _halves(packed.steps).astype(np.float32)
    errors -= _halves(packed.zero_points)[:, :blocks, None]
    errors *= packed.scales[..., None]
    np.subtract(weight.reshape(errors.shape), errors, out=errors)
    mean: Float32 = errors.mean(axis=2)
    explained = BLOCK * float(np.vdot(mean, mean))
    return mean if explained > _WORTH * float(np.vdot(errors, errors)) else None


def _halves(packed: Any) -> UInt8:
    """Unpack bytes along the last axis."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _joined(halves: UInt8) -> UInt8:
    """Pack them again, a half 0 behind an odd number."""
    even = np.pad(halves, ((0, 0), (0, halves.shape[1] % 2)))
    joined: UInt8 = even[:, ::2] | even[:, 1::2] << np.uint8(4)
    return joined


def _quantiser(backend: str, *, bits: int, symmetric: bool) -> Any:
    """The quantiser; importing it would set up the root logger."""
    root, quiet = logging.getLogger(), logging.NullHandler()
    root.addHandler(quiet)
    try:
        module = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
        make, settings = module.DefaultWeightOnlyQuantizer, module.DefaultWeightOnlyQuantConfig
        logging.getLogger(module.__name__).setLevel(logging.WARNING)
        return make(settings(block_size=BLOCK, is_symmetric=symmetric, bits=bits))
    except (ImportError, AttributeError, TypeError) as error:
        raise BackendUnavailable(
            f"backend {backend!r} cannot quantise here: {error}",
            help="pip install --upgrade 'edgewise[onnx]' onnx-ir",
        ) from error
    finally:
        root.removeHandler(quiet)

"""Operators and segments of transformers on each runtime, on tensors that are not copied."""

from edgewise.backends.operators.base import OperatorProgram, load_operator, operator_backends
from edgewise.backends.operators.weights import (
    Weights,
    random_inputs,
    random_weights,
    subnormal_share,
)

__all__ = [
    "OperatorProgram",
    "Weights",
    "load_operator",
    "operator_backends",
    "random_inputs",
    "random_weights",
    "subnormal_share",
]

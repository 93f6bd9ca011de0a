"""Operators and segments of transformers on each runtime, on tensors that are not copied."""

from edgewise.backends.operators.base import (
    OperatorProgram,
    Weights,
    load_operator,
    operator_backends,
    random_inputs,
    random_weights,
)

__all__ = [
    "OperatorProgram",
    "Weights",
    "load_operator",
    "operator_backends",
    "random_inputs",
    "random_weights",
]

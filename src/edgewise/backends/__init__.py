"""One file per runtime; each runs the stages and heads of a `StagedModel`.

`load_program` finds a backend by name: ``"onnxruntime:CPU"``, or the runtime's name alone.
"""

from edgewise.backends.base import Context, Program, buddy_segments
from edgewise.backends.registry import available_backends, backend_names, load_program

__all__ = [
    "Context",
    "Program",
    "available_backends",
    "backend_names",
    "buddy_segments",
    "load_program",
]

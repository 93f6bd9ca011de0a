"""The one place that sets and checks how many threads each runtime has, where, and how they wait.

Two runtimes with two threads each on two cores cost many times the sum of both: torch's threads
wait, in steps of the scheduler's tick, for a core on which those of ONNX Runtime spin (onnxruntime
13808).
"""

from edgewise.backends.threads.governor import (
    govern,
    onnxruntime_options,
    openvino_settings,
    require,
    set_torch_threads,
    thread_environment,
)
from edgewise.backends.threads.interference import (
    TARGET_RATIO,
    Coresidency,
    Interference,
    coresidency,
    interference,
)
from edgewise.backends.threads.states import (
    AFFINITY_AT_START,
    ThreadState,
    busy_threads,
    check_threads,
)

__all__ = [
    "AFFINITY_AT_START",
    "TARGET_RATIO",
    "Coresidency",
    "Interference",
    "ThreadState",
    "busy_threads",
    "check_threads",
    "coresidency",
    "govern",
    "interference",
    "onnxruntime_options",
    "openvino_settings",
    "require",
    "set_torch_threads",
    "thread_environment",
]

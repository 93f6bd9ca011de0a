"""The real worker around a device that does what it is told to, crashes included; run as a script.

Its first argument says how the delegate behaves. A model's bytes say how its loading ends, the
first number of an input how a call does.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edgewise.backends.edgetpu import worker
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.errors import BackendError

SPEC = ArraySpec(shape=(1, 4), dtype="float32")
ABORT, HANG, HANG_HARD, FAIL, FLOOD, GARBAGE = -1, -2, -3, -4, -5, -6


def die(number: int) -> NoReturn:
    os.write(2, b"[usb_driver.cc:857] transfer on tag 2 failed. Abort.\n")
    os.kill(os.getpid(), number)
    raise AssertionError


class Obedient(Piece):
    """Adds the length of its model to its input."""

    backend = "obedient"
    threads = 1
    input = SPEC
    output = SPEC

    def __init__(self, model: bytes) -> None:
        self.add = len(model)

    def run(self, x: Array) -> Array:
        order = int(x[0, 0])
        if order == ABORT:
            die(signal.SIGABRT)
        elif order == HANG:
            time.sleep(600)
        elif order == HANG_HARD:
            if "TELL_HANGING" in os.environ:
                Path(os.environ["TELL_HANGING"]).touch()
            ctypes.PyDLL(None).sleep(600)  # in a driver, and no other Python thread can run
        elif order == FAIL:
            raise BackendError("failed at invocation")
        elif order == FLOOD:
            os.write(1, b"said on standard output\n" * 40_000)
        elif order == GARBAGE:
            os.write(int(sys.argv[3]), b"this is no message at all, whoever reads it")
        return x + np.float32(self.add)


def load(model: bytes, _: str, *, threads: int) -> Piece:
    assert threads == 1
    if model == b"refused":
        raise BackendError("the model is damaged")
    if model == b"aborts":
        die(signal.SIGABRT)
    if model.startswith(b"once ") and not Path(model[5:].decode()).exists():
        die(signal.SIGABRT)
    return Obedient(model)


class Runtime:
    """Stands for ai_edge_litert.interpreter."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def load_delegate(self, library: str, options: dict[str, str]) -> Any:
        if self.mode == "segfault":
            die(signal.SIGSEGV)
        if self.mode == "hang":
            time.sleep(600)
        if self.mode == "missing":
            raise OSError(f"{library}: cannot open shared object file: No such file or directory")
        if self.mode == "refuse":
            raise ValueError(f"Failed to load delegate from {library}\n")
        return options

    def Interpreter(self, **_: Any) -> NoReturn:  # noqa: N802 - the runtime's own name
        if self.mode == "refuse model":
            raise ValueError("Model provided has model identifier 'none'")
        die(signal.SIGSEGV)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mode = sys.argv[1]
    replaced: dict[str, Any] = {
        "find_runtime": lambda: (Runtime(mode), "ai-edge-litert", "2.3.0"),
        "library_version": lambda _: "RuntimeVersion(14)",
    }
    if mode == "no runtime":
        replaced = {"_RUNTIMES": (("edgewise_has_no_such_runtime", "none"),)}
    elif mode == "fine":
        replaced["delegate_loader"] = lambda *_: load
    vars(worker).update(replaced)
    return worker.main(sys.argv[2:], load=load)


if __name__ == "__main__":
    sys.exit(main())

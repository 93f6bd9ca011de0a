"""The child process that owns an Edge TPU: loads and runs models as it is told over a socket.

It ends when told to, when the socket closes, and when its parent is gone, however that ended. What
aborts here takes nobody else along. It says what it is made of before it touches the device, so
that a crash there can be explained.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from edgewise.backends.edgetpu import frames
from edgewise.backends.piece import Array, ArraySpec, Piece, load_piece
from edgewise.errors import BackendError, BackendUnavailable, EdgeError, ShapeError

PieceLoader = Callable[..., Piece]
Reply = tuple[frames.Header, bytes]

_RUNTIMES = (
    ("ai_edge_litert.interpreter", "ai-edge-litert"),
    ("tflite_runtime.interpreter", "tflite-runtime"),
)
_PR_SET_PDEATHSIG = 1


class DelegateRefused(BackendError):
    """The delegate could not be loaded; why is for the parent to find out."""


class _DelegatedPiece(Piece):
    """A compiled TFLite model on the Edge TPU."""

    backend = "litert:EdgeTPU"

    def __init__(self, runtime: Any, model: bytes, delegate: Any, *, threads: int) -> None:
        self.threads = threads
        self._model = model  # the interpreter does not own it
        try:
            self._interpreter = runtime.Interpreter(
                model_content=model, experimental_delegates=[delegate], num_threads=threads
            )
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the Edge TPU runtime refuses the model: {error}") from error
        inputs = self._interpreter.get_input_details()
        outputs = self._interpreter.get_output_details()
        if len(inputs) != 1 or len(outputs) != 1:
            raise BackendError(
                f"expected a model with one input and one output, found {len(inputs)} and"
                f" {len(outputs)}"
            )
        self._in, self._out = inputs[0]["index"], outputs[0]["index"]
        self.input, self.output = _spec(inputs[0]), _spec(outputs[0])

    def run(self, x: Array) -> Array:
        self.check(x)
        self._interpreter.set_tensor(self._in, x)
        try:
            self._interpreter.invoke()
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the model failed at invocation: {error}") from error
        output: Array = self._interpreter.get_tensor(self._out)
        return output


class Server:
    """Answers one message after the other.

    Args:
        load: Makes a piece of a model's bytes, its format and ``threads``.
    """

    def __init__(self, load: PieceLoader) -> None:
        self._load = load
        self._pieces: dict[str, Piece] = {}

    def answer(self, header: frames.Header, payload: bytearray) -> Reply:
        """Do what a message says; what goes wrong with a model is an answer, too."""
        try:
            return getattr(self, f"do_{header['op']}")(header, payload)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
            return error_reply(error), b""

    def do_load(self, header: frames.Header, payload: bytearray) -> Reply:
        """Load a model under a key; a piece of that key goes once the new one works."""
        piece = self._load(bytes(payload), header["format"], threads=header["threads"])
        for name, found in (("input", piece.input), ("output", piece.output)):
            said = header.get(name)
            if said is not None and (tuple(said["shape"]), said["dtype"]) != (
                found.shape,
                found.dtype,
            ):
                piece.close()
                raise BackendError(
                    f"expected {name} {said['dtype']} {tuple(said['shape'])}, its model file has"
                    f" {found.dtype} {found.shape}"
                )
        self.do_unload(header, payload)
        self._pieces[header["key"]] = piece
        return {}, b""

    def do_unload(self, header: frames.Header, _: bytearray) -> Reply:
        """Forget a key."""
        old = self._pieces.pop(header["key"], None)
        if old is not None:
            old.close()
        return {}, b""

    def do_run(self, header: frames.Header, payload: bytearray) -> Reply:
        """Run a key's piece, and say how long that took."""
        piece = self._pieces[header["key"]]
        x = frames.array_of(header, payload)
        start_s = time.perf_counter()
        output = piece.run(x)
        service_s = time.perf_counter() - start_s
        return {**frames.array_header(output), "service_s": service_s}, output.tobytes()


def error_reply(error: Exception) -> frames.Header:
    """Describe an error in a header."""
    kinds = (
        (ShapeError, "shape"),
        (DelegateRefused, "delegate"),
        (BackendUnavailable, "unavailable"),
    )
    kind = next((name for cls, name in kinds if isinstance(error, cls)), "backend")
    if isinstance(error, EdgeError):
        return {"error": error.message, "help": error.help, "kind": kind}
    return {"error": f"{type(error).__name__}: {error}", "help": None, "kind": kind}


def find_runtime() -> tuple[Any, str, str]:
    """Import the first runtime that is installed.

    Returns:
        Module, name and version.

    Raises:
        BackendUnavailable: There is none.
    """
    for module, package in _RUNTIMES:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # built by hand
            version = "(version unknown)"
        return found, package, version
    raise BackendUnavailable(
        "no runtime for the Edge TPU: neither ai-edge-litert nor tflite-runtime is installed",
        help="pip install ai-edge-litert",
    )


def library_version(library: str) -> str | None:
    """What libedgetpu says about itself; ``None`` where it cannot be asked.

    Source:
        google-coral/libedgetpu, edgetpu_c.h: const char* edgetpu_version().
    """
    try:
        ask = ctypes.CDLL(library).edgetpu_version
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    said = ask()
    return said.decode(errors="replace") if said else None


def delegate_loader(runtime: Any, library: str, options: dict[str, str]) -> PieceLoader:
    """Open the device, and return what loads models on it.

    Raises:
        DelegateRefused: It cannot be opened.
    """
    try:
        delegate = runtime.load_delegate(library, options)
    except (OSError, ValueError, RuntimeError) as error:
        raise DelegateRefused(" ".join(str(error).split())) from error

    def load(model: bytes, format: str, *, threads: int) -> Piece:  # noqa: A002 - as load_piece
        if format != "tflite":
            raise BackendError(f"the Edge TPU runs compiled TFLite models, found {format!r}")
        return _DelegatedPiece(runtime, model, delegate, threads=threads)

    return load


def main(argv: list[str], *, load: PieceLoader = load_piece) -> int:
    """Serve until the parent ends it.

    Args:
        argv: Settings as JSON (``library``, ``options``), the socket's number, the parent's
            process number.
        load: Loads models where ``library`` is ``None``: no device, the CPU alone.
    """
    settings, number, parent_pid = json.loads(argv[0]), int(argv[1]), int(argv[2])
    _end_with_parent(parent_pid)
    with socket.socket(fileno=number) as channel:
        try:
            if settings["library"] is not None:
                runtime, name, version = find_runtime()
                library = settings["library"]
                versions = {
                    "runtime": name,
                    "runtime_version": version,
                    "library": library,
                    "library_version": library_version(library),
                }
                frames.send(channel, versions)
                load = delegate_loader(runtime, library, settings["options"])
            frames.send(channel, {"ready": True})
        except EdgeError as error:
            frames.send(channel, error_reply(error))
            return 3
        _serve(channel, Server(load))
    return 0


def _serve(channel: socket.socket, server: Server) -> None:
    def fill(buffer: memoryview) -> bool:
        while buffer:
            count = channel.recv_into(buffer)
            if count == 0:
                return False
            buffer = buffer[count:]
        return True

    while (message := frames.receive(fill)) is not None:
        header, payload = message
        if header["op"] == "end":
            return
        reply, data = server.answer(header, payload)
        frames.send(channel, reply, data)


def _end_with_parent(parent_pid: int) -> None:
    """Arrange that this process never outlives the thread that minds it, hung or not.

    Signals that a terminal or service manager sends to the whole group are for the parent: it
    drains, then ends us.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


def _spec(details: dict[str, Any]) -> ArraySpec:
    import numpy as np

    shape = tuple(int(n) for n in details["shape"])
    return ArraySpec(shape=shape, dtype=np.dtype(details["dtype"]).name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

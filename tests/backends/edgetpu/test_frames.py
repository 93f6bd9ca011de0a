from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from edgewise.backends.edgetpu import frames


def exchange(raw: bytes) -> Any:
    rest = bytearray(raw)

    def fill(buffer: memoryview) -> bool:
        if len(rest) < len(buffer):
            return False
        buffer[:] = rest[: len(buffer)]
        del rest[: len(buffer)]
        return True

    return frames.receive(fill)


def sent(header: dict[str, Any], payload: bytes = b"") -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, header, payload)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(65536), b""))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32", "float16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(1, 2, 3), (0,), (), (5,)])
def test_arrays_of_every_kind_arrive_as_they_left(dtype: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 2, size=shape).astype(dtype)

    header, payload = exchange(sent({"op": "run", **frames.array_header(x)}, x.tobytes()))
    found = frames.array_of(header, payload)

    assert header["op"] == "run"
    assert (found.shape, found.dtype.name) == (shape, dtype)
    np.testing.assert_array_equal(found, x)
    assert found.flags.writeable


def test_an_end_within_a_message_is_an_end_and_anything_else_is_no_message() -> None:
    whole = sent({"op": "end"}, b"12345")

    assert exchange(b"") is None
    assert exchange(whole[:-1]) is None
    with pytest.raises(frames.BadFrame, match="starts with"):
        exchange(b"x" + whole)
    with pytest.raises(ValueError, match="char"):
        exchange(whole.replace(b"{", b"["))

"""Messages between the supervisor and its child: a JSON header and raw bytes, no pickle."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgewise.backends.piece import Array

Header = dict[str, Any]
Fill = Callable[[memoryview], bool]

_HEAD = struct.Struct("<4sIQ")  # magic, bytes of the header, bytes of the payload
_MAGIC = b"EdW1"


class BadFrame(ValueError):
    """The other side sent something that is no message."""


def send(channel: socket.socket, header: Mapping[str, Any], payload: bytes = b"") -> None:
    """Send one message; blocks as the socket does."""
    text = json.dumps(header).encode()
    channel.sendall(_HEAD.pack(_MAGIC, len(text), len(payload)) + text)
    if payload:
        channel.sendall(payload)


def receive(fill: Fill) -> tuple[Header, bytearray] | None:
    """Receive one message.

    Args:
        fill: Fills all of a buffer and returns ``True``, or ``False`` where the other side ended.

    Returns:
        Header and payload, or ``None`` where the other side ended.

    Raises:
        BadFrame: It is no message.
    """
    head = bytearray(_HEAD.size)
    if not fill(memoryview(head)):
        return None
    magic, header_bytes, payload_bytes = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise BadFrame(f"expected a message that starts with {_MAGIC!r}, found {magic!r}")
    text, payload = bytearray(header_bytes), bytearray(payload_bytes)
    if not (fill(memoryview(text)) and fill(memoryview(payload))):
        return None
    header = json.loads(text)
    if not isinstance(header, dict):
        raise BadFrame(f"expected an object as header, found {type(header).__name__}")
    return header, payload


def array_header(x: Array) -> Header:
    """Shape and element type, for a header."""
    return {"dtype": x.dtype.name, "shape": list(x.shape)}


def array_of(header: Header, payload: bytearray) -> Array:
    """Take the array that a message carries; it may be written to and shares its payload."""
    return np.frombuffer(payload, dtype=header["dtype"]).reshape(header["shape"])

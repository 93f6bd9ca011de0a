"""Fetch one file over HTTPS so that it is either there and right, or not there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from edgewise.errors import DataError
from edgewise.units import format_bytes

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0


class Body(Protocol):
    """What answers a request: bytes, in pieces."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        ...


OpenUrl = Callable[[str], contextlib.AbstractContextManager[Body]]


def open_https(url: str) -> contextlib.AbstractContextManager[Body]:
    """Open an ``https://`` address, giving up after 30 s of silence.

    Raises:
        DataError: The address does not start with ``https://``.
        OSError: There is no network, or the server refused.
    """
    if not url.startswith("https://"):
        raise DataError(
            f"expected an address that starts with https://, found {url!r}", help="use https"
        )
    response: contextlib.AbstractContextManager[Body] = urllib.request.urlopen(  # noqa: S310 - https, checked above
        url, timeout=_TIMEOUT_S
    )
    return response


def download(  # noqa: PLR0913 - what is safe about a download is passed in
    url: str,
    target: Path,
    *,
    sha256: str,
    max_bytes: int,
    open_url: OpenUrl = open_https,
    otherwise: str = "check the network, or copy the file there by hand",
) -> None:
    """Fetch a file into ``target``; nothing is left behind when that fails.

    The bytes go to a temporary file beside the target and take its name only when the checksum
    is right, so an interrupted run never leaves half a file under the real name.

    Args:
        url: Where to fetch from.
        target: Where the file shall be; its folder is made.
        sha256: Expected SHA-256 of the bytes, in hexadecimal.
        max_bytes: Stop reading beyond this size.
        open_url: Opens the address; tests pass their own.
        otherwise: What the user can do when there is no network.

    Raises:
        DataError: No network, a server that refuses, a wrong checksum, or no room to write.
    """
    _LOG.info("downloading %s to %s", url, target)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, received_bytes = hashlib.sha256(), 0
        with (
            open_url(url) as body,
            tempfile.NamedTemporaryFile(
                dir=target.parent, prefix=f".{target.name}.", delete=False
            ) as sink,
        ):
            partial = Path(sink.name)
            while chunk := body.read(_CHUNK_BYTES):
                received_bytes += len(chunk)
                if received_bytes > max_bytes:
                    raise DataError(
                        f"{url} sent more than {format_bytes(max_bytes)}", help=otherwise
                    )
                digest.update(chunk)
                sink.write(chunk)
        if digest.hexdigest() != sha256:
            raise DataError(
                f"{url} sent {received_bytes} bytes with SHA-256 {digest.hexdigest()}, "
                f"expected {sha256}",
                help=otherwise,
            )
        partial.replace(target)
    except (OSError, HTTPException) as error:
        raise DataError(f"cannot download {url} to {target}: {error}", help=otherwise) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)

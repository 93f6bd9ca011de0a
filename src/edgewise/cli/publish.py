"""``edgewise publish-emc``: let programs without privileges know the memory clock of a Jetson."""

from __future__ import annotations

import signal
import sys
import threading
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from edgewise.cli.output import stderr_console
from edgewise.device.publisher import PUBLISHED, UNIT, EmcPublisher
from edgewise.units import parse_duration_s

_COMMAND = "ExecStart=/usr/bin/env edgewise publish-emc"


def publish_emc(
    *,
    period: Annotated[
        str, typer.Option(metavar="TIME", help="Time between two writings, 1 to 25 ms.")
    ] = "10ms",
    path: Annotated[
        Path | None,
        typer.Option(help=f"The file to write. [default: /{PUBLISHED}]", show_default=False),
    ] = None,
    root: Annotated[Path, typer.Option(help="Where the file tree starts.", hidden=True)] = Path(
        "/"
    ),
    unit: Annotated[
        bool, typer.Option("--unit", help="Print a systemd unit that runs this, and stop.")
    ] = False,
) -> None:
    """Publish the memory clock of a Jetson board, as root, until it is stopped.

    The clock stands where only root may read it. This writes it to a file that every program may
    read, and removes the file when it is stopped.
    """
    if unit:
        sys.stdout.write(unit_text())
        return
    stopping = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        with EmcPublisher(root, path, parse_duration_s(period)) as publisher:
            publisher.publish()
            stderr_console().print(
                f"the memory clock is published to {publisher.path} until this is stopped",
                soft_wrap=True,
            )
            publisher.run(stopping)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("was stopped; what it published is removed") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def unit_text() -> str:
    """The systemd unit, with the Python that runs now."""
    text = files("edgewise.device").joinpath(UNIT).read_text(encoding="utf-8")
    # systemd splits at blanks and expands "%" and "$".
    python = sys.executable.replace("%", "%%").replace("$", "$$")
    return text.replace(_COMMAND, f'ExecStart="{python}" -m edgewise publish-emc')

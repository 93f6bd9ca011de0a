"""What every sensor does, and how all of them are found."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from edgewise.device.state import Quantity


class Sensor(ABC):
    """Reads some quantities again and again; keeps its files open.

    A sensor never raises for what the machine lacks, loses or refuses: it says so in the quality
    of the quantity. It probes again by itself, so that a node that appears late, a core that comes
    back or a permission that changes is noticed. It is used by one thread at a time.

    Attributes:
        name: The name of its file.
        period_s: How often reading it is worth its cost, seconds; 0 for at every chance.
    """

    name: str
    period_s: float = 0.0

    @abstractmethod
    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read everything once.

        Args:
            now_s: The present instant on a monotonic clock, for rates and ages.

        Returns:
            Quantities by name. A quantity that was ever reported stays in later answers, with a
            value or with a reason.
        """

    def close(self) -> None:  # noqa: B027 - most keep nothing but descriptors that close themselves
        """Close what is kept open; reading again afterwards opens it again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sensor_names() -> tuple[str, ...]:
    """Every sensor, by the name of its file."""
    package = importlib.import_module("edgewise.device.sensors")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__)))


def make_sensors(root: Path = Path("/")) -> list[Sensor]:
    """Make every sensor; none is left out for what this machine lacks, so that it can say why.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
    """
    modules = (importlib.import_module(f"edgewise.device.sensors.{n}") for n in sensor_names())
    return [module.make(root) for module in modules]

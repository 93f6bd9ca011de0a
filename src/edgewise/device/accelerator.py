"""An accelerator with little memory of its own, described: what a load, a byte and a call cost.

The description is a file that a probe, a data sheet or a user writes; simulated devices, the
planner and the runtime read the same one.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from edgewise.errors import ConfigError, nearest_names

CachePolicy = Literal["token", "pinned", "lru"]
Provenance = Literal["measured", "simulated", "estimated"]

_SHIPPED = "edgewise.device.accelerators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What the planner must know about a device.

    Attributes:
        name: For people and profiles.
        sram_bytes: Memory that can hold parameters, bytes, above zero. Less than a data sheet
            says where activations share it.
        in_bytes_per_s: Rate at which parameters and inputs reach the device.
        out_bytes_per_s: Rate at which outputs come back.
        fixed_s: What every call costs beside its work, seconds.
        switch_s: What loading another model costs beside its bytes, seconds.
        cache_policy: What stays in memory between calls of different models. ``token``: only the
            last model's parameters. ``lru``: whole models, the least recently used goes first.
            ``pinned``: what was given memory at compile time stays, the rest streams every call.
        can_pin: Whether models can be compiled together so that their shares of the memory stay,
            whatever ``cache_policy`` does to models compiled apart.
        provenance: How the numbers came about.
        source: From where.

    Raises:
        ConfigError: A value is out of range.
    """

    name: str
    sram_bytes: int
    in_bytes_per_s: float
    out_bytes_per_s: float
    fixed_s: float = 0.0
    switch_s: float = 0.0
    cache_policy: CachePolicy = "token"
    can_pin: bool = False
    provenance: Provenance = "estimated"
    source: str = ""

    def __post_init__(self) -> None:
        for field, least in (
            ("sram_bytes", 1),
            ("in_bytes_per_s", 1),
            ("out_bytes_per_s", 1),
            ("fixed_s", 0),
            ("switch_s", 0),
        ):
            value = getattr(self, field)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < least:
                raise ConfigError(
                    f"accelerator {self.name!r}: expected {field} of at least {least}, found"
                    f" {value!r}",
                    help="without usable memory plan for the CPU alone: leave the accelerator out"
                    if field == "sram_bytes"
                    else None,
                )
        for field, known in (("cache_policy", CachePolicy), ("provenance", Provenance)):
            value = getattr(self, field)
            if value not in get_args(known):
                raise ConfigError(
                    f"accelerator {self.name!r}: unknown {field} {value!r}",
                    help=nearest_names(str(value), get_args(known)),
                )

    def load_s(self, prefix_bytes: float, *, sram_bytes: float | None = None) -> float:
        """Time to bring a prefix's cached part into memory: min(F, C) / B + t_sw.

        Only what fits is loaded once; the overflow streams with every call and is part of the
        service time, so it is counted once.

        Args:
            prefix_bytes: F, parameters of the prefix.
            sram_bytes: C for this prefix, where a compiler said so; the device's by default.
        """
        cached = min(prefix_bytes, self.sram_bytes if sram_bytes is None else sram_bytes)
        return cached / self.in_bytes_per_s + self.switch_s

    def stream_s(self, prefix_bytes: float, *, sram_bytes: float | None = None) -> float:
        """Time that every call spends on parameters that do not fit: max(0, F - C) / B."""
        room = self.sram_bytes if sram_bytes is None else sram_bytes
        return max(0.0, prefix_bytes - room) / self.in_bytes_per_s


def accelerator_names() -> tuple[str, ...]:
    """Descriptions that ship with Edgewise."""
    folder = resources.files(_SHIPPED)
    return tuple(
        sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    )


def load_accelerator(name_or_path: str | Path) -> Accelerator:
    """Read a description.

    Args:
        name_or_path: A shipped name or a TOML file.

    Raises:
        ConfigError: No such name or file, not TOML, an unknown key, or a value out of range.
    """
    if str(name_or_path) in accelerator_names():
        file = resources.files(_SHIPPED) / f"{name_or_path}.toml"
        return parse_accelerator(file.read_text(encoding="utf-8"), where=str(name_or_path))
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no accelerator is called {str(name_or_path)!r}, and no such file can be read"
            f" ({error})",
            help=nearest_names(str(name_or_path), accelerator_names()),
        ) from error
    return parse_accelerator(text, where=str(path))


def parse_accelerator(text: str, *, where: str) -> Accelerator:
    """Read a description from TOML text.

    Args:
        text: One key per attribute of `Accelerator`.
        where: For messages.

    Raises:
        ConfigError: As `load_accelerator`.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    known = {f.name for f in fields(Accelerator)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}", help=nearest_names(key, known))
    missing = [
        k for k in ("name", "sram_bytes", "in_bytes_per_s", "out_bytes_per_s") if k not in values
    ]
    if missing:
        raise ConfigError(f"{where}: the key {missing[0]!r} is missing")
    arguments: dict[str, Any] = values
    return Accelerator(**arguments)

"""What commands share that take a language model: options, and which names are such models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.errors import ConfigError, nearest_names

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadChoice, Precision
    from edgewise.model.language import LanguageModel

Exits = Annotated[
    str | None,
    typer.Option("--exits", help="After how many layers one may leave, as 12,18,24,27."),
]
ExitsFile = Annotated[
    Path | None,
    typer.Option("--exits-file", help="What edgewise fit-exits wrote, if kept elsewhere."),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="What answers at exits: shortlist (default where one was fitted), affine, raw.",
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision", help="Of the weights: fp32 (default), int8, int4.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageOptions:
    """What a language model is opened with, checked.

    Attributes:
        precision: Of the weights.
        head: What answers at exits; ``"auto"`` for what was fitted.
        layers: After how many layers one may leave; ``None`` for those that were fitted.
        exits_file: ``None`` for the exits that are kept for the model.

    Raises:
        ConfigError: By `read`, a value that is not known.
    """

    precision: Precision
    head: HeadChoice
    layers: list[int] | None
    exits_file: Path | None

    @classmethod
    def read(
        cls, *, precision: str | None, head: str | None, exits: str | None, exits_file: Path | None
    ) -> LanguageOptions:
        """Read what was written."""
        known = ("fp32", "int8", "int4")
        return cls(
            precision=one_of("--precision", precision or "fp32", known),  # type: ignore[arg-type]  # checked
            head=one_of("--head", head or "auto", ("auto", "affine", "raw", "shortlist")),  # type: ignore[arg-type]  # checked
            layers=None if exits is None else parse_exits(exits),
            exits_file=exits_file,
        )

    def open(
        self, model: str | LanguageModel, *, backend: str | None = None, threads: int = 1
    ) -> DecoderProgram:
        """Load a model with them.

        Args:
            model: As for `load_language`.
            backend: ``None`` for the usual one.
            threads: Of each call.

        Raises:
            EdgeError: As `load_language`.
        """
        from edgewise.api import LANGUAGE_BACKEND, open_decoder

        return open_decoder(
            model,
            backend=backend or LANGUAGE_BACKEND,
            precision=self.precision,
            threads=threads,
            exit_layers=self.layers,
            exits=self.exits_file or "auto",
        )


def is_language(name: str) -> bool:
    """Whether a name or path means a language model, whole or damaged."""
    path = Path(name)
    if name in _shipped():
        return False
    if name.lower() in _published():
        return True
    if path.is_dir():
        checkpoints = importlib.import_module("edgewise.frontends.checkpoint")
        return (path / "config.json").is_file() and not checkpoints.is_checkpoint(path)
    return path.is_file() and path.suffix.lower() == ".gguf"


def check_known(name: str, *, others: tuple[str, ...] = ()) -> None:
    """Refuse a name that is no model and no path.

    Args:
        name: As it was written.
        others: Names that the command knows besides shipped and language models.

    Raises:
        ConfigError: The nearest names are told, or all.
    """
    known = [*_shipped(), *_published(), *others]
    alike = name.lower().replace("-", "_")
    if not Path(name).exists() and alike not in {each.replace("-", "_") for each in known}:
        raise ConfigError(
            f"unknown model {name!r}, and there is no file or directory of that name",
            help=nearest_names(name, known),
        )


def refuse_without_language(options: Mapping[str, object]) -> None:
    """Refuse options that a model without layers of text does not have.

    Raises:
        ConfigError: One was given.
    """
    for option, given in options.items():
        if given is not None:
            raise ConfigError(
                f"{option} has no meaning without a language model",
                help="edgewise pull lists language models",
            )


def parse_exits(text: str) -> list[int]:
    """Numbers of layers.

    Raises:
        ConfigError: Not numbers.

    Example:
        >>> parse_exits("12, 18")
        [12, 18]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"expected layers as 12,18,24, found {text!r}", help="an exit after k layers is k"
        ) from None


def one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    """Return a value that is known.

    Raises:
        ConfigError: It is not.
    """
    if value not in known:
        raise ConfigError(f"expected {' or '.join(known)} for {flag}, found {value!r}")
    return value


def _shipped() -> tuple[str, ...]:
    names: Any = importlib.import_module("edgewise.frontends.checkpoint").shipped_names()
    return tuple(names)


def _published() -> tuple[str, ...]:
    return tuple(importlib.import_module("edgewise.frontends.language.pull").PUBLISHED)

"""What `edgetpu_compiler` says about memory: how much of a model's parameters stays on the chip.

A data sheet's 8 MB is not what a model gets: activations share it, and models that are compiled
together share what is left. Only the log of that compilation tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgewise.errors import ConfigError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|B|bytes)\b", re.IGNORECASE)
_FAILED = re.compile(
    r"^.*(?:not quantized|compil\w* (?:failed|error)|aborting|invalid model).*$",
    re.IGNORECASE | re.MULTILINE,
)
_FACTORS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HELP = "save what `edgetpu_compiler -s MODEL.tflite` prints"

# Words that a line starts with, in lower case → field. Versions differ in the words between.
_SIZES = (
    (r"on-chip memory used for cach\w+ model parameters", "cached_bytes"),
    (r"on-chip memory remaining for cach\w+ model parameters", "remaining_bytes"),
    (r"on-chip memory available for cach\w+ model parameters", "available_bytes"),
    (r"off-chip memory used for stream\w+ (?:uncached )?model parameters", "streamed_bytes"),
    (r"input size", "input_bytes"),
    (r"output size", "output_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """One model of a log; sizes in bytes, as exact as the log's two decimals.

    Attributes:
        name: Of the file that went in; ``""`` where the log does not say.
        output: Of the file that came out; ``""`` where the log does not say.
        cached_bytes: Parameters that stay on the chip.
        streamed_bytes: Parameters that every call brings in again.
        remaining_bytes: Memory for parameters that is left over; ``None`` where the log does not
            say.
        input_bytes: Size of the file that went in, or ``None``.
        output_bytes: Size of the file that came out, or ``None``.
        compiler: Its version; ``""`` where the log does not say.
    """

    name: str
    output: str
    cached_bytes: int
    streamed_bytes: int
    remaining_bytes: int | None
    input_bytes: int | None
    output_bytes: int | None
    compiler: str

    @property
    def weight_bytes(self) -> int:
        """F, all parameters."""
        return self.cached_bytes + self.streamed_bytes

    @property
    def sram_bytes(self) -> int:
        """C, memory that this model could use for parameters.

        What is left over counts only where nothing streams: a remainder beside a stream is too
        small for the next layer's parameters.
        """
        left = 0 if self.streamed_bytes or self.remaining_bytes is None else self.remaining_bytes
        return self.cached_bytes + left


def read_compiler_log(path: str | Path) -> tuple[CompiledModel, ...]:
    """Read a saved log.

    Raises:
        ConfigError: It cannot be read, or as `parse_compiler_log`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the compiler log {path}: {error}", help=_HELP) from error
    return parse_compiler_log(text, where=str(path))


def parse_compiler_log(text: str, *, where: str) -> tuple[CompiledModel, ...]:
    """Read what the compiler printed, one or several models, one or several runs.

    Args:
        text: The log.
        where: For messages.

    Returns:
        One record per model, in the order of the log.

    Raises:
        ConfigError: It is no such log, a model failed to compile, or its memory is not told.
    """
    found: list[dict[str, str | int]] = []
    compiler = ""
    for line in text.splitlines():
        words, _, value = line.strip().partition(":")
        words = " ".join(words.lower().split())
        if version := re.match(r"edge ?tpu compiler version\s+(\S+)", line.strip(), re.IGNORECASE):
            compiler = version[1]
        elif words in {"input model", "input"}:
            found.append({"name": value.strip(), "compiler": compiler})
        elif words in {"output model", "output"} and found:
            found[-1]["output"] = value.strip()
        else:
            _note_size(found, words, value, compiler=compiler)
    if not found:
        failed = _FAILED.search(text)
        raise ConfigError(
            f"{where}: the model was not compiled: {failed[0].strip()!r}"
            if failed
            else f"{where} is no log of edgetpu_compiler: it names no model and no memory",
            help=_HELP,
        )
    return tuple(_record(each, where=where) for each in found)


def _note_size(found: list[dict[str, str | int]], words: str, value: str, *, compiler: str) -> None:
    """Take a line that tells a size."""
    field = next((name for pattern, name in _SIZES if re.fullmatch(pattern, words)), None)
    size = _SIZE.search(value)
    if field is None or size is None:
        return
    if not found or field in found[-1]:
        found.append({"compiler": compiler})  # a log that names no models
    found[-1][field] = round(float(size[1]) * _FACTORS[size[2][0].upper()])


def _record(values: dict[str, str | int], *, where: str) -> CompiledModel:
    name = str(values.get("name", ""))
    numbers = {k: v for k, v in values.items() if isinstance(v, int)}
    for field in ("cached_bytes", "streamed_bytes"):
        if field not in numbers:
            said = "on-chip" if field == "cached_bytes" else "off-chip"
            raise ConfigError(
                f"{where}: expected the {said} memory of model {name!r}, found none: the log is cut"
                " short or the model was not compiled",
                help=_HELP,
            )
    remaining = numbers.get("remaining_bytes")
    if remaining is None and "available_bytes" in numbers:
        remaining = max(0, numbers["available_bytes"] - numbers["cached_bytes"])
    return CompiledModel(
        name=name,
        output=str(values.get("output", "")),
        cached_bytes=numbers["cached_bytes"],
        streamed_bytes=numbers["streamed_bytes"],
        remaining_bytes=remaining,
        input_bytes=numbers.get("input_bytes"),
        output_bytes=numbers.get("output_bytes"),
        compiler=str(values.get("compiler", "")),
    )

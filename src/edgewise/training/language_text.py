"""Text files for language models: plain or gzipped UTF-8, WikiText put back into prose."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgewise.errors import DataError
from edgewise.model.language import Tokenizer

Int64 = npt.NDArray[np.int64]

MOST_BYTES = 16 << 20  # read of one file, unpacked
_BLOCK_CHARACTERS = 1 << 16  # given to the tokenizer at once
_HEADING = re.compile(r"^ ?(= )+.*( =)+ ?$")
_JOINED = re.compile(r" @([-,.])@ ")
_UNKNOWN = "<unk>"
# Spaces that WikiText's tokenizer put in, in the order in which they are taken out.
_SPACES = (
    (re.compile(r"\s+([,;:.!?%)\]])"), r"\1"),
    (re.compile(r"([(\[$£€])\s+"), r"\1"),
    (re.compile(r"\s+'\s?(s|t|re|ve|ll|d|m)\b"), r"'\1"),
    (re.compile(r"s\s+'\s"), "s' "),
    (re.compile(r'"\s+([^"]*?)\s+"'), r'"\1"'),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenText:
    """One text as tokens.

    Attributes:
        name: Of the file.
        tokens: [N].
        detokenised: It was WikiText and was put back into prose.
    """

    name: str
    tokens: Int64
    detokenised: bool = False


def load_text(path: Path, tokenizer: Tokenizer) -> TokenText:
    """Read a file as tokens.

    Args:
        path: Plain or gzipped (by its first bytes) UTF-8; of a long one the first 16 MiB.
        tokenizer: Of the model.

    Raises:
        DataError: It cannot be read, is empty, or is not UTF-8.
    """
    text, detokenised = read_text(path)
    tokens = [token for block in _blocks(text) for token in tokenizer.encode(block)]
    if not tokens:
        raise DataError(f"{path}: expected text, found an empty file")
    return TokenText(
        name=path.name, tokens=np.asarray(tokens, dtype=np.int64), detokenised=detokenised
    )


def read_text(path: Path) -> tuple[str, bool]:
    """Read a file as text, and say whether it was WikiText that was put back into prose.

    Raises:
        DataError: It cannot be read, is empty, or is not UTF-8.
    """
    content, whole = _read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not whole and error.start >= len(content) - 3:  # the cut went through a letter
            text = content[: error.start].decode("utf-8-sig")
        else:
            raise DataError(
                f"{path}: expected UTF-8, found byte 0x{content[error.start]:02x} at byte"
                f" {error.start}",
                help=f"iconv -f latin1 -t utf-8 {path.name}",
            ) from error
    text = text.replace("\r\n", "\n")
    if looks_like_wikitext(text):
        return detokenise_wikitext(text), True
    return text, False


def looks_like_wikitext(text: str) -> bool:
    """Whether a text has WikiText's headings and its marks for unknown or joined words."""
    head = text[: 1 << 18]
    marks = head.count(_UNKNOWN) + len(_JOINED.findall(head))
    return marks > 0 and any(_HEADING.match(line) for line in head.split("\n") if line.strip())


def detokenise_wikitext(text: str) -> str:
    r"""Prose from WikiText: headings and sentences with unknown words left out.

    Source:
        Merity et al., Pointer sentinel mixture models, 2016 (arXiv:1609.07843), section 4.3: words
        that are rarer than three are ``<unk>``; punctuation inside numbers and words is ``@,@``.

    Example:
        >>> detokenise_wikitext(" = Heading = \n It 's 1 @,@ 200 m long . The <unk> is red . ")
        "It's 1,200 m long."
    """
    paragraphs = []
    for line in text.split("\n"):
        if not line.strip() or _HEADING.match(line):
            continue
        sentences = re.split(r"(?<= [.!?]) ", f"{line.strip()} ")
        kept = " ".join(s.strip() for s in sentences if s.strip() and _UNKNOWN not in s)
        if kept:
            paragraphs.append(_close_up(kept))
    return "\n".join(paragraphs)


def _close_up(text: str) -> str:
    text = _JOINED.sub(r"\1", f" {text} ")
    for pattern, replacement in _SPACES:
        text = pattern.sub(replacement, text)
    return text.strip()


def _read_bytes(path: Path) -> tuple[bytes, bool]:
    """The first bytes, unpacked, and whether that is all."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as unpacked:
            content = unpacked.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return content[:MOST_BYTES], len(content) <= MOST_BYTES


def _blocks(text: str) -> Iterator[str]:
    """Pieces of whole lines where there are lines, so that no tokenizer meets all at once."""
    start = 0
    while start < len(text):
        stop = start + _BLOCK_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        block = text[start:stop]
        if block.strip():
            yield block
        start = stop


def cut_windows(texts: Sequence[TokenText], *, window: int) -> list[list[Int64]]:
    """Each text as windows of that many tokens, the rest at its end left out."""
    return [list(t.tokens[: len(t.tokens) // window * window].reshape(-1, window)) for t in texts]


def spread(counts: Sequence[int], wanted: int) -> list[list[int]]:
    """Choose windows from several texts: equal shares, evenly spaced in each.

    Args:
        counts: How many each text has.
        wanted: How many to choose in all.

    Returns:
        For each text the chosen indices, rising. A text too short for its share gives all it has,
        and the others make up for it; fewer than wanted where all are too short.

    Example:
        >>> spread([2, 10], 6)
        [[0, 1], [0, 2, 5, 7]]
    """
    shares, left = [0] * len(counts), min(wanted, sum(counts))
    for turn, i in enumerate(sorted(range(len(counts)), key=lambda i: counts[i])):
        shares[i] = min(counts[i], left // (len(counts) - turn))
        left -= shares[i]
    return [[j * n // k for j in range(k)] for n, k in zip(counts, shares, strict=True)]

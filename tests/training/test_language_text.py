"""Text files as tokens."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import DataError
from edgewise.training.language_text import (
    MOST_BYTES,
    TokenText,
    cut_windows,
    detokenise_wikitext,
    load_text,
    looks_like_wikitext,
    read_text,
    spread,
)


class Letters:
    """A token per character."""

    stop_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def chat(self, messages: object) -> list[int]:
        raise NotImplementedError


WIKITEXT = """ 
 = Homarus gammarus = 
 
 It is a species of <unk> lobster . It may grow to 60 cm ( 24 in ) , or 1 @,@ 000 g . 
 
 = = Life = = 
 
 Only becoming " lobster red " on cooking ; it 's red @-@ tipped and 0 @.@ 5 m long . 
"""  # noqa: W291, W293 - as WikiText is


def test_wikitext_becomes_prose_without_headings_and_unknown_words(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKITEXT)

    text, detokenised = read_text(tmp_path / "wiki.txt")

    assert detokenised
    assert text == (
        "It may grow to 60 cm (24 in), or 1,000 g.\n"
        'Only becoming "lobster red" on cooking; it\'s red-tipped and 0.5 m long.'
    )


@pytest.mark.parametrize(
    "text",
    ["A plain text .\n = not a heading\n", "a = b\n@-@ <unk>", " = Heading = \n\nbut plain"],
    ids=["plain", "an equation", "a heading alone"],
)
def test_other_text_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)

    assert not looks_like_wikitext(text)
    assert read_text(tmp_path / "a.txt") == (text, False)


def test_a_text_of_unknown_words_alone_has_no_prose() -> None:
    assert detokenise_wikitext(" = A = \n <unk> . \n") == ""


def test_gzip_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress("grün\r\nrot".encode()))

    text = load_text(tmp_path / "a.txt", Letters())

    assert Letters().decode(list(text.tokens)) == "grün\nrot"
    assert text.name == "a.txt"


def test_long_text_is_given_to_the_tokenizer_in_pieces_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "".join(f"line {i} of some\n" for i in range(10_000)) + "x" * 70_000
    (tmp_path / "a.txt").write_text(content)

    tokens = load_text(tmp_path / "a.txt", Letters()).tokens

    assert Letters().decode(list(tokens)) == content


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")

    with pytest.raises(DataError, match="found byte 0xe9 at byte 3") as caught:
        load_text(tmp_path / "a.txt", Letters())

    assert caught.value.help == "iconv -f latin1 -t utf-8 a.txt"


def test_a_letter_that_the_limit_cuts_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * (MOST_BYTES - 1) + "é".encode(), 1))

    text, _ = read_text(tmp_path / "a.gz")

    assert len(text) == MOST_BYTES - 1


@pytest.mark.parametrize("content", [b"", b" \n\n"], ids=["empty", "blank"])
def test_an_empty_file_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)

    with pytest.raises(DataError, match="found an empty file"):
        load_text(tmp_path / "a.txt", Letters())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"some text" * 100)[:30])

    with pytest.raises(DataError, match=r"cut\.gz cannot be read"):
        read_text(tmp_path / "cut.gz")
    with pytest.raises(DataError, match="there is no file"):
        read_text(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path)


def test_windows_are_whole_and_in_order() -> None:
    text = TokenText(name="a", tokens=np.arange(11))

    ((first, second),) = cut_windows([text], window=5)

    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [5, 6, 7, 8, 9]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 100))
def test_windows_are_shared_out_as_evenly_as_the_texts_allow(
    counts: list[int], wanted: int
) -> None:
    chosen = spread(counts, wanted)

    sizes = [len(c) for c in chosen]
    assert sum(sizes) == min(wanted, sum(counts))
    for picks, count in zip(chosen, counts, strict=True):
        assert picks == sorted(set(picks))
        assert all(0 <= j < count for j in picks)
    short_of = [s for s, n in zip(sizes, counts, strict=True) if s < n]
    assert max(sizes) <= min(short_of, default=max(sizes)) + 1

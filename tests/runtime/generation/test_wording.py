from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.runtime.generation.wording import Wording


def by_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def words(text: str, stops: Sequence[str] = ()) -> list[str]:
    """What comes with each byte, and at the end."""
    wording = Wording(by_bytes, stops)
    pieces = []
    for byte in text.encode():
        pieces.append(wording.add(byte))
        if wording.stopped:
            break
    return [*pieces, wording.finish()]


@given(st.text(max_size=30))
def test_no_character_is_ever_split(text: str) -> None:
    pieces = words(text)

    assert "".join(pieces) == text
    assert text.count("\N{REPLACEMENT CHARACTER}") == "".join(pieces).count(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_a_character_of_four_bytes_comes_with_its_last() -> None:
    assert words("a😀b") == ["a", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_as_such_at_the_end() -> None:
    wording = Wording(by_bytes)

    assert [wording.add(0x61), wording.add(0xF0), wording.finish()] == ["a", "", "�"]


def test_a_stop_string_across_tokens_is_left_out_with_all_that_follows() -> None:
    assert "".join(words("one<end>two", ["<end>"])) == "one"


def test_what_only_begins_like_a_stop_string_is_shown_late_but_shown() -> None:
    assert words("a<e", ["<end>"]) == ["a", "", "", "<e"]
    assert "".join(words("a<e<ennnd", ["<end>"])) == "a<e<ennnd"


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_where_the_first_stop_string_begins(text: str, stops: list[str]) -> None:
    # The first that is complete; of several complete at once the one that began first.
    expected = text
    for end in range(len(text) + 1):
        found = [text[:end].find(s) for s in stops if s in text[:end]]
        if found:
            expected = text[: min(found)]
            break

    assert "".join(words(text, stops)) == expected


@pytest.mark.parametrize("stops", [[""], "end"])
def test_a_stop_that_is_empty_or_a_bare_string_is_refused(stops: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="stop strings"):
        Wording(by_bytes, stops)

"""Exits in a file: the same after a round trip, and never half or changed ones."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="safetensors is not installed")

from edgewise.errors import CheckpointError, ConfigError, ModelError
from edgewise.frontends.language.exits_file import (
    exits_path,
    find_exits,
    load_exits,
    save_exits,
)
from edgewise.model.decoding import AffineExit, Gate, LanguageExits

DIGEST = "5a" * 32


def _exits(*, shortlist: bool = True, width: int = 6) -> LanguageExits:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return rng.standard_normal(shape).astype(np.float32)

    return LanguageExits(
        model="tiny λ",
        digest=DIGEST,
        affine={
            2: AffineExit(layer=2, weight=draw(width, width), bias=draw(width), temperature=1.25),
            5: AffineExit(layer=5, weight=draw(width, width), bias=draw(width), agreement=0.5),
        },
        gates={2: Gate(layer=2, weight=draw(width), bias=-0.75)},
        shortlist=np.array([7, 1, 4]) if shortlist else None,
        fitted_on="text.txt: 100 tokens",
        notes={"scores": [{"layer": 2, "auc": None}]},
    )


@pytest.mark.parametrize("shortlist", [True, False], ids=["short list", "no short list"])
def test_what_is_read_is_what_was_written(tmp_path: Path, *, shortlist: bool) -> None:
    exits = _exits(shortlist=shortlist)
    save_exits(exits, tmp_path / "deep" / "exits")

    found = load_exits(tmp_path / "deep" / "exits", digest=DIGEST)

    assert (found.model, found.digest, found.fitted_on) == ("tiny λ", DIGEST, exits.fitted_on)
    assert found.notes == exits.notes
    assert list(found.affine) == [2, 5]
    for layer, own in exits.affine.items():
        other = found.affine[layer]
        np.testing.assert_array_equal(other.weight, own.weight)
        np.testing.assert_array_equal(other.bias, own.bias)
        assert (other.temperature, other.agreement) == (own.temperature, own.agreement)
    np.testing.assert_array_equal(found.gates[2].weight, exits.gates[2].weight)
    assert found.gates[2].bias == -0.75
    if shortlist:
        np.testing.assert_array_equal(found.shortlist, [7, 1, 4])
    else:
        assert found.shortlist is None
    assert not found.affine[2].weight.flags.writeable
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["exits"]


def test_exits_are_found_by_the_digest_of_the_weights(tmp_path: Path) -> None:
    assert find_exits(DIGEST, cache=tmp_path) is None

    save_exits(_exits(), exits_path(DIGEST, cache=tmp_path))

    found = find_exits(DIGEST, cache=tmp_path)
    assert found is not None
    assert found.model == "tiny λ"
    assert find_exits("b" * 64, cache=tmp_path) is None


def test_exits_of_other_weights_are_refused(tmp_path: Path) -> None:
    save_exits(_exits(), tmp_path / "exits")

    with pytest.raises(ModelError, match="fitted for 'tiny λ'"):
        load_exits(tmp_path / "exits", digest="b" * 64)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "exits"
    save_exits(_exits(), path)
    whole = path.read_bytes()

    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 0x11
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load_exits(path, digest=DIGEST)


@pytest.mark.parametrize("keep", [0, 5, 300, -1], ids=["nothing", "a few bytes", "part", "most"])
def test_a_truncated_file_is_refused_with_the_command_that_makes_it(
    tmp_path: Path, keep: int
) -> None:
    path = tmp_path / "exits"
    save_exits(_exits(), path)
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(CheckpointError, match="no whole file of exits") as caught:
        load_exits(path)

    assert caught.value.help is not None
    assert "edgewise fit-exits" in caught.value.help


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    head = {"format": "edgewise-language-exits", "version": 99, "records": {}, "sha256": ""}
    save_file({"a": np.zeros(1)}, tmp_path / "exits", metadata={"edgewise": json.dumps(head)})

    with pytest.raises(CheckpointError, match="version 99"):
        load_exits(tmp_path / "exits")


def test_another_safetensors_file_is_no_file_of_exits(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1)}, tmp_path / "other")

    with pytest.raises(CheckpointError, match="no readable header"):
        load_exits(tmp_path / "other")


def test_a_missing_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: expected a file of exits"):
        load_exits(tmp_path / "nowhere")


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        save_exits(_exits(), tmp_path)


def test_numbers_that_are_none_are_not_saved(tmp_path: Path) -> None:
    exits = _exits()
    exits.affine[2].bias[0] = np.nan

    with pytest.raises(CheckpointError, match=r"affine\.2\.bias holds NaN"):
        save_exits(exits, tmp_path / "exits")

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_moved_into_place_leaves_nothing(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)

    with pytest.raises(OSError, match="name") as caught:
        save_exits(_exits(), too_long)

    assert caught.value.errno == errno.ENAMETOOLONG
    assert list(tmp_path.iterdir()) == []

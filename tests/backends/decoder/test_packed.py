from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder import packed as module
from edgewise.backends.decoder import quantise
from edgewise.backends.decoder.onnxruntime import OnnxRuntimeDecoder
from edgewise.backends.decoder.packed import packed_folder, packed_matrices
from edgewise.backends.decoder.quantise import Packed


@pytest.fixture(scope="module")
def tiny(language: Any) -> Any:
    return language.tiny()


@pytest.fixture
def packed_now(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each matrix that is packed instead of read."""
    count: list[str] = []
    pack = quantise.pack

    def counted(weight: Any, precision: Any, *, backend: str) -> Packed:
        count.append(precision)
        return pack(weight, precision, backend=backend)

    monkeypatch.setattr(quantise, "pack", counted)
    return count


def matrices(model: Any, folder: Path | None, **changes: Any) -> dict[str, Packed]:
    choice: Any = {"part": "layers", "precision": "int4"} | changes
    return packed_matrices(
        model, choice["part"], choice["precision"], backend="a test", folder=folder
    )


def same(found: dict[str, Packed], wanted: dict[str, Packed]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(getattr(found[n], part), getattr(wanted[n], part))
        for n in wanted
        for part in Packed.__slots__
    )


def test_a_second_start_reads_what_the_first_packed(
    tiny: Any, tmp_path: Path, packed_now: list[str]
) -> None:
    for precision in ("int4", "int8"):
        first = matrices(tiny, tmp_path / "new", precision=precision)
        assert packed_now
        packed_now.clear()

        assert same(matrices(tiny, tmp_path / "new", precision=precision), first)
        assert not packed_now
        assert same(first, matrices(tiny, None, precision=precision))
        packed_now.clear()


def test_another_model_precision_or_part_is_another_file(tiny: Any, tmp_path: Path) -> None:
    matrices(tiny, tmp_path)
    matrices(tiny, tmp_path, precision="int8")
    head = matrices(tiny, tmp_path, part="head")
    matrices(replace(tiny, digest="0" * 64), tmp_path)

    assert list(head) == ["head"]
    assert len(list(tmp_path.iterdir())) == 4


def flip(at: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = at(len(data))
        return data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :]

    return change


@pytest.mark.parametrize(
    "change",
    [
        flip(lambda size: size // 2),
        flip(lambda size: size // 5),
        flip(lambda size: size - 20),
        lambda data: data[: len(data) // 2],
        lambda _: b"",
        lambda _: b"something else",
    ],
    ids=["a bit in the middle", "a bit in front", "a bit of the end", "half", "empty", "foreign"],
)
def test_a_damaged_file_is_made_anew(
    tiny: Any, tmp_path: Path, packed_now: list[str], change: Callable[[bytes], bytes]
) -> None:
    whole = matrices(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(change(path.read_bytes()))
    packed_now.clear()

    assert same(matrices(tiny, tmp_path), whole)
    assert packed_now
    packed_now.clear()
    assert same(matrices(tiny, tmp_path), whole)
    assert not packed_now


def test_a_file_of_other_weights_or_another_version_is_made_anew(
    tiny: Any, tmp_path: Path, packed_now: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    other = replace(tiny, digest=tiny.digest[:-1] + "x")  # the name tells only the first half
    packed_now.clear()
    matrices(other, tmp_path)
    assert packed_now
    assert list(tmp_path.iterdir()) == [path]

    packed_now.clear()
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    matrices(other, tmp_path)
    assert packed_now


def test_what_cannot_be_written_is_no_error(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")

    assert same(matrices(tiny, tmp_path / "a file"), matrices(tiny, None))
    assert (tmp_path / "a file").read_text() == "in the way"


def test_a_disk_that_fills_leaves_no_part_behind(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_save", full)
        assert same(matrices(tiny, tmp_path), matrices(tiny, None))

    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_files_place_is_left_alone(tiny: Any, tmp_path: Path) -> None:
    matrices(tiny, tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("kept")

    assert same(matrices(tiny, tmp_path), matrices(tiny, None))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert (path / "mine").read_text() == "kept"


def test_others_of_the_machine_may_read_what_umask_lets_them(tiny: Any, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        matrices(tiny, tmp_path)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_program_from_kept_weights_computes_the_same(
    tiny: Any, tmp_path: Path, packed_now: list[str]
) -> None:
    found = []
    for folder in (None, tmp_path, tmp_path):
        packed_now.clear()
        program = OnnxRuntimeDecoder(tiny, precision="int4", exit_layers=(2,), folder=folder)
        cache = program.new_cache(8)
        states = program.run_layers(program.embed([5, 7, 9]), cache, start=0, stop=2, first=0)
        found.append(program.logits(states, position=2))

    assert not packed_now
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_only_models_that_take_long_to_pack_are_kept(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    large = {"embedding": np.broadcast_to(np.float32(0), (1 << 12, 1 << 12))}

    assert packed_folder(tiny) is None
    folder = packed_folder(replace(tiny, weights=large))
    assert folder is not None
    assert folder.is_relative_to(tmp_path / "edgewise" / "models")

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from edgewise.bench.language_peers import Turn
from edgewise.bench.language_runs import (
    LLAMA,
    TRANSFORMERS,
    Contender,
    drafting_figures,
    in_turns,
    ratio_of,
    reader,
    speed_figures,
)
from edgewise.errors import BackendUnavailable


class FakePeer:
    """Decodes in no time."""

    version = "fake 1"
    closed = False

    def decode(self, count: int) -> Turn:
        return Turn(tpot_s=0.01, ids=tuple(range(count)))

    def close(self) -> None:
        self.closed = True


def test_contenders_run_to_and_fro_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    clock: Iterator[int] = itertools.count()

    def contender(name: str) -> Contender:
        def seconds() -> float:
            order.append(name)
            return float(next(clock))

        return Contender(name=name, seconds=seconds)

    samples = in_turns([contender("a"), contender("b")], rounds=2)

    assert order == ["b", "a", "a", "b", "b", "a"]
    assert samples == {"a": [2.0, 5.0], "b": [3.0, 4.0]}


def test_a_ratio_is_of_turns_of_the_same_round() -> None:
    # What slows both down tenfold in one round does not show.
    slow = [1.0, 10.0, 1.0, 1.0, 10.0, 1.0, 1.0]
    found = ratio_of([2 * s for s in slow], slow)

    assert (found.ratio, found.low, found.high, found.rounds) == (2.0, 2.0, 2.0, 7)


def test_reading_takes_time_for_each_byte() -> None:
    assert 0 < reader(1, size_bytes=1 << 16)() < 1


def test_runtimes_peers_and_limits_stand_in_one_table(language: Any) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    notes: list[str] = []
    peer = FakePeer()

    found = speed_figures(
        language.tiny(),
        [3, 1, 4],
        threads=1,
        rounds=2,
        tokens=3,
        notes=notes,
        runtimes=(("torch:cpu", "fp32"), ("onnxruntime:CPU", "int4")),
        open_peer=lambda *_, **__: peer,  # type: ignore[arg-type]
    )

    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == {
        TRANSFORMERS,
        LLAMA,
        *(f"{r}{h}" for r in ("torch:cpu fp32", "onnxruntime:CPU int4") for h in ("", ", head")),
    }
    assert rows["torch:cpu fp32"]["over_bandwidth_limit"] > 0
    assert rows["torch:cpu fp32, head"]["weight_bytes"] == 4 * 160 * 64
    assert rows[LLAMA]["over_bandwidth_limit"] is None
    assert found["tokens_equal_transformers"] is True
    assert found["torch_over_transformers"]["rounds"] == 2
    assert found["int4_over_llama"]["ratio"] > 0
    assert peer.closed


def test_a_peer_that_is_missing_leaves_a_note_and_no_figure(language: Any) -> None:
    notes: list[str] = []

    def missing(*_: Any, **__: Any) -> Any:
        raise BackendUnavailable("llama_cpp is not installed", help="pip install it")

    found = speed_figures(
        language.tiny(), [3, 1], threads=1, rounds=1, tokens=2, notes=notes,
        runtimes=(("torch:cpu", "fp32"),), open_peer=missing,
    )  # fmt: skip

    assert found["int4_over_llama"] is None
    assert f"{LLAMA}: llama_cpp is not installed; pip install it" in notes


def test_drafting_peers_are_beside_plain_decoding(language: Any) -> None:
    notes: list[str] = []

    found = drafting_figures(
        language.tiny(), [3, 1, 4], layers=(2,), rounds=1, tokens=4, notes=notes
    )

    plain, drafted = found["rows"]
    assert plain["over_greedy"] == 1.0
    assert drafted["name"].endswith("assistant_early_exit=2")
    assert drafted["tokens_equal"] is True
    assert any("no folder" in note for note in notes)

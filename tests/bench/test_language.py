from __future__ import annotations

from typing import Any

import pytest

from edgewise.bench import language as bench
from edgewise.errors import BackendError

SECTIONS = ("one_thread", "two_threads", "widths", "exits", "deadlines", "exact", "drafting_peers")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, language: Any) -> None:
    """Sections that take no time, of a model without a tokenizer."""
    model = language.tiny()
    monkeypatch.setattr("edgewise.frontends.language.load_language_model", lambda _: model)
    monkeypatch.setattr("edgewise.backends.threads.govern", lambda _: type("P", (), {"key": "1t"}))
    for name in SECTIONS:
        method = {"one_thread": "speed", "two_threads": "speed", "drafting_peers": "drafting"}

        def measure(*_: Any, name: str = name) -> dict[str, Any]:
            return {"rows": [{"name": name, "seconds_s": 1.0}]}

        monkeypatch.setattr(bench._Bench, method.get(name, name), measure)


@pytest.mark.usefixtures("fakes")
def test_each_section_has_its_figures_and_the_share_of_others() -> None:
    said: list[str] = []
    found = bench.run(quick=True, say=said.append)

    assert all(found[name]["rows"] for name in SECTIONS)
    assert set(found["other_programs"]) == set(SECTIONS)
    assert found["provenance"] == "measured"
    assert "one thread" in said
    assert any("thread policy" in note for note in found["notes"])


@pytest.mark.usefixtures("fakes")
def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise BackendError("the disk burnt", help="buy another")

    monkeypatch.setattr(bench._Bench, "widths", fails)
    found = bench.run(quick=True)

    assert found["widths"] is None
    assert found["exits"] is not None
    assert "widths: the disk burnt; buy another" in found["notes"]


def test_missing_texts_and_exits_are_reasons_not_errors(
    monkeypatch: pytest.MonkeyPatch, language: Any, tmp_path: Any
) -> None:
    monkeypatch.setenv("EDGEWISE_TEXTS", str(tmp_path / "none.txt"))
    monkeypatch.delenv("EDGEWISE_EXITS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = bench._Bench(language.tiny(), quick=True, say=lambda _: None)

    for name in ("widths", "exits", "deadlines", "drafting"):
        with made.section(name):
            getattr(made, name)()
            pytest.fail("expected a reason")
    told = " ".join(made.notes)
    assert "has no tokenizer" in told
    assert "edgewise fit-exits" in told
    assert "left out of a quick run" in told

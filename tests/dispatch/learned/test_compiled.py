from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from edgewise.dispatch.learned.compiled import (
    SelectorTable,
    compile_selector,
    read_selector_table,
    write_selector_table,
)
from edgewise.dispatch.learned.rows import Context, Rows
from edgewise.dispatch.learned.selectors import Selector, fit_selector
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.operators import OperatorShape

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def selector(rows: Rows) -> Selector:
    return fit_selector(rows, objective="latency", classifier="extra-trees", estimators=5)


@pytest.fixture
def compiled(selector: Selector, rows: Rows) -> SelectorTable:
    return compile_selector(selector, rows)


def unseen(rows: Rows, *, kind: str = "linear") -> Context:
    known = next(c for c in rows.contexts if c.shape.kind == "linear")
    shape = OperatorShape(kind=kind, m=24, k=80, n=80)  # type: ignore[arg-type]
    return Context(
        shape=shape, phase="prefill", length=24, hidden=80, intermediate=known.intermediate
    )


def test_every_known_operator_is_in_the_table_for_each_backend_before(
    compiled: SelectorTable, selector: Selector, rows: Rows
) -> None:
    chosen = selector.choose(rows.features)

    assert len(compiled.choices) == 3 * len(rows.contexts)
    for i, context in enumerate(rows.contexts):
        for b, before in enumerate(compiled.backends):
            assert compiled.choices[context.key, before] == compiled.backends[chosen[i, b]]


def test_the_model_is_asked_once_for_an_operator_that_was_not_known(
    compiled: SelectorTable, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = Selector.probabilities

    def count(self: Selector, features: Any) -> Any:
        asked.append(len(features))
        return ask(self, features)

    monkeypatch.setattr(Selector, "probabilities", count)
    context = unseen(rows)
    first = [compiled.choose(context, before) for before in compiled.backends]

    assert [compiled.choose(context, before) for before in compiled.backends] == first
    assert asked == [1]
    compiled.choose(rows.contexts[0], "torch:cpu")
    assert asked == [1]


def test_beyond_what_was_taught_it_abstains_to_the_single_backend(
    selector: Selector, rows: Rows
) -> None:
    table = compile_selector(selector, rows, fallback="torch:cpu")
    large = dataclasses.replace(unseen(rows), hidden=4096)

    assert table.choose(large, "torch:cuda") == "torch:cpu"
    assert table.choose(unseen(rows, kind="layernorm"), "torch:cuda") == "torch:cpu"
    assert len({*table.choices.values()}) > 1  # not for those that were taught


def test_where_it_is_not_sure_it_abstains(rows: Rows) -> None:
    # Trees grown to single rows are always sure of those.
    selector = fit_selector(rows, objective="latency", classifier="logistic-regression")
    table = compile_selector(selector, rows, fallback="torch:cpu", least=0.9)
    likely = selector.probabilities(rows.features)
    doubted = [
        table.choices[context.key, before]
        for i, context in enumerate(rows.contexts)
        for b, before in enumerate(table.backends)
        if likely[i, b].max() < 0.9
    ]

    assert set(doubted) == {"torch:cpu"}
    assert compile_selector(selector, rows, least=None).choices != table.choices


def test_a_walk_takes_each_choice_as_the_backend_before_of_the_next(
    compiled: SelectorTable, rows: Rows
) -> None:
    contexts = [rows.contexts[i % 11] for i in range(40)]
    walked = compiled.follow(contexts, "torch:cpu")

    previous = "torch:cpu"
    for context, number in zip(contexts, walked, strict=True):
        previous = compiled.choose(context, previous)
        assert compiled.backends[number] == previous


def test_a_selector_that_does_not_know_the_backend_before_answers_alike_for_all(
    rows: Rows,
) -> None:
    local = fit_selector(
        rows, objective="latency", classifier="extra-trees", transition=False, estimators=5
    )
    table = compile_selector(local, rows)

    for context in rows.contexts[:20]:
        assert len({table.choose(context, before) for before in table.backends}) == 1


def test_a_table_comes_back_from_its_file_without_the_model(
    compiled: SelectorTable, rows: Rows, tmp_path: Path
) -> None:
    file = tmp_path / "selector.json"
    write_selector_table(compiled, file)
    back = read_selector_table(file, trained_on=rows.digest())

    assert back.choices == compiled.choices
    assert (back.sklearn_version, back.trained_on) == (compiled.sklearn_version, rows.digest())
    assert back.selector is None
    assert back.choose(unseen(rows), "torch:cuda") == back.fallback


def test_a_file_that_was_taught_other_costs_is_refused(
    compiled: SelectorTable, tmp_path: Path
) -> None:
    write_selector_table(compiled, tmp_path / "selector.json")

    with pytest.raises(ProfileError, match="taught other costs"):
        read_selector_table(tmp_path / "selector.json", trained_on="0" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "holds no selector"),
        ({"version": 9}, "expected version 1"),
        ({"choices": [["a"]]}, "damaged"),
        ({"fallback": "nowhere"}, "nowhere"),
        ({"choices": None}, "damaged"),
    ],
    ids=["another format", "a newer version", "a short row", "an unknown backend", "no choices"],
)
def test_damaged_files_say_what_is_wrong(
    compiled: SelectorTable, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "selector.json"
    write_selector_table(compiled, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    with pytest.raises(ProfileError, match=message):
        read_selector_table(file)


def test_a_file_that_is_not_there_or_cannot_be_written_is_said(
    compiled: SelectorTable, tmp_path: Path
) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        read_selector_table(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_selector_table(compiled, tmp_path / "none" / "selector.json")


def test_a_backend_that_the_selector_does_not_know_is_named(
    compiled: SelectorTable, rows: Rows
) -> None:
    with pytest.raises(ConfigError, match="openvino:CPU"):
        compiled.choose(rows.contexts[0], "openvino:CPU")

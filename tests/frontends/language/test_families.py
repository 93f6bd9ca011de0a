"""What a family of models costs in lines, counted in the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgewise
from edgewise.frontends.language.weights import FAMILIES

SOURCE = Path(edgewise.__file__).parent
PARTS = ("model", "frontends/language", "backends/decoder", "training", "runtime/generation")
MOST_LINES = 40


def _says(node: ast.expr, family: str) -> bool:
    return any(isinstance(n, ast.Constant) and n.value == family for n in ast.walk(node))


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _lines(tree: ast.Module, family: str) -> set[int]:
    """Lines that name a family, that run for it alone, and functions that only those call."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == family:
            lines.add(node.lineno)
        if isinstance(node, ast.If) and _says(node.test, family):
            lines.update(*(_span(statement) for statement in node.body))
    uses: dict[str, set[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            uses.setdefault(node.id, set()).add(node.lineno)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in uses]
    for _ in functions:  # one may be called by another
        for function in functions:
            if uses[function.name] <= lines:
                lines.update(_span(function))
    return lines


def _files() -> Iterator[Path]:
    for part in PARTS:
        yield from (SOURCE / part).rglob("*.py")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_forty_lines_at_most(family: str) -> None:
    named = {
        p.relative_to(SOURCE).as_posix(): text
        for p in _files()
        if f'"{family}"' in (text := p.read_text())
    }
    found = {name: len(_lines(ast.parse(text), family)) for name, text in named.items()}

    assert found["frontends/language/weights.py"] >= 1
    assert found["backends/decoder/layers.py"] >= 1
    assert 4 <= sum(found.values()) <= MOST_LINES, found


def test_what_belongs_to_a_family_is_counted() -> None:
    tree = ast.parse(
        "def only(x):\n"
        "    return x\n"
        "def both(x):\n"
        "    return x\n"
        "if kind == 'mine':\n"
        "    only(1)\n"
        "    both(2)\n"
        "else:\n"
        "    both(3)\n"
        "names = {'mine': 1}\n"
    )

    assert _lines(tree, "mine") == {1, 2, 5, 6, 7, 10}
    assert _lines(tree, "other") == set()

"""A selector as a table: which backend, by operator and by who ran before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgewise.dispatch.learned.rows import Context, Int64, Rows
from edgewise.dispatch.learned.selectors import Selector, likeliest
from edgewise.dispatch.problem import OBJECTIVES, Float64, Objective
from edgewise.errors import ConfigError, ProfileError

FORMAT = "edgewise-selector"
VERSION = 1


@dataclass(slots=True, kw_only=True, eq=False)
class SelectorTable:
    """Choices for all operators that were known, and the way to more.

    A look-up is one access to a dict: ``table.choices[context_key, previous]``.

    Attributes:
        classifier: Which one was taught.
        objective: What it makes small.
        transition: Whether the backend before matters.
        backends: That may be chosen.
        fallback: The backend where the selector abstains: outside of what was taught, and where it
            is not sure.
        least: Probability that it must give its choice, else it abstains; with ``None`` it never
            does, not even outside of what was taught.
        sklearn_version: That it was taught with; the same seed gives other trees in another.
        trained_on: Hash of the costs it was taught: `Rows.digest`.
        choices: Backend by key of the context and backend before.
        selector: The model, for operators that are not in ``choices``; a file has none.
    """

    classifier: str
    objective: Objective
    transition: bool
    backends: tuple[str, ...]
    fallback: str
    least: float | None
    sklearn_version: str
    trained_on: str
    choices: dict[tuple[str, str], str]
    selector: Selector | None = field(default=None, repr=False)

    def choose(self, context: Context, previous: str) -> str:
        """The backend of an operator, whether it was known or not.

        The model is asked once for an operator that was not, and its answer kept. Without a model
        it is the fallback.
        """
        found = self.choices.get((context.key, previous))
        if found is not None:
            return found
        if previous not in self.backends:
            raise ConfigError(
                f"this selector does not know backend {previous!r}",
                help=f"it knows {', '.join(self.backends)}",
            )
        if self.selector is None:
            return self.fallback
        self.choices |= _choices(self.selector, [context], self.fallback, self.least)
        return self.choices[context.key, previous]

    def follow(self, contexts: Iterable[Context], start: str) -> Int64:
        """Walk along a trace as the paper does: each choice is the backend before of the next.

        Args:
            contexts: Of the operators, in order.
            start: The backend before the first.

        Returns:
            Numbers of backends. [T].
        """
        numbers = {name: b for b, name in enumerate(self.backends)}
        keys: dict[Context, str] = {}
        previous, found = start, []
        for context in contexts:
            key = keys.get(context)
            if key is None:
                key = keys[context] = context.key
            chosen = self.choices.get((key, previous))
            previous = self.choose(context, previous) if chosen is None else chosen
            found.append(numbers[previous])
        return np.array(found, dtype=np.int64)


def compile_selector(
    selector: Selector,
    rows: Rows,
    *,
    contexts: Sequence[Context] | None = None,
    fallback: str | None = None,
    least: float | None = 0.0,
) -> SelectorTable:
    """Ask a selector once for everything that is known.

    Args:
        selector: A fitted one.
        rows: What it was taught.
        contexts: To ask for; those it was taught by default.
        fallback: The backend where it abstains; by default the single one that was best for all
            that it was taught.
        least: Probability that it must give its choice, else it abstains; with ``None`` it never
            does, not even outside of what was taught.
    """
    able = rows.op_s if contexts is None else None
    known = rows.contexts if contexts is None else contexts
    single = selector.backends[selector.constant] if fallback is None else fallback
    return SelectorTable(
        classifier=selector.classifier,
        objective=selector.objective,
        transition=selector.transition,
        backends=selector.backends,
        fallback=single,
        least=least,
        sklearn_version=_sklearn_version(),
        trained_on=rows.digest(),
        choices=_choices(selector, known, single, least, able),
        selector=selector,
    )


def write_selector_table(table: SelectorTable, path: Path) -> None:
    """Write the choices as JSON; the model stays behind.

    Raises:
        ConfigError: The file cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "classifier": table.classifier,
        "objective": table.objective,
        "transition": table.transition,
        "backends": list(table.backends),
        "fallback": table.fallback,
        "sklearn_version": table.sklearn_version,
        "trained_on": table.trained_on,
        "choices": [[key, before, to] for (key, before), to in sorted(table.choices.items())],
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_selector_table(path: Path, *, trained_on: str | None = None) -> SelectorTable:
    """Read what `write_selector_table` wrote.

    Args:
        path: The file.
        trained_on: Hash of the costs at hand; not compared where ``None``.

    Raises:
        ProfileError: It is not such a file, is damaged, or was taught other costs.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read the selector in {path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError(f"{path} holds no selector of edgewise")
    if document.get("version") != VERSION:
        raise ProfileError(
            f"{path}: expected version {VERSION} of the format, found {document.get('version')!r}",
            help="compile the selector anew",
        )
    table = _from_document(document, path)
    if trained_on is not None and table.trained_on != trained_on:
        raise ProfileError(
            f"the selector in {path} was taught other costs than those at hand",
            help="compile the selector anew",
        )
    return table


def _from_document(document: Mapping[str, Any], path: Path) -> SelectorTable:
    try:
        table = SelectorTable(
            classifier=str(document["classifier"]),
            objective=document["objective"],
            transition=bool(document["transition"]),
            backends=tuple(map(str, document["backends"])),
            fallback=str(document["fallback"]),
            least=0.0,
            sklearn_version=str(document["sklearn_version"]),
            trained_on=str(document["trained_on"]),
            choices={(key, before): to for key, before, to in document["choices"]},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"the selector in {path} is damaged: {error!r}") from error
    named = {table.fallback, *(before for _, before in table.choices), *table.choices.values()}
    if table.objective not in OBJECTIVES or not named <= set(table.backends):
        raise ProfileError(
            f"the selector in {path} is damaged: objective {table.objective!r}, backends"
            f" {', '.join(sorted(map(str, named)))}"
        )
    return table


def _choices(
    selector: Selector,
    contexts: Sequence[Context],
    fallback: str,
    least: float | None,
    able: Float64 | None = None,
) -> dict[tuple[str, str], str]:
    """By context and backend before."""
    features = np.array([context.features() for context in contexts])
    likely = selector.probabilities(features)
    if not selector.transition:
        likely = np.repeat(likely[:, None, :], len(selector.backends), axis=1)
    chosen = likeliest(likely, able)
    sure = np.ones(chosen.shape, dtype=bool)
    if least is not None:
        sure = (likely.max(axis=-1) >= least) & ~selector.outside(features)[:, None]
    return {
        (context.key, before): selector.backends[chosen[i, b]] if sure[i, b] else fallback
        for i, context in enumerate(contexts)
        for b, before in enumerate(selector.backends)
    }


def _sklearn_version() -> str:
    import sklearn

    return str(sklearn.__version__)

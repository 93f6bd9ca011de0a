"""``edgewise bench lm``: how fast tokens come, what bits and exits keep, which deadlines hold."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgewise.backends.decoder import load_decoder
from edgewise.bench.language_deadlines import (
    DeadlineSettings,
    deadline_figures,
    deadline_layers,
    open_session,
)
from edgewise.bench.language_runs import drafting_figures, speed_figures
from edgewise.bench.language_widths import (
    choose,
    exit_figures,
    find_texts,
    read_texts,
    split_texts,
    width_figures,
)
from edgewise.device import load_between, read_cpu_counters
from edgewise.device.cores import usable_cores
from edgewise.errors import BackendError, ConfigError, EdgeError

if TYPE_CHECKING:
    from edgewise.model.decoding import LanguageExits
    from edgewise.model.language import LanguageModel
    from edgewise.training.language_text import TokenText

Say = Callable[[str], None]

# Of rows that are wide, what people are shown; JSON has all.
COLUMNS: Mapping[str, Sequence[str]] = {
    "deadlines.rows": (
        "state",
        "share",
        "name",
        "dsr",
        "dsr_low",
        "relative_accuracy",
        "agreement",
        "first_divergence",
        "perplexity",
        "mean_depth_ratio",
        "tpot_p50_s",
    ),
}

MODEL = "smollm2-135m"
EXITS = "EDGEWISE_EXITS"
_PROMPT = "The history of the town begins with a river crossing that traders used long before"
_PROMPT_TOKENS = 32
_DRAFTING_LAYER = 12
_EXIT_LAYERS = (24, 27, 29)
_WINDOWS = 16  # of each text, 4,096 tokens


def run(*, quick: bool = False, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all figures of this bench, section by section: one that fails leaves the others.

    Args:
        quick: Fewer rounds, prompts and windows, and no peers that decode by drafting.
        say: Told what is being measured.

    Returns:
        A mapping ready for JSON. Unknown figures are ``None`` with the reason under ``notes``.

    Raises:
        BackendUnavailable: The model's package is not installed.
    """
    from edgewise.backends.threads import govern
    from edgewise.frontends.language import load_language_model

    policy = govern(1)  # before torch is imported; two threads are asked for by each program
    say("loading the model")
    bench = _Bench(load_language_model(MODEL), quick=quick, say=say)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "one_thread": lambda: bench.speed(1),
        "two_threads": lambda: bench.speed(2),
        "widths": bench.widths,
        "exits": bench.exits,
        "deadlines": bench.deadlines,
        "exact": bench.exact,
        "drafting_peers": bench.drafting,
    }
    result: dict[str, Any] = {}
    for name, measure in sections.items():
        with bench.section(name):
            result[name] = None
            result[name] = measure()
    bench.notes.append(
        f"thread policy of every runtime of ours: {policy.key}; with two threads ONNX Runtime's"
        " second one spins while a call runs, not between calls"
    )
    bench.notes.append(
        "measured: times in turns on this machine; the bandwidth limit is what torch reads of"
        " memory in the same turns with as many threads"
    )
    return {
        "model": MODEL,
        **result,
        "threads": 1,
        "provenance": "measured",
        "quick": quick,
        "other_programs": bench.others,
        "notes": bench.notes,
    }


class _Bench:
    """What sections share.

    Args:
        model: Whose figures they are.
        quick: Fewer of everything.
        say: Told what is being measured.

    Attributes:
        notes: Facts for people.
        others: Share of the machine that other programs used, by section.
    """

    def __init__(self, model: LanguageModel, *, quick: bool, say: Say) -> None:
        self._model, self._quick, self._say = model, quick, say
        self._name = ""
        self._read: list[TokenText] | None = None
        self._exits: LanguageExits | None = None
        self.notes: list[str] = []
        self.others: dict[str, float | None] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Watch what other programs do meanwhile; an error becomes a note."""
        self._name = name
        self.say("")
        before, began_s = read_cpu_counters(), time.perf_counter()
        try:
            yield
        except EdgeError as error:
            said = f"{name}: {error.message}"
            self.notes.append(f"{said}; {error.help}" if error.help else said)
        load = load_between(before, read_cpu_counters(), window_s=time.perf_counter() - began_s)
        self.others[name] = load.other_ratio
        if load.other_ratio is not None and load.other_ratio >= 0.1:
            self.notes.append(
                f"{name}: others used {load.other_ratio:.0%} of the machine, which was not quiet"
            )

    def say(self, what: str) -> None:
        """Which section, and where in it."""
        self._say(f"{self._name.replace('_', ' ')}{': ' if what else ''}{what}")

    def speed(self, threads: int) -> dict[str, Any]:
        """Runtimes and peers at full depth."""
        if threads > usable_cores().threads:
            raise ConfigError(f"expected {threads} usable cores, found {usable_cores().threads}")
        prompt = self._encoded(_PROMPT)
        return speed_figures(
            self._model,
            prompt,
            threads=threads,
            rounds=6 if self._quick else 21,
            tokens=6 if self._quick else 12,
            notes=self.notes,
            say=self.say,
        )

    def widths(self) -> dict[str, Any]:
        """Few bits beside full precision."""
        return width_figures(
            self._model, self._held_out(), threads=self._most_threads(), say=self.say
        )

    def exits(self) -> dict[str, Any]:
        """Affine and raw heads beside full depth."""
        return exit_figures(
            self._model,
            self._fitted(),
            self._held_out(),
            layers=_EXIT_LAYERS,
            threads=self._most_threads(),
            say=self.say,
        )

    def deadlines(self) -> dict[str, Any]:
        """All ways under budgets."""
        fitted = self._fitted()
        fit, held_out = split_texts(self._texts())
        count = 1 if self._quick else 3
        prompts = [
            [int(t) for t in window[:_PROMPT_TOKENS]]
            for own in zip(*choose(held_out, count).values(), strict=False)
            for window in own
        ]
        training = [w for own in choose(fit, 1 if self._quick else 8).values() for w in own]
        settings = DeadlineSettings(max_tokens=16) if self._quick else DeadlineSettings()
        return deadline_figures(
            self._model,
            fitted,
            prompts[:1] if self._quick else prompts,
            training,
            settings=settings,
            notes=self.notes,
            say=self.say,
        )

    def exact(self) -> dict[str, Any]:
        """Exact mode: whether tokens are equal, and what it gains."""
        from edgewise.bench.language_exact import (
            ExactSettings,
            as_json,
            held_out_prompts,
            run_exact,
        )

        fitted = self._fitted()
        prompts = held_out_prompts(self._texts(), count=2 if self._quick else 50)
        self.say("measuring tokens")
        decoder = load_decoder(
            dataclasses.replace(self._model, tokenizer=None),
            "torch:cpu",
            exit_layers=deadline_layers(fitted),
            exits=fitted,
        )
        settings = ExactSettings(max_tokens=16, turns=2) if self._quick else ExactSettings()
        found = run_exact(open_session(decoder), prompts, settings=settings, say=self.say)
        return {
            "name": "torch:cpu fp32",
            **as_json(found),
            "best": dataclasses.asdict(found.best()),
        }

    def drafting(self) -> dict[str, Any]:
        """Peers that draft."""
        if self._quick:
            raise ConfigError("left out of a quick run", help="edgewise bench lm")
        return drafting_figures(
            self._model,
            self._encoded(_PROMPT),
            layers=(_DRAFTING_LAYER, 24),
            rounds=7,
            tokens=24,
            notes=self.notes,
            say=self.say,
        )

    def _most_threads(self) -> int:
        return min(2, usable_cores().threads)

    def _encoded(self, text: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise BackendError(f"model {self._model.name!r} has no tokenizer")
        return [int(t) for t in tokenizer.encode(text)]

    def _texts(self) -> list[TokenText]:
        if self._read is None:
            self.say("reading text")
            self._read = read_texts(find_texts(), self._model)
        return self._read

    def _held_out(self) -> Mapping[str, Sequence[Any]]:
        return choose(split_texts(self._texts())[1], 1 if self._quick else _WINDOWS)

    def _fitted(self) -> LanguageExits:
        if self._exits is None:
            from edgewise.frontends.language.exits_file import find_exits, load_exits

            digest, path = self._model.digest, os.environ.get(EXITS)
            found = load_exits(Path(path), digest=digest) if path else find_exits(digest)
            if found is None:
                raise ConfigError(
                    f"no exits are fitted for {self._model.name}",
                    help=f"edgewise fit-exits {MODEL} --text FILE, or export {EXITS}=FILE",
                )
            self._exits = found
        return self._exits

"""UniExit, Figure 10: time to each exit of a language model, every head run or the chosen one."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.language_quality import relative_accuracy
from edgewise.bench.simulated_decoder import STANDS_FOR
from edgewise.device.simulated import load_device, load_work
from edgewise.profiles.statistics import quantile_interval
from edgewise.report.chart import Chart, Series
from edgewise.reproduce import _language as lm
from edgewise.reproduce._simulated import DEVICES, TITLES
from edgewise.reproduce.registry import Figure, Provenance, Reproduction, Setup, Verdict
from edgewise.reproduce.uniexit_fig9 import ExitTimes
from edgewise.runtime.generation.state import TextState

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind

Float64 = npt.NDArray[np.float64]
Prompts = Sequence[tuple[int, ...]]

TITLE = "Latency and accuracy at each exit of a language model: every head, or the chosen one"

_PAPER_ADVANCE = 2.0  # "about 2.0 times", on the Orin Nano
_LEAST_ADVANCE = 1.8
_ROUNDS, _QUICK_ROUNDS = 20, 5
_BEFORE = 64  # tokens before the one that is measured
_HEADS: tuple[HeadKind, ...] = ("raw", "affine")


def run(setup: Setup) -> Reproduction:
    """Count on the simulated Orin Nano, and measure and generate with the real decoder here.

    Args:
        setup: ``models``, ``data``, ``limit`` (texts), ``backend``, ``threads``; ``quick``.
    """
    if setup.backend == "auto":
        setup = dataclasses.replace(setup, backend="torch:cpu")
    decoder, prompts, source = lm.open_decoder(setup)
    return reproduce(
        decoder,
        prompts,
        setup,
        max_tokens=16 if setup.quick else 64,
        rounds=_QUICK_ROUNDS if setup.quick else _ROUNDS,
        source=source,
    )


def reproduce(  # noqa: PLR0913 - a comparison's whole circumstances
    decoder: DecoderProgram,
    prompts: Prompts,
    setup: Setup,
    *,
    max_tokens: int,
    rounds: int,
    source: str,
) -> Reproduction:
    """Put the simulated and the measured times beside what exits are worth."""
    simulated = simulated_times()
    setup.say("measuring times to each exit")
    measured = measure_exits(decoder, rounds=rounds)
    accuracy: dict[str, list[float]] = {}
    reference = [continue_at(decoder, p, len(decoder.exit_layers), max_tokens) for p in prompts]
    for head in _HEADS:
        accuracy[head] = []
        for position in range(1, len(decoder.exit_layers) + 1):
            setup.say(f"texts of the {head} exit after {decoder.layers_at(position)} layers")
            found = [continue_at(decoder, p, position, max_tokens, kind=head) for p in prompts]
            pairs = zip(found, reference, strict=True)
            accuracy[head].append(
                math.fsum(relative_accuracy(a, b) for a, b in pairs) / len(prompts)
            )
    name = decoder.model.name
    board = f"LLaMA 3.2-1B, {TITLES[DEVICES[0]]}"
    here = f"{name}, this machine"
    layers = list(range(1, 1 + simulated.every_s.shape[1]))
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 10 and section 7.2",
        setting={
            "paper": "LLaMA 3.2-1B on the Orin Nano at its highest clocks; raw heads at 16 layers",
            "simulated": "the same shapes on the simulated Orin Nano, noise left out",
            "measured": (
                f"{name} on {decoder.backend}, {decoder.precision}, {decoder.threads} thread, a"
                f" token after {_BEFORE}, {rounds} interleaved rounds; raw heads"
            ),
            "texts": f"{len(prompts)} of {max_tokens} tokens of {source}, all at one exit",
        },
        figures=(
            *_times(board, layers, simulated, "simulated"),
            *_times(here, list(decoder.exit_layers), measured, "measured"),
            *_accuracies(name, decoder, accuracy),
        ),
        verdicts=judge(board, here, simulated, measured, accuracy),
        notes=(
            (
                "Both ways share the accuracy at an exit: the same head on the same state. Raw"
                " heads are the paper's; affine ones are fitted in closed form here."
            ),
            (
                "How much past-the-heads gains is the price of a head: with one behind every"
                " layer, (layer + head) / layer in the limit."
            ),
        ),
        charts=(
            _latency_chart(board, layers, simulated, "simulated"),
            _latency_chart(here, list(decoder.exit_layers), measured, "measured"),
            _accuracy_chart(name, list(decoder.exit_layers), accuracy),
        ),
        details={
            "exit_layers": list(decoder.exit_layers),
            "relative_accuracy": accuracy,
            **_json("simulated", simulated),
            **_json("measured", measured),
        },
    )


def simulated_times() -> ExitTimes:
    """Both ways to each of the 16 exits on the simulated Orin Nano."""
    work = load_work(STANDS_FOR)
    seconds = load_device(DEVICES[0]).costs_s(work, np.array([[1.0, 1.0, 1.0, 0.0, 0.0]]))
    stages, heads = np.split(seconds, 2, axis=1)  # [1, E] each
    chosen = stages.cumsum(axis=1) + heads
    return ExitTimes(every_s=(stages + heads).cumsum(axis=1), chosen_s=chosen, fused_s=chosen)


def measure_exits(
    decoder: DecoderProgram, *, rounds: int, now_s: Callable[[], float] = time.perf_counter
) -> ExitTimes:
    """Time a token both ways to every exit, in turns; raw heads, as the paper's.

    Args:
        decoder: With its candidate exits.
        rounds: How often; two more at the start are not counted.
        now_s: Tells time.
    """
    last = len(decoder.exit_layers)
    before = min(_BEFORE, decoder.model.context_length - 1)
    text = TextState(decoder, before + 1)
    text.prefill([1] * before)

    def passing(stops: Sequence[int], heads: frozenset[int]) -> list[float]:
        """Instants after the heads that run, from the start."""
        begin_s, position, found = now_s(), 0, []
        state = decoder.embed([1])
        for stop in stops:
            state = text.run(state, start=position, stop=stop)
            position = stop
            if stop in heads:
                decoder.logits(state, position=stop, kind="raw")
                found.append(now_s() - begin_s)
        return found

    every_stop = range(1, last + 1)
    rows: tuple[list[list[float]], list[list[float]]] = ([], [])
    for n in range(rounds + 2):
        every = passing(every_stop, frozenset(every_stop))
        chosen = [passing(range(1, k + 1), frozenset({k}))[0] for k in every_stop]
        if n >= 2:
            rows[0].append(every)
            rows[1].append(chosen)
    chosen_s = np.array(rows[1])
    return ExitTimes(every_s=np.array(rows[0]), chosen_s=chosen_s, fused_s=chosen_s)


def continue_at(
    decoder: DecoderProgram,
    prompt: tuple[int, ...],
    position: int,
    count: int,
    *,
    kind: HeadKind = "affine",
) -> list[int]:
    """The most likely tokens of one exit, the cache behind it filled from its states."""
    text = TextState(decoder, len(prompt) + count)
    if len(prompt) > 1:
        text.prefill(prompt[:-1])
    ids = [prompt[-1]]
    while len(ids) <= count:
        state = text.run(decoder.embed(ids[-1:]), start=0, stop=position)
        ids.append(int(decoder.logits(state, position=position, kind=kind)[0].argmax()))
        text.leave(state, position=position)
        text.advance()
    return ids[1:]


def judge(
    board: str,
    here: str,
    simulated: ExitTimes,
    measured: ExitTimes,
    accuracy: dict[str, list[float]],
) -> tuple[Verdict, ...]:
    """What must hold."""
    verdicts = []
    for title, times in ((board, simulated), (here, measured)):
        advance = float(np.median(times.advance()))
        slower = times.slower_exits()
        verdicts += [
            Verdict(
                claim=f"{title}: past the heads to the end at least {_LEAST_ADVANCE} times as fast",
                holds=advance >= _LEAST_ADVANCE,
                detail=f"{advance:.2f} times",
            ),
            Verdict(
                claim=f"{title}: past the heads never slower at any exit",
                holds=not slower,
                detail=f"slower at {slower}" if slower else "at none",
            ),
        ]
    means = {head: float(np.mean(each[:-1])) for head, each in accuracy.items()}
    verdicts.append(
        Verdict(
            claim="before the last exit, fitted heads keep more of full depth's text than raw ones",
            holds=means["affine"] > means["raw"],
            detail=f"{100 * means['affine']:.1f} % against {100 * means['raw']:.1f} % on average",
        )
    )
    return tuple(verdicts)


def _times(
    title: str, layers: Sequence[int], times: ExitTimes, provenance: Provenance
) -> list[Figure]:
    figures = []
    for k, layer in enumerate(layers):
        for what, samples in (("every head", times.every_s), ("chosen head", times.chosen_s)):
            low, high = _interval(samples[:, k])
            figures.append(
                Figure(
                    name=f"{title}, after {layer} layers: {what}",
                    unit="s",
                    ours=float(np.median(samples[:, k])),
                    low=low,
                    high=high,
                    provenance=provenance,
                )
            )
    low, high = _interval(times.advance())
    figures.append(
        Figure(
            name=f"{title}: to the end, every head over the chosen one",
            unit="ratio",
            paper=_PAPER_ADVANCE if provenance == "simulated" else None,
            ours=float(np.median(times.advance())),
            low=low,
            high=high,
            provenance=provenance,
        )
    )
    return figures


def _interval(samples: Float64) -> tuple[float | None, float | None]:
    if len(samples) < 2:
        return None, None
    found = quantile_interval(samples, 0.5)
    finite = math.isfinite(found.low) and math.isfinite(found.high)
    return (found.low, found.high) if finite else (None, None)


def _accuracies(
    name: str, decoder: DecoderProgram, accuracy: dict[str, list[float]]
) -> list[Figure]:
    return [
        Figure(
            name=f"{name}, after {layer} layers, {head} head: relative accuracy",
            unit="%",
            ours=100 * accuracy[head][k],
            provenance="measured",
        )
        for k, layer in enumerate(decoder.exit_layers)
        for head in accuracy
    ]


def _latency_chart(
    title: str, layers: Sequence[int], times: ExitTimes, provenance: Provenance
) -> Chart:
    ways = (("every head", times.every_s), ("chosen head", times.chosen_s))
    return Chart(
        title=title,
        x_label="layers that have run",
        y_label="time to the answer, ms",
        provenance=provenance,
        series=tuple(
            Series(
                name=what,
                x=list(layers),
                y=[1e3 * float(s) for s in np.median(samples, axis=0)],
            )
            for what, samples in ways
        ),
    )


def _accuracy_chart(name: str, layers: list[int], accuracy: dict[str, list[float]]) -> Chart:
    return Chart(
        title=f"{name}: what an exit is worth",
        x_label="layers that have run",
        y_label="relative accuracy, %",
        provenance="measured",
        y_range=(0.0, 105.0),
        series=tuple(
            Series(name=f"{head} head", x=layers, y=[100 * a for a in each])
            for head, each in accuracy.items()
        ),
    )


def _json(name: str, times: ExitTimes) -> dict[str, Any]:
    return {
        f"{name}_every_head_s": np.median(times.every_s, axis=0).tolist(),
        f"{name}_chosen_head_s": np.median(times.chosen_s, axis=0).tolist(),
    }

"""UniExit, Figure 9: time to each exit, with every head on the way and with the chosen one only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends import Context, Program, load_program
from edgewise.backends.base import probe_input
from edgewise.backends.registry import full_name
from edgewise.errors import EdgeError
from edgewise.model import ExitHead, HeadSpec, StagedModel
from edgewise.profiles.statistics import quantile_interval
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Latency and accuracy at each exit: run every head, or go past them"

_NUM_EXITS = 8
_PAPER_ADVANCE = 1.5
_PAPER_NETS = ("resnet50", "mobilenet_v2")
_PAPER_WIDTH = 566  # between what Table 6 says of its two networks; see uniexit-table6
_ROUNDS, _QUICK_ROUNDS = 30, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTimes:
    """Measured times to each exit of one net.

    Attributes:
        every_s: [R, E], seconds to the answer when every head on the way runs.
        chosen_s: [R, E], the same when only that exit's head runs; the stages one by one.
        fused_s: [R, E], the same over the longest compiled runs.
    """

    every_s: npt.NDArray[np.float64]
    chosen_s: npt.NDArray[np.float64]
    fused_s: npt.NDArray[np.float64]

    def slower_exits(self) -> list[int]:
        """Exits at which going past heads was surely slower: beyond what rounds differ by.

        A difference counts where the median over rounds is above zero and nine tenths of the rounds
        agree. The first exit is left out: up to it both run the same.
        """
        worse = self.chosen_s - self.every_s
        return [
            k
            for k in range(1, worse.shape[1])
            if np.median(worse[:, k]) > 0 and np.quantile(worse[:, k], 0.1) > 0
        ]

    def advance(self) -> npt.NDArray[np.float64]:
        """[R]: time to full depth with every head over the time past the heads."""
        return np.asarray(self.every_s[:, -1] / self.chosen_s[:, -1])


def run(setup: Setup) -> Reproduction:
    """Measure each net, the two ways interleaved.

    Args:
        setup: ``models`` instead of the shipped ones; ``quick`` leaves out the paper's networks.
    """
    rounds = _QUICK_ROUNDS if setup.quick else _ROUNDS
    notes = [
        (
            "Accuracy is the same both ways: the same heads on the same features. That ours are"
            " better at depth in the paper is the training's doing; see uniexit-table8."
        ),
        (
            "The paper's 1.5 holds where a head takes as long as a stage: with two stages between"
            " exits, (2 s + e) / 2 s is 1.5 for e = s."
        ),
    ]
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    details: dict[str, Any] = {}
    for name, make in _nets(setup, notes):
        setup.say(f"{name}: loading and measuring")
        try:
            model = make()
            program = load_program(model, _backend(setup), threads=setup.threads)
            times = measure_exits(program, rounds=rounds)
        except EdgeError as error:
            notes.append(f"{name} left out: {error.message}")
            continue
        found, verdict = describe(name, model, times)
        figures += found
        verdicts.append(verdict)
        details[name] = {
            "accuracy": [e.accuracy for e in model.exits],
            "every_head_s": np.median(times.every_s, axis=0).tolist(),
            "chosen_head_s": np.median(times.chosen_s, axis=0).tolist(),
            "chosen_head_fused_s": np.median(times.fused_s, axis=0).tolist(),
        }
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 9 and section 7.2",
        setting={
            "paper": "Jetson Orin Nano, locked clocks",
            "ours": f"{_backend(setup)}, {setup.threads} thread, {rounds} interleaved rounds",
        },
        figures=tuple(figures),
        verdicts=tuple(verdicts)
        or (Verdict(claim="never slower at any exit", holds=None, detail="nothing was measured"),),
        notes=tuple(notes),
        details=details,
    )


def measure_exits(
    program: Program, *, rounds: int, now_s: Callable[[], float] = time.perf_counter
) -> ExitTimes:
    """Time both ways to every exit, in turns.

    Args:
        program: A loaded model with heads at all exits.
        rounds: How often; two more at the start are not counted.
        now_s: Tells time.
    """
    num = program.model.num_exits
    x = probe_input(program.model)
    steps = _longest_runs(program)
    rows: dict[str, list[list[float]]] = {"every": [], "chosen": [], "fused": []}

    def every(context: Context) -> list[float]:
        begin_s, found = now_s(), []
        for k in range(num):
            context.run_segment(k, k + 1)
            context.run_head(k)
            found.append(now_s() - begin_s)
        return found

    def chosen(context: Context) -> list[float]:
        return [timed(context, [(p, p + 1) for p in range(k + 1)], k) for k in range(num)]

    def fused(context: Context) -> list[float]:
        return [timed(context, steps[k], k) for k in range(num)]

    def timed(context: Context, path: Sequence[tuple[int, int]], k: int) -> float:
        begin_s = now_s()
        for start, stop in path:
            context.run_segment(start, stop)
        context.run_head(k)
        return now_s() - begin_s

    ways = [("every", every), ("chosen", chosen), ("fused", fused)]
    with program.context() as context:
        context.set_boundary(0, x)
        for n in range(rounds + 2):
            for turn in range(len(ways)):
                name, way = ways[(turn + n) % len(ways)]
                row = way(context)
                if n >= 2:
                    rows[name].append(row)
    return ExitTimes(
        every_s=np.array(rows["every"]),
        chosen_s=np.array(rows["chosen"]),
        fused_s=np.array(rows["fused"]),
    )


def describe(name: str, model: StagedModel, times: ExitTimes) -> tuple[list[Figure], Verdict]:
    """Figures and verdict of one net."""
    figures = []
    for k, exit_ in enumerate(model.exits):
        known = (
            "accuracy unknown" if exit_.accuracy is None else f"{100 * exit_.accuracy:.1f} % right"
        )
        for what, samples in (("every head", times.every_s), ("chosen head", times.chosen_s)):
            low, high = _interval(samples[:, k])
            figures.append(
                Figure(
                    name=f"{name}, exit {k}: {what}",
                    unit="s",
                    ours=float(np.median(samples[:, k])),
                    low=low,
                    high=high,
                    provenance="measured",
                    note=known,
                )
            )
    advance = times.advance()
    low, high = _interval(advance)
    figures.append(
        Figure(
            name=f"{name}: advance per unit time over every head",
            unit="ratio",
            paper=_PAPER_ADVANCE,
            ours=float(np.median(advance)),
            low=low,
            high=high,
            provenance="measured",
            note=f"over fused runs {np.median(times.every_s[:, -1] / times.fused_s[:, -1]):.2f}",
        )
    )
    slower = times.slower_exits()
    return figures, Verdict(
        claim=f"{name}: past the heads never slower at any exit",
        holds=not slower,
        detail=f"slower at {slower}"
        if slower
        else f"{np.median(advance):.2f} times as fast to the end",
    )


def _interval(samples: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    """95 % interval of the median over rounds; ``None`` where there are too few of them."""
    found = quantile_interval(samples, 0.5)
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return None, None
    return found.low, found.high


def with_conv_heads(model: StagedModel, *, width: int, seed: int = 0) -> StagedModel:
    """A copy with untrained convolutional heads, as the paper's: their cost is real."""
    rng = np.random.default_rng(seed)
    heads = {}
    for stage in model.stages:
        if len(stage.stop.shape) != 4:
            continue
        spec = HeadSpec(
            kind="conv",
            feature_shape=stage.stop.shape,
            width=width,
            num_classes=model.num_classes,
        )
        weights = {
            key: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
            for key, shape in spec.weight_shapes().items()
        }
        heads[stage.index] = ExitHead(spec=spec, weights=weights)
    return model.with_heads(heads)


def _nets(setup: Setup, notes: list[str]) -> list[tuple[str, Callable[[], StagedModel]]]:
    from edgewise.frontends.checkpoint import load_model, shipped_names
    from edgewise.frontends.zoo import build_backbone

    def paper_net(name: str) -> StagedModel:
        return with_conv_heads(build_backbone(name).stage(_NUM_EXITS), width=_PAPER_WIDTH)

    nets: list[tuple[str, Callable[[], StagedModel]]] = [
        (name, lambda name=name: load_model(name))  # type: ignore[misc]
        for name in setup.models or shipped_names()
    ]
    if setup.quick:
        notes.append(
            "--quick leaves out ResNet-50 and MobileNetV2 with heads as wide as the paper's."
        )
    else:
        nets += [
            (f"{name}, heads {_PAPER_WIDTH} wide", lambda name=name: paper_net(name))  # type: ignore[misc]
            for name in _PAPER_NETS
        ]
    return nets


def _backend(setup: Setup) -> str:
    from edgewise.api import best_backend

    return best_backend() if setup.backend == "auto" else full_name(setup.backend)


def _longest_runs(program: Program) -> list[list[tuple[int, int]]]:
    """For each exit the longest compiled runs that lead to it."""
    paths = []
    for k in range(program.model.num_exits):
        at, path = 0, []
        while at <= k:
            stop = max(j for i, j in program.segments if i == at and j <= k + 1)
            path.append((at, stop))
            at = stop
        paths.append(path)
    return paths

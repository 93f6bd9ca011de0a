"""UniExit, Table 5: what profiling and fitting cost before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from edgewise.clock import MonotonicClock
from edgewise.device.simulated import load_device, load_work
from edgewise.predict.active import choose_states
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import evaluate, predicted_s
from edgewise.predict.kinds.mlp import Mlp
from edgewise.predict.state_samples import StateSamples
from edgewise.report.chart import Chart, Series
from edgewise.reproduce._predicted import LM, ORIN, fit, named, profiled, spread
from edgewise.reproduce.registry import Figure, Provenance, Reproduction, Setup, Verdict

TITLE = "Cost of profiling and fitting, and how few states are enough"

_NETS = ("resnet50", LM)
# Hours of profiling, minutes of training, KiB of parameters.
_PAPER = {"resnet50": (2.73, 5.15, 20.01), LM: (29.63, 5.14, 19.51)}
_PAPER_STATES, _PAPER_RECORDS = 17_600, 52_800
_SHARES = (0.005, 0.01, 0.02, 0.05, 0.10)
_MOST_SHARE = 0.10
_MLP_SHARES = (0.01, 0.10)
# "The error of all": within a hundredth of it.
_MORE = 1.01
_QUICK_STEPS = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A predictor fitted on a share of the states.

    Attributes:
        share: Of all states that could be profiled.
        states: How many that is.
        mape_ratio: Mean over all units, of single records in states set aside.
        excess_ratio: Mean distance from what the device takes there without noise.
        hours: What profiling these states takes, simulated.
    """

    share: float
    states: int
    mape_ratio: float
    excess_ratio: float
    hours: float


def run(setup: Setup) -> Reproduction:
    """Profile the simulated Orin Nano, whole and in part; training is timed here.

    Args:
        setup: ``seed`` of noise, draws and fits; ``quick`` takes the CNN alone, with few steps of
            training.
    """
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    charts: list[Chart] = []
    details = {}
    for net in _NETS[:1] if setup.quick else _NETS:
        setup.say(f"{named(ORIN, net)}: profiling all states")
        every = profiled(ORIN, net, seed=setup.seed)
        found, verdict = _whole(net, every, setup)
        figures += found
        verdicts.append(verdict)
        setup.say(f"{named(ORIN, net)}: fewer states")
        curves = fewer(net, every, seed=setup.seed, steps=_QUICK_STEPS if setup.quick else None)
        found, verdict = _active(net, every, curves)
        figures += found
        verdicts.append(verdict)
        charts.append(_chart(net, curves))
        details[net] = {name: [asdict(p) for p in points] for name, points in curves.items()}
    model = load_device(ORIN)
    return Reproduction(
        title=TITLE,
        source="UniExit, Table 5",
        setting={
            "paper": "Jetson Orin Nano",
            "ours": (
                "simulated Orin Nano; hours are those its units would take, run"
                f" {model.passes} times for a record of which the last counts, and"
                f" {model.settle_s:g} s to set each record's state; the two constants were chosen"
                " near the paper's hours, their ratio between nets was not"
            ),
            "training": "numpy on this machine, one thread, both networks; measured",
        },
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(
            "The paper trains for five minutes; how many epochs it does not say.",
            (
                "The error is that of single records, which noise bounds from below. The distance"
                " from the noise-free cost shows what fewer states do cost."
            ),
            (
                "The physical model has the simulated device's form, so few states suffice by"
                " construction; on a board they must be shown to."
            ),
        ),
        charts=tuple(charts),
        details=details,
    )


def fewer(
    net: str, every: StateSamples, *, seed: int, steps: int | None
) -> dict[str, tuple[Point, ...]]:
    """Fit on chosen states, on random ones and on all, and judge each in the same states.

    Args:
        net: Whose records.
        every: In all states; a tenth is set aside to judge by.
        seed: Of noise, draws and fits.
        steps: Of the network's training.

    Returns:
        By kind and way of choosing; the last point of ``"physical, all"`` and ``"mlp, all"`` is
        fitted on every state that is not set aside.
    """
    aside = spread(every.num_states, every.num_states // 10, seed=seed)
    known = np.delete(np.arange(every.num_states), aside)
    judged = every.take(aside)

    def point(kind: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]], cut: int) -> Point:
        """``cut`` rows to fit on, the rest to calibrate on; profiled anew, as if nothing else."""
        samples = profiled(ORIN, net, seed=seed + 1, states=every.states[rows])
        fitted = fit(
            kind,
            samples.take(np.arange(cut)),
            net=net,
            seed=seed,
            steps=steps,
            calibration=samples.take(np.arange(cut, len(rows))),
        )
        assert samples.elapsed_s is not None  # noqa: S101 - a simulated campaign knows
        return _judge(fitted, judged, net, len(rows) / every.num_states, samples.elapsed_s)

    def chosen(share: float) -> Point:
        count = round(share * every.num_states)
        choice = choose_states(every.states[known], features=every.features, count=count, seed=seed)
        return point("physical", known[choice.rows], len(choice.fit))

    def drawn(kind: str, share: float) -> Point:
        count = round(share * every.num_states)
        rows = known[np.random.default_rng([seed, 3]).permutation(len(known))[:count]]
        return point(kind, rows, count - max(1, count // 4))

    return {
        "physical, chosen": tuple(chosen(share) for share in _SHARES),
        "physical, random": tuple(drawn("physical", share) for share in _SHARES),
        "mlp, random": tuple(drawn("mlp", share) for share in _MLP_SHARES),
        "physical, all": (drawn("physical", len(known) / every.num_states),),
        "mlp, all": (drawn("mlp", len(known) / every.num_states),),
    }


def _judge(
    fitted: FittedPredictor, judged: StateSamples, net: str, share: float, elapsed_s: float
) -> Point:
    errors = evaluate(fitted, judged).values()
    true_s = load_device(ORIN).costs_s(load_work(net), judged.states)
    excess = np.abs(predicted_s(fitted.predictor, judged) / true_s - 1)
    return Point(
        share=share,
        states=round(share * _PAPER_STATES),
        mape_ratio=float(np.mean([e.mape_ratio for e in errors])),
        excess_ratio=float(excess.mean()),
        hours=elapsed_s / 3600,
    )


def _whole(net: str, every: StateSamples, setup: Setup) -> tuple[list[Figure], Verdict]:
    paper_h, paper_min, paper_kib = _PAPER[net]
    name, clock = named(ORIN, net), MonotonicClock()
    assert every.elapsed_s is not None  # noqa: S101 - a simulated campaign knows
    begin_s = clock.now_s()
    fitted = fit(
        "mlp", every, net=net, seed=setup.seed, steps=_QUICK_STEPS if setup.quick else None
    )
    training_s = clock.now_s() - begin_s
    assert isinstance(fitted.predictor, Mlp)  # noqa: S101 - asked for
    parameters = sum(fitted.predictor.num_parameters.values())
    begin_s = clock.now_s()
    physical = fit("physical", every, net=net, seed=setup.seed)
    physical_s = clock.now_s() - begin_s
    records = every.seconds.shape[0] * every.seconds.shape[1]
    kib = 4 * parameters / 1024
    note = "few steps of training: --quick" if setup.quick else "both networks, numpy, this machine"
    figures = [
        _figure(f"{name}: states", "states", every.num_states, "simulated", paper=_PAPER_STATES),
        _figure(f"{name}: records", "records", records, "simulated", paper=_PAPER_RECORDS),
        _figure(f"{name}: profiling", "h", every.elapsed_s / 3600, "simulated", paper=paper_h),
        _figure(f"{name}: training, mlp", "s", training_s, "measured", 60 * paper_min, note),
        _figure(f"{name}: fit, physical", "s", physical_s, "measured"),
        _figure(
            f"{name}: parameters in FP32, mlp",
            "KiB",
            kib,
            "measured",
            paper_kib,
            f"{parameters} parameters",
        ),
        _figure(
            f"{name}: parameters, physical", "KiB", physical.predictor.num_bytes / 1024, "measured"
        ),
    ]
    exact = (every.num_states, records, round(kib, 2)) == (
        _PAPER_STATES,
        _PAPER_RECORDS,
        paper_kib,
    )
    return figures, Verdict(
        claim=f"{name}: states, records and size of parameters as in the paper, exactly",
        holds=exact,
        detail=f"{every.num_states}, {records} and {kib:.2f} KiB",
    )


def _active(
    net: str, every: StateSamples, curves: dict[str, tuple[Point, ...]]
) -> tuple[list[Figure], Verdict]:
    name = named(ORIN, net)
    all_, network = curves["physical, all"][-1], curves["mlp, all"][-1]
    able = [p for p in curves["physical, chosen"] if p.mape_ratio <= _MORE * all_.mape_ratio]
    figures = [
        _figure(f"{name}: MAPE, {curve}, {p.share:.1%} of states", "%", 100 * p.mape_ratio,
                note=f"{p.excess_ratio:.3%} from the noise-free cost")
        for curve, points in curves.items()
        for p in points
    ]  # fmt: skip
    assert every.elapsed_s is not None  # noqa: S101 - a simulated campaign knows
    if able:
        fewest = able[0]
        figures += [
            _figure(f"{name}: fewest chosen states with the error of all", "states", fewest.states),
            _figure(
                f"{name}: hours saved by them",
                "h",
                every.elapsed_s / 3600 - fewest.hours,
                note=f"{fewest.hours:.2f} h instead of {every.elapsed_s / 3600:.2f} h",
            ),
        ]
    holds = bool(able) and able[0].share <= _MOST_SHARE
    return figures, Verdict(
        claim=f"{name}: at most {_MOST_SHARE:.0%} of the states, chosen, give the error of all",
        holds=holds,
        detail=(
            f"MAPE {able[0].mape_ratio:.3%} with {able[0].states} states, {all_.mape_ratio:.3%}"
            f" with all; the network has {network.mape_ratio:.3%} with all"
            if able
            else f"{curves['physical, chosen'][-1].mape_ratio:.3%}, {all_.mape_ratio:.3%} with all"
        ),
    )


def _figure(  # noqa: PLR0913, PLR0917 - a line of a table
    name: str,
    unit: str,
    ours: float,
    provenance: Provenance = "simulated",
    paper: float | None = None,
    note: str = "",
) -> Figure:
    return Figure(name=name, unit=unit, paper=paper, ours=ours, provenance=provenance, note=note)


def _chart(net: str, curves: dict[str, tuple[Point, ...]]) -> Chart:
    def series(name: str, points: Sequence[Point]) -> Series:
        return Series(
            name=name, x=[100 * p.share for p in points], y=[100 * p.excess_ratio for p in points]
        )

    lines = {
        "physical, chosen": curves["physical, chosen"],
        "physical, random": (*curves["physical, random"], *curves["physical, all"]),
        "mlp, random": (*curves["mlp, random"], *curves["mlp, all"]),
    }
    return Chart(
        title=f"{named(ORIN, net)}: distance from the noise-free cost",
        x_label="states profiled, % of 17,600",
        y_label="mean, %",
        series=tuple(series(name, points) for name, points in lines.items()),
        provenance="simulated",
        kind="line",
        log_x=True,
    )

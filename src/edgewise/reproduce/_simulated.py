"""What the simulated claims share: devices, networks, policies, and rows over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from edgewise.bench.simulation import (
    Played,
    Row,
    Scene,
    arrivals,
    look_back,
    over_seeds,
    play,
    play_oracle,
    replayed_model,
    static_costs,
    summarise,
)
from edgewise.bench.tuning import make_tuned, right_in_time
from edgewise.device.simulated import (
    DeviceModel,
    SimulatedClock,
    SimulatedDevice,
    StepTrace,
    UnitWork,
    down_up,
    full_factorial,
    load_device,
    load_work,
    run_campaign,
    static_max,
)
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.model import StagedModel
from edgewise.predict import CostTable
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.predictor import fit_predictor
from edgewise.predict.state_samples import StateSamples
from edgewise.report.chart import Series
from edgewise.report.evaluation import Estimate
from edgewise.reproduce.registry import Figure, Setup
from edgewise.runtime.repricing import Repricer
from edgewise.units import format_duration

DEVICES = ("jetson-orin-nano", "jetson-xavier-nx")
NETS = ("resnet50", "mobilenet_v2")
TITLES = {
    "jetson-orin-nano": "Orin Nano",
    "jetson-xavier-nx": "Xavier NX",
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
}
# UniExit, section 7.1, under dynamic DVFS.
DEADLINE_S = 0.016

PREDICTOR = "physical"
_FIT_STATES = 600
_JOULE_STEPS = 1500
_PROFILE_ROUNDS = 60
_ANSWERS = "fashion-lite0"
# Of the longest a request can take, so that none waits for another.
_SPACING_RATIO = 1.4
# Of the deadline, where all policies keep to it nearly.
SHORT_SPACING_RATIO = 3.5

Clocks = Literal["static", "dvfs"]
CLOCKS: tuple[Clocks, ...] = ("static", "dvfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A policy as it is compared.

    Attributes:
        name: In tables.
        policy: Its file.
        options: Its own.
        choices: Settings beside ``options``, of which it gets the one that answers most validation
            samples rightly and in time by the profile; those that `make_tuned` tries where empty.
        reads_state: Whether it is told what units cost in each state of the device; such a policy
            is not tuned.
    """

    name: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Mapping[str, Any], ...] = ()
    reads_state: bool = False


_SPINN_CHOICES: tuple[Mapping[str, Any], ...] = (
    {"objective": "accuracy"},
    {"objective": "latency"},
    {"objective": "latency", "accuracy_loss": 0.02},
)


PLAYERS: Mapping[str, Player] = {
    player.name: player
    for player in (
        Player(name="edgewise", policy="edgewise", reads_state=True),
        Player(name="uniexit", policy="uniexit", options={"margin": "fallback"}, reads_state=True),
        Player(
            name="spinn", policy="spinn", options={"scale_factor": False}, choices=_SPINN_CHOICES
        ),
        Player(
            name="spinn scaled",
            policy="spinn",
            options={"scale_factor": True},
            choices=_SPINN_CHOICES,
        ),
        Player(name="eenet", policy="eenet"),
        Player(name="branchynet", policy="branchynet"),
        Player(name="static_table", policy="static_table"),
        Player(name="full_depth", policy="full_depth"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One network on one simulated device.

    Attributes:
        device: Its model.
        work: The network's units.
        chain: The network as sessions see it.
        answers: [E, N, C], replayed.
        labels: [N].
        costs: A profile at the highest clocks.
    """

    device: DeviceModel
    net: str
    work: tuple[UnitWork, ...]
    chain: StagedModel
    answers: Any
    labels: Any
    costs: CostTable

    @property
    def title(self) -> str:
        """For people."""
        return f"{TITLES.get(self.net, self.net)}, {TITLES.get(self.device.name, self.device.name)}"

    @property
    def inputs(self) -> PolicyInputs:
        """What policies may know in advance."""
        singles = frozenset((k, k + 1) for k in range(self.chain.num_exits))
        return PolicyInputs.of(self.chain, self.costs, segments=singles)

    def trace(self, clocks: Clocks) -> StepTrace:
        """What the clocks do."""
        return down_up(self.device.clocks) if clocks == "dvfs" else static_max(self.device.clocks)

    def slowest_s(self) -> float:
        """The whole network with every head at the lowest clocks, noise left out, seconds."""
        lowest = [levels[0] / levels[-1] for levels in self.device.clocks.lists]
        return float(self.device.costs_s(self.work, np.array([[*lowest, 0.0, 0.0]])).sum())

    def scene(  # noqa: PLR0913 - one scene's whole circumstances
        self,
        *,
        clocks: Clocks,
        budget_s: float,
        seed: int,
        count: int,
        state_age_s: float = 0.0,
        spacing_s: float | None = None,
    ) -> Scene:
        """The requests of one seed, so far apart by default that none waits for another."""
        spacing_s = _SPACING_RATIO * self.slowest_s() if spacing_s is None else spacing_s
        rng = np.random.default_rng([seed, 4])
        trace = self.trace(clocks)

        def open_world() -> tuple[SimulatedClock, SimulatedDevice]:
            return SimulatedClock(), SimulatedDevice(self.device, trace, self.work, seed=seed)

        return Scene(
            open_world=open_world,
            model=self.chain,
            costs=self.costs,
            answers=self.answers,
            labels=self.labels,
            arrivals_s=arrivals(count, spacing_s=spacing_s, rng=rng),
            images=rng.integers(0, len(self.labels), count),
            budget_s=budget_s,
            monitor_phase_s=float(rng.uniform(0.0, 0.010)),
            state_age_s=state_age_s,
        )


@lru_cache(maxsize=8)
def case(device: str, net: str) -> Case:
    """Load a network and a device, and profile it at the highest clocks."""
    from edgewise.frontends.checkpoint import load_model

    recorded = load_model(_ANSWERS)
    assert recorded.validation is not None  # noqa: S101 - shipped with it
    model, work = load_device(device), load_work(net)
    chain, answers, labels = replayed_model(
        recorded.validation,
        depths=[e.depth_ratio for e in recorded.exits],
        temperatures=[e.head.temperature if e.head else 1.0 for e in recorded.exits],
        flops=[unit.flops for unit in work if unit.name.startswith("stage:")],
        name=net,
    )
    top = run_campaign(
        model, work, seed=0, states=np.array([[1.0, 1.0, 1.0, 0.0, 0.0]]), repeats=_PROFILE_ROUNDS
    )
    return Case(
        device=model,
        net=net,
        work=work,
        chain=chain,
        answers=answers,
        labels=labels,
        costs=static_costs(top.seconds[0], names=top.units),
    )


@lru_cache(maxsize=8)
def predictor(device: str, net: str, *, seed: int = 0) -> FittedPredictor:
    """Fit what costs are predicted with, on states drawn from the full factorial."""
    return fit_kind(PREDICTOR, dataclasses.replace(_samples(device, net, seed), joules=None))


@lru_cache(maxsize=8)
def joule_predictor(device: str, net: str, *, seed: int = 0) -> FittedPredictor:
    """The same with joules, by a network: power grows with a clock while time falls with it."""
    samples = _samples(device, net, seed)
    assert samples.joules is not None  # noqa: S101 - of a simulated campaign
    in_joules = dataclasses.replace(samples, seconds=samples.joules, joules=None)
    energy = fit_predictor("mlp", in_joules, seed=seed, steps=_JOULE_STEPS)
    return dataclasses.replace(predictor(device, net, seed=seed), energy=energy)


def _samples(device: str, net: str, seed: int) -> StateSamples:
    found = case(device, net)
    states = full_factorial(found.device)
    rows = np.random.default_rng([seed, 1]).choice(len(states), _FIT_STATES, replace=False)
    campaign = run_campaign(found.device, found.work, seed=seed, states=states[rows])
    return StateSamples.simulated(campaign)


def make_player(player: Player, found: Case, *, budget_s: float) -> Policy:
    """Make a policy for a deadline.

    A policy that reads the device's state is not tuned for one; the others get the setting that
    does best on validation data and the profile.
    """
    if player.reads_state:
        return make_policy(player.policy, found.inputs, **_with_offline_errors(player, found))
    if not player.choices:
        return make_tuned(player.policy, found.inputs, budget_s=budget_s, fixed=player.options)
    made = [
        make_policy(player.policy, found.inputs, **player.options, **each)
        for each in player.choices
    ]
    return max(made, key=lambda each: right_in_time(each, found.inputs, budget_s=budget_s))


def _with_offline_errors(player: Player, found: Case) -> Mapping[str, Any]:
    """The paper's base margin is a percentile of the predictor's errors in states kept aside."""
    if player.policy != "uniexit" or player.options.get("margin") == "none":
        return player.options
    upper = predictor(found.device.name, found.net).upper_ratio
    return {"base_ratio": upper.tolist(), **player.options}


def play_player(
    player: Player,
    found: Case,
    scene: Scene,
    *,
    policy: Policy | None = None,
    **told: Callable[[Any], None],
) -> Played:
    """Let one policy answer a scene's requests; ``told`` goes to `play`."""
    policy = policy or make_player(player, found, budget_s=scene.budget_s)
    on_state = None
    if player.reads_state:
        on_state = Repricer(predictor(found.device.name, found.net), [policy]).on_state
    played = play(scene, policy, on_state=on_state, **told)
    return dataclasses.replace(played, policy=player.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One policy's rows, one for each seed."""

    name: str
    rows: tuple[Row, ...]

    def estimate(self, field_name: str) -> Estimate:
        """Mean over seeds of one field, with its interval."""
        return over_seeds([getattr(row, field_name) for row in self.rows])

    def mean(self, field_name: str) -> float:
        """Mean over seeds of one field."""
        return self.estimate(field_name).value


def compare(  # noqa: PLR0913 - a comparison's whole circumstances
    found: Case,
    players: Sequence[Player],
    *,
    clocks: Clocks,
    budget_s: float,
    seeds: Sequence[int],
    count: int,
    state_age_s: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Rows]:
    """Play the same requests to each policy and to the oracle, seed by seed.

    Returns:
        By name, the oracle last.
    """
    rows: dict[str, list[Row]] = {name: [] for name in (*[p.name for p in players], "oracle")}
    short_s = SHORT_SPACING_RATIO * budget_s
    fixed = {
        p.name: _made_once(found.device.name, found.net, p.name, budget_s)
        for p in players
        if _forgets(p)
    }
    for seed in seeds:
        say(f"{found.title}: {clocks} clocks, {budget_s * 1e3:.3g} ms, seed {seed}")
        scene = found.scene(
            clocks=clocks,
            budget_s=budget_s,
            seed=seed,
            count=count,
            state_age_s=state_age_s,
            spacing_s=short_s if all(p.reads_state for p in players) else None,
        )
        hindsight = look_back(scene)
        for player in players:
            played = play_player(player, found, scene, policy=fixed.get(player.name))
            rows[player.name].append(summarise(scene, played, hindsight))
        rows["oracle"].append(summarise(scene, play_oracle(scene, hindsight), hindsight))
    return {name: Rows(name=name, rows=tuple(each)) for name, each in rows.items()}


def _forgets(player: Player) -> bool:
    """Whether a policy learns nothing from requests, so that one object serves all seeds."""
    return player == PLAYERS.get(player.name) and player.policy in {
        "eenet",
        "branchynet",
        "static_table",
        "full_depth",
    }


@lru_cache(maxsize=64)
def _made_once(device: str, net: str, name: str, budget_s: float) -> Policy:
    return make_player(PLAYERS[name], case(device, net), budget_s=budget_s)


def seeds_of(setup: Setup, *, full: int = 5, quick: int = 1) -> tuple[int, ...]:
    """Consecutive seeds from the setup's."""
    count = setup.seeds if setup.seeds is not None else quick if setup.quick else full
    return tuple(range(setup.seed, setup.seed + count))


def count_of(setup: Setup, *, full: int = 400, quick: int = 150) -> int:
    """Requests per seed."""
    return setup.limit if setup.limit is not None else quick if setup.quick else full


def cases(*, quick: bool) -> tuple[tuple[str, str], ...]:
    """Every network on every device, or the first of both."""
    found = tuple((device, net) for net in NETS for device in DEVICES)
    return found[:1] if quick else found


def as_json(rows: Mapping[str, Rows]) -> dict[str, list[dict[str, Any]]]:
    """All rows of all seeds as plain types."""
    return {name: [dataclasses.asdict(row) for row in each.rows] for name, each in rows.items()}


def bars(label: str, rows: Sequence[Rows], field_name: str, *, names: Sequence[str]) -> Series:
    """One set of bars, in percent."""
    return _series(label, list(names), rows, field_name)


def line(label: str, x: Sequence[float], rows: Sequence[Rows], field_name: str) -> Series:
    """One line, in percent."""
    return _series(label, list(x), rows, field_name)


def _series(label: str, x: Sequence[float | str], rows: Sequence[Rows], field_name: str) -> Series:
    found = [each.estimate(field_name) for each in rows]
    several = all(len(each.rows) > 1 for each in rows)
    return Series(
        name=label,
        x=x,
        y=[100 * each.value for each in found],
        low=[100 * max(0.0, each.low) for each in found] if several else (),
        high=[100 * min(1.0, each.high) for each in found] if several else (),
    )


def row_figures(
    title: str, rows: Rows, *, paper_dsr: float | None = None, note: str = ""
) -> list[Figure]:
    """Deadlines, depth and accuracy of one policy."""
    notes = [
        *([note] if note else []),
        f"right and in time {100 * rows.mean('right_in_time'):.1f} %",
        f"p99 {format_duration(rows.mean('p99_s'))}",
    ]
    return [
        percent(f"{title}: in time", rows, "dsr", paper=paper_dsr, note="; ".join(notes)),
        percent(f"{title}: mean depth", rows, "mean_depth_ratio"),
    ]


def percent(
    name: str, rows: Rows, field_name: str, *, paper: float | None = None, note: str = ""
) -> Figure:
    """A share as a figure in percent."""
    found = rows.estimate(field_name)
    several = len(rows.rows) > 1
    return Figure(
        name=name,
        unit="%",
        paper=paper,
        ours=100 * found.value,
        provenance="simulated",
        # Student's interval does not know that a share ends at one.
        low=100 * max(0.0, found.low) if several else None,
        high=100 * min(1.0, found.high) if several else None,
        note=note,
    )


def setting(*, seeds: Sequence[int], count: int, **more: str) -> dict[str, str]:
    """What every simulated claim says of itself."""
    return {
        "ours": (
            f"simulated devices, {len(seeds)} seed{'s' if len(seeds) > 1 else ''} from {seeds[0]},"
            f" {count} requests each, played one at a time to every policy in a world of its own:"
            " same clocks, noise, arrivals and answers"
        ),
        "answers": (
            f"recorded: logits of {_ANSWERS} on held-out images, from its exit of the nearest"
            " depth; half of them choose thresholds, the other half is replayed"
        ),
        "costs": (
            f"policies that read the state predict with a {PREDICTOR} model fitted on"
            f" {_FIT_STATES} of the device's states, told every 10 ms; the others have a profile at"
            " the highest clocks"
        ),
        **more,
    }

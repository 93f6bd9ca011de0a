"""Tenants whose pieces are made of events and clocks instead of networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.accelerator import (
    AcceleratorAnswer,
    AcceleratorDevice,
    AcceleratorLost,
    Prefix,
)
from edgewise.backends.piece import ArraySpec, Piece
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import TenantModel

LAST = 3
SHAPE = (1, 4)
COSTS_S = (3e-3, 2e-3, 1e-3, 0.0)


def device_of(**changes: Any) -> Accelerator:
    values: dict[str, Any] = {
        "name": "toy",
        "sram_bytes": 1000,
        "in_bytes_per_s": 1e6,
        "out_bytes_per_s": 1e6,
    }
    return Accelerator(**{**values, **changes})


def profile_of(name: str, *, scale: float = 1.0, weights: float = 600.0) -> PartitionProfile:
    return PartitionProfile(
        model_id=name,
        cuts=("x", "a", "b", "y"),
        depth_ratio=np.array([0, 0.3, 0.6, 1]),
        prefix_bytes=np.array([0, 0.3, 0.6, 1]) * weights,
        boundary_bytes=np.full(LAST + 1, 16.0),
        accelerator_s=np.array([0, 1e-4, 2e-4, 3e-4]) * scale,
        threads=(1, 2),
        cpu_s=np.array([[c, 0.6 * c] for c in COSTS_S]) * scale,
    )


class Model:
    """A chain x → x + 1 per stage; its file is its name and places."""

    format = "onnx"
    places = tuple(
        SimpleNamespace(shape=SHAPE, dtype="float32", nbytes=16, prefix_bytes=200 * p)
        for p in range(LAST + 1)
    )
    last = LAST

    def __init__(self, name: str) -> None:
        self.name = name

    def segment(self, start: int, stop: int) -> bytes:
        return f"{self.name}:{start}-{stop}".encode()


@dataclass(eq=False)
class World:
    """What fake pieces obey: doors that they wait at, errors that they raise, what is alive.

    Attributes:
        doors: By the start of a file's name; a run waits until its door is open.
        refuse: Starts of names that cannot be loaded.
        fail: Starts of names that fail at invocation.
    """

    doors: dict[str, threading.Event] = field(default_factory=dict)
    refuse: set[str] = field(default_factory=set)
    fail: set[str] = field(default_factory=set)
    alive: int = 0
    loaded: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, model: bytes, format: str, *, threads: int = 1) -> Piece:  # noqa: A002, ARG002
        name = model.decode()
        if any(name.startswith(bad) for bad in self.refuse):
            raise BackendError(f"cannot load {name}")
        return FakePiece(self, name, threads)

    def run(self, name: str, x: Any) -> Any:
        door = next((d for n, d in self.doors.items() if name.startswith(n)), None)
        if door is not None:
            assert door.wait(20)
        if any(name.startswith(bad) for bad in self.fail):
            raise RuntimeError(f"{name} does not compute")
        start, stop = map(int, name.split(":")[1].split("-"))
        return x + np.float32(stop - start)


class FakePiece(Piece):
    backend = "fake"
    input = output = ArraySpec(shape=SHAPE, dtype="float32")

    def __init__(self, world: World, name: str, threads: int) -> None:
        self.world, self.name, self.threads = world, name, threads
        with world.lock:
            world.alive += 1
            world.loaded.append(f"{name}x{threads}")

    def run(self, x: Any) -> Any:
        return self.world.run(self.name, x)

    def close(self) -> None:
        with self.world.lock:
            self.world.alive -= 1


class FakeDevice(AcceleratorDevice):
    """Runs prefixes by the world's rules, and can be lost."""

    provenance = "simulated"

    def __init__(self, world: World, description: Accelerator) -> None:
        self.world, self.description = world, description
        self.prefixes: dict[str, Prefix] = {}
        self.order: list[tuple[str, float]] = []
        self.users: set[int] = set()
        self.lost = ""
        self.restarts = 0
        self.refuses_restart = False
        self._resident: tuple[str, ...] = ()

    def load(self, prefix: Prefix) -> None:
        self._check()
        self.world.load(prefix.model, "onnx").close()
        self.prefixes[prefix.key] = prefix

    def unload(self, key: str) -> None:
        self.prefixes.pop(key, None)

    def run(self, key: str, x: Any) -> AcceleratorAnswer:
        self._check()
        self.users.add(threading.get_ident())
        self.order.append((key, float(x[0, 0])))
        output = self.world.run(self.prefixes[key].model.decode(), x)
        self._check()
        missed = self._resident != (key,)
        self._resident = (key,)
        return AcceleratorAnswer(output=output, service_s=1e-4, load_s=0.0, missed=missed)

    def restart(self) -> None:
        self.restarts += 1
        if self.refuses_restart:
            raise AcceleratorLost("not yet")
        self.lost = ""

    @property
    def resident(self) -> tuple[str, ...]:
        return self._resident

    def _check(self) -> None:
        if self.lost:
            raise AcceleratorLost(self.lost)


@dataclass(eq=False)
class Bench:
    """A world with tenants, and engines made of it."""

    world: World
    names: Sequence[str]
    deadline_s: dict[str, float] = field(default_factory=dict)
    priority: dict[str, int] = field(default_factory=dict)
    rate_per_s: float = 20.0
    cores: int = 4
    engines: list[TenantEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.description = device_of()
        self.device: Any = FakeDevice(self.world, self.description)

    def tenants(self) -> list[TenantModel]:
        return [
            TenantModel(
                name=n,
                model=Model(n),
                profile=profile_of(n),
                deadline_s=self.deadline_s.get(n),
                priority=self.priority.get(n, 16),
            )
            for n in self.names
        ]

    def problem(self) -> Problem:
        return Problem.of(
            [
                Tenant(
                    name=n,
                    profile=profile_of(n),
                    rate_per_s=self.rate_per_s,
                    deadline_s=self.deadline_s.get(n),
                )
                for n in self.names
            ],
            self.description,
            cores=self.cores,
        )

    def plan(self, places: Sequence[int], cores: Sequence[int] | None = None) -> Placement:
        if cores is None:
            cores = [0 if p == LAST else 1 for p in places]
        return make_placement(self.problem(), list(places), list(cores), method="test")

    def engine(self, places: Sequence[int], **options: Any) -> TenantEngine:
        cores = options.pop("plan_cores", None)
        engine = TenantEngine(
            self.tenants(),
            self.plan(places, cores),
            device=self.device,
            load=self.world.load,
            **{"first_retry_s": 0.01, "keep_idle": 0, **options},
        )
        self.engines.append(engine)
        if isinstance(self.device, FakeDevice):
            self.device.order.clear()
        return engine

    def shut(self, name: str) -> threading.Event:
        """Make pieces whose names start so wait; the door is returned."""
        door = self.world.doors[name] = threading.Event()
        return door

    @staticmethod
    def x(value: float = 0.0) -> Any:
        return np.full(SHAPE, value, dtype=np.float32)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Any:
    """``make_bench("a", "b")``: checks at the end that nothing was left behind."""
    made: list[Bench] = []

    def make(*names: str, **options: Any) -> Bench:
        made.append(Bench(World(), names, **options))
        return made[-1]

    yield make
    for bench in made:
        for door in bench.world.doors.values():
            door.set()
        for engine in bench.engines:
            engine.close(drain_s=5)
        assert bench.world.alive == 0, "a piece was not closed"
    left = [t.name for t in threading.enumerate() if t.name.startswith("edgewise-")]
    assert not left


@pytest.fixture(name="until")
def _until() -> Callable[[Callable[[], Any]], None]:
    def until(condition: Callable[[], Any]) -> None:
        """Look again and again, for at most ten seconds."""
        pause = threading.Event()
        for _ in range(5000):
            if condition():
                return
            pause.wait(0.002)
        raise AssertionError("it did not come about")

    return until

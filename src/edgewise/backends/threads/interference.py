"""Do torch and ONNX Runtime disturb each other? Both alone and in turn, each setting afresh.

Each setting is measured in a process of its own: how OpenMP waits is settled when it is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgewise.errors import BackendError, BackendUnavailable, ConfigError
from edgewise.profiles.records import ThreadPolicy
from edgewise.profiles.statistics import median_bootstrap_interval

TARGET_RATIO = 1.3
"""Up to this, running in turn costs about as much as both do alone: caches are shared."""

NAIVE = ThreadPolicy(threads=2, spinning=True)
"""What runtimes do on two cores when nobody tells them otherwise."""

_WORKER = ("-P", "-m", "edgewise.backends.threads.interference_worker")
_PATIENCE_S = 120.0
_OF_RUNTIMES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
_PACKAGES = (("torch", "torch"), ("onnxruntime", "onnx"), ("onnx", "onnx"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Calls of torch and ONNX Runtime, alone and in turn: Linear 576 to 1536, 32 rows.

    Attributes:
        policy: Threads of each runtime, and whether idle ones spin.
        torch_s: Median call, torch alone, seconds.
        onnxruntime_s: Median call, ONNX Runtime alone.
        torch_in_turn_s: Median call of torch where the two take turns.
        onnxruntime_in_turn_s: Median call of ONNX Runtime where the two take turns.
        ratio: Both in turn over the sum of both alone; the median over rounds.
        low: Lower end of its 95 % interval.
        high: Upper end.
        idle_cores: Cores this process went on using right after a call, while nobody computed.
        rounds: Interleaved rounds.
    """

    policy: ThreadPolicy
    torch_s: float
    onnxruntime_s: float
    torch_in_turn_s: float
    onnxruntime_in_turn_s: float
    ratio: float
    low: float
    high: float
    idle_cores: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coresidency:
    """The same under the governor, and as runtimes are when nobody governs them.

    Attributes:
        governed: Under :func:`edgewise.backends.threads.govern`.
        naive: Two threads each that spin.
    """

    governed: Interference
    naive: Interference

    @property
    def naive_over_governed(self) -> float:
        """Naive runtimes in turn over the sum of governed ones alone."""
        naive, governed = self.naive, self.governed
        in_turn_s = naive.torch_in_turn_s + naive.onnxruntime_in_turn_s
        return in_turn_s / (governed.torch_s + governed.onnxruntime_s)

    @property
    def holds(self) -> bool:
        """Whether the governor keeps the ratio within :data:`TARGET_RATIO`."""
        return self.governed.ratio <= TARGET_RATIO

    def findings(self) -> tuple[str, ...]:
        """What was found and what to do, in sentences."""
        return _findings(self)


def interference(
    *, rounds: int = 8, calls: int = 12, threads: int = 1, spinning: bool = False
) -> Interference:
    """Measure in a process of its own; this one must not be busy meanwhile.

    Args:
        rounds: Each has a block of torch alone, one of ONNX Runtime alone, and one of turns, in
            changing order.
        calls: Of each block and runtime.
        threads: Of each runtime.
        spinning: Leave runtimes as they come, rather than govern them.

    Raises:
        BackendUnavailable: torch, onnxruntime or onnx is not installed.
        BackendError: The process failed.
        ConfigError: No round, call or thread; more threads than cores.
    """
    if rounds < 1 or calls < 1:
        raise ConfigError(
            f"expected at least one round and call, found {rounds} rounds of {calls} calls"
        )
    policy = ThreadPolicy(threads=threads, spinning=spinning)
    return summarise(policy, _ask(policy, rounds=rounds, calls=calls))


def coresidency(*, rounds: int = 8, calls: int = 12, threads: int = 1) -> Coresidency:
    """Measure both settings, in two turns each; takes about fifteen seconds.

    Args:
        rounds: Of each setting, over both turns.
        calls: Of each block and runtime.
        threads: Of each governed runtime.

    Raises:
        EdgeError: As :func:`interference`.
    """
    if rounds < 1 or calls < 1:
        raise ConfigError(
            f"expected at least one round and call, found {rounds} rounds of {calls} calls"
        )
    settings = (ThreadPolicy(threads=threads), NAIVE)
    parts = [rounds - rounds // 2, rounds // 2]
    seen: dict[ThreadPolicy, list[Mapping[str, list[float]]]] = {p: [] for p in settings}
    for part in filter(None, parts):
        for policy in settings:
            seen[policy].append(_ask(policy, rounds=part, calls=calls))
    governed, naive = (summarise(policy, *seen[policy]) for policy in settings)
    return Coresidency(governed=governed, naive=naive)


def summarise(policy: ThreadPolicy, *runs: Mapping[str, Sequence[float]]) -> Interference:
    """Medians and the ratio with its interval.

    Args:
        policy: What was measured under.
        runs: Of each process ``torch``, ``onnxruntime``, ``torch_in_turn``,
            ``onnxruntime_in_turn``: the median of each round's block, seconds; ``idle_cores``.
    """
    t, o, tt, ot, idle = (
        np.concatenate([np.asarray(run[name], dtype=np.float64) for run in runs])
        for name in ("torch", "onnxruntime", "torch_in_turn", "onnxruntime_in_turn", "idle_cores")
    )
    ratios = (tt + ot) / (t + o)
    interval = median_bootstrap_interval(ratios, rng=np.random.default_rng(0))
    return Interference(
        policy=policy,
        torch_s=float(np.median(t)),
        onnxruntime_s=float(np.median(o)),
        torch_in_turn_s=float(np.median(tt)),
        onnxruntime_in_turn_s=float(np.median(ot)),
        ratio=float(np.median(ratios)),
        low=interval.low,
        high=interval.high,
        idle_cores=float(np.median(idle)),
        rounds=len(ratios),
    )


def _findings(found: Coresidency) -> tuple[str, ...]:
    governed, naive = found.governed, found.naive
    said = [
        (
            f"governed ({governed.policy.key}): torch and ONNX Runtime in turn take"
            f" {governed.ratio:.2f} times what they take alone"
        ),
        (
            f"naive ({naive.policy.key}): in turn they take {found.naive_over_governed:.2g} times"
            f" what governed ones take alone, {naive.ratio:.2g} times what naive ones take alone"
        ),
    ]
    if not found.holds:
        said.append(
            f"more than {TARGET_RATIO:g} even governed: other programs may use the cores; look at"
            " the load above and try again when it is quieter"
        )
    elif max(naive.ratio, found.naive_over_governed) > TARGET_RATIO:
        said.append(
            "with several runtimes in one process, call edgewise.backends.threads.govern() before"
            " torch is imported, or set OMP_WAIT_POLICY=PASSIVE and one thread each"
        )
    else:
        said.append("the runtimes do not disturb each other here, governed or not")
    if naive.idle_cores > 0.1:
        said.append(
            f"left alone, idle threads burn {naive.idle_cores:.1f} cores right after a call"
            f" (governed: {governed.idle_cores:.1f}): energy that an idle baseline does not see"
        )
    return tuple(said)


def _ask(policy: ThreadPolicy, *, rounds: int, calls: int) -> Mapping[str, list[float]]:
    for package, extra in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise BackendUnavailable(
                f"the test of interference needs {package}, which is not installed",
                help=f"pip install 'edgewise[torch,{extra}]'",
            )
    job = json.dumps({**dataclasses.asdict(policy), "rounds": rounds, "calls": calls})
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RUNTIMES)}
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, *_WORKER, job],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"the test of interference under {policy.key} did not end within {_PATIENCE_S:g} s",
            help="other programs use the cores: try again when it is quieter",
        ) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BackendError(f"the test of interference under {policy.key} failed: {lines[-1]}")
    found: Mapping[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found

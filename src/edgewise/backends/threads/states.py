"""What threads of this process really have now: counts, cores, and whether idle ones spin."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgewise.clock import Clock, MonotonicClock
from edgewise.device.files import read_text
from edgewise.profiles.records import ThreadPolicy

# More of the window than an idle thread that wakes now and then can burn.
_SPINS_FROM_RATIO = 0.5
# Below this one tick of the kernel's counters, which is also their error, would decide.
_LEAST_TICKS = 5
_OPENMP = ("libgomp", "libiomp", "libomp")
# With one of these OpenMP gives each thread a core of its own, the one that loads it among them.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def allowed_cpus() -> tuple[int, ...] | None:
    """CPUs that the calling thread may run on now; ``None`` where the system cannot say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return tuple(sorted(os.sched_getaffinity(0)))


AFFINITY_AT_START = allowed_cpus()
"""CPUs that were allowed when this was first imported, before a runtime could narrow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """One thing about threads, as it is now.

    Attributes:
        runtime: Whose: ``"torch"``, ``"openmp"``, ``"blas"``, ``"process"``.
        what: ``"intra-op threads"``, ``"cores"``, ``"waiting"``, ``"threads that spin"``.
        found: As found, in words.
        wanted: What the policy asks for, in words; empty without a policy.
        fits: Whether that is so; ``None`` where nobody can tell, or nothing was asked for.
        help: What would change it; empty where it fits.
    """

    runtime: str
    what: str
    found: str
    wanted: str = ""
    fits: bool | None = None
    help: str = ""


def check_threads(
    policy: ThreadPolicy | None = None,
    *,
    window_s: float = 0.1,
    at_start: tuple[int, ...] | None = AFFINITY_AT_START,
    root: Path = Path("/"),
    clock: Clock | None = None,
) -> tuple[ThreadState, ...]:
    """Look at every runtime that is loaded in this process, and at the process itself.

    Nothing is imported and nothing is changed.

    Args:
        policy: What to compare with; without one only what was found is told.
        window_s: How long to watch for threads that spin, seconds; 0 leaves that out, and the
            least is five ticks of the kernel. Nothing else may run in this process meanwhile.
        at_start: CPUs that were allowed when the process began.
        root: Where the file tree starts. Tests pass a made-up tree.
        clock: Sleeps through the window; the machine's by default.

    Returns:
        Cores first, then each runtime that is loaded.
    """
    found = [cores_state(policy, at_start=at_start)]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        found += _torch_states(torch, policy)
    loaded = openmp_libraries(root)
    if loaded:
        found.append(waiting_state(policy, os.environ, loaded))
    found += _pool_states(policy)
    if window_s > 0:
        found.append(_spinning_state(busy_threads(window_s, root=root, clock=clock)))
    return tuple(found)


def cores_state(
    policy: ThreadPolicy | None,
    *,
    at_start: tuple[int, ...] | None = AFFINITY_AT_START,
    now: tuple[int, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ThreadState:
    """Compare the cores of the calling thread with those it should have.

    Args:
        policy: Its affinity is what it should have, else those of the start.
        at_start: CPUs that were allowed when the process began.
        now: CPUs that are allowed now; asked of the kernel by default.
        environment: Of the process; may name who took the others away.
    """
    now = allowed_cpus() if now is None else now
    expected = at_start if policy is None or policy.affinity is None else policy.affinity
    if now is None or expected is None:
        return ThreadState(
            runtime="process", what="cores", found="unknown: this system does not say"
        )
    missing = sorted(set(expected) - set(now))
    extra = policy is not None and policy.affinity is not None and set(now) - set(expected)
    return ThreadState(
        runtime="process",
        what="cores",
        found=_cpus(now),
        wanted=_cpus(expected),
        fits=not missing and not extra,
        help=_narrowed_help(missing, os.environ if environment is None else environment)
        if missing
        else "",
    )


def busy_threads(
    window_s: float = 0.1, *, root: Path = Path("/"), clock: Clock | None = None
) -> dict[int, float] | None:
    """Threads of this process that use a core while the caller sleeps.

    Args:
        window_s: How long to watch, seconds; at least five of the kernel's ticks, 10 ms each as a
            rule.
        root: Where the file tree starts. Tests pass a made-up tree.
        clock: Sleeps; the machine's by default.

    Returns:
        Thread number to the least share of the window that it used for certain, of those above one
        half: a tick less than was counted. ``None`` where the kernel does not tell.

    Source:
        proc_pid_task_tid_stat(5): fields 14 and 15 are utime and stime.
    """
    clock, tick_s = clock or MonotonicClock(), 1 / os.sysconf("SC_CLK_TCK")
    before, start_s = _thread_ticks(root), clock.now_s()
    clock.sleep_s(max(window_s, _LEAST_TICKS * tick_s))
    after, spent_s = _thread_ticks(root), clock.now_s() - start_s
    if not before or not after or spent_s <= 0:
        return None
    shares = {
        thread: min(1.0, (ticks - 1 - before[thread]) * tick_s / spent_s)
        for thread, ticks in after.items()
        if thread in before
    }
    return {thread: share for thread, share in shares.items() if share > _SPINS_FROM_RATIO}


def openmp_libraries(root: Path = Path("/")) -> tuple[str, ...]:
    """File names of the OpenMP runtimes that are loaded in this process, in order of address.

    Source:
        proc_pid_maps(5): the path is the sixth field.
    """
    text = read_text(root / "proc/self/maps").value or ""
    names = [line.split(maxsplit=5)[5] for line in text.splitlines() if len(line.split()) > 5]
    found = [name.rpartition("/")[2] for name in names]
    return tuple(dict.fromkeys(name for name in found if name.startswith(_OPENMP)))


def waiting_state(
    policy: ThreadPolicy | None, environment: Mapping[str, str], loaded: tuple[str, ...]
) -> ThreadState:
    """How OpenMP's threads wait for each other, as far as the environment tells.

    Args:
        policy: What to compare with.
        environment: As it was when the libraries were loaded.
        loaded: Names of the libraries.

    Source:
        OpenMP 5.2, 21.7 (OMP_WAIT_POLICY); libgomp manual, 4.22 (GOMP_SPINCOUNT).
    """
    sleeps = waits_asleep(environment)
    alone = policy is not None and policy.threads == 1
    fits = None if policy is None else alone or sleeps or policy.spinning
    return ThreadState(
        runtime="openmp",
        what="waiting",
        found=("asleep" if sleeps else "spins first") + f" ({', '.join(loaded)})",
        wanted="" if policy is None else "nobody waits" if alone else "asleep",
        fits=fits,
        help="set OMP_WAIT_POLICY=PASSIVE before torch is imported" if fits is False else "",
    )


def waits_asleep(environment: Mapping[str, str]) -> bool:
    """Whether an OpenMP runtime that is loaded under it lets idle threads sleep at once."""
    return environment.get("OMP_WAIT_POLICY", "").lower() == "passive"


def threadpoolctl() -> Any | None:
    """The package of that name; ``None`` where it is not installed (scikit-learn brings it)."""
    try:
        return importlib.import_module("threadpoolctl")
    except ImportError:
        return None


def _torch_states(torch: Any, policy: ThreadPolicy | None) -> list[ThreadState]:
    intra, inter = torch.get_num_threads(), torch.get_num_interop_threads()
    fits = None if policy is None else intra == policy.threads
    return [
        ThreadState(
            runtime="torch",
            what="intra-op threads",
            found=str(intra),
            wanted="" if policy is None else str(policy.threads),
            fits=fits,
            help="torch.set_num_threads, or govern() again" if fits is False else "",
        ),
        # Only operators that a script forks use these; none of ours does.
        ThreadState(runtime="torch", what="inter-op threads", found=str(inter)),
    ]


def _pool_states(policy: ThreadPolicy | None) -> list[ThreadState]:
    control = threadpoolctl()
    found = []
    for pool in [] if control is None else control.threadpool_info():
        if pool["user_api"] != "blas":
            continue
        fits = None if policy is None else pool["num_threads"] <= policy.threads
        found.append(
            ThreadState(
                runtime="blas",
                what=f"threads of {pool['internal_api']}",
                found=str(pool["num_threads"]),
                wanted="" if policy is None else f"at most {policy.threads}",
                fits=fits,
                help="govern() again: something has set it since" if fits is False else "",
            )
        )
    return found


def _spinning_state(busy: dict[int, float] | None) -> ThreadState:
    if busy is None:
        return ThreadState(
            runtime="process", what="threads that spin", found="unknown: no /proc/self/task"
        )
    names = ", ".join(f"thread {t} at {share:.0%}" for t, share in sorted(busy.items()))
    return ThreadState(
        runtime="process",
        what="threads that spin",
        found=names or "none",
        wanted="none",
        fits=not busy,
        help="switch spinning off before the runtime starts, or wait until other work is done"
        if busy
        else "",
    )


def _thread_ticks(root: Path) -> dict[int, int]:
    """Processor time of each thread of this process, in the kernel's ticks."""
    found = {}
    try:
        names = os.listdir(root / "proc/self/task")  # noqa: PTH208 - names are wanted
    except OSError:
        return {}
    for name in names:
        text = read_text(root / "proc/self/task" / name / "stat").value or ""
        fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
        if name.isdigit() and len(fields) > 12:
            found[int(name)] = int(fields[11]) + int(fields[12])
    return found


def _narrowed_help(missing: list[int], environment: Mapping[str, str]) -> str:
    named = [f"{name}={environment[name]}" for name in _BINDING if environment.get(name)]
    who = f"unset {' and '.join(named)}" if named else "a runtime has bound this thread: restart"
    return f"CPUs {' '.join(map(str, missing))} were taken away; {who}"


def _cpus(cpus: tuple[int, ...]) -> str:
    return f"{len(cpus)} ({' '.join(map(str, cpus))})"

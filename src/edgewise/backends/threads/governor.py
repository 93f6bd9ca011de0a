"""Sets threads, affinity and spinning of every runtime, and refuses to measure under others."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

from edgewise.backends.base import import_runtime
from edgewise.backends.threads.states import (
    AFFINITY_AT_START,
    allowed_cpus,
    cores_state,
    openmp_libraries,
    threadpoolctl,
    waits_asleep,
)
from edgewise.device.cores import usable_cores
from edgewise.errors import ConfigError
from edgewise.profiles.records import ThreadPolicy

_log = logging.getLogger(__name__)


def thread_environment(threads: int) -> dict[str, str]:
    """What a process must find in its environment for its runtimes to be governed from the start.

    Args:
        threads: Of each call.

    Source:
        OpenMP 5.2, ch. 21; libgomp manual, 4 (GOMP_SPINCOUNT); Intel's OpenMP (KMP_BLOCKTIME);
        joblib (LOKY_MAX_CPU_COUNT bounds ``n_jobs=-1``).

    Example:
        >>> thread_environment(2)["OMP_WAIT_POLICY"]
        'PASSIVE'
    """
    _check(threads)
    count = str(threads)
    counts = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LOKY_MAX_CPU_COUNT")
    return dict.fromkeys(counts, count) | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        # A bound thread hands its core, and no other, on to the threads of the next runtime.
        "OMP_PROC_BIND": "FALSE",
    }


def govern(threads: int = 1, *, affinity: Collection[int] | None = None) -> ThreadPolicy:
    """Give every runtime of this process so many threads, none of which spins.

    Runtimes that are loaded are told; those that are not find it in the environment, which
    processes that are started from here inherit. ONNX Runtime and OpenVINO take theirs with each
    session: :func:`onnxruntime_options`, :func:`openvino_settings`; scikit-learn with each
    estimator: ``n_jobs=policy.threads``. How OpenMP waits is settled when it is loaded: call this
    before torch is imported, or the log says what could no longer be set.

    Args:
        threads: Of one call of any runtime.
        affinity: CPUs for all threads of this process, those that run among them; left as it is by
            default.

    Returns:
        What holds from now on. ``spinning`` is true where torch has several threads and was loaded
        before they could be told to sleep.

    Raises:
        ConfigError: No thread, more threads than cores, or CPUs that this process may not use.
    """
    _check(threads)
    if affinity is not None:
        _bind(affinity)
    usable = usable_cores().threads
    if threads > usable:
        raise ConfigError(
            f"expected at most one thread for each of {usable} usable cores, found {threads}",
            help="edgewise doctor shows the cores and who limits them",
        )
    spins = _set_environment(threads) and threads > 1
    if "torch" in sys.modules:
        set_torch_threads(threads)
        _set_interop(sys.modules["torch"])
    _limit_pools(threads)
    bound = None if affinity is None else tuple(affinity)
    return ThreadPolicy(threads=threads, spinning=spins, affinity=bound)


def require(
    policy: ThreadPolicy,
    *,
    at_start: tuple[int, ...] | None = AFFINITY_AT_START,
    now: tuple[int, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Refuse to measure where this process has fewer cores, or other threads, than expected.

    OpenMP can bind the thread that loads it to one core, and runtimes that start their threads from
    there are then confined to it (openvino 15597, pytorch 91989).

    Args:
        policy: What is to be measured under.
        at_start: CPUs that were allowed when the process began.
        now: CPUs that are allowed now; asked of the kernel by default.
        environment: Of the process; may name who took cores away.

    Raises:
        ConfigError: It does not hold.
    """
    now = allowed_cpus() if now is None else now
    cores = cores_state(policy, at_start=at_start, now=now, environment=environment)
    if cores.fits is False:
        raise ConfigError(
            f"expected cores {cores.wanted}, found {cores.found}: measured now, costs would be"
            " those of another machine",
            help=cores.help or "govern(affinity=...) again",
        )
    if now is not None and len(now) < policy.threads:
        raise ConfigError(f"expected a core for each of {policy.threads} threads, found {len(now)}")
    torch = sys.modules.get("torch")
    found = None if torch is None else torch.get_num_threads()
    if found not in {None, policy.threads}:
        raise ConfigError(
            f"expected torch to have {policy.threads} threads, found {found}",
            help="something has set them since: govern() again before measuring",
        )


def set_torch_threads(threads: int) -> None:
    """Set torch's threads, which are one number for the whole process.

    Raises:
        BackendUnavailable: torch is not installed.
    """
    torch = import_runtime("torch", backend="torch:cpu", extra="torch")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def onnxruntime_options(threads: int, *, log_severity: int = 3, spin_in_calls: bool = False) -> Any:
    """Options of a session: so many threads within an operator, one between, none spins.

    Args:
        threads: Of each call.
        log_severity: 3 lets it print errors, 4 only what is fatal.
        spin_in_calls: Threads beside the caller's spin while a call runs, not between calls: for
            operators so short that waking a thread for each costs more than they do.

    Returns:
        ``onnxruntime.SessionOptions``; the caller may set more.

    Raises:
        BackendUnavailable: onnxruntime is not installed.
        ConfigError: No thread.

    Source:
        onnxruntime_session_options_config_keys.h. With a number of threads given, ONNX Runtime does
        not bind them.
    """
    _check(threads)
    runtime = import_runtime("onnxruntime", backend="onnxruntime:CPU", extra="onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = log_severity
    spins = spin_in_calls and threads > 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if spins:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def openvino_settings(threads: int, device: str = "CPU") -> dict[str, Any]:
    """Settings of a compiled model: one stream in full precision; on the CPU so many threads, free.

    Args:
        threads: Of each call.
        device: OpenVINO's name of the device; only the CPU has threads of ours.

    Raises:
        ConfigError: No thread.

    Source:
        OpenVINO, ov::inference_num_threads and ov::hint::enable_cpu_pinning. Its threads sleep
        between calls.
    """
    _check(threads)
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1"}
    if device == "CPU":
        settings |= {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    return settings


def _check(threads: int) -> None:
    if threads < 1:
        raise ConfigError(f"expected at least one thread, found {threads}")


def _bind(affinity: Collection[int]) -> None:
    """Bind every thread of this process; those that start later inherit it."""
    allowed = AFFINITY_AT_START
    if allowed is None:
        raise ConfigError("this system cannot bind threads to CPUs", help="leave affinity out")
    if not affinity or not set(affinity) <= set(allowed):
        raise ConfigError(
            f"expected some of the CPUs {' '.join(map(str, allowed))}, found {sorted(affinity)}",
            help="this process was given no others when it began",
        )
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names are wanted
        try:
            os.sched_setaffinity(int(thread), affinity)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as error:
            raise ConfigError(
                f"the system refuses to bind to the CPUs {sorted(affinity)}: {error}"
            ) from error


def _set_environment(threads: int) -> bool:
    """Write what later imports read; returns whether OpenMP threads are left that spin."""
    wanted = thread_environment(threads)
    if not openmp_libraries():
        os.environ.update(wanted)
        return False
    # It was read when OpenMP was loaded: to change it now would only hide what holds.
    late = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND"}
    os.environ.update({name: value for name, value in wanted.items() if name not in late})
    if waits_asleep(os.environ):
        return False
    if threads > 1:
        _log.warning(
            "torch was imported before its threads could be told to sleep: they spin while they"
            " wait; set OMP_WAIT_POLICY=PASSIVE, or call govern() before the import"
        )
    return True


def _set_interop(torch: Any) -> None:
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:  # only before the first parallel work
        if torch.get_num_interop_threads() != 1:
            _log.debug("torch keeps %d inter-op threads", torch.get_num_interop_threads())


def _limit_pools(threads: int) -> None:
    """Limit numpy's and scipy's BLAS, which are loaded long before."""
    control = threadpoolctl()
    if control is None:
        _log.debug("threadpoolctl is not installed: numpy keeps the threads it was loaded with")
    else:
        control.threadpool_limits(limits=threads, user_api="blas")

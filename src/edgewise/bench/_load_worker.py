"""The process behind a background load: burns the processor or the memory bus until told to stop.

Run by ``background.Load`` as a plain script, so it imports neither numpy nor the rest of Edgewise
and is at work within milliseconds. It ends when its standard input closes, when its parent is gone
or on SIGTERM, whichever comes first. It says ``ready`` or ``error: …`` on standard output, once.
Given a command, it runs that instead of its own loops, and the command ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_DUTY_PERIOD_S = 0.02
_BUFFER_BYTES = 64 << 20
_CHUNK_BYTES = 2 << 20
_SPIN_STEPS = 2000
_PR_SET_PDEATHSIG = 1
_SETTLING_S = 1.0


def _spin(steps: int) -> int:
    """Do a fixed amount of arithmetic."""
    value = 1
    for _ in range(steps):
        value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
    return value


def _steps_per_s() -> float:
    """Measure how fast ``_spin`` goes when undisturbed: the best of some short runs."""
    best = 0.0
    for _ in range(5):
        start_s = time.perf_counter()
        _spin(5 * _SPIN_STEPS)
        best = max(best, 5 * _SPIN_STEPS / max(time.perf_counter() - start_s, 1e-9))
    return best


def _hog_cpu(duty_ratio: float) -> None:
    """Compute for ``duty_ratio`` of every 20 ms of wall time."""
    while True:
        start_s = time.perf_counter()
        if duty_ratio >= 1.0:
            _spin(_SPIN_STEPS)
            continue
        while time.perf_counter() - start_s < duty_ratio * _DUTY_PERIOD_S:
            _spin(_SPIN_STEPS)
        time.sleep(max(0.0, start_s + _DUTY_PERIOD_S - time.perf_counter()))


def _stream_memory(duty_ratio: float) -> None:
    """Copy within a buffer larger than the caches, resting so that ``duty_ratio`` is busy."""
    # Filled, not zeroed: untouched zero pages would all be one page that sits in the cache.
    view = memoryview(bytearray(b"\x5a") * _BUFFER_BYTES)
    half_bytes = _BUFFER_BYTES // 2
    busy_s = 0.0
    while True:
        for at in range(0, half_bytes, _CHUNK_BYTES):
            start_s = time.perf_counter()
            view[at : at + _CHUNK_BYTES] = view[half_bytes + at : half_bytes + at + _CHUNK_BYTES]
            busy_s += time.perf_counter() - start_s
            if duty_ratio < 1.0 and busy_s >= duty_ratio * _DUTY_PERIOD_S:
                time.sleep(busy_s * (1.0 / duty_ratio - 1.0))
                busy_s = 0.0


def _burst_periodically(duty_ratio: float, period_s: float) -> None:
    """Do the same work at the start of every period, as an audio callback does.

    The work is fixed, so a burst that is disturbed takes longer; a period that is missed is
    skipped, not made up for.
    """
    steps = max(1, int(_steps_per_s() * duty_ratio * period_s))
    due_s = time.perf_counter()
    while True:
        _spin(steps)
        now_s = time.perf_counter()
        due_s += period_s * max(1, int((now_s - due_s) // period_s) + 1)
        time.sleep(max(0.0, due_s - now_s))


def _die_with_parent(signal_number: int) -> None:
    """Ask the kernel for a signal when the thread that started this process ends."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _start_command(command: list[str]) -> Callable[[], None]:
    """Start a program that makes the load, and wait until it is at work.

    Returns:
        What waits for its end.

    Raises:
        OSError: It cannot be started, or ended at once.
    """
    import subprocess

    # The main thread starts it and never ends before the process does.
    started = subprocess.Popen(  # noqa: S603 - given by our own parent
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: _die_with_parent(int(signal.SIGKILL)),  # noqa: PLW1509 - no threads yet
    )

    def end(*_: object) -> None:
        started.terminate()  # it ends what it started itself, then the wait below returns

    signal.signal(signal.SIGTERM, end)
    children = f"/proc/{started.pid}/task/{started.pid}/children"
    until_s = time.perf_counter() + _SETTLING_S
    while time.perf_counter() < until_s and started.poll() is None:
        try:
            with open(children) as file:  # noqa: PTH123 - pathlib is slow to import
                if file.read().strip():
                    break
        except OSError:
            pass
        time.sleep(0.005)
    if started.poll() is not None:
        said = started.communicate()[0].decode(errors="replace").strip().replace("\n", "; ")
        raise OSError(f"{command[0]} ended with code {started.returncode}: {said}")
    return lambda: sys.exit(started.wait())


def _end_with_parent(parent_pid: int) -> None:
    """Arrange that this process never outlives its parent, by two independent means."""

    def end_if_orphaned(*_: object) -> None:
        # The kernel also signals when only the *thread* that started us ended; that is no reason.
        if os.getppid() != parent_pid:
            os._exit(0)

    def end_at_eof() -> None:
        while os.read(0, 64):
            pass
        os._exit(0)

    if sys.platform == "linux":
        signal.signal(signal.SIGHUP, end_if_orphaned)
        _die_with_parent(int(signal.SIGHUP))
    threading.Thread(target=end_at_eof, daemon=True).start()
    end_if_orphaned()  # the parent may have died before the line above


def _settle(nice: int, cpus: str) -> None:
    """Take the priority and the processors asked for."""
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def main(argv: list[str]) -> int:
    """Run one load until it is ended from outside.

    Args:
        argv: kind, duty ratio, period in seconds, niceness, processors (``0,1`` or empty), parent,
            and the command that does it instead, if any.
    """
    kind, duty_ratio, period_s, nice, cpus, parent_pid, *command = argv
    # Inherited from a parent that ignores or blocks SIGTERM, we could only be killed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    duty = float(duty_ratio)
    work: dict[str, Callable[[], None]] = {
        "cpu": lambda: _hog_cpu(duty),
        "memory": lambda: _stream_memory(duty),
        "periodic": lambda: _burst_periodically(duty, float(period_s)),
    }
    try:
        _settle(int(nice), cpus)
        run = _start_command(command) if command else work[kind]
    except (OSError, OverflowError, ValueError) as error:
        os.write(1, f"error: {error}\n".encode())
        return 2
    _end_with_parent(int(parent_pid))
    os.write(1, b"ready\n")
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

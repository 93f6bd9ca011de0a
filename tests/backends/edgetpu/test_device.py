from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.backends.accelerator import AcceleratorLost, Prefix
from edgewise.backends.edgetpu import EdgeTpuDevice
from edgewise.backends.piece import Array, ArraySpec
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError, BackendUnavailable, ShapeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses prctl")

SCRIPT = Path(__file__).with_name("fake_worker.py")
SRC = Path(edgewise.__file__).parents[1]
DEVICE = Accelerator(name="tpu", sram_bytes=8_000_000, in_bytes_per_s=400e6, out_bytes_per_s=50e6)
SPEC = ArraySpec(shape=(1, 4), dtype="float32")
ABORT, HANG, HANG_HARD, FAIL, FLOOD, GARBAGE = -1, -2, -3, -4, -5, -6


def worker(mode: str = "none") -> tuple[str, ...]:
    return (sys.executable, str(SCRIPT), mode)


def order(number: float) -> Array:
    return np.full(SPEC.shape, number, dtype=np.float32)


def prefix(key: str, model: bytes = b"", **other: Any) -> Prefix:
    usual = {"format": "onnx", "weight_bytes": 1000, "input": SPEC, "output": SPEC}
    return Prefix(key=key, model=model or key.encode(), **{**usual, **other})


def eventually(happened: Callable[[], bool], *, within_s: float = 30.0) -> bool:
    """Wait for something that takes as long as the machine lets it; the limit only ends a hang."""
    until_s = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int | None) -> bool:
    """Whether a process has ended; one that nobody reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def rss_bytes(pid: int | str) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def make() -> Iterator[Callable[..., EdgeTpuDevice]]:
    """``make(*prefixes)``: a device without a device, closed in the end with no child left."""
    made: list[EdgeTpuDevice] = []

    def device(*prefixes: Prefix, mode: str = "none", **options: Any) -> EdgeTpuDevice:
        usual: dict[str, Any] = {
            "library": None,
            "command": worker(mode),
            "watchdog_least_s": 30.0,  # a busy machine is no fault of the device
        }
        made.append(EdgeTpuDevice(DEVICE, **{**usual, **options}))
        for each in prefixes:
            made[-1].load(each)
        return made[-1]

    yield device
    for each in made:
        pid = each.pid
        each.close()
        assert pid is None or is_gone(pid)


@pytest.fixture(scope="module")
def calm() -> Iterator[EdgeTpuDevice]:
    """One device for tests that do not lose it; the thread that started its child has ended."""
    device = EdgeTpuDevice(DEVICE, library=None, command=worker(), watchdog_least_s=30.0)
    starter = threading.Thread(target=device.load, args=(prefix("first"),))
    starter.start()
    starter.join()
    yield device
    device.close()


def test_the_child_outlives_the_thread_that_started_it(calm: EdgeTpuDevice) -> None:
    np.testing.assert_array_equal(calm.run("first", order(1)).output, order(6))


def test_prefixes_run_in_a_child_and_what_goes_wrong_with_one_spares_the_others(
    calm: EdgeTpuDevice,
) -> None:
    device = calm
    device.load(prefix("a"))
    device.load(prefix("bb"))

    answer = device.run("bb", order(1))

    np.testing.assert_array_equal(answer.output, order(3))
    answer.output[:] = 0  # its own, and writable
    assert answer.service_s > 0
    assert (answer.load_s, answer.missed) == (None, None)
    assert list(device.resident) == ["bb"]
    assert device.provenance == "measured"
    with pytest.raises(BackendError, match="prefix 'c': the model is damaged"):
        device.load(prefix("c", b"refused"))
    with pytest.raises(BackendError, match="expected output float32"):
        device.load(prefix("a", output=ArraySpec(shape=(2,), dtype="float32")))
    with pytest.raises(BackendError, match="prefix 'a': failed at invocation"):
        device.run("a", order(FAIL))
    with pytest.raises(ShapeError, match="found float64"):
        device.run("a", np.zeros((1, 4)))
    with pytest.raises(BackendError, match="no prefix 'c' is loaded"):
        device.run("c", order(1))
    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))
    device.load(prefix("a", b"1234"))
    np.testing.assert_array_equal(device.run("a", order(1)).output, order(5))
    device.unload("a")
    device.unload("a")
    assert not device.resident
    with pytest.raises(BackendError, match="no prefix 'a' is loaded"):
        device.run("a", order(1))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (ABORT, "SIGABRT: .*transfer on tag 2 failed"),
        (GARBAGE, "sent something that is no message"),
    ],
    ids=["abort", "garbage on the line"],
)
def test_a_crash_in_a_call_is_survived_and_a_restart_brings_all_prefixes_back(
    make: Callable[..., EdgeTpuDevice], number: int, said: str
) -> None:
    device = make(prefix("a"), prefix("bb"))
    pid, files, threads = device.pid, open_files(), threading.active_count()

    with pytest.raises(AcceleratorLost, match=said):
        device.run("a", order(number))
    assert is_gone(pid)
    assert device.pid is None
    with pytest.raises(AcceleratorLost, match="was lost"):
        device.run("bb", order(1))
    with pytest.raises(AcceleratorLost, match="was lost"):
        device.load(prefix("c"))
    device.unload("nothing")
    device.restart()

    assert device.pid not in {None, pid}
    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))
    np.testing.assert_array_equal(device.run("bb", order(1)).output, order(3))
    assert (open_files(), threading.active_count()) == (files, threads)


def test_a_call_that_hangs_in_a_driver_is_ended_by_the_watchdog_and_its_process_with_it(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(prefix("a"), watchdog_least_s=0.2)
    pid = device.pid

    with pytest.raises(AcceleratorLost, match=r"did not answer within 0\.2 s"):
        device.run("a", order(HANG_HARD))

    assert is_gone(pid)


def test_the_watchdog_waits_longer_for_what_is_expected_to_take_long(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(watchdog_least_s=1.0)
    slow = prefix("slow", weight_bytes=40_000_000, compute_s=0.1)

    # 8 MB are loaded and 32 MB stream: all 40 MB pass once in a call that misses.
    assert device._limit_s(slow) == pytest.approx(20 * (0.1 + 40 / 400), rel=1e-3)
    assert device._limit_s(prefix("quick")) == 1.0


def test_a_child_killed_in_the_middle_of_a_call_is_noticed_at_once(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(prefix("a"))
    assert device.pid is not None
    killer = threading.Timer(0.05, os.kill, (device.pid, signal.SIGKILL))
    killer.start()

    with pytest.raises(AcceleratorLost, match="SIGKILL"):
        device.run("a", order(HANG))
    killer.join()


def test_a_model_that_crashes_at_loading_is_not_loaded_again_after_the_restart(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(prefix("a"))

    with pytest.raises(AcceleratorLost, match="SIGABRT"):
        device.load(prefix("bad", b"aborts"))
    device.restart()

    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))
    with pytest.raises(BackendError, match="no prefix 'bad'"):
        device.run("bad", order(1))


def test_restarts_end_with_their_budget_and_the_message_says_when_to_try_again(
    make: Callable[..., EdgeTpuDevice], tmp_path: Path
) -> None:
    clock = VirtualClock()
    flag = tmp_path / "flag"
    flag.touch()
    device = make(prefix("a", f"once {flag}".encode()), clock=clock, restarts=1, within_s=60.0)
    with pytest.raises(AcceleratorLost):
        device.run("a", order(ABORT))
    flag.unlink()

    for message in ("cannot be brought back", "next try is in 60 s"):
        with pytest.raises(AcceleratorLost, match=message):
            device.restart()
        assert device.pid is None
    assert device.restart_wait_s == 60.0
    flag.touch()
    clock.sleep_s(60.0)
    device.restart()

    assert device.run("a", order(1)).output[0, 0] > 1


def test_cycles_of_loading_unloading_and_failed_loads_leave_nothing_behind(
    calm: EdgeTpuDevice,
) -> None:
    device = calm
    device.load(prefix("a"))

    def cycle() -> None:
        device.load(prefix("big", b"x" * 2_000_000))
        device.run("big", order(1))
        device.unload("big")
        with pytest.raises(BackendError):
            device.load(prefix("bad", b"refused"))

    for _ in range(5):
        cycle()
    gc.collect()
    assert device.pid is not None
    before = [rss_bytes(device.pid), rss_bytes("self")]
    files = open_files()
    for _ in range(30):
        cycle()
    gc.collect()

    after = [rss_bytes(device.pid), rss_bytes("self")]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 10_000_000
    assert open_files() == files
    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))


def test_a_child_that_writes_a_lot_to_its_outputs_still_answers(calm: EdgeTpuDevice) -> None:
    device = calm
    device.load(prefix("a"))

    np.testing.assert_array_equal(device.run("a", order(FLOOD)).output, order(FLOOD + 1))


def test_signals_to_the_whole_group_are_left_to_the_parent(calm: EdgeTpuDevice) -> None:
    device = calm
    device.load(prefix("a"))
    assert device.pid is not None

    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(device.pid, number)

    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))


def test_closing_ends_even_a_child_that_does_not_listen(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(prefix("a"))
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    device.close(grace_s=0.1)

    assert is_gone(pid)
    device.close()
    with pytest.raises(AcceleratorLost, match="was closed"):
        device.run("a", order(1))


def test_a_child_that_hangs_in_a_driver_vanishes_when_its_parent_is_killed(
    tmp_path: Path,
) -> None:
    hangs = tmp_path / "hangs"
    program = f"""
import numpy as np
from edgewise.backends.accelerator import Prefix
from edgewise.backends.edgetpu import EdgeTpuDevice
from edgewise.backends.piece import ArraySpec
from edgewise.device.accelerator import load_accelerator
spec = ArraySpec(shape=(1, 4), dtype="float32")
device = EdgeTpuDevice(
    load_accelerator("coral-usb"), library=None, command={worker()!r}, watchdog_least_s=600.0
)
device.load(
    Prefix(key="a", model=b"a", format="onnx", weight_bytes=1, input=spec, output=spec)
)
print(device.pid, flush=True)
device.run("a", np.full(spec.shape, {HANG_HARD}, dtype=np.float32))
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC), "TELL_HANGING": str(hangs)},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert eventually(hangs.exists)
        assert not is_gone(pid)
        parent.kill()
        parent.wait()

    assert eventually(lambda: is_gone(pid))


def test_a_command_that_cannot_be_started_is_told(make: Callable[..., EdgeTpuDevice]) -> None:
    device = make(command=("/no/such/program",))

    with pytest.raises(AcceleratorLost, match="cannot be started"):
        device.load(prefix("a"))


def test_the_real_worker_runs_a_real_model(make: Callable[..., EdgeTpuDevice]) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from edgewise.backends.edgetpu.child import WORKER

    helper = onnx.helper
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in ("x", "y")
    ]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    device = make(prefix("relu", model.SerializeToString()), command=WORKER)
    x = np.array([[-1, 2, -3, 4]], dtype=np.float32)

    np.testing.assert_array_equal(device.run("relu", x).output, np.maximum(x, 0))
    with pytest.raises(BackendError, match="refuses the model"):
        device.load(prefix("bad", b"no model at all"))
    with pytest.raises(BackendError, match="unknown format"):
        device.load(prefix("odd", format="odd"))
    np.testing.assert_array_equal(device.run("relu", x).output, np.maximum(x, 0))


def test_a_device_that_works_is_tried_out_in_children_that_are_gone_before_it_is_used(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(mode="fine", library="libedgetpu.so.1", options={"device": "usb:0"})

    assert str(device.versions) == "ai-edge-litert 2.3.0 and libedgetpu.so.1 RuntimeVersion(14)"
    assert device.pid is None
    device.load(prefix("a", format="tflite"))
    np.testing.assert_array_equal(device.run("a", order(1)).output, order(2))


@pytest.mark.parametrize(
    ("mode", "said", "help_says"),
    [
        (
            "segfault",
            r"2\.3\.0 and libedgetpu\.so\.1 RuntimeVersion\(14\) do not work .* with SIGSEGV",
            "built together",
        ),
        ("missing", r"library cannot be loaded: libedgetpu\.so\.1: cannot open", "libedgetpu1-std"),
        ("refuse", "no Edge TPU is plugged in", "plug it in"),
        ("hang", "cannot be used through", "power"),
        ("no runtime", "neither ai-edge-litert nor tflite-runtime is installed", "pip install"),
    ],
)
def test_what_keeps_a_device_from_opening_is_told_with_what_to_do(
    tmp_path: Path, mode: str, said: str, help_says: str
) -> None:
    with pytest.raises(BackendUnavailable, match=said) as caught:
        EdgeTpuDevice(
            DEVICE,
            command=worker(mode),
            root=tmp_path,
            start_timeout_s=1.0 if mode == "hang" else 60.0,
        )

    assert help_says in (caught.value.help or "")


def test_a_pair_that_crashes_at_the_first_model_is_named_before_the_device_is_used(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(mode="allocate", library="libedgetpu.so.1")

    with pytest.raises(BackendUnavailable, match=r"2\.3\.0 and .*RuntimeVersion\(14\) do not work"):
        device.load(prefix("a", format="tflite"))
    assert device.pid is None


def test_a_model_that_the_runtime_refuses_does_not_speak_against_the_device(
    make: Callable[..., EdgeTpuDevice],
) -> None:
    device = make(mode="refuse model", library="libedgetpu.so.1")

    with pytest.raises(BackendError, match="refuses the model"):
        device.load(prefix("a", format="tflite"))
    with pytest.raises(BackendError, match="runs compiled TFLite models, found 'onnx'"):
        device.load(prefix("a"))

from __future__ import annotations

import bisect
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.clock import VirtualClock
from edgewise.device.monitor import Monitor
from edgewise.device.recording import Recorder, Replay
from edgewise.device.sensor import Sensor
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import ConfigError, DataError

FINITE = st.floats(allow_nan=False, allow_infinity=False)
QUANTITIES = st.one_of(
    FINITE.map(Quantity.ok),
    st.builds(
        Quantity,
        value=st.none(),
        quality=st.sampled_from(["masked", "unsupported", "denied"]),
        reason=st.text(),
    ),
    st.builds(Quantity, value=FINITE, quality=st.just("stale"), reason=st.text()),
)
# Few names, so that they come, change, stay and go from state to state.
NAMES = st.sampled_from(["cpu.frequency_hz", "gpu.load_ratio", "power.VDD_IN_w", "µ \n"])


@st.composite
def recordings(draw: st.DrawFn) -> list[DeviceState]:
    instants = draw(st.lists(FINITE, min_size=1, max_size=12))
    return [
        DeviceState(at_s=at_s, quantities=draw(st.dictionaries(NAMES, QUANTITIES)))
        for at_s in sorted(instants)
    ]


def ramp(steps: int = 5, *, period_s: float = 0.1, start_s: float = 50.0) -> list[DeviceState]:
    """A load that counts its steps."""
    return [
        DeviceState(
            at_s=start_s + period_s * step, quantities={"cpu.load_ratio": Quantity.ok(step)}
        )
        for step in range(steps)
    ]


def record(path: Path, states: list[DeviceState], *, full_every: int = 500) -> Path:
    with Recorder(path, full_every=full_every) as recorder:
        for each in states:
            recorder(each)
    assert recorder.states == len(states)
    return path


@settings(max_examples=50)
@given(states=recordings(), full_every=st.integers(1, 4))
def test_what_was_recorded_is_what_is_played(states: list[DeviceState], full_every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder) / "device.jsonl", states, full_every=full_every)
        replay = Replay(path, VirtualClock())

    assert replay.states == states
    assert replay.duration_s == states[-1].at_s - states[0].at_s
    assert replay.problem == ""


@given(states=recordings(), cut=st.data())
def test_a_recording_cut_anywhere_plays_every_whole_line(
    states: list[DeviceState], cut: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder) / "device.jsonl", states, full_every=3)
        whole = path.read_bytes()
        ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
        size = cut.draw(st.integers(ends[1], len(whole)))
        path.write_bytes(whole[:size])
        replay = Replay(path, VirtualClock())

    assert replay.states == states[: bisect.bisect_right(ends, size) - 1]
    assert bool(replay.problem) == (size not in ends)


def test_a_cut_recording_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = record(tmp_path / "device.jsonl", ramp())
    path.write_bytes(path.read_bytes()[:-3])

    replay = Replay(path, VirtualClock())

    assert len(replay.states) == 4
    assert caplog.messages == [f"{path} was cut off in line 6; played up to there"]


def test_the_header_says_what_was_recorded(plant: Callable[[Mapping[str, str]], Path]) -> None:
    root = plant({"proc/sys/kernel/random/boot_id": "0a1b-2c\n"})
    with Recorder(root / "r.jsonl", period_s=0.02, note="orin nano", root=root) as recorder:
        recorder(ramp()[0])

    replay = Replay(root / "r.jsonl", VirtualClock())

    assert json.loads((root / "r.jsonl").read_text().splitlines()[0]) == {
        "edgewise_recording": 1,
        "period_s": 0.02,
        "boot_id": "0a1b-2c",
        "note": "orin nano",
    }
    assert (replay.period_s, replay.boot_id, replay.note) == (0.02, "0a1b-2c", "orin nano")


def test_a_line_holds_only_what_changed(tmp_path: Path) -> None:
    still = Quantity.missing("denied", "for root")
    states = [
        DeviceState(
            at_s=float(each), quantities={"a_w": Quantity.ok(each // 2), "emc.frequency_hz": still}
        )
        for each in range(4)
    ]

    lines = record(tmp_path / "r.jsonl", states, full_every=3).read_text().splitlines()[1:]

    assert [json.loads(each) for each in lines] == [
        {"at_s": 0.0, "full": {"a_w": 0, "emc.frequency_hz": [None, "denied", "for root"]}},
        {"at_s": 1.0, "changed": {}},
        {"at_s": 2.0, "changed": {"a_w": 1}},
        {"at_s": 3.0, "full": {"a_w": 1, "emc.frequency_hz": [None, "denied", "for root"]}},
    ]


def test_whole_lines_reach_the_file_twice_a_second_and_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl")
    sizes = []
    for each in ramp(12, period_s=0.1):
        recorder(each)
        sizes.append((tmp_path / "r.jsonl").read_bytes().count(b"\n"))
    recorder.close()
    recorder(ramp(start_s=99.0)[0])
    recorder.close()

    assert sizes == [2, 2, 2, 2, 2, 7, 7, 7, 7, 7, 12, 12]
    assert len(Replay(recorder.path, VirtualClock()).states) == 12


def test_a_state_older_than_the_last_is_left_out(tmp_path: Path) -> None:
    states = ramp(3)
    with Recorder(tmp_path / "r.jsonl") as recorder:
        for each in (states[0], states[2], states[1]):
            recorder(each)

    assert Replay(recorder.path, VirtualClock()).states == [states[0], states[2]]


def test_numbers_that_json_lacks_become_unknown(tmp_path: Path) -> None:
    state = DeviceState(at_s=0.0, quantities={"a_w": Quantity.ok(float("nan"))})

    replay = Replay(record(tmp_path / "r.jsonl", [state]), VirtualClock())

    assert replay.latest().value("a_w") is None


def test_states_follow_the_playing_clock(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", ramp())
    clock = VirtualClock(1000.0)
    replay = Replay(path, clock)
    path.unlink()  # playing reads no file

    played = []
    for _ in range(6):
        state = replay.latest()
        played.append((round(state.at_s, 6), state.value("cpu.load_ratio"), replay.ended))
        clock.sleep_s(0.1 + 1e-9)
    assert played == [
        (1000.0, 0, False),
        (1000.1, 1, False),
        (1000.2, 2, False),
        (1000.3, 3, False),
        (1000.4, 4, True),
        (1000.4, 4, True),
    ]

    replay.restart()
    assert replay.latest().value("cpu.load_ratio") == 0
    assert replay.latest() is replay.latest()


def test_speed_shortens_the_time_between_states(tmp_path: Path) -> None:
    clock = VirtualClock()
    replay = Replay(record(tmp_path / "r.jsonl", ramp()), clock, speed=10)

    clock.sleep_s(0.025)

    assert replay.latest().value("cpu.load_ratio") == 2
    assert replay.latest().at_s == pytest.approx(0.02)
    assert replay.duration_s == pytest.approx(0.4)


def test_a_loop_begins_anew_after_the_last_state_had_its_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    replay = Replay(record(tmp_path / "r.jsonl", ramp(3, period_s=0.5)), clock, loop=True)

    played = []
    for _ in range(8):
        state = replay.latest()
        played.append((state.at_s, state.value("cpu.load_ratio")))
        clock.sleep_s(0.5)

    assert played == [(0.5 * step, step % 3) for step in range(8)]
    assert not replay.ended


def test_a_loop_of_one_state_shows_it_for_ever(tmp_path: Path) -> None:
    clock = VirtualClock()
    replay = Replay(record(tmp_path / "r.jsonl", ramp(1)), clock, loop=True)

    clock.sleep_s(1e6)

    assert replay.latest().value("cpu.load_ratio") == 0
    assert replay.duration_s == 0


HEADER = b'{"edgewise_recording":1}\n'
FIRST = b'{"at_s":1.0,"full":{"a_w":1.0}}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "is not a recording", id="empty"),
        pytest.param(b"\x93NUMPY\x01\0", "is not a recording", id="binary"),
        pytest.param(b'{"model": 1}\n', "is not a recording", id="other JSON"),
        pytest.param(b"[1, 2]\n", "is not a recording", id="a list"),
        pytest.param(b"x" * 100_000, "is not a recording", id="one long line"),
        pytest.param(b'{"edgewise_recording":7}\n', "version 7; this program reads 1", id="newer"),
        pytest.param(HEADER, "without a state", id="header only"),
        pytest.param(HEADER + FIRST[:-5], "without a state", id="cut in the first state"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)

    with pytest.raises(DataError, match=said) as refused:
        Replay(path, VirtualClock())

    assert refused.value.help


@pytest.mark.parametrize(
    "line",
    [
        b"\0\0\0\n",
        b"{}\n",
        b"[]\n",
        b'{"at_s":0.5,"changed":{}}\n',
        b'{"at_s":NaN,"changed":{}}\n',
        b'{"at_s":2.0,"changed":{"a_w":true}}\n',
        b'{"at_s":2.0,"changed":{"a_w":[1.0,"fine",""]}}\n',
        b'{"at_s":2.0,"changed":{"a_w":[1.0,"stale"]}}\n',
        b'{"at_s":2.0,"changed":[1]}\n',
        b'{"at_s":2.0,"changed":{},"gone":["b_w"]}\n',
    ],
)
def test_damage_is_located_and_at_the_end_it_only_shortens(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(HEADER + FIRST + line + FIRST)
    with pytest.raises(DataError, match="is damaged at line 3 of 4") as refused:
        Replay(path, VirtualClock())
    assert refused.value.help == f"to play what comes before: head -n 2 {path} > part.jsonl"

    path.write_bytes(HEADER + FIRST + line)
    replay = Replay(path, VirtualClock())

    assert [each.at_s for each in replay.states] == [1.0]
    assert "cut off in line 3" in replay.problem


def test_a_recording_that_does_not_begin_with_everything_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(HEADER + b'{"at_s":1.0,"changed":{}}\n' + FIRST)

    with pytest.raises(DataError, match="damaged at line 2"):
        Replay(path, VirtualClock())


def test_an_absent_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        Replay(tmp_path / "none.jsonl", VirtualClock())
    with pytest.raises(DataError, match="Is a directory"):
        Replay(tmp_path, VirtualClock())
    with pytest.raises(ConfigError, match=r"cannot record .*: No such file"):
        Recorder(tmp_path / "none" / "r.jsonl")
    with pytest.raises(ConfigError, match=r"cannot record .*: Is a directory"):
        Recorder(tmp_path)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(tmp_path: Path, speed: float) -> None:
    with pytest.raises(ConfigError, match="speed above zero"):
        Replay(record(tmp_path / "r.jsonl", ramp()), VirtualClock(), speed=speed)


def test_only_a_recording_is_replaced(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", ramp(5))
    record(path, ramp(2))
    assert len(Replay(path, VirtualClock()).states) == 2

    path.write_text("my thesis")
    with pytest.raises(ConfigError, match="exists and is not a recording"):
        Recorder(path)
    assert path.read_text() == "my thesis"


class Counting(Sensor):
    name = "counting"
    count = 0

    def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: ARG002 - needs no instant
        self.count += 1
        return {"energy.fake_j": Quantity.ok(self.count)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_monitor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    recorder = Recorder(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        monitor = Monitor([Counting()], clock=clock, period_s=0.1, on_state=[recorder])
        for _ in range(50):
            monitor.step()
            clock.sleep_s(0.1)
        recorder.close()

    assert recorder.problem == "No space left on device: /dev/full"
    assert caplog.messages == [f"the recording stops: {recorder.problem}"]
    assert monitor.latest().value("energy.fake_j") == 50


def test_a_monitor_and_the_replay_of_its_recording_say_the_same(tmp_path: Path) -> None:
    clock = VirtualClock(5.0)
    recorder = Recorder(tmp_path / "r.jsonl")
    seen: list[DeviceState] = []
    monitor = Monitor([Counting()], clock=clock, period_s=0.25, on_state=[recorder, seen.append])
    for _ in range(20):
        monitor.step()
        clock.sleep_s(0.25)
    recorder.close()
    clock = VirtualClock(5.0)
    replay = Replay(recorder.path, clock)

    for state in seen:
        assert replay.latest() == state
        clock.sleep_s(0.25)

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device.files import NumberReading, read_number, read_text
from edgewise.device.kept_file import KeptFile

Plant = Callable[[Mapping[str, str]], Path]

CONTENTS = {
    "a number": b"1907200\n",
    "zero": b"0\n",
    "blanks": b"  7 \n\n",
    "a trailing NUL": b"gv11b\0",
    "a number and NUL": b"12\0\n",
    "empty": b"",
    "only blanks": b" \n",
    "only NUL": b"\0",
    "a word": b"<unknown>\n",
    "negative": b"-1\n",
    "largest number": b"18446744073709551615\n",
    "largest signed number": b"9223372036854771712\n",
    "a fraction": b"1.5\n",
    "not text": b"\xff\xfe\x80",
}


class Opener:
    """Opens like the kernel, counts, and can be told to refuse or to hand out something broken."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: OSError | None = None
        self.broken = 0

    def __call__(self, path: str, flags: int) -> int:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.broken:
            self.broken -= 1
            return os.open("/", os.O_RDONLY)  # reading a directory fails, as a gone device does
        return os.open(path, flags)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_it_says_what_reading_the_file_once_says(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "value"
    path.write_bytes(content)

    with KeptFile(path) as file:
        assert file.text(0.0) == read_text(path)
        assert file.number(0.0) == read_number(path)


def test_what_is_absent_or_no_file_says_what_reading_it_once_says(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, tmp_path / "absent/below"):
        assert KeptFile(path).text(0.0) == read_text(path)


def test_a_value_that_changes_is_read_through_one_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("1\n", encoding="ascii")
    opener = Opener()

    with KeptFile(path, open_=opener) as file:
        for number in range(200):
            path.write_text(f"{number}\n", encoding="ascii")
            assert file.number(0.01 * number).value == number

    assert opener.calls == 1


def test_an_absent_path_is_probed_once_per_retry_and_noticed_when_it_appears(
    tmp_path: Path,
) -> None:
    path, opener = tmp_path / "late", Opener()
    with KeptFile(path, retry_s=1.0, open_=opener) as file:
        for step in range(250):
            assert file.text(0.01 * step).quality == "unsupported"
        assert opener.calls == 3

        path.write_text("5\n", encoding="ascii")

        assert file.number(2.9).value is None
        assert file.number(3.0) == NumberReading(value=5, quality="ok")


def test_a_clock_that_is_set_back_does_not_stop_the_probing(tmp_path: Path) -> None:
    path = tmp_path / "late"
    with KeptFile(path) as file:
        file.text(1e6)
        path.write_text("5\n", encoding="ascii")

        assert file.number(3.0).value == 5


def test_a_permission_that_is_given_later_is_noticed(tmp_path: Path) -> None:
    path, opener = tmp_path / "value", Opener()
    path.write_text("5\n", encoding="ascii")
    with KeptFile(path, open_=opener) as file:
        opener.error = PermissionError(13, "Permission denied")
        assert file.number(0.0).quality == "denied"
        assert "no permission" in file.number(0.5).reason
        opener.error = None

        assert file.number(0.9).quality == "denied"
        assert file.number(1.0).value == 5


def test_a_permission_that_flips_on_disk_is_noticed(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant({"value": "5\n"})
    path = root / "value"
    path.chmod(0o000)
    if os.geteuid() == 0:
        os.chown(root, 65534, 65534)
        os.chown(path, 65534, 65534)
    as_somebody()
    with KeptFile(path) as file:
        denied = file.number(0.0)
        path.chmod(0o444)

        assert denied.quality == "denied"
        assert file.number(1.0).value == 5


def test_a_descriptor_that_breaks_is_replaced_within_the_same_read(tmp_path: Path) -> None:
    path, opener = tmp_path / "value", Opener()
    path.write_text("5\n", encoding="ascii")
    opener.broken = 1
    with KeptFile(path, open_=opener) as file:
        assert "EISDIR" in file.number(0.0).reason

        assert file.number(1.0).value == 5
    assert opener.calls == 2


def test_a_file_that_keeps_failing_is_opened_again_once_per_retry(tmp_path: Path) -> None:
    path, opener = tmp_path / "value", Opener()
    path.write_text("5\n", encoding="ascii")
    opener.broken = 10_000
    with KeptFile(path, retry_s=1.0, open_=opener) as file:
        for step in range(250):
            assert file.text(0.01 * step).quality == "unsupported"

    assert opener.calls == 3


def test_a_file_of_a_process_that_ended_says_so() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        file = KeptFile(Path(f"/proc/{process.pid}/stat"))
        before = file.text(0.0)
        process.communicate(b"\n")

    after = file.text(0.01)
    file.close()

    assert before.quality == "ok"
    assert after.quality == "unsupported"
    assert "cannot be read" in after.reason


def test_a_file_that_is_replaced_or_removed_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("1\n", encoding="ascii")
    with KeptFile(path) as file:
        assert file.number(0.0).value == 1
        (tmp_path / "new").write_text("2\n", encoding="ascii")
        (tmp_path / "new").replace(path)

        assert file.number(1.0).value == 2

        path.unlink()

        assert file.number(2.0).quality == "unsupported"


def test_a_pipe_where_a_file_should_be_does_not_stop_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with KeptFile(tmp_path / "pipe") as file:
        assert file.text(0.0).quality == "unsupported"


def test_only_as_much_is_read_as_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_text("x" * 10_000, encoding="ascii")

    with KeptFile(path, max_bytes=100) as file:
        assert file.text(0.0).value == "x" * 100


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    path, opener = tmp_path / "value", Opener()
    path.write_text("1\n", encoding="ascii")
    before = open_descriptors()

    for step in range(50):
        file = KeptFile(path, open_=opener)
        opener.broken = step % 3
        for now_s in range(4):
            file.number(float(now_s))
        file.close()
        file.number(10.0)  # reading opens it again
        del file  # and forgetting it closes it

    assert open_descriptors() == before

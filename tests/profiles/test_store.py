from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.errors import ProfileError
from edgewise.profiles import (
    Method,
    Profile,
    ProfileStore,
    ThreadPolicy,
    UnitKey,
    default_store_path,
)

STAGE = UnitKey(name="stage:0", kind="stage", backend="null")
HEAD = UnitKey(name="head:0", kind="head", backend="null")
METHOD = Method(
    warmup_rounds=1, clock="virtual", synchronised=True, interleaved=True, stop_rule="3 rounds"
)
IDENTITY: dict[str, Any] = {
    "model_id": "net",
    "model_version": "aa11",
    "device_id": "board-1",
    "device": {"cpu": "A76"},
    "thread_policy": ThreadPolicy(threads=1),
    "method": METHOD,
}
SITUATION: dict[str, Any] = {
    "model_version": "aa11",
    "device_id": "board-1",
    "thread_policy": ThreadPolicy(threads=1),
}


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "home" / "profiles.sqlite3", unix_now_s=lambda: 1e9)


def measured(store: ProfileStore, scale: float = 1.0, **changes: Any) -> Profile:
    with store.begin(**{**IDENTITY, **changes}) as campaign:
        for i in range(3):
            campaign.add(STAGE, i, scale * 0.001 * (i + 1))
            if i != 1:
                campaign.add(HEAD, i, scale * 0.0001 * (i + 1))
        return campaign.finish()


@contextlib.contextmanager
def raw(store: ProfileStore) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(store.path, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def test_a_finished_campaign_is_loaded_as_measured(store: ProfileStore) -> None:
    finished = measured(store)

    loaded = store.load("net", **SITUATION)

    assert loaded.digest() == finished.digest()
    assert loaded.created_unix_s == 1e9
    assert loaded.method == METHOD
    assert loaded.cost("stage:0", "null").samples_s.tolist() == [0.001, 0.002, 0.003]
    np.testing.assert_array_equal(
        loaded.matrix(["head:0"], "null")[:, 0], [0.0001, math.nan, 0.0001 * 3]
    )


def test_an_unfinished_campaign_is_resumed_with_its_counts(store: ProfileStore) -> None:
    with store.begin(**IDENTITY, state={"load_ratio": 0.1}) as campaign:
        assert not campaign.resumed
        assert campaign.counts() == {}
        assert campaign.next_round() == 0
        campaign.add(STAGE, 0, 0.5)
        campaign.add(HEAD, 0, 0.25)
        campaign.add(STAGE, 1, 0.75)
        first_id = campaign.campaign_id

    with store.begin(**IDENTITY, state={"load_ratio": 0.7}) as campaign:
        assert campaign.resumed
        assert campaign.campaign_id == first_id
        assert campaign.counts() == {STAGE: 2, HEAD: 1}
        assert campaign.next_round() == 2
        assert campaign.samples_s(STAGE).tolist() == [0.5, 0.75]
        assert campaign.samples_s(UnitKey(name="full", kind="full", backend="null")).size == 0
        campaign.add(STAGE, 2, 1.0)
        profile = campaign.finish()

    assert profile.cost("stage:0", "null").samples_s.tolist() == [0.5, 0.75, 1.0]
    assert profile.state == {
        "load_ratio": 0.1,
        "resumed": [{"unix_s": 1e9, "load_ratio": 0.7}],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "other"},
        {"model_version": "bb22"},
        {"device_id": "board-2"},
        {"thread_policy": ThreadPolicy(threads=2)},
        {"method": dataclasses.replace(METHOD, warmup_rounds=9)},
        {"provenance": "simulated"},
    ],
    ids=["model", "version", "device", "threads", "method", "provenance"],
)
def test_another_identity_begins_anew(store: ProfileStore, change: dict[str, Any]) -> None:
    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)

    with store.begin(**{**IDENTITY, **change}) as campaign:
        assert not campaign.resumed
        assert campaign.counts() == {}


def test_a_finished_campaign_is_not_resumed_and_takes_no_sample(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)
        campaign.finish()
        with pytest.raises(ProfileError, match="takes no more samples"):
            campaign.add(STAGE, 1, 0.5)
        with pytest.raises(ProfileError, match="takes no more samples"):
            campaign.finish()

    with store.begin(**IDENTITY) as campaign:
        assert not campaign.resumed


def test_the_newest_profile_is_loaded(store: ProfileStore) -> None:
    measured(store)
    measured(store, scale=2.0)

    assert store.load("net", **SITUATION).cost("stage:0", "null").median_s == 0.004


def test_a_campaign_without_a_sample_cannot_be_finished(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign, pytest.raises(ProfileError, match="no sample"):
        campaign.finish()

    assert not store.list()[0].finished


@pytest.mark.parametrize("latency_s", [math.nan, math.inf, -1e-9])
def test_an_impossible_latency_is_refused_when_it_is_added(
    store: ProfileStore, latency_s: float
) -> None:
    with store.begin(**IDENTITY) as campaign:
        with pytest.raises(ProfileError, match="a latency must be a finite number"):
            campaign.add(STAGE, 0, latency_s)

        assert campaign.counts() == {}


def test_a_negative_round_is_refused(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign, pytest.raises(ProfileError, match="from zero"):
        campaign.add(STAGE, -1, 0.1)


def test_one_unit_has_one_sample_in_a_round(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as one, store.begin(**IDENTITY) as other:
        one.add(STAGE, 0, 0.5)
        with pytest.raises(ProfileError, match="has one already; the 1 samples"):
            other.add(STAGE, 0, 0.7)

        assert other.samples_s(STAGE).tolist() == [0.5]


def test_one_name_has_one_kind_in_a_campaign(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)
        with pytest.raises(ProfileError, match="is a stage in this campaign"):
            campaign.add(UnitKey(name="stage:0", kind="segment", backend="null"), 1, 0.5)


def test_a_closed_campaign_takes_no_sample(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)

    with pytest.raises(ProfileError, match="closed database; the samples stored before are kept"):
        campaign.add(STAGE, 1, 0.5)


# Refusals of load


def test_no_store_is_said_and_none_is_made(store: ProfileStore) -> None:
    with pytest.raises(ProfileError, match="does not exist or is empty") as caught:
        store.load("net", **SITUATION)

    assert caught.value.help == "edgewise profile net"
    assert store.list() == ()
    assert not store.path.parent.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device_id": "board-2"}, "another device (profile: 'board-1', here: 'board-2')"),
        (
            {"thread_policy": ThreadPolicy(threads=2)},
            "another thread policy (profile: '1 thread, no spin', here: '2 threads, no spin')",
        ),
        ({"model_version": "bb22"}, "another model version (profile: 'aa11', here: 'bb22')"),
    ],
    ids=["device", "threads", "model"],
)
def test_a_profile_of_another_situation_is_refused_with_the_reason(
    store: ProfileStore, change: dict[str, Any], says: str
) -> None:
    measured(store)

    with pytest.raises(ProfileError) as caught:
        store.load("net", **{**SITUATION, **change})

    assert says in caught.value.message
    assert caught.value.help == "edgewise profile net"


def test_the_nearest_of_several_unusable_profiles_is_named(store: ProfileStore) -> None:
    measured(store, model_version="bb22")
    measured(
        store, device_id="board-9", model_version="cc33", thread_policy=ThreadPolicy(threads=8)
    )

    with pytest.raises(ProfileError) as caught:
        store.load("net", **SITUATION)

    assert "another model version (profile: 'bb22'" in caught.value.message
    assert "device" not in caught.value.message


def test_an_exact_profile_is_found_among_others(store: ProfileStore) -> None:
    measured(store)
    measured(store, device_id="board-2", scale=9.0)

    assert store.load("net", **SITUATION).device_id == "board-1"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        ({"model_id": "other"}, r"no measured profile of model 'net' in .*sqlite3$"),
        ({"provenance": "simulated"}, "there is one that is simulated"),
    ],
    ids=["another model", "another provenance"],
)
def test_a_missing_profile_is_said_with_what_is_there(
    store: ProfileStore, prepare: dict[str, Any], says: str
) -> None:
    measured(store, **prepare)

    with pytest.raises(ProfileError) as caught:
        store.load("net", **SITUATION)

    assert re.search(says, caught.value.message)


def test_an_unfinished_campaign_is_no_profile_but_is_mentioned(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)

    with pytest.raises(ProfileError, match="there is 1 unfinished, which profiling resumes"):
        store.load("net", **SITUATION)


# Listing and exchange


def test_the_list_names_finished_and_unfinished(store: ProfileStore) -> None:
    measured(store)
    with store.begin(**{**IDENTITY, "model_id": "other"}):
        pass

    first, second = store.list()

    assert (first.model_id, first.finished, first.num_units, first.num_samples) == (
        "net", True, 2, 5,
    )  # fmt: skip
    assert first.thread_policy == ThreadPolicy(threads=1)
    assert (second.model_id, second.finished, second.num_samples) == ("other", False, 0)


def test_a_profile_is_read_by_its_number(store: ProfileStore) -> None:
    profile = measured(store)

    assert store.get(store.list()[0].profile_id).digest() == profile.digest()
    with pytest.raises(ProfileError, match="no profile 77"):
        store.get(77)


def test_an_unfinished_profile_is_not_read_by_its_number(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign, pytest.raises(ProfileError, match="is unfinished"):
        store.get(campaign.campaign_id)


def test_a_profile_from_elsewhere_is_added_once(store: ProfileStore, tmp_path: Path) -> None:
    profile = measured(store)
    other = ProfileStore(tmp_path / "other.sqlite3")

    first_id, second_id = other.add_profile(profile), other.add_profile(profile)

    assert first_id == second_id
    assert other.load("net", **SITUATION).digest() == profile.digest()
    assert len(other.list()) == 1


# Damage


def test_a_changed_sample_is_noticed(store: ProfileStore) -> None:
    measured(store)
    with raw(store) as connection:
        connection.execute("UPDATE samples SET latency_s = latency_s * 0.9 WHERE round_index = 1")

    with pytest.raises(ProfileError, match="do not match its digest"):
        store.load("net", **SITUATION)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM samples WHERE round_index = 2",
        "DELETE FROM samples",
        "UPDATE units SET name = 'head:1' WHERE name = 'head:0'",
        "UPDATE units SET kind = 'nonsense'",
        "UPDATE campaigns SET device = '{}'",
        "UPDATE campaigns SET device = 'not json'",
        "UPDATE campaigns SET state = '{'",
        "UPDATE campaigns SET method = '{\"version\": 1}'",
        "UPDATE campaigns SET digest = NULL",
        "UPDATE campaigns SET created_unix_s = 0",
    ],
)
def test_every_other_change_is_noticed(store: ProfileStore, statement: str) -> None:
    measured(store)
    with raw(store) as connection:
        connection.execute(statement)

    with pytest.raises(ProfileError, match=r"damaged|changed"):
        store.load("net", **SITUATION)


def refused_untouched(store: ProfileStore, says: str) -> None:
    """Each way in is refused, with the place and the help, and no byte changes."""
    before = store.path.read_bytes()
    for way_in in (
        lambda: store.load("net", **SITUATION),
        store.list,
        lambda: store.get(1),
        lambda: store.begin(**IDENTITY),
    ):
        with pytest.raises(ProfileError, match=says) as caught:
            way_in()
        assert str(store.path) in caught.value.message
        assert caught.value.help
        assert store.path.read_bytes() == before


@pytest.mark.parametrize("kept_ratio", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_store_is_refused_with_the_reason(
    store: ProfileStore, kept_ratio: float
) -> None:
    measured(store)
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[: int(len(whole) * kept_ratio)])

    refused_untouched(store, "damaged: it is ")


def test_the_help_for_damage_names_the_commands_that_move_it_aside(store: ProfileStore) -> None:
    measured(store)
    store.path.write_bytes(b"not a database")

    with pytest.raises(ProfileError) as caught:
        store.list()
    assert caught.value.help is not None
    command = caught.value.help.removeprefix("move it aside and profile again: ")
    subprocess.run(command, shell=True, check=True)  # noqa: S602 - ours

    measured(store)
    assert store.path.with_name("profiles.sqlite3.damaged").read_bytes() == b"not a database"


def test_overwritten_pages_are_refused(store: ProfileStore) -> None:
    measured(store)
    content = bytearray(store.path.read_bytes())
    content[4096 : 3 * 4096] = b"\xa5" * (2 * 4096)
    store.path.write_bytes(bytes(content))

    refused_untouched(store, "damaged")


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG" * 100, b"{}", b"SQLite format 3\x00", b"SQLite format 3\x00" + b"\xff" * 5000],
    ids=["a picture", "json", "only the magic", "noise after the magic"],
)
def test_a_file_that_is_no_database_is_refused(store: ProfileStore, content: bytes) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(content)

    refused_untouched(store, "damaged")


def test_an_empty_file_is_an_empty_store(store: ProfileStore) -> None:
    store.path.parent.mkdir()
    store.path.touch()

    assert store.list() == ()
    measured(store)
    assert len(store.list()) == 1


def test_a_database_left_by_a_kill_during_creation_is_an_empty_store(store: ProfileStore) -> None:
    store.path.parent.mkdir()
    with raw(store) as connection:
        connection.execute("PRAGMA journal_mode = WAL")

    assert store.path.stat().st_size > 0
    assert store.list() == ()
    with pytest.raises(ProfileError, match="no measured profile"):
        store.load("net", **SITUATION)
    measured(store)
    assert len(store.list()) == 1


def test_a_newer_schema_is_refused(store: ProfileStore) -> None:
    measured(store)
    with raw(store) as connection:
        connection.execute("PRAGMA user_version = 2")

    refused_untouched(store, "schema version 2; this Edgewise reads 1")


def test_the_database_of_another_program_is_refused(store: ProfileStore) -> None:
    store.path.parent.mkdir()
    with raw(store) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")

    refused_untouched(store, "of another program")


def test_a_folder_in_the_place_of_the_store_is_refused(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)

    with pytest.raises(ProfileError, match="is a folder"):
        store.begin(**IDENTITY)
    with pytest.raises(ProfileError, match="is a folder"):
        store.list()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = ProfileStore(tmp_path / "file" / "profiles.sqlite3")

    with pytest.raises(ProfileError, match="cannot make the folder"):
        store.begin(**IDENTITY)
    with pytest.raises(ProfileError, match="Not a directory"):
        store.list()


# Full disk, no permission, other processes


def test_a_full_disk_says_what_is_kept_and_keeps_it(tmp_path: Path) -> None:
    def limit(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 12")

    small = ProfileStore(tmp_path / "p.sqlite3", on_connect=limit)
    added = 0
    with small.begin(**IDENTITY) as campaign:
        with pytest.raises(ProfileError, match="the disk is full") as caught:  # noqa: PT012 - until
            for i in range(10_000):
                campaign.add(STAGE, i, 0.001)
                added += 1
        assert f"the {added} samples stored before are kept" in caught.value.message

    large = ProfileStore(small.path)
    with large.begin(**IDENTITY) as campaign:
        assert campaign.resumed
        assert campaign.counts() == {STAGE: added}
        campaign.add(STAGE, added, 0.001)
        assert campaign.finish().num_rounds == added + 1


def test_a_disk_that_is_full_from_the_start_leaves_no_half_made_store(tmp_path: Path) -> None:
    def limit(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 2")

    with pytest.raises(ProfileError, match="the disk is full"):
        ProfileStore(tmp_path / "p.sqlite3", on_connect=limit).begin(**IDENTITY)

    store = ProfileStore(tmp_path / "p.sqlite3")
    assert store.list() == ()
    measured(store)


def script(body: str, *arguments: str) -> list[str]:
    common = """
    import sys
    from pathlib import Path
    from edgewise.errors import ProfileError
    from edgewise.profiles import Method, ProfileStore, ThreadPolicy, UnitKey
    unit = UnitKey(name="stage:0", kind="stage", backend="null")
    head = UnitKey(name="head:0", kind="head", backend="null")
    store = ProfileStore(Path(sys.argv[1]))
    def begin(model_id="net"):
        return store.begin(
            model_id=model_id, model_version="aa11", device_id="board-1", device={"cpu": "A76"},
            thread_policy=ThreadPolicy(threads=1),
            method=Method(warmup_rounds=1, clock="virtual", synchronised=True, interleaved=True,
                          stop_rule="3 rounds"))
    """
    return [sys.executable, "-c", textwrap.dedent(common) + textwrap.dedent(body), *arguments]


def environment() -> dict[str, str]:
    assert edgewise.__file__ is not None
    return {**os.environ, "PYTHONPATH": str(Path(edgewise.__file__).parents[1])}


ADD_FOREVER = """
try:
    with begin() as campaign:
        i = campaign.next_round()
        while True:
            for each in (unit, head):
                campaign.add(each, i, 0.001)
                print(each.name, i, flush=True)
            i += 1
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name
)
def test_a_campaign_ended_by_a_signal_loses_at_most_the_sample_in_flight(
    store: ProfileStore, how: signal.Signals
) -> None:
    acknowledged = 0
    for start in range(2):  # the second run resumes the first, and is ended as well
        with subprocess.Popen(
            script(ADD_FOREVER, str(store.path)),
            env=environment(), stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for _ in range(40 + start):
                assert process.stdout.readline()
                acknowledged += 1
            process.send_signal(how)
            acknowledged += process.stdout.read().count("\n")
        assert process.returncode in (-how, 130)

        with store.begin(**IDENTITY) as campaign:
            assert campaign.resumed
            kept = sum(campaign.counts().values())
        # Between the commit and the acknowledgement there may be one; the other way round, none.
        assert acknowledged <= kept <= acknowledged + 1
        acknowledged = kept

    with store.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, campaign.next_round(), 0.002)
        campaign.finish()
    profile = store.load("net", **SITUATION)
    assert sum(cost.count for cost in profile.units.values()) == acknowledged + 1


def test_a_store_truncated_beside_its_log_is_refused(store: ProfileStore) -> None:
    with store.begin(**IDENTITY) as campaign:
        for i in range(3000):
            campaign.add(STAGE, i, 0.001)
        copy = ProfileStore(store.path.with_name("copy.sqlite3"))
        size_bytes = store.path.stat().st_size
        assert size_bytes > 3 * 4096
        copy.path.write_bytes(store.path.read_bytes()[: 2 * 4096])
        log = store.path.with_name("profiles.sqlite3-wal").read_bytes()
        # The header of the log alone: it exists, and heals nothing.
        copy.path.with_name("copy.sqlite3-wal").write_bytes(log[:32])

    with pytest.raises(ProfileError, match="damaged"):
        copy.load("net", **SITUATION)


WRITE_ONE_MODEL = """
with begin(sys.argv[2]) as campaign:
    for i in range(150):
        campaign.add(unit, i, 0.001)
    campaign.finish()
"""


def test_two_processes_write_one_new_store_at_once(store: ProfileStore) -> None:
    processes = [
        subprocess.Popen(
            script(WRITE_ONE_MODEL, str(store.path), name),
            env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for name in ("one", "two", "three")
    ]  # fmt: skip
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr

    assert {(line.model_id, line.num_samples, line.finished) for line in store.list()} == {
        ("one", 150, True), ("two", 150, True), ("three", 150, True),
    }  # fmt: skip


def test_a_store_that_stays_locked_is_an_error_and_keeps_what_it_has(store: ProfileStore) -> None:
    impatient = ProfileStore(store.path, busy_timeout_s=0.01)
    with impatient.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)
        with raw(store) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(ProfileError, match=r"another process .*the 1 samples"):
                campaign.add(STAGE, 1, 0.5)
        campaign.add(STAGE, 1, 0.5)

        assert campaign.counts() == {STAGE: 2}


def test_a_reader_does_not_wait_for_a_writer(store: ProfileStore) -> None:
    measured(store)
    impatient = ProfileStore(store.path, busy_timeout_s=0.0)
    with raw(store) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM samples")

        assert impatient.load("net", **SITUATION).num_rounds == 3


LIMITED_FILE = """
import resource
with begin() as campaign:
    campaign.add(unit, 0, 0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for i in range(1, 20_000):
            campaign.add(unit, i, 0.001)
    except ProfileError as error:
        print(i)
        print(error.message)
"""


def test_a_write_that_the_system_refuses_keeps_what_was_stored(store: ProfileStore) -> None:
    done = subprocess.run(
        script(LIMITED_FILE, str(store.path)),
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    count, message = done.stdout.splitlines()

    assert "has no room left" in message
    assert f"the {count} samples stored before are kept" in message
    with store.begin(**IDENTITY) as campaign:
        assert campaign.counts() == {STAGE: int(count)}


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere, so a superuser becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder whose parents everyone may enter, as pytest's are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_an_error_with_the_way_out(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with without_privileges():
        for path in (open_folder / "p.sqlite3", open_folder / "new" / "p.sqlite3"):
            with pytest.raises(ProfileError) as caught:
                ProfileStore(path).begin(**IDENTITY)

            assert caught.value.help is not None
            assert "EDGEWISE_HOME" in caught.value.help


def test_a_store_in_a_read_only_folder_can_be_read_and_not_written(open_folder: Path) -> None:
    store = ProfileStore(open_folder / "p.sqlite3")
    measured(store)
    store.path.chmod(0o444)
    open_folder.chmod(0o555)
    with without_privileges():
        assert store.load("net", **SITUATION).num_rounds == 3
        with pytest.raises(ProfileError, match="may not be read or written"):
            store.begin(**IDENTITY)


def test_an_unreadable_store_is_an_error(open_folder: Path) -> None:
    store = ProfileStore(open_folder / "p.sqlite3")
    measured(store)
    store.path.chmod(0)
    with without_privileges(), pytest.raises(ProfileError, match="Permission denied"):
        store.list()


def test_an_interrupted_statement_leaves_nothing_half_done(store: ProfileStore) -> None:
    interrupt = False

    def interrupting(connection: sqlite3.Connection) -> None:
        def authorise(action: int, *_: object) -> int:
            if interrupt and action == sqlite3.SQLITE_UPDATE:
                connection.interrupt()
                return sqlite3.SQLITE_DENY
            return sqlite3.SQLITE_OK

        connection.set_authorizer(authorise)

    fragile = ProfileStore(store.path, on_connect=interrupting)
    with fragile.begin(**IDENTITY) as campaign:
        campaign.add(STAGE, 0, 0.5)
        interrupt = True
        with pytest.raises(ProfileError, match="cannot finish the campaign"):
            campaign.finish()

    assert not store.list()[0].finished
    with store.begin(**IDENTITY) as campaign:
        assert campaign.resumed
        campaign.finish()


# Where


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"EDGEWISE_HOME": "/srv/e", "XDG_DATA_HOME": "/data"}, "/srv/e"),
        ({"XDG_DATA_HOME": "/data"}, "/data/edgewise"),
        ({"XDG_DATA_HOME": "relative"}, "/home/me/.local/share/edgewise"),
        ({"EDGEWISE_HOME": "", "XDG_DATA_HOME": ""}, "/home/me/.local/share/edgewise"),
        ({}, "/home/me/.local/share/edgewise"),
    ],
    ids=["own variable", "XDG", "relative XDG is ignored", "empty is unset", "nothing set"],
)
def test_the_default_place_follows_the_environment(environ: dict[str, str], folder: str) -> None:
    path = default_store_path(environ=environ, home=Path("/home/me"))

    assert path == Path(folder) / "profiles.sqlite3"


def test_a_path_with_signs_that_mean_something_in_a_uri_is_a_path(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "a b?mode=memory#%41" / "p.sqlite3")
    measured(store)

    assert store.path.stat().st_size > 0
    assert len(store.list()) == 1


def test_campaigns_hold_json_only(store: ProfileStore) -> None:
    with pytest.raises(ProfileError, match="JSON values only"):
        store.begin(**IDENTITY, state={"load": math.nan})

    assert not store.path.exists()

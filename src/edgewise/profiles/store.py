"""Where profiles are kept: campaigns that still take samples, and finished profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.campaign import Campaign, read_finished
from edgewise.profiles.database import Database, damaged, transaction, translated
from edgewise.profiles.exchange import thread_policy_from_json
from edgewise.profiles.records import (
    Method,
    Profile,
    Provenance,
    ThreadPolicy,
    canonical_json,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping


def default_store_path(
    *, environ: Mapping[str, str] = os.environ, home: Path | None = None
) -> Path:
    """Where profiles are kept unless the user says otherwise.

    ``$EDGEWISE_HOME``, else ``$XDG_DATA_HOME/edgewise``, else ``~/.local/share/edgewise``; in it
    the file ``profiles.sqlite3``. Nothing is created.

    Args:
        environ: Environment variables; an empty one counts as unset.
        home: The user's home folder; asked from the system by default.

    Raises:
        ConfigError: No variable is set and the user has no home folder.

    Source:
        XDG Base Directory Specification 0.8, which also says to ignore a relative path.
    """
    if own := environ.get("EDGEWISE_HOME"):
        folder = Path(own).expanduser()
    elif (shared := environ.get("XDG_DATA_HOME")) and Path(shared).is_absolute():
        folder = Path(shared) / "edgewise"
    else:
        try:
            folder = (home or Path.home()) / ".local" / "share" / "edgewise"
        except RuntimeError as error:
            raise ConfigError(
                "this user has no home folder to keep profiles in",
                help="export EDGEWISE_HOME=/a/folder/you/may/write/to",
            ) from error
    return folder / "profiles.sqlite3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """One line of :meth:`ProfileStore.list`.

    Attributes:
        profile_id: Number within the store.
        model_id: The model's name.
        model_version: Hash of its weights and structure.
        device_id: Fingerprint of the device.
        thread_policy: Threads the backends had.
        provenance: Measured, simulated or estimated.
        created_unix_s: When the campaign began, seconds since 1970.
        finished: No more samples will come.
        num_units: Units with at least one sample.
        num_samples: Samples of all units.
    """

    profile_id: int
    model_id: str
    model_version: str
    device_id: str
    thread_policy: ThreadPolicy
    provenance: Provenance
    created_unix_s: float
    finished: bool
    num_units: int
    num_samples: int


class ProfileStore:
    """Profiles and unfinished campaigns in one file.

    Making the object touches nothing; the file and its folder appear with the first
    :meth:`begin` or :meth:`add_profile`.

    Args:
        path: The file.
        busy_timeout_s: How long to wait while another process writes.
        clock: Times the retries of the waiting.
        unix_now_s: Wall clock for the dates of profiles.
        on_connect: Called with every new connection, before its first use: for limits and
            tracing.
    """

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout_s: float = 10.0,
        clock: Clock | None = None,
        unix_now_s: Callable[[], float] = time.time,
        on_connect: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self._unix_now_s = unix_now_s
        self._database = Database(
            self.path,
            busy_timeout_s=busy_timeout_s,
            clock=MonotonicClock() if clock is None else clock,
            on_connect=on_connect,
        )

    def begin(  # noqa: PLR0913 - an identity has this many parts
        self,
        *,
        model_id: str,
        model_version: str,
        device_id: str,
        device: Mapping[str, object],
        thread_policy: ThreadPolicy,
        method: Method,
        provenance: Provenance = "measured",
        state: Mapping[str, object] | None = None,
        energy_note: str = "no energy meter was read",
    ) -> Campaign:
        """Start a campaign, or go on with an unfinished one of the same identity.

        The identity is model, model version, device, thread policy, method and provenance.

        Args:
            model_id: The model's name.
            model_version: Hash of its weights and structure.
            device_id: Fingerprint of the device.
            device: What the fingerprint stands for, JSON.
            thread_policy: Threads the backends have.
            method: How samples are taken.
            provenance: Whether a clock, a simulator or a formula gives the samples.
            state: Load of others, frequencies and the like, JSON. A resumed campaign keeps its
                first state and lists the later ones, with their times, under ``"resumed"``.
            energy_note: Why there is no energy.

        Returns:
            An open campaign; close it, or use it in a ``with`` statement.

        Raises:
            ProfileError: The store cannot be written, or is damaged, newer or not a store.
        """
        identity = {
            "model_id": model_id,
            "model_version": model_version,
            "device_id": device_id,
            "thread_policy": canonical_json(dataclasses.asdict(thread_policy)),
            "method": canonical_json(dataclasses.asdict(method)),
            "provenance": provenance,
        }
        new_state = dict(state or {})
        device_text, state_text = canonical_json(device), canonical_json(new_state)
        where = " AND ".join(f"{column} = :{column}" for column in identity)
        connection = self._database.open_writing()
        try:
            with translated(self.path, "start a campaign"), transaction(connection):
                row = connection.execute(
                    f"SELECT campaign_id, state FROM campaigns WHERE {where}"  # noqa: S608 - column names
                    " AND finished_unix_s IS NULL ORDER BY campaign_id DESC LIMIT 1",
                    identity,
                ).fetchone()
                if row is None:
                    campaign_id = connection.execute(
                        "INSERT INTO campaigns (model_id, model_version, device_id, device,"
                        " thread_policy, method, provenance, energy_note, state, created_unix_s)"
                        " VALUES (:model_id, :model_version, :device_id, :device,"
                        " :thread_policy, :method, :provenance, :energy_note, :state, :created)",
                        {
                            **identity,
                            "device": device_text,
                            "energy_note": energy_note,
                            "state": state_text,
                            "created": self._unix_now_s(),
                        },
                    ).lastrowid
                else:
                    campaign_id = row[0]
                    try:
                        first = dict(json.loads(row[1]))
                        earlier = list(first.pop("resumed", []))
                    except (TypeError, ValueError) as error:
                        raise damaged(self.path, f"state of campaign {row[0]}: {error}") from error
                    later = [*earlier, {"unix_s": self._unix_now_s(), **new_state}]
                    connection.execute(
                        "UPDATE campaigns SET state = ? WHERE campaign_id = ?",
                        (canonical_json({**first, "resumed": later}), campaign_id),
                    )
            return Campaign(
                connection,
                path=self.path,
                campaign_id=cast("int", campaign_id),
                resumed=row is not None,
                energy_note=energy_note,
                unix_now_s=self._unix_now_s,
            )
        except BaseException:
            connection.close()
            raise

    def load(  # noqa: PLR0913 - an identity has this many parts
        self,
        model_id: str,
        *,
        model_version: str,
        device_id: str,
        thread_policy: ThreadPolicy,
        device: Mapping[str, object] | None = None,
        provenance: Provenance = "measured",
    ) -> Profile:
        """Read the finished profile that was begun or added last for exactly this situation.

        Args:
            model_id: The model's name.
            model_version: Hash of its weights and structure.
            device_id: Fingerprint of this device.
            thread_policy: Threads the backends will have.
            device: What the fingerprint stands for; used to name what differs.
            provenance: Only profiles of this provenance are considered.

        Raises:
            ProfileError: There is none. The message says whether profiles of the model exist
                and what separates the nearest one from this situation; or that the file is
                damaged, newer or not a store.
        """
        help_text = f"edgewise profile {model_id}"
        if not self._database.has_content():
            raise ProfileError(
                f"there is no profile of model {model_id!r}: "
                f"{self.path} does not exist or is empty",
                help=help_text,
            )
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT campaign_id, model_version, device_id, thread_policy, finished_unix_s,"
                " provenance FROM campaigns WHERE model_id = ? ORDER BY campaign_id DESC",
                (model_id,),
            ).fetchall()
            wanted = (model_version, device_id, canonical_json(dataclasses.asdict(thread_policy)))
            finished = [row for row in rows if row[4] is not None and row[5] == provenance]
            if finished:
                nearest = max(
                    finished,
                    key=lambda row: (
                        row[2] == wanted[1],
                        sum(a == b for a, b in zip(row[1:4], wanted, strict=True)),
                        row[0],
                    ),
                )
                profile = read_finished(connection, nearest[0], self.path)
                profile.check_usable(
                    model_version=model_version,
                    device_id=device_id,
                    thread_policy=thread_policy,
                    device=device,
                )
                return profile
        raise ProfileError(
            f"there is no {provenance} profile of model {model_id!r} in {self.path}"
            + _what_else(rows, provenance),
            help=help_text,
        )

    def get(self, profile_id: int) -> Profile:
        """Read a finished profile by its number in :meth:`list`.

        Raises:
            ProfileError: There is no such profile, it is unfinished, or the file is damaged.
        """
        if self._database.has_content():
            with self._database.reading() as connection:
                row = connection.execute(
                    "SELECT finished_unix_s FROM campaigns WHERE campaign_id = ?", (profile_id,)
                ).fetchone()
                if row is not None and row[0] is None:
                    raise ProfileError(
                        f"profile {profile_id} in {self.path} is unfinished",
                        help="run `edgewise profile` for its model again: it goes on from there",
                    )
                if row is not None:
                    return read_finished(connection, profile_id, self.path)
        raise ProfileError(f"there is no profile {profile_id} in {self.path}")

    def list(self) -> tuple[ProfileSummary, ...]:
        """Name everything in the store, finished or not, newest last; empty without a file.

        Raises:
            ProfileError: The file is damaged, newer or not a store.
        """
        if not self._database.has_content():
            return ()
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT c.campaign_id, c.model_id, c.model_version, c.device_id, c.thread_policy,"
                " c.provenance, c.created_unix_s, c.finished_unix_s IS NOT NULL,"
                " COUNT(DISTINCT u.unit_id), COUNT(s.latency_s) FROM campaigns c"
                " LEFT JOIN units u USING (campaign_id) LEFT JOIN samples s USING (unit_id)"
                " GROUP BY c.campaign_id ORDER BY c.campaign_id"
            ).fetchall()
            return tuple(
                ProfileSummary(
                    profile_id=row[0],
                    model_id=row[1],
                    model_version=row[2],
                    device_id=row[3],
                    thread_policy=thread_policy_from_json(json.loads(row[4])),
                    provenance=row[5],
                    created_unix_s=row[6],
                    finished=bool(row[7]),
                    num_units=row[8],
                    num_samples=row[9],
                )
                for row in rows
            )

    def add_profile(self, profile: Profile) -> int:
        """Keep a finished profile that came from elsewhere, such as a file or a simulator.

        Returns:
            Its number. A profile that is already here, to the last digit, is not added again.

        Raises:
            ProfileError: The store cannot be written, or is damaged, newer or not a store.
        """
        digest = profile.digest()
        connection = self._database.open_writing()
        with (
            contextlib.closing(connection),
            translated(self.path, "add a profile"),
            transaction(connection),
        ):
            row = connection.execute(
                "SELECT campaign_id FROM campaigns WHERE digest = ?", (digest,)
            ).fetchone()
            if row is not None:
                return cast("int", row[0])
            campaign_id = connection.execute(
                "INSERT INTO campaigns (model_id, model_version, device_id, device,"
                " thread_policy, method, provenance, energy_note, state, created_unix_s,"
                " finished_unix_s, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    profile.model_id,
                    profile.model_version,
                    profile.device_id,
                    canonical_json(profile.device),
                    canonical_json(dataclasses.asdict(profile.thread_policy)),
                    canonical_json(dataclasses.asdict(profile.method)),
                    profile.provenance,
                    next(iter(profile.units.values())).energy_note,
                    canonical_json(profile.state),
                    profile.created_unix_s,
                    self._unix_now_s(),
                    digest,
                ),
            ).lastrowid
            for key, cost in profile.units.items():
                unit_id = connection.execute(
                    "INSERT INTO units (campaign_id, name, kind, backend, batch, energy_j,"
                    " energy_note) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        campaign_id,
                        key.name,
                        key.kind,
                        key.backend,
                        key.batch,
                        cost.energy_j,
                        cost.energy_note,
                    ),
                ).lastrowid
                connection.executemany(
                    "INSERT INTO samples (unit_id, round_index, latency_s) VALUES (?, ?, ?)",
                    (
                        (unit_id, i, latency_s)
                        for i, latency_s in enumerate(cost.samples_s.tolist())
                        if not math.isnan(latency_s)
                    ),
                )
            return cast("int", campaign_id)


def _what_else(rows: list[tuple[object, ...]], provenance: str) -> str:
    found = []
    unfinished = sum(1 for row in rows if row[4] is None and row[5] == provenance)
    if unfinished:
        found.append(f"{unfinished} unfinished, which profiling resumes")
    others = sorted({str(row[5]) for row in rows if row[4] is not None} - {provenance})
    if others:
        found.append("one that is " + " and one that is ".join(others))
    return f"; there is {' and '.join(found)}" if found else ""

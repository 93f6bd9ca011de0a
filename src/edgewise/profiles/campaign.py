"""An unfinished profile that takes samples, one commit each."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from typing import TYPE_CHECKING, Self

import numpy as np

from edgewise.errors import ProfileError
from edgewise.profiles.database import damaged, transaction, translated
from edgewise.profiles.exchange import thread_policy_from_json
from edgewise.profiles.records import Cost, Method, Profile, UnitKey, UnitKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt


class Campaign:
    """An unfinished profile that takes samples; made by :meth:`ProfileStore.begin`.

    For one thread. Leaving the ``with`` block closes it without finishing it, so that an
    interrupted campaign can be resumed.

    Attributes:
        campaign_id: Its number in the store, and that of the profile it becomes.
        resumed: It had been begun before.
    """

    def __init__(  # noqa: PLR0913 - only the store calls it
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        campaign_id: int,
        resumed: bool,
        energy_note: str,
        unix_now_s: Callable[[], float],
    ) -> None:
        self.campaign_id = campaign_id
        self.resumed = resumed
        self._connection = connection
        self._path = path
        self._energy_note = energy_note
        self._unix_now_s = unix_now_s
        self._unit_ids: dict[UnitKey, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def counts(self) -> dict[UnitKey, int]:
        """How many samples each unit has; a unit never sampled is absent."""
        with self._translated("count samples"):
            rows = self._connection.execute(
                "SELECT name, kind, backend, batch, COUNT(*)"
                " FROM units JOIN samples USING (unit_id)"
                " WHERE campaign_id = ? GROUP BY unit_id ORDER BY unit_id",
                (self.campaign_id,),
            ).fetchall()
        return {_unit_key(row): row[4] for row in rows}

    def next_round(self) -> int:
        """The first round without any sample.

        A resumed campaign starts there: the round it was killed in stays incomplete, since
        samples taken later do not belong to it.
        """
        with self._translated("find the next round"):
            row = self._connection.execute(
                "SELECT COALESCE(MAX(round_index) + 1, 0)"
                " FROM units JOIN samples USING (unit_id)"
                " WHERE campaign_id = ?",
                (self.campaign_id,),
            ).fetchone()
        return int(row[0])

    def samples_s(self, unit: UnitKey) -> npt.NDArray[np.float64]:
        """Samples of one unit in the order of rounds, seconds; empty where there is none."""
        with self._translated("read samples"):
            rows = self._connection.execute(
                "SELECT latency_s FROM units JOIN samples USING (unit_id) WHERE campaign_id = ?"
                " AND name = ? AND backend = ? AND batch = ? ORDER BY round_index",
                (self.campaign_id, unit.name, unit.backend, unit.batch),
            ).fetchall()
        return np.array([row[0] for row in rows], dtype=np.float64)

    def add(self, unit: UnitKey, round_index: int, latency_s: float) -> None:
        """Keep one sample; it is committed when this returns.

        Args:
            unit: What was run, and where.
            round_index: From zero; samples of one round are compared with each other.
            latency_s: Wall time of one call, seconds.

        Raises:
            ProfileError: The latency is NaN, infinite or negative; the unit already has a sample
                in this round; the campaign is finished or closed; or the file cannot be written,
                and then the message says what is kept.
        """
        latency_s = float(latency_s)
        if not (math.isfinite(latency_s) and latency_s >= 0):
            raise ProfileError(
                f"a latency must be a finite number of seconds, zero or more; found {latency_s!r} "
                f"for {unit} in round {round_index}",
                help="nothing was stored; see which backend gave it",
            )
        if round_index < 0:
            raise ProfileError(f"rounds count from zero, found {round_index} for {unit}")
        doing = f"store the sample of {unit} in round {round_index}"
        with self._translated(doing):
            unit_id = self._unit_ids.get(unit)
            if unit_id is None:
                unit_id = self._unit_ids[unit] = self._unit_id(unit)
            added = self._connection.execute(
                "INSERT INTO samples (unit_id, round_index, latency_s) SELECT ?, ?, ?"
                " FROM campaigns WHERE campaign_id = ? AND finished_unix_s IS NULL",
                (unit_id, int(round_index), latency_s, self.campaign_id),
            ).rowcount
        if added != 1:
            raise self._finished_error()

    def finish(self) -> Profile:
        """Seal the campaign with a digest over all it says, and read it back.

        Returns:
            The finished profile.

        Raises:
            ProfileError: There is no sample, it is finished already, or the file cannot be
                written, and then the message says what is kept.
        """
        with self._translated("finish the campaign"):
            with transaction(self._connection):
                row = self._connection.execute(
                    "SELECT finished_unix_s FROM campaigns WHERE campaign_id = ?",
                    (self.campaign_id,),
                ).fetchone()
                if row is None or row[0] is not None:
                    raise self._finished_error()
                try:
                    profile = _read(self._connection, self.campaign_id)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise damaged(self._path, f"campaign {self.campaign_id}: {error}") from error
                self._connection.execute(
                    "UPDATE campaigns SET finished_unix_s = ?, digest = ? WHERE campaign_id = ?",
                    (self._unix_now_s(), profile.digest(), self.campaign_id),
                )
            # All of it in the main file and on the disk; a reader in the way is no harm.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return profile

    def close(self) -> None:
        """Let go of the file; what was added is kept. May be called again."""
        self._connection.close()

    def _unit_id(self, unit: UnitKey) -> int:
        self._connection.execute(
            "INSERT INTO units (campaign_id, name, kind, backend, batch, energy_note)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (self.campaign_id, unit.name, unit.kind, unit.backend, unit.batch, self._energy_note),
        )
        unit_id, kind = self._connection.execute(
            "SELECT unit_id, kind FROM units"
            " WHERE campaign_id = ? AND name = ? AND backend = ? AND batch = ?",
            (self.campaign_id, unit.name, unit.backend, unit.batch),
        ).fetchone()
        if kind != unit.kind:
            raise ProfileError(
                f"{unit} is a {kind} in this campaign and cannot become a {unit.kind}"
            )
        return int(unit_id)

    def _finished_error(self) -> ProfileError:
        return ProfileError(
            f"campaign {self.campaign_id} in {self._path} is finished and takes no more samples",
            help="begin a new one",
        )

    def _kept(self) -> str:
        try:
            row = self._connection.execute(
                "SELECT COUNT(*) FROM units JOIN samples USING (unit_id) WHERE campaign_id = ?",
                (self.campaign_id,),
            ).fetchone()
        except sqlite3.Error:
            return "; the samples stored before are kept"
        return f"; the {row[0]} samples stored before are kept"

    def _translated(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return translated(self._path, doing, kept=self._kept)


def _unit_key(row: tuple[str, UnitKind, str, int]) -> UnitKey:
    return UnitKey(name=row[0], kind=row[1], backend=row[2], batch=row[3])


def _read(connection: sqlite3.Connection, campaign_id: int) -> Profile:
    row = connection.execute(
        "SELECT model_id, model_version, device_id, device, thread_policy, method, provenance,"
        " created_unix_s, state FROM campaigns WHERE campaign_id = ?",
        (campaign_id,),
    ).fetchone()
    samples = connection.execute(
        "SELECT unit_id, round_index, latency_s FROM units JOIN samples USING (unit_id)"
        " WHERE campaign_id = ?",
        (campaign_id,),
    ).fetchall()
    if not samples:
        raise ProfileError(
            f"campaign {campaign_id} of model {row[0]!r} has no sample, so it says nothing",
            help=f"edgewise profile {row[0]}",
        )
    table = np.array(samples, dtype=np.float64)  # [N, 3]; doubles hold these integers exactly
    # Rounds become consecutive rows: a round that nobody has a sample of leaves no trace.
    rounds, row_of_sample = np.unique(table[:, 1], return_inverse=True)
    units = {}
    for unit in connection.execute(
        "SELECT name, kind, backend, batch, energy_j, energy_note, unit_id FROM units"
        " WHERE campaign_id = ? ORDER BY unit_id",
        (campaign_id,),
    ).fetchall():
        mine = table[:, 0] == unit[6]
        if not mine.any():
            continue  # killed between naming the unit and its first sample
        samples_s = np.full(rounds.size, np.nan)
        samples_s[row_of_sample[mine]] = table[mine, 2]
        key = _unit_key(unit)
        units[key] = Cost(unit=key, samples_s=samples_s, energy_j=unit[4], energy_note=unit[5])
    return Profile(
        model_id=row[0],
        model_version=row[1],
        device_id=row[2],
        device=json.loads(row[3]),
        thread_policy=thread_policy_from_json(json.loads(row[4])),
        method=Method(**json.loads(row[5])),
        provenance=row[6],
        created_unix_s=row[7],
        state=json.loads(row[8]),
        units=units,
    )


def read_finished(connection: sqlite3.Connection, campaign_id: int, path: Path) -> Profile:
    """Read a finished profile and compare it with its digest.

    Raises:
        ProfileError: It is damaged or was changed.
    """
    digest = connection.execute(
        "SELECT digest FROM campaigns WHERE campaign_id = ?", (campaign_id,)
    ).fetchone()[0]
    try:
        profile = _read(connection, campaign_id)
    except (ProfileError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProfileError(
            f"profile {campaign_id} in {path} is damaged or was changed: {error}",
            help="measure it again with `edgewise profile`",
        ) from error
    if profile.digest() != digest:
        raise ProfileError(
            f"profile {campaign_id} of model {profile.model_id!r} in {path} was changed after it "
            "was measured: its samples do not match its digest",
            help=f"edgewise profile {profile.model_id}",
        )
    return profile

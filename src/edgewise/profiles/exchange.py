"""One profile as one JSON file, to carry from one machine or report to another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from edgewise.errors import ProfileError
from edgewise.profiles.records import Cost, Method, Profile, ThreadPolicy, UnitKey

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = "edgewise-profile"
FORMAT_VERSION = 1


def write_whole(path: Path, data: bytes, *, what: str) -> None:
    """Write a file whole or not at all: beside its place, flushed, then renamed.

    Args:
        path: Where.
        data: Its content.
        what: For the message, such as ``"the profile"``.

    Raises:
        ProfileError: It cannot be written; what was there before stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ProfileError(
            f"cannot write {what} to {path}: {error.strerror or error}",
            help="choose a folder you may write to, with free space",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file, whole or not at all.

    Args:
        profile: What to write.
        path: Where to; a file of that name is replaced at the end, when all is on disk.

    Raises:
        ProfileError: The file cannot be written; what was there before is unharmed.
    """
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": profile.digest(),
        "model_id": profile.model_id,
        "model_version": profile.model_version,
        "device_id": profile.device_id,
        "device": profile.device,
        "thread_policy": dataclasses.asdict(profile.thread_policy),
        "method": dataclasses.asdict(profile.method),
        "provenance": profile.provenance,
        "created_unix_s": profile.created_unix_s,
        "state": profile.state,
        "units": [
            {
                **dataclasses.asdict(key),
                "energy_j": cost.energy_j,
                "energy_note": cost.energy_note,
                "samples_s": [None if math.isnan(s) else s for s in cost.samples_s.tolist()],
            }
            for key, cost in sorted(profile.units.items(), key=lambda item: item[0])
        ],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, text.encode(), what="the profile")


def read_profile(path: Path) -> Profile:
    """Read a profile that :func:`write_profile` wrote, and check its digest.

    Raises:
        ProfileError: The file is missing, truncated, changed, of a newer format, or another
            kind of file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path} is not one whole JSON document, so it is truncated or not a profile: {error}",
            help="export the profile again",
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError(f'{path} is not a profile: it does not say "format": "{FORMAT}"')
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ProfileError(
            f"{path} has profile format {version!r}; this Edgewise reads {FORMAT_VERSION}",
            help="pip install --upgrade edgewise",
        )
    try:
        profile = _profile(document)
        intact = profile.digest() == document["digest"]
    except (KeyError, TypeError, ValueError, AttributeError, ProfileError) as error:
        raise ProfileError(
            f"{path} is damaged: {type(error).__name__}: {error}", help="export the profile again"
        ) from error
    if not intact:
        raise ProfileError(
            f"{path} was changed after it was written: its content does not match its digest",
            help="export the profile again",
        )
    return profile


def thread_policy_from_json(document: Mapping[str, Any]) -> ThreadPolicy:
    """Rebuild a thread policy; ``TypeError`` for fields that do not belong."""
    affinity = document["affinity"]
    return ThreadPolicy(**{**document, "affinity": None if affinity is None else tuple(affinity)})


def _profile(document: dict[str, Any]) -> Profile:
    units = {}
    for unit in document["units"]:
        key = UnitKey(
            name=unit["name"], kind=unit["kind"], backend=unit["backend"], batch=unit["batch"]
        )
        samples_s = [math.nan if s is None else s for s in unit["samples_s"]]
        units[key] = Cost(
            unit=key,
            samples_s=np.array(samples_s, dtype=np.float64),
            energy_j=unit["energy_j"],
            energy_note=unit["energy_note"],
        )
    return Profile(
        model_id=document["model_id"],
        model_version=document["model_version"],
        device_id=document["device_id"],
        device=document["device"],
        thread_policy=thread_policy_from_json(document["thread_policy"]),
        method=Method(**document["method"]),
        provenance=document["provenance"],
        created_unix_s=document["created_unix_s"],
        state=document["state"],
        units=units,
    )

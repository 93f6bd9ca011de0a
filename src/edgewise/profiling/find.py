"""Finds the profile that holds here and now, or says exactly why there is none."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from edgewise.device import DeviceFingerprint, device_fingerprint, usable_cores
from edgewise.errors import ProfileError
from edgewise.profiles import Profile, ProfileStore, Provenance, ThreadPolicy

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel


def find_profile(
    model: StagedModel,
    backend: str,
    *,
    threads: int = 1,
    store: ProfileStore,
    device: DeviceFingerprint | None = None,
) -> Profile:
    """Load the newest profile of a model on a backend that holds in this situation.

    Args:
        model: What will run.
        backend: Full name of where it will run, for example ``"onnxruntime:CPU"``.
        threads: Threads of each call.
        store: Where profiles are kept.
        device: The machine; this one by default.

    Raises:
        ProfileError: There is none: never measured, or measured on another device, thread policy,
            model version or backend. The message says which, ``help`` which command measures it.
    """
    device = device or device_fingerprint()
    identity: dict[str, Any] = {
        "model_version": model.version(),
        "device_id": device.id,
        "thread_policy": thread_policy(threads),
    }
    provenance = provenance_of(backend)
    again = f"edgewise profile {model.name} --backend {backend} --threads {threads}"
    try:
        newest = store.load(
            model.name, **identity, device=device_record(device), provenance=provenance
        )
    except ProfileError as error:
        if error.help is not None and error.help.startswith("edgewise profile"):
            raise ProfileError(error.message, help=again) from error
        raise
    if backend in newest.backends():
        return newest
    for summary in reversed(store.list()):
        if (
            summary.finished
            and summary.model_id == model.name
            and summary.provenance == provenance
            and all(getattr(summary, name) == value for name, value in identity.items())
        ):
            profile = store.get(summary.profile_id)
            if backend in profile.backends():
                return profile
    raise ProfileError(
        f"the profile of model {model.name!r} has no costs on backend {backend!r}; measured here:"
        f" {', '.join(newest.backends())}",
        help=again,
    )


def thread_policy(threads: int) -> ThreadPolicy:
    """How programs with that many threads run in this process.

    Backends are loaded with spinning off. The affinity is named only where this process may not
    use every core that is online.
    """
    affinity = None
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        host = usable_cores().host
        if host is not None and len(allowed) < host:
            affinity = tuple(sorted(allowed))
    return ThreadPolicy(threads=threads, spinning=False, affinity=affinity)


def device_record(device: DeviceFingerprint) -> dict[str, object]:
    """A fingerprint as a profile keeps it: JSON, equal before and after storage."""
    record: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(device)))
    return record


def provenance_of(backend: str) -> Provenance:
    """Costs on the null backend are somebody's numbers, whatever clock they are charged to."""
    return "simulated" if backend.partition(":")[0] == "null" else "measured"

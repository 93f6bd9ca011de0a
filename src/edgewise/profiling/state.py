"""What else happened on the machine while it was measured, and what that means for the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgewise.clock import Clock
from edgewise.device import OtherLoad, other_load, read_clocks
from edgewise.profiles import Profile

_NOISY_CORES = 0.25  # as `edgewise doctor` says
_NOISY_STEAL_RATIO = 0.02
_WINDOW_S = 0.2


def state_before(root: Path, clock: Clock) -> dict[str, object]:
    """Look at the machine for a fifth of a second before anything is measured, as JSON."""
    return {
        "when": "before",
        **_load(other_load(_WINDOW_S, root=root, clock=clock)),
        **_frequencies(root),
    }


def state_after(
    root: Path, during: OtherLoad, *, notes: Sequence[str], **facts: object
) -> dict[str, object]:
    """Say how it went, as JSON.

    Args:
        root: Where the file tree starts.
        during: Load of others while samples were taken.
        notes: Sentences for whoever reads the numbers.
        facts: Anything else worth keeping, JSON.
    """
    return {
        "when": "after",
        **_load(during),
        **_frequencies(root),
        **facts,
        "notes": list(notes),
    }


def noise_notes(before: Mapping[str, object], during: OtherLoad) -> list[str]:
    """Say that the machine was busy with other work, where it was."""
    notes = []
    busy_before = before.get("other_cores")
    if during.other_cores is not None and during.other_cores > _NOISY_CORES:
        notes.append(
            f"the machine was noisy: other programs used {during.other_cores:.1f} cores while it"
            " was measured"
        )
    elif isinstance(busy_before, float) and busy_before > _NOISY_CORES:
        notes.append(
            f"the machine was noisy: other programs used {busy_before:.1f} cores just before"
        )
    if during.steal_ratio is not None and during.steal_ratio > _NOISY_STEAL_RATIO:
        notes.append(
            f"the machine was noisy: its hypervisor gave {during.steal_ratio:.0%} of its time to"
            " others"
        )
    return notes


def campaign_notes(profile: Profile) -> tuple[str, ...]:
    """What the campaign said about its own numbers: noise, and units that did not settle.

    Returns:
        Sentences for people; empty where all went well, or where nothing is known.
    """
    later = profile.state.get("resumed")
    notes: list[str] = []
    for entry in later if isinstance(later, list) else []:
        said = entry.get("notes") if isinstance(entry, dict) else None
        notes += [str(each) for each in said if each not in notes] if said else []
    return tuple(notes)


def _load(load: OtherLoad) -> dict[str, object]:
    return {
        "other_cores": load.other_cores,
        "own_ratio": load.own_ratio,
        "steal_ratio": load.steal_ratio,
        "load_window_s": load.window_s,
        "load_reason": load.reason,
    }


def _frequencies(root: Path) -> dict[str, object]:
    clocks = read_clocks(root)
    known = {str(cpu): each.current_hz for cpu, each in clocks.items() if each.current_hz}
    reasons = sorted({each.reason for each in clocks.values() if each.reason})
    return {
        "frequencies_hz": known or None,
        "frequencies_reason": "; ".join(reasons) if clocks else "the kernel lists no CPU",
    }

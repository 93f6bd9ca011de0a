from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ProfileError
from edgewise.profiles.partition import (
    PartitionProfile,
    parse_partition_profile,
    partition_profile_text,
    read_partition_profile,
    thread_column,
    write_partition_profile,
)


@pytest.fixture
def profile() -> PartitionProfile:
    return PartitionProfile(
        model_id="net",
        model_version="aa",
        cuts=("input", "middle", "answer"),
        depth_ratio=np.array([0.0, 0.4, 1.0]),
        prefix_bytes=np.array([0.0, 1e6, 5e6]),
        boundary_bytes=np.array([150528.0, 3e4, 1e3]),
        accelerator_s=np.array([0.0, 1e-3, 2e-3]),
        threads=(1, 2),
        cpu_s=np.array([[0.03, 0.02], [1 / 3, 0.1], [0.0, 0.0]]),
        accelerator="coral-usb",
        notes={"made": "for a test"},
    )


def test_a_file_gives_back_every_digit(profile: PartitionProfile, tmp_path: Path) -> None:
    write_partition_profile(profile, tmp_path / "p.json")

    back = read_partition_profile(tmp_path / "p.json")

    assert partition_profile_text(back) == partition_profile_text(profile)
    assert back.cpu_s[1, 0] == 1 / 3
    assert back.last == 2
    assert back.weight_bytes == 5e6


def test_times_are_constant_unless_the_profile_says_otherwise(profile: PartitionProfile) -> None:
    assert profile.cpu_cv2 is not None
    assert profile.cpu_cv2.tolist() == [0.0, 0.0, 0.0]


def test_arrays_of_a_profile_cannot_be_changed(profile: PartitionProfile) -> None:
    with pytest.raises(ValueError, match="read-only"):
        profile.cpu_s[0, 0] = 1.0


@pytest.mark.parametrize(("threads", "column"), [(0, 0), (1, 0), (2, 1), (3, 1), (16, 1)])
def test_the_column_is_that_of_the_most_threads_that_are_allowed(
    profile: PartitionProfile, threads: int, column: int
) -> None:
    assert thread_column(profile, threads) == column


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix_bytes": np.array([0.0, 6e6, 5e6])}, "cuts out of order"),
        ({"depth_ratio": np.array([0.0, 1.0])}, "a place to cut is missing"),
        ({"cpu_s": np.zeros((3, 1))}, "expected cpu_s of shape"),
        ({"cpu_s": np.full((3, 2), np.nan)}, "negative or not finite"),
        ({"boundary_bytes": np.array([1.0, -1.0, 1.0])}, "negative or not finite"),
        ({"threads": (2, 4)}, "threads that rise from 1"),
        ({"accelerator_s": np.array([1.0, 2.0, 3.0])}, "nothing on the accelerator"),
        ({"cpu_provenance": "guessed"}, "unknown cpu_provenance"),
        ({"cuts": ("input",)}, "at least the places 0 and P"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(
    profile: PartitionProfile, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ProfileError, match=said):
        replace(profile, **change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no partition profile"),
        ('{"format": "other"}', "is no partition profile"),
        ('{"format": "edgewise-partition-profile", "version": 99}', "has version 99"),
        ('{"format": "edgewise-partition-profile", "version": 1}', "missing or unknown members"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text: str, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        parse_partition_profile(text, where="p.json")


def test_a_missing_member_is_named(profile: PartitionProfile) -> None:
    found = json.loads(partition_profile_text(profile))
    del found["cpu_s"]

    with pytest.raises(ProfileError, match=r"p\.json: missing or unknown members: cpu_s"):
        parse_partition_profile(json.dumps(found), where="p.json")


def test_members_of_another_type_end_in_a_message(profile: PartitionProfile) -> None:
    found = json.loads(partition_profile_text(profile)) | {"cpu_s": "fast"}

    with pytest.raises(ProfileError, match=r"p\.json"):
        parse_partition_profile(json.dumps(found), where="p.json")


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="edgewise profile MODEL --segments"):
        read_partition_profile(tmp_path / "none.json")

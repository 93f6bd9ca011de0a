from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ProfileError
from edgewise.profiles import Cost, Method, Profile, ThreadPolicy, UnitKey
from edgewise.profiles.exchange import read_profile, write_profile

STAGE = UnitKey(name="stage:0", kind="stage", backend="null")
HEAD = UnitKey(name="head:0", kind="head", backend="null", batch=4)


@pytest.fixture
def profile() -> Profile:
    return Profile(
        model_id="nëtz",
        model_version="aa11",
        device_id="board-1",
        device={"cpu": "A76"},
        thread_policy=ThreadPolicy(threads=2, affinity=(0, 1)),
        method=Method(
            warmup_rounds=1, clock="virtual", synchronised=True, interleaved=False, stop_rule="3"
        ),
        provenance="simulated",
        created_unix_s=1.5e9,
        units={
            STAGE: Cost(unit=STAGE, samples_s=np.array([0.1, math.nan, 1 / 3]), energy_j=2.5),
            HEAD: Cost(unit=HEAD, samples_s=np.array([5e-324, 1e-9, 0.0])),
        },
    )


def test_a_file_gives_back_every_digit(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.json")

    back = read_profile(tmp_path / "p.json")

    assert back.digest() == profile.digest()
    assert back.thread_policy == profile.thread_policy
    np.testing.assert_array_equal(
        back.cost("stage:0", "null").samples_s, profile.cost("stage:0", "null").samples_s
    )
    assert back.cost("stage:0", "null").energy_j == 2.5
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}))


def test_a_changed_file_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(profile, path)
    changed(path, device_id="board-2")

    with pytest.raises(ProfileError, match="changed after it was written"):
        read_profile(path)


def test_a_newer_format_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(profile, path)
    changed(path, format_version=2)

    with pytest.raises(ProfileError, match="profile format 2; this Edgewise reads 1"):
        read_profile(path)


@pytest.mark.parametrize("field", ["units", "method", "thread_policy", "device_id", "digest"])
@pytest.mark.parametrize("value", [None, 3, [], {}, [{}], "x"], ids=str)
def test_a_file_with_a_senseless_field_is_refused(
    profile: Profile, tmp_path: Path, field: str, value: object
) -> None:
    path = tmp_path / "p.json"
    write_profile(profile, path)
    changed(path, **{field: value})

    with pytest.raises(ProfileError, match=r"damaged|changed"):
        read_profile(path)


def test_every_truncation_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(profile, path)
    whole = path.read_bytes()
    for size_bytes in range(0, len(whole) - 2, 37):
        path.write_bytes(whole[:size_bytes])
        with pytest.raises(ProfileError, match="truncated"):
            read_profile(path)


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b'{"format": "other"}', b"\xff\xfe", b"[" * 100_000],
    ids=["a list", "another format", "not text", "nested without end"],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)

    with pytest.raises(ProfileError, match="not a profile"):
        read_profile(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        read_profile(tmp_path / "p.json")


def test_a_write_that_fails_leaves_the_old_file(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(ProfileError, match="cannot write the profile"):
        write_profile(profile, tmp_path / "folder")

    assert [path.name for path in tmp_path.iterdir()] == ["folder"]

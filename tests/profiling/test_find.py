from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import numpy as np
import pytest

from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.device import DeviceFingerprint
from edgewise.errors import ProfileError
from edgewise.model.heads import HeadSpec, random_head
from edgewise.model.staged import StagedModel
from edgewise.profiles import ProfileStore
from edgewise.profiling import find_profile, measure, thread_policy

MakeProgram = Callable[..., NullProgram]
MakeModel = Callable[..., StagedModel]


@pytest.fixture
def model(
    make_model: MakeModel,
    make_program: MakeProgram,
    store: ProfileStore,
    clock: VirtualClock,
    device: DeviceFingerprint,
) -> StagedModel:
    """A model with a profile in the store."""
    model = make_model()
    program = make_program(clock, model=model)
    measure({"null": program}, store, rounds=3, clock=clock, device=device)
    return model


def test_a_profile_of_this_situation_is_found(
    model: StagedModel, store: ProfileStore, device: DeviceFingerprint
) -> None:
    profile = find_profile(model, "null", store=store, device=device)

    assert profile.model_id == "net"
    assert profile.device_id == device.id


def test_the_newest_is_found(
    model: StagedModel,
    make_program: MakeProgram,
    store: ProfileStore,
    device: DeviceFingerprint,
) -> None:
    clock = VirtualClock()
    programs = {"null": make_program(clock, model=model, scale=2.0)}
    measure(programs, store, rounds=4, clock=clock, device=device)

    assert find_profile(model, "null", store=store, device=device).num_rounds == 4


def test_an_older_profile_is_found_where_the_newest_is_of_another_backend(
    model: StagedModel,
    make_program: MakeProgram,
    store: ProfileStore,
    device: DeviceFingerprint,
    clock: VirtualClock,
) -> None:
    programs = {"null:b": make_program(clock, model=model)}
    measure(programs, store, rounds=4, clock=clock, device=device)

    assert find_profile(model, "null", store=store, device=device).num_rounds == 3
    assert find_profile(model, "null:b", store=store, device=device).num_rounds == 4


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another device", ("another device", "edgewise profile net --backend null --threads 1")),
        (
            "other threads",
            ("2 threads, no spin", "edgewise profile net --backend null --threads 2"),
        ),
        ("other weights", ("another model version", "edgewise profile net")),
        ("another backend", ("no costs on backend 'null:b'", "--backend null:b")),
        ("unknown model", ("there is no simulated profile of model 'other'", "profile other")),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_with_the_reason_and_the_command(
    model: StagedModel,
    store: ProfileStore,
    device: DeviceFingerprint,
    what: str,
    said: tuple[str, str],
) -> None:
    if what == "another device":
        device = dataclasses.replace(device, cpu_model="A55")
    if what == "other weights":
        spec = HeadSpec(kind="pool", feature_shape=(1, 4, 4, 4), width=4, num_classes=5)
        model = model.with_heads({0: random_head(spec, np.random.default_rng(9))})
    if what == "unknown model":
        model = dataclasses.replace(model, name="other")
    threads = 2 if what == "other threads" else 1
    backend = "null:b" if what == "another backend" else "null"

    with pytest.raises(ProfileError, match=said[0]) as caught:
        find_profile(model, backend, threads=threads, store=store, device=device)

    assert said[1] in (caught.value.help or "")


def test_the_field_of_the_device_that_differs_is_named(
    model: StagedModel, store: ProfileStore, device: DeviceFingerprint
) -> None:
    other = dataclasses.replace(device, cpu_model="A55")

    with pytest.raises(ProfileError, match="cpu_model: 'A76', here 'A55'"):
        find_profile(model, "null", store=store, device=other)


def test_without_a_store_the_command_that_makes_one_is_told(
    make_model: MakeModel, store: ProfileStore
) -> None:
    with pytest.raises(ProfileError, match="does not exist") as caught:
        find_profile(make_model(), "onnxruntime:CPU", threads=1, store=store)

    assert caught.value.help == "edgewise profile net --backend onnxruntime:CPU --threads 1"


def test_simulated_costs_are_not_taken_for_measured_ones(
    model: StagedModel, store: ProfileStore, device: DeviceFingerprint
) -> None:
    with pytest.raises(ProfileError, match=r"there is no measured profile .* that is simulated"):
        find_profile(model, "onnxruntime:CPU", store=store, device=device)


def test_an_unfinished_campaign_is_no_profile(
    make_model: MakeModel,
    make_program: MakeProgram,
    store: ProfileStore,
    clock: VirtualClock,
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        measure({"null": make_program(clock, model=model)}, store, clock=clock, on_progress=stop)

    with pytest.raises(ProfileError, match="1 unfinished, which profiling resumes"):
        find_profile(model, "null", store=store)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_an_affinity_is_part_of_the_thread_policy_where_it_leaves_cores_out() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        os.sched_setaffinity(0, {one})
        bound = thread_policy(1)
    finally:
        os.sched_setaffinity(0, before)

    assert bound.affinity == (one,) or os.cpu_count() == 1
    assert not bound.spinning

from __future__ import annotations

import importlib.util
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ProfileError
from edgewise.profiles.partition import write_partition_profile
from edgewise.profiles.shipped_partitions import load_partition_profile, partition_profile_names

WITH_EXITS = "fashion-lite0"
NAMES = tuple(n for n in partition_profile_names() if n != WITH_EXITS)


def _script() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "placement_profiles.py"
    if not path.exists():
        pytest.skip("the script that makes the profiles is not here: an installed package")
    spec = importlib.util.spec_from_file_location("edgewise_placement_profiles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_nine_networks_ship_and_one_script_makes_them_all() -> None:
    assert len(NAMES) == 9
    assert tuple(sorted(_script().NETS)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_is_whole_small_and_says_how_it_was_made(name: str) -> None:
    profile = load_partition_profile(name)
    file = resources.files("edgewise.profiles.partitions") / f"{name}.json"

    assert len(file.read_bytes()) < 15_000
    assert profile.model_id == name
    assert 9 <= profile.last <= 12
    assert profile.threads == (1, 2)
    assert (profile.cpu_provenance, profile.accelerator_provenance) == ("measured", "simulated")
    assert profile.accelerator == "coral-usb"
    assert profile.cpu
    assert {"network", "cpu", "accelerator", "sum_to_whole"} <= set(profile.notes)
    assert "random weights" in profile.notes["network"]


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_a_shipped_profile_go_the_way_they_must(name: str) -> None:
    profile = load_partition_profile(name)

    assert (np.diff(profile.accelerator_s) > 0).all()
    # A longer rest costs more; 5 % for what a measurement of two neighbours may differ.
    assert (profile.cpu_s[1:] <= 1.05 * profile.cpu_s[:-1]).all()
    # Two threads are no slower than one, within the same.
    assert (profile.cpu_s[:, 1] <= 1.05 * profile.cpu_s[:, 0]).all()
    assert (profile.accelerator_s[-1] < profile.cpu_s[0]).all()


def test_the_shipped_model_with_exits_has_a_profile_of_its_very_version() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from edgewise.frontends.checkpoint import load_model
    from edgewise.profiling.staged_partition import partitioned

    profile = load_partition_profile(WITH_EXITS)
    model = partitioned(load_model(WITH_EXITS))

    assert profile.model_version == model.version
    assert profile.cuts == tuple(p.tensor for p in model.places)
    assert (profile.cpu_provenance, profile.accelerator_provenance) == ("measured", "simulated")
    assert (np.diff(profile.cpu_s[:, 0]) < 0).all()
    assert {"network", "cpu", "accelerator", "sum_to_whole"} <= set(profile.notes)


def test_the_stand_in_for_gpunet_says_that_it_is_one() -> None:
    assert "GPUNet" in load_partition_profile("gpunet_standin").notes["remark"]


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    profile = load_partition_profile(NAMES[0])
    write_partition_profile(profile, tmp_path / "mine.json")

    again = load_partition_profile(tmp_path / "mine.json")
    assert np.array_equal(again.cpu_s, profile.cpu_s)


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(ProfileError) as caught:
        load_partition_profile("inception_v5")
    assert "inception_v4" in (caught.value.help or "")

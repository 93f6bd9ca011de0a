from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgewise.bench.tenant_models import model_file, open_model
from edgewise.errors import ConfigError, ProfileError
from edgewise.frontends.partition import read_partitioned
from edgewise.frontends.zoo_int8 import VERSION, models_folder
from edgewise.profiles.partition import PartitionProfile

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
WIDTH = 8


def write_net(path: Path, *, seed: int = 0, width: int = WIDTH) -> Path:
    """Two layers in a row."""
    rng = np.random.default_rng(seed)
    helper = onnx.helper
    weights, nodes, last = [], [], "x"
    for n, name in enumerate(("middle", "y")):
        values = rng.standard_normal((width, width)).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(values, f"w{n}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [name]))
        last = name
    x, y = (helper.make_tensor_value_info(v, onnx.TensorProto.FLOAT, [1, width]) for v in "xy")
    graph = helper.make_graph(nodes, "net", [x], [y], initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def profile_of(path: Path) -> PartitionProfile:
    model = read_partitioned(path)
    depth = np.array([p.depth_ratio for p in model.places])
    return PartitionProfile(
        model_id=model.name,
        model_version=model.version,
        cuts=tuple(p.tensor for p in model.places),
        depth_ratio=depth,
        prefix_bytes=np.array([float(p.prefix_bytes) for p in model.places]),
        boundary_bytes=np.array([float(p.nbytes) for p in model.places]),
        accelerator_s=1e-3 * depth,
        cpu_s=1e-3 * (1 - depth[:, None]),
    )


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a network of the zoo, as an earlier run left it in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return write_net(models_folder() / f"squeezenet-int8-v{VERSION}.onnx")


def test_a_network_of_the_zoo_is_its_file_in_the_cache(built: Path) -> None:
    assert model_file("squeezenet") == built
    assert model_file("SqueezeNet") == built
    assert model_file(built) == built


@pytest.mark.usefixtures("built")
def test_another_build_of_a_network_is_taken_where_places_and_sizes_agree(
    tmp_path: Path,
) -> None:
    elsewhere = profile_of(write_net(tmp_path / "other.onnx", seed=1))
    model = open_model("squeezenet", elsewhere)
    assert model.version != elsewhere.model_version
    assert tuple(p.tensor for p in model.places) == elsewhere.cuts

    wider = profile_of(write_net(tmp_path / "wider.onnx", width=2 * WIDTH))
    with pytest.raises(ProfileError, match="of another model than squeezenet") as caught:
        open_model("squeezenet", wider)
    assert "profile squeezenet --segments" in str(caught.value.help)


def test_a_file_must_be_the_one_that_was_measured(tmp_path: Path) -> None:
    path = write_net(tmp_path / "net.onnx")
    profile = profile_of(path)
    assert open_model(path, profile).version == profile.model_version
    write_net(path, seed=1)
    with pytest.raises(ProfileError, match="of another model"):
        open_model(path, profile)
    renamed = replace(profile, model_version="", cuts=("x", "centre", "y"))
    with pytest.raises(ProfileError, match="of another model"):
        open_model(path, renamed)


def test_a_name_that_is_no_model_can_only_be_planned_for(tmp_path: Path) -> None:
    profile = profile_of(write_net(tmp_path / "net.onnx"))
    with pytest.raises(ConfigError, match="no model 'gpunet_standin' to run") as caught:
        open_model("gpunet_standin", profile)
    assert "squeezenet" in str(caught.value.help)

from __future__ import annotations

import importlib.util
import sys

import pytest

from edgewise.backends import available_backends, backend_names
from edgewise.backends.registry import full_name
from edgewise.errors import BackendUnavailable


def test_a_runtime_alone_runs_on_its_usual_device() -> None:
    assert full_name("onnxruntime") == "onnxruntime:CPU"
    assert full_name("openvino") == "openvino:CPU"
    assert full_name("torch") == "torch:cpu"
    assert full_name("null") == "null"


def test_a_full_name_stays_as_it_is() -> None:
    for name in backend_names():
        assert full_name(name) == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("onnxruntme", "onnxruntime:CPU"), ("opnvino", "openvino:CPU"), ("Torch:cpu", "torch:cpu")],
)
def test_an_unknown_backend_is_refused_with_the_nearest_names(wrong: str, near: str) -> None:
    with pytest.raises(BackendUnavailable, match="unknown backend") as caught:
        full_name(wrong)
    assert near in str(caught.value.help)


@pytest.mark.parametrize("wrong", ["onnxruntime:CUDA", "torch:cuda", "null:CPU", "numpy:GPU"])
def test_a_device_that_a_runtime_is_not_run_on_is_refused(wrong: str) -> None:
    with pytest.raises(BackendUnavailable, match="not supported"):
        full_name(wrong)


def test_nonsense_is_refused_with_all_names() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        full_name("")
    assert "known names" in str(caught.value.help)


def test_what_is_not_installed_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "openvino", "onnxruntime", "onnx"):
        monkeypatch.setitem(sys.modules, package, None)

    assert available_backends() == ()


def test_what_is_installed_is_available_and_null_is_not_counted() -> None:
    assert "null" not in available_backends()
    assert ("torch:cpu" in available_backends()) == (importlib.util.find_spec("torch") is not None)


def test_a_device_that_openvino_does_not_list_is_refused_with_those_it_does() -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    openvino = importlib.import_module("edgewise.backends.openvino")

    with pytest.raises(BackendUnavailable, match="OpenVINO lists CPU") as caught:
        openvino.load(None, device="NOSUCH")
    assert caught.value.help == "edgewise doctor --backends"

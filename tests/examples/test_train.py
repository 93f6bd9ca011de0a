"""The training scripts do a few steps on made-up images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edgewise.errors import DataError
from edgewise.frontends.checkpoint import load_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
EXAMPLES = Path(__file__).parents[2] / "examples"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("net", ["resnet50", "mobilenet_v2"])
def test_the_cifar_script_trains_narrow_networks_on_made_up_images(
    net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = _script("train_cifar100").main(
        ["--tiny", "--net", net, "--epochs", "1", "--out", str(out), "--device", "cpu"]
    )

    assert code == 0
    assert "exit 0 at" in capsys.readouterr().out
    model = load_checkpoint(out)
    assert model.input.shape == (1, 3, 32, 32)
    assert model.provenance["training"]["head"] == "conv"


@pytest.mark.slow
def test_the_imagenet_script_packs_and_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = _script("train_imagenet").main(
        ["--tiny", "--epochs", "1", "--out", str(out), "--device", "cpu"]
    )

    assert code == 0
    assert "exit 0 at" in capsys.readouterr().out
    assert load_checkpoint(out).provenance["training"]["schedule"]["kind"] == "every"


def test_cifars_binary_records_are_read_in_order(tmp_path: Path) -> None:
    cifar = _script("train_cifar100")
    image = np.arange(3 * 32 * 32, dtype=np.uint64).astype(np.uint8)
    (tmp_path / "train.bin").write_bytes(
        bytes([3, 1]) + image.tobytes() + bytes([4, 0] + [7] * 3072)
    )
    (tmp_path / "fine_label_names.txt").write_text("apple\nbear\n")
    data = cifar.read_cifar100(tmp_path)

    assert data.labels.tolist() == [1, 0]
    assert data.images.shape == (2, 32, 32, 3)
    assert data.images[0, 0, :2, 0].tolist() == [0, 1]
    assert data.images[0, 0, 0].tolist() == [image[0], image[1024], image[2048]]
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="no whole number of records"):
        cifar.read_cifar100(tmp_path)


def test_packing_lists_damaged_images_and_goes_on_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imagenet = _script("train_imagenet")
    folder = imagenet.made_up(tmp_path / "images")
    (folder / "patches" / "3.png").write_bytes(b"no image")
    packed = tmp_path / "packed.npy"
    with pytest.raises(DataError, match="some images are damaged"):
        imagenet.pack(folder, packed, size=32, skip_damaged=False)
    data = imagenet.pack(folder, packed, size=32, skip_damaged=True)

    assert "3.png" in capsys.readouterr().err
    assert len(data) == 19
    assert data.labels.sum() == 9 or data.labels.sum() == 10

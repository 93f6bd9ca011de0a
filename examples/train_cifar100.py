# ruff: noqa: INP001 - a script, not a package
"""Train ResNet-50 or MobileNetV2 with eight exits on CIFAR-100, at the UniExit paper's settings.

    python examples/train_cifar100.py ~/data/cifar-100-binary --out cifar100.resnet50 --device cuda

The folder is that of `cifar-100-binary.tar.gz` from https://www.cs.toronto.edu/~kriz/cifar.html.
Stop it at any moment: the same command goes on. `--tiny` tries everything on made-up images with
narrow networks, on any machine, in a minute.

The paper says SGD at 0.1, weight decay 1e-4, batch 64, decay at 50 and 75 %; momentum, the number
of epochs and the heads' width are not in it: 0.9, 200 and 560 are ours (the width is what its
Table 6 implies).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from edgewise.data import Dataset, Preprocess
from edgewise.errors import DataError, EdgeError
from edgewise.frontends.checkpoint import check_target, save_checkpoint
from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.random_weights import initialise
from edgewise.training.joint import train_jointly
from edgewise.training.joint_run import JointSettings
from edgewise.training.losses import ExitLoss
from edgewise.training.progress import Progress

PREPROCESS = Preprocess(
    size=(32, 32), mean=(129.3, 124.1, 112.4), std=(68.2, 65.4, 70.4)
)  # of CIFAR-100's training images
_RECORD = 2 + 3 * 32 * 32  # bytes: coarse label, fine label, pixels by channel


def read_cifar100(folder: Path) -> Dataset:
    """Read the training split of the binary version, which needs no unpickling."""
    path = folder / "train.bin"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist", help="unpack cifar-100-binary.tar.gz and name its folder"
        )
    raw = np.fromfile(path, dtype=np.uint8)
    if raw.size == 0 or raw.size % _RECORD:
        raise DataError(f"{path} is no whole number of records of {_RECORD} bytes")
    records = raw.reshape(-1, _RECORD)
    names = (folder / "fine_label_names.txt").read_text().split()
    return Dataset(
        name="cifar-100",
        images=records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(),
        labels=records[:, 1].astype(np.int64),
        class_names=tuple(names),
        split="train",
        source=f"CIFAR-100 (Krizhevsky, 2009), read from {folder}",
        licence=None,
    )


def made_up(images: int = 40) -> Dataset:
    """Patchwork with labels, to try the script."""
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 256, (images, 4, 4, 3), dtype=np.uint8)
    return Dataset(
        name="made-up",
        images=patches.repeat(8, axis=1).repeat(8, axis=2),
        labels=np.arange(images, dtype=np.int64) % 4,
        class_names=("a", "b", "c", "d"),
        split="train",
        source="made up",
        licence=None,
    )


def make_backbone(net: str, *, seed: int, tiny: bool) -> Backbone:
    """A network for images of 32 pixels: the first convolution does not shrink them."""
    if net == "resnet50":
        narrow = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
        config = transformers.ResNetConfig(num_labels=100, **(narrow if tiny else {}))
        module = transformers.ResNetForImageClassification(config)
        stem = module.resnet.embedder
        width = config.embedding_size
        stem.embedder.convolution = torch.nn.Conv2d(3, width, 3, padding=1, bias=False)
        stem.pooler = torch.nn.Identity()
    else:
        config = transformers.MobileNetV2Config(
            num_labels=100,
            image_size=32,
            tf_padding=False,
            depth_multiplier=0.35 if tiny else 1.0,
        )
        module = transformers.MobileNetV2ForImageClassification(config)
        module.mobilenet_v2.conv_stem.first_conv.convolution.stride = (1, 1)
        # This block changes its channels, so it never adds its input: its stride is free.
        module.mobilenet_v2.layer[0].conv_3x3.convolution.stride = (1, 1)
    initialise(module, torch.zeros(1, 3, 32, 32), seed=seed)
    return Backbone(
        name=f"{net}-32px",
        module=module,
        preprocess=PREPROCESS,
        weights="random",
        provenance={"architecture": f"{net} of transformers with a stem for 32 pixels"},
    )


def main(arguments: list[str] | None = None) -> int:
    """Train, save, and say how accurate each exit is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of cifar-100-binary")
    parser.add_argument("--net", choices=["resnet50", "mobilenet_v2"], default="resnet50")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--loss", default="wel+mono", help="equal, wel, mono, eenet+distil, …")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="made-up images, narrow networks")
    given = parser.parse_args(arguments)
    try:
        check_target(given.out)
        if given.data is None and not given.tiny:
            parser.error("name the folder of cifar-100-binary, or pass --tiny")
        data = made_up() if given.tiny else read_cifar100(given.data)
        settings = JointSettings(
            epochs=given.epochs,
            loss=ExitLoss.parse(given.loss),
            # Two steps at the full rate leave a network whose statistics fit no weights.
            learning_rate=0.005 if given.tiny else 0.1,
            head="conv",
            width=16 if given.tiny else 560,
            padding=4,
            seed=given.seed,
            device=given.device,
        )
        prepared = train_jointly(
            make_backbone(given.net, seed=given.seed, tiny=given.tiny),
            data,
            work=given.out.with_name(f"{given.out.name}.work"),
            settings=settings,
            on_progress=_say,
        )
        save_checkpoint(prepared.model, given.out)
    except EdgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for exit_ in prepared.exits:
        sys.stdout.write(f"exit {exit_.index} at {exit_.depth_ratio:.0%}: {exit_.accuracy:.1%}\n")
    return 0


def _say(progress: Progress) -> None:
    sys.stderr.write(f"\r{progress.phase} {progress.done} of {progress.total}: {progress.detail} ")


if __name__ == "__main__":
    sys.exit(main())

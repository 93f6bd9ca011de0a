# ruff: noqa: INP001 - a script, not a package
"""Train ResNet-50 or MobileNetV2 with eight exits on ImageNet, at the UniExit paper's settings.

    python examples/train_imagenet.py ~/data/imagenet/train --out imagenet.resnet50 --device cuda

The folder holds one folder of images per class. They are resized to 224 x 224 once, into one file
beside the result (193 GB for all of ImageNet), which is then read as it is needed. Stop it at any
moment: the same command goes on. `--tiny` tries everything on made-up images, in a minute.

The paper says SGD at 0.1, weight decay 1e-4, batch 64, decay every 30 epochs; momentum, the number
of epochs and the heads' width are not in it: 0.9, 90 and 560 are ours (the width is what its
Table 6 implies).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from edgewise.data import Dataset
from edgewise.data.image_file import find_images, read_image
from edgewise.errors import DataError, EdgeError
from edgewise.frontends.checkpoint import check_target, save_checkpoint
from edgewise.frontends.zoo import build_backbone
from edgewise.training.joint import train_jointly
from edgewise.training.joint_run import JointSettings
from edgewise.training.losses import ExitLoss
from edgewise.training.progress import Progress
from edgewise.training.schedule import Schedule


def pack(folder: Path, packed: Path, *, size: int, skip_damaged: bool) -> Dataset:
    """Resize every image into one memory-mapped file; damaged ones are listed.

    Raises:
        DataError: There are no images, or damaged ones and ``skip_damaged`` is not set.
    """
    index = packed.with_suffix(".json")
    if not index.is_file():  # it is written last, so a file without it is unfinished
        names = sorted(p.name for p in folder.iterdir() if p.is_dir())
        files = [(p, c) for c, n in enumerate(names) for p in find_images((folder / n).iterdir())]
        if not files:
            raise DataError(f"{folder} holds no folders of images", help="one folder per class")
        packed.parent.mkdir(parents=True, exist_ok=True)
        store = np.lib.format.open_memmap(
            packed, mode="w+", dtype=np.uint8, shape=(len(files), size, size, 3)
        )
        labels, damaged = [], []
        for path, label in files:
            try:
                store[len(labels)] = read_image(path, size=(size, size))
            except DataError as error:
                damaged.append(error.message)
                continue
            labels.append(label)
        store.flush()
        if damaged:
            sys.stderr.write("\n".join([f"{len(damaged)} damaged images:", *damaged, ""]))
            if not skip_damaged:
                raise DataError("some images are damaged", help="pass --skip-damaged, or mend them")
        index.write_text(json.dumps({"labels": labels, "names": names}))
    facts = json.loads(index.read_text())
    labels = np.array(facts["labels"], dtype=np.int64)
    return Dataset(
        name=folder.name,
        images=np.load(packed, mmap_mode="r")[: len(labels)],
        labels=labels,
        class_names=tuple(facts["names"]),
        split="train",
        source=f"images of {folder} resized to {size} x {size}",
        licence=None,
    )


def made_up(folder: Path) -> Path:
    """A folder of patchwork in two classes, to try the script."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("patches", "more_patches"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for n in range(10):
            patches = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            pixels = patches.repeat(8, axis=0).repeat(8, axis=1)
            Image.fromarray(pixels).save(folder / name / f"{n}.png")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Pack, train, save, and say how accurate each exit is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder with one folder per class")
    parser.add_argument("--net", choices=["resnet50", "mobilenet_v2"], default="resnet50")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--loss", default="wel+mono", help="equal, wel, mono, eenet+distil, …")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip-damaged", action="store_true", help="go on without damaged images")
    parser.add_argument(
        "--tiny", action="store_true", help="made-up images of 32 pixels, a small net"
    )
    given = parser.parse_args(arguments)
    work = given.out.with_name(f"{given.out.name}.work")
    size = 32 if given.tiny else 224
    try:
        check_target(given.out)
        if given.data is None and not given.tiny:
            parser.error("name the folder of images, or pass --tiny")
        folder = given.data or made_up(work.with_name(f"{work.name}.images"))
        packed = work.with_name(f"{work.name}.images-{size}.npy")
        data = pack(folder, packed, size=size, skip_damaged=given.skip_damaged)
        net = "small_resnet" if given.tiny else given.net
        backbone = build_backbone(net, size_pixels=size, seed=given.seed)
        settings = JointSettings(
            epochs=given.epochs,
            schedule=Schedule(kind="every"),
            loss=ExitLoss.parse(given.loss),
            # Two steps at the full rate leave a network whose statistics fit no weights.
            learning_rate=0.005 if given.tiny else 0.1,
            head="conv",
            width=16 if given.tiny else 560,
            padding=size // 8,
            seed=given.seed,
            device=given.device,
            save_every_s=600.0,
        )
        prepared = train_jointly(backbone, data, work=work, settings=settings, on_progress=_say)
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

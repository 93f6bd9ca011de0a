from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgewise.backends import load_program
from edgewise.clock import VirtualClock
from edgewise.data import Dataset, Preprocess, load_dataset
from edgewise.errors import CheckpointError, ConfigError, DataError, EdgeError, ModelError
from edgewise.frontends.checkpoint import load_checkpoint, save_checkpoint
from edgewise.frontends.zoo.backbone import Backbone
from edgewise.model.staged import StagedModel
from edgewise.training import Progress, evaluate_exits
from edgewise.training.joint import JointFit, fit_jointly, train_jointly
from edgewise.training.joint_run import CURVE, STATE, JointSettings
from edgewise.training.losses import ExitLoss
from edgewise.training.schedule import Schedule
from edgewise.training.trainable import TrainableBackbone
from edgewise.training.work import WorkDirectory, write_file

pytest.importorskip("onnxruntime")
DATA = load_dataset("shapes", limit=240)
assert DATA.labels is not None
LABELS = DATA.labels
PREPROCESS = Preprocess(size=(16, 16), mean=(127.5,) * 3, std=(127.5,) * 3)
SETTINGS = JointSettings(epochs=3, batch=32, width=8, padding=1, save_every_s=0.0)
MODELS = Path(__file__).parents[1] / "models.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Backbone):
    """Gives each training a copy of one export, which takes longer than a short training."""

    staged: StagedModel

    def stage(self, exits: int | Sequence[float] | Sequence[str] = 8) -> StagedModel:
        assert exits == 8
        source: Any = copy.copy(self.staged.source)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's own
            source._module = copy.deepcopy(source._module)
        source._lock, source._segments, source._onnx = threading.Lock(), {}, None
        return replace(self.staged, source=source)


def _backbone(nets: Any, family: str = "chain") -> Backbone:
    return Backbone(
        name=family,
        module=nets.make(family),
        preprocess=PREPROCESS,
        weights="random",
        provenance={"architecture": f"a {family}"},
    )


@pytest.fixture(scope="module")
def exported(nets: Any) -> StagedModel:
    return _backbone(nets).stage()


@pytest.fixture
def backbone(nets: Any, exported: StagedModel) -> Backbone:
    plain = _backbone(nets)
    return Exported(
        name=plain.name,
        module=plain.module,
        preprocess=plain.preprocess,
        weights=plain.weights,
        provenance=plain.provenance,
        staged=exported,
    )


def _fit(backbone: Backbone, work: Path, **changes: Any) -> JointFit:
    settings = replace(SETTINGS, **changes)
    return fit_jointly(backbone, DATA, work=work, exits=3, settings=settings, clock=VirtualClock())


def test_backbone_and_heads_learn_and_the_result_survives_saving(nets: Any, tmp_path: Path) -> None:
    backbone = _backbone(nets)
    seen: list[Progress] = []
    before = copy.deepcopy(backbone.module.state_dict())
    prepared = train_jointly(
        backbone,
        DATA,
        work=tmp_path / "work",
        exits=3,
        settings=replace(SETTINGS, epochs=6),
        provenance={"why": "a test"},
        on_progress=seen.append,
    )
    save_checkpoint(prepared.model, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    curve = json.loads((tmp_path / "work" / CURVE).read_text())

    assert all(torch.equal(v, before[k]) for k, v in backbone.module.state_dict().items())
    assert prepared.model.num_exits == 3
    assert prepared.exits[-1].accuracy > 0.3  # chance is 0.1
    assert len(curve["epochs"]) == 6
    assert curve["epochs"][-1]["loss"] < curve["epochs"][0]["loss"]
    assert loaded.provenance["training_curve"]["epochs"] == curve["epochs"]
    assert loaded.provenance["training"]["loss"]["weighting"] == "weighted"
    assert loaded.provenance["why"] == "a test"
    assert loaded.validation is not None
    assert len(loaded.validation.labels) == 24
    assert [e.head.temperature for e in loaded.exits if e.head] == [
        r.temperature for r in prepared.exits
    ]
    training = [p for p in seen if p.phase == "train"]
    assert training[-1].done == training[-1].total == 6 * 192
    load_program(loaded, "onnxruntime")  # compares every stage with what was recorded


def test_the_stored_model_answers_as_the_trained_one(backbone: Backbone, tmp_path: Path) -> None:
    fit = _fit(backbone, tmp_path / "work")
    prepared = train_jointly(backbone, DATA, work=tmp_path / "work", exits=3, settings=SETTINGS)
    images = DATA.images[fit.held_out]
    stored = evaluate_exits(load_program(prepared.model, "onnxruntime"), images, PREPROCESS)

    # Weights are stored in float16, with 11 bits.
    np.testing.assert_allclose(stored, fit.run.logits(images), atol=0.02 * np.abs(stored).max())
    in_torch = evaluate_exits(load_program(fit.model, "torch"), images, PREPROCESS)
    np.testing.assert_allclose(in_torch, fit.run.logits(images), atol=1e-4)


def test_in_training_form_the_batch_is_normalised_and_statistics_move(nets: Any) -> None:
    module = nets.make("residual")
    model = StagedModel.from_module(module, nets.example("residual"), exits=3)
    backbone = TrainableBackbone(model)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(module)
    for part in expected.modules():
        part.training = not isinstance(part, torch.nn.Dropout)  # it is left out
    want = expected(x)
    found = backbone.features(x, training=True)[-1]
    after = {k: v.clone() for k, v in module.state_dict().items()}

    torch.testing.assert_close(found, want)
    for name, value in expected.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(after[name], value)
    again = backbone.features(x, training=False)
    assert all(torch.equal(after[k], v) for k, v in module.state_dict().items())
    assert len(again) == model.num_exits


DYING = """
    import importlib.util, os, signal, sys
    from pathlib import Path
    from edgewise.clock import VirtualClock
    from edgewise.data import Preprocess, load_dataset
    from edgewise.frontends.zoo.backbone import Backbone
    from edgewise.training.joint import fit_jointly
    from edgewise.training.joint_run import JointSettings
    from edgewise.training.work import write_file

    models, work, fatal = sys.argv[1], sys.argv[2], int(sys.argv[3])
    spec = importlib.util.spec_from_file_location("edgewise_test_models", models)
    nets = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = nets
    spec.loader.exec_module(nets)
    states = 0

    def write(path, data):
        global states
        states += path.name == "state.safetensors"
        if states == fatal:
            path.with_name(path.name + ".part").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_file(path, data)

    fit_jointly(
        Backbone(
            name="chain",
            module=nets.make("chain"),
            preprocess=Preprocess(size=(16, 16), mean=(127.5,) * 3, std=(127.5,) * 3),
            weights="random",
            provenance={},
        ),
        load_dataset("shapes", limit=240),
        work=Path(work),
        exits=3,
        settings=JointSettings(
            epochs=3, batch=32, width=8, padding=1, save_every_s=0.0, patience=2
        ),
        clock=VirtualClock(),
        write=write,
    )
"""


def test_a_training_killed_while_saving_goes_on_and_ends_with_the_same_bits(
    backbone: Backbone, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for fatal in (3, 7):  # within the first epoch, then further on
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DYING), str(MODELS), str(killed), str(fatal)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = _fit(backbone, killed, patience=2)
    straight = _fit(backbone, whole, patience=2)

    assert resumed.model.version() == straight.model.version()
    assert (killed / STATE).read_bytes() == (whole / STATE).read_bytes()
    assert resumed.curve == straight.curve


def test_saving_often_or_seldom_gives_the_same_bits(backbone: Backbone, tmp_path: Path) -> None:
    often = _fit(backbone, tmp_path / "often")
    seldom = _fit(backbone, tmp_path / "seldom", save_every_s=1e9)

    assert often.model.version() == seldom.model.version()


def test_another_seed_is_another_training(backbone: Backbone, tmp_path: Path) -> None:
    one = _fit(backbone, tmp_path / "one", epochs=1)
    two = _fit(backbone, tmp_path / "two", epochs=1, seed=1)

    assert one.model.version() != two.model.version()


def test_a_pretrained_backbone_can_move_more_slowly_than_its_heads(
    backbone: Backbone, tmp_path: Path
) -> None:
    def moved(work: Path, ratio: float) -> float:
        fit = _fit(backbone, work, epochs=1, backbone_rate_ratio=ratio, weight_decay=0.0)
        source: Any = fit.model.source
        weights = dict(source._module.named_parameters())
        before = dict(backbone.module.named_parameters())
        moves = [(weights[n] - p).detach().abs().max() for n, p in before.items() if n in weights]
        return max(float(m) for m in moves)

    assert moved(tmp_path / "slow", 1e-3) < 0.05 * moved(tmp_path / "fast", 1.0)


def test_early_stopping_keeps_the_best_epoch(backbone: Backbone, tmp_path: Path) -> None:
    fit = _fit(
        backbone,
        tmp_path / "work",
        epochs=12,
        patience=1,
        learning_rate=0.5,
        schedule=Schedule(kind="cosine"),
    )
    losses = [np.mean(e["stop_loss"]) for e in fit.curve["epochs"]]

    assert fit.epochs == len(losses) < 12
    assert int(np.argmin(losses)) == len(losses) - 2
    again = _fit(
        backbone,
        tmp_path / "work",
        epochs=12,
        patience=1,
        learning_rate=0.5,
        schedule=Schedule(kind="cosine"),
    )
    assert again.model.version() == fit.model.version()


def test_a_loss_that_is_not_a_number_names_the_step_and_keeps_the_last_good_state(
    backbone: Backbone, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    with pytest.raises(ModelError, match=r"NaN|nan|inf") as caught:
        _fit(backbone, work, learning_rate=1e18)
    message = str(caught.value)

    assert "at step" in message
    assert "--learning-rate" in message
    arrays = WorkDirectory(work).load(STATE) if (work / STATE).exists() else {}
    assert all(np.isfinite(a).all() for k, a in arrays.items() if not k.startswith("facts"))


def test_the_state_before_a_failure_can_be_finished_into_a_model(
    backbone: Backbone, tmp_path: Path
) -> None:
    class Stop(KeyboardInterrupt):
        pass

    def stop_later(progress: Progress) -> None:
        if progress.phase == "train" and progress.done >= 192:
            raise Stop

    def job(**more: Any) -> Any:
        return train_jointly(
            backbone,
            DATA,
            work=tmp_path / "work",
            exits=3,
            settings=SETTINGS,
            clock=VirtualClock(),  # so progress is told at the end of epochs only
            **more,
        )

    with pytest.raises(Stop):
        job(on_progress=stop_later)
    finished = job(finish=True)
    complete = job()

    assert finished.model.has_all_heads
    assert finished.model.provenance["training"]["epochs_made"] == 1
    assert complete.model.provenance["training"]["epochs_made"] == 3
    assert complete.model.version() != finished.model.version()


def test_nothing_to_finish_is_said(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no state of a training that could be finished"):
        train_jointly(backbone, DATA, work=tmp_path / "w", exits=3, settings=SETTINGS, finish=True)


def test_a_full_disk_keeps_the_last_state(backbone: Backbone, tmp_path: Path) -> None:
    states = 0

    def fill_up(path: Path, data: bytes) -> None:
        nonlocal states
        states += path.name == "state.safetensors"
        if states == 4:
            raise OSError(28, "No space left on device")
        write_file(path, data)

    with pytest.raises(EdgeError, match="the disk is full"):
        fit_jointly(
            backbone,
            DATA,
            work=tmp_path / "work",
            exits=3,
            settings=SETTINGS,
            clock=VirtualClock(),
            write=fill_up,
        )
    kept = WorkDirectory(tmp_path / "work").load(STATE)["facts"]
    resumed = _fit(backbone, tmp_path / "work")

    assert kept[:2].tolist() == [0, 3]
    assert resumed.model.version() == _fit(backbone, tmp_path / "whole").model.version()


def test_a_state_of_another_architecture_is_refused(
    backbone: Backbone, nets: Any, tmp_path: Path
) -> None:
    _fit(_backbone(nets, "residual"), tmp_path / "other", epochs=1)
    with pytest.raises(ConfigError, match="holds the work of another job: backbone was 'residual'"):
        _fit(backbone, tmp_path / "other", epochs=1)

    _fit(backbone, tmp_path / "own", epochs=1)
    (tmp_path / "own" / STATE).write_bytes((tmp_path / "other" / STATE).read_bytes())
    with pytest.raises(CheckpointError, match="is of another architecture: expected backbone"):
        _fit(backbone, tmp_path / "own", epochs=1)


def test_a_damaged_state_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    _fit(backbone, tmp_path / "work", epochs=1)
    (tmp_path / "work" / STATE).write_bytes(b"not a state")

    with pytest.raises(CheckpointError, match="is damaged"):
        _fit(backbone, tmp_path / "work", epochs=1)


def _refused(backbone: Backbone, data: Dataset, work: Path) -> None:
    fit_jointly(backbone, data, work=work, exits=3, settings=SETTINGS)


def test_an_empty_class_is_named(backbone: Backbone, tmp_path: Path) -> None:
    data = replace(DATA, class_names=(*DATA.class_names, "unicorn"))

    with pytest.raises(DataError, match=r"1 of 11 classes .* have no image to train on: unicorn"):
        _refused(backbone, data, tmp_path)


def test_one_image_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    one = replace(DATA.take(1, seed=0), class_names=("only",))
    data = replace(one, labels=np.zeros(1, dtype=np.int64))

    with pytest.raises(DataError, match=r"at least 10 labelled images .* found 1"):
        _refused(backbone, data, tmp_path)


def test_labels_outside_the_classes_are_refused_before_any_training() -> None:
    with pytest.raises(DataError, match=r"expected 0 to 9 .* found 0 to 10"):
        replace(DATA, labels=np.where(LABELS == 9, 10, LABELS))


def test_images_without_labels_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no labels"):
        _refused(backbone, replace(DATA, labels=None, class_names=(), split="all"), tmp_path)


def _write_folder(root: Path, *, sizes: tuple[int, int] = (16, 16), damaged: int = 0) -> Path:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for c, size in zip("ab", sizes, strict=True):
        (root / c).mkdir(parents=True)
        for n in range(12):
            pixels = rng.integers(0, 256, (size, size), dtype=np.uint8)
            image.fromarray(pixels).save(root / c / f"{n}.png")
    for n in range(damaged):
        (root / "a" / f"{n}.png").write_bytes(b"no image")
    return root


def test_images_of_mixed_sizes_are_refused_unless_a_size_is_given(
    backbone: Backbone, tmp_path: Path
) -> None:
    folder = _write_folder(tmp_path / "mixed", sizes=(16, 20))
    with pytest.raises(DataError, match="images differ in size"):
        load_dataset(folder)
    data = load_dataset(folder, size=(16, 16))
    fit = fit_jointly(
        backbone, data, work=tmp_path / "work", exits=3, settings=replace(SETTINGS, epochs=1)
    )

    assert fit.model.num_classes == 2


def test_damaged_images_are_listed_before_any_training(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "damaged", damaged=2)

    with pytest.raises(DataError, match=r"2 of \d+ images cannot be read:(.|\n)*0\.png") as caught:
        load_dataset(folder)
    assert "1.png" in str(caught.value)


def test_a_backbone_that_is_not_torchs_cannot_be_trained(tiny_onnx: Path, tmp_path: Path) -> None:
    del tmp_path
    with pytest.raises(ModelError, match="does not come from torch"):
        TrainableBackbone(StagedModel.from_onnx(tiny_onnx))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "epochs of at least 1"),
        ({"batch": 1}, "batch of at least 2"),
        ({"learning_rate": 0.0}, "learning_rate above zero"),
        ({"momentum": 1.0}, r"momentum in \[0, 1\)"),
        ({"patience": 0}, "patience of at least 1"),
        ({"padding": -1}, "padding of at least 0"),
        ({"head": "auto"}, "'pool' or 'conv'"),
    ],
)
def test_settings_without_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SETTINGS, **wrong)


@pytest.mark.parametrize("loss", ["equal", "branchynet+mono", "eenet+distil", "wel+mono+distil"])
def test_every_combination_of_losses_trains(backbone: Backbone, tmp_path: Path, loss: str) -> None:
    fit = _fit(backbone, tmp_path, loss=ExitLoss.parse(loss), head="conv")

    assert fit.curve["epochs"][-1]["loss"] < fit.curve["epochs"][0]["loss"]
    assert (fit.curve["epochs"][-1]["distillation"] > 0) == ("distil" in loss)
    assert fit.model.exits[0].head is not None
    assert fit.model.exits[0].head.spec.kind == "conv"

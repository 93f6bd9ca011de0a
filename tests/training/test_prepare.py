from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.data import Dataset, Preprocess, load_dataset
from edgewise.errors import ConfigError, DataError, EdgeError, ModelError
from edgewise.frontends.checkpoint import load_checkpoint, save_checkpoint
from edgewise.model.staged import StagedModel
from edgewise.training import PreparedModel, PrepareSettings, Progress, prepare, stage_backbone
from edgewise.training.fit import FitSettings, FittedHead
from edgewise.training.prepare import choose_head, split_images
from edgewise.training.work import write_file

pytest.importorskip("onnxruntime")
SETTINGS = PrepareSettings(width=8, fit=FitSettings(epochs=4), max_conv_share=100.0)
DATA = load_dataset("shapes", limit=300)


def _prepare(tiny_onnx: Path, work: Path, preprocess: Preprocess) -> PreparedModel:
    backbone = stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=[0.3, 1.0])
    return prepare(backbone, DATA, preprocess=preprocess, work=work, settings=SETTINGS)


def test_every_exit_gets_a_calibrated_head_and_the_result_survives_saving(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    backbone = stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=[0.3, 1.0])
    prepared = prepare(
        backbone,
        DATA,
        preprocess=tiny_preprocess,
        work=tmp_path / "work",
        settings=SETTINGS,
        provenance={"why": "a test"},
        on_progress=seen.append,
    )
    save_checkpoint(prepared.model, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")

    assert [s.stop.name for s in prepared.model.stages] == ["relu1", "relu2"]
    assert prepared.model.has_all_heads
    assert prepared.model.num_classes == len(prepared.model.class_names) == 10
    assert set(prepared.exits[0].considered) == {"pool", "conv"}
    assert [p.phase for p in seen if p.done == p.total] == sorted(
        [p.phase for p in seen if p.done == p.total],
        key=["backbone", "features", "fit", "validate"].index,
    )
    assert loaded.version() == prepared.model.version()
    assert loaded.provenance["why"] == "a test"
    assert loaded.validation is not None
    np.testing.assert_allclose(
        loaded.validation.accuracy(), [e.accuracy for e in prepared.exits], rtol=1e-12
    )
    for own, report in zip(loaded.exits, prepared.exits, strict=True):
        assert own.head is not None
        assert own.head.temperature == report.temperature
        assert own.accuracy == report.accuracy
    load_program(loaded, "onnxruntime")  # compares every stage with what was recorded


DYING = """
    import os, signal, sys
    from pathlib import Path
    from edgewise.data import Preprocess, load_dataset
    from edgewise.model.staged import StagedModel
    from edgewise.training import PrepareSettings, prepare, stage_backbone
    from edgewise.training.fit import FitSettings
    from edgewise.training.work import write_file

    onnx, work, fatal = sys.argv[1:]
    written = []

    def write(path, data):
        written.append(path.name)
        if ",".join(written[-2:]).endswith(fatal):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name + ".part").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_file(path, data)

    prepare(
        stage_backbone(StagedModel.from_onnx(onnx), exits=[0.3, 1.0]),
        load_dataset("shapes", limit=300),
        preprocess=Preprocess(size=(16, 16), mean=(127.5,), std=(127.5,), channels=1),
        work=Path(work),
        settings=PrepareSettings(width=8, fit=FitSettings(epochs=4), max_conv_share=100.0),
        write=write,
    )
"""


def test_a_job_killed_while_writing_goes_on_and_ends_with_the_same_bits(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    work = tmp_path / "killed"
    fatal = [
        "shard-00000.safetensors",
        # Two writes of one state in a row: in the middle of the second epoch of the last head.
        "exit-1-conv.state.safetensors,exit-1-conv.state.safetensors",
    ]
    for name in fatal:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DYING), str(tiny_onnx), str(work), name],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = _prepare(tiny_onnx, work, tiny_preprocess)
    whole = _prepare(tiny_onnx, tmp_path / "whole", tiny_preprocess)

    assert resumed.exits == whole.exits
    assert resumed.model.version() == whole.model.version()
    assert resumed.model.validation is not None
    assert whole.model.validation is not None
    assert resumed.model.validation.logits.tobytes() == whole.model.validation.logits.tobytes()


def test_a_full_disk_keeps_finished_work(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    def fill_up(path: Path, data: bytes) -> None:
        if path.name == "shard-00001.safetensors":
            raise OSError(28, "No space left on device")
        write_file(path, data)

    with pytest.raises(EdgeError, match="the disk is full"):
        prepare(
            stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=[0.3, 1.0]),
            DATA,
            preprocess=tiny_preprocess,
            work=tmp_path / "work",
            settings=SETTINGS,
            write=fill_up,
        )
    assert (tmp_path / "work/features-maps-0-1/shard-00000.safetensors").is_file()


def test_another_job_does_not_reuse_the_work(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    _prepare(tiny_onnx, tmp_path / "work", tiny_preprocess)
    backbone = stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=[0.3, 1.0])

    with pytest.raises(ConfigError, match="holds the work of another job: seed was 0, now 1"):
        prepare(
            backbone,
            DATA,
            preprocess=tiny_preprocess,
            work=tmp_path / "work",
            settings=replace(SETTINGS, seed=1),
        )


def test_other_heads_are_fitted_on_the_same_features(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    first = _prepare(tiny_onnx, tmp_path / "work", tiny_preprocess)
    seen: list[Progress] = []
    wider = prepare(
        stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=[0.3, 1.0]),
        DATA,
        preprocess=tiny_preprocess,
        work=tmp_path / "work",
        settings=replace(SETTINGS, width=16),
        on_progress=seen.append,
    )

    assert "features" not in {p.phase for p in seen}
    assert wider.model.version() != first.model.version()


def _refused(tiny_onnx: Path, data: Dataset, preprocess: Preprocess, work: Path) -> None:
    backbone = stage_backbone(StagedModel.from_onnx(tiny_onnx), exits=2)
    prepare(backbone, data, preprocess=preprocess, work=work, settings=SETTINGS)


def test_images_without_labels_are_refused(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    data = replace(DATA, labels=None, class_names=(), split="all")

    with pytest.raises(DataError, match="has no labels"):
        _refused(tiny_onnx, data, tiny_preprocess, tmp_path)


def test_one_image_is_refused(tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"at least 10 labelled images .* found 1"):
        _refused(tiny_onnx, DATA.take(1, seed=0), tiny_preprocess, tmp_path)


def test_preprocessing_of_another_size_is_refused(
    tiny_onnx: Path, tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"makes \[1, 8, 8\], the backbone takes \[1, 16, 16\]"):
        _refused(tiny_onnx, DATA, replace(tiny_preprocess, size=(8, 8)), tmp_path)


def test_an_unknown_kind_of_head_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'conv'"):
        PrepareSettings(head="convv")


def test_a_backbone_ends_before_its_classifier(tiny_onnx: Path) -> None:
    whole = StagedModel.from_onnx(tiny_onnx)

    assert stage_backbone(whole, exits=3).stages[-1].stop.name == "relu2"
    assert stage_backbone(whole, exits=2, until="relu1").stages[-1].stop.name == "relu1"
    with pytest.raises(ConfigError, match="no legal cut is named 'relu9'"):
        stage_backbone(whole, until="relu9")


def test_a_model_without_feature_maps_has_no_backbone(tiny_onnx: Path) -> None:
    model = StagedModel.from_onnx(tiny_onnx)
    graph = replace(
        model.source.graph,
        tensors={k: replace(t, shape=(1, 7)) for k, t in model.source.graph.tensors.items()},
    )
    model.source.graph = graph  # type: ignore[misc]

    with pytest.raises(ModelError, match="no legal cut with feature maps or tokens"):
        stage_backbone(model)


def test_images_are_divided_without_overlap_and_each_class_in_its_share() -> None:
    labels = np.repeat(np.arange(4), [400, 200, 200, 200])
    order, stop, calibrate = split_images(labels, seed=1, max_validation=2000)

    assert sorted(order.tolist()) == list(range(1000))
    assert (stop, calibrate) == (800, 900)
    assert np.bincount(labels[order[calibrate:]]).tolist() == [40, 20, 20, 20]
    assert split_images(labels, seed=1, max_validation=30)[1:] == (940, 970)


@pytest.mark.parametrize(
    ("gain", "chosen"),
    [pytest.param(0.005, "pool", id="not worth it"), pytest.param(0.02, "conv", id="worth it")],
)
def test_a_convolutional_head_must_be_worth_its_cost(gain: float, chosen: str) -> None:
    from edgewise.model.heads import HeadSpec, random_head

    def fitted(kind: str, accuracy: float) -> FittedHead:
        spec = HeadSpec(kind=kind, feature_shape=(1, 4, 5, 5), width=4, num_classes=2)  # type: ignore[arg-type]
        head = random_head(spec, np.random.default_rng(0))
        return FittedHead(head=head, accuracy=accuracy, loss=1.0, epochs=1)

    by_kind = {"pool": fitted("pool", 0.8), "conv": fitted("conv", 0.8 + gain)}
    assert choose_head(by_kind, PrepareSettings()).head.spec.kind == chosen

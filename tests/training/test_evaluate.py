from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from edgewise.backends import load_program
from edgewise.data import Preprocess, load_dataset
from edgewise.frontends.onnx_file import OnnxSource
from edgewise.model.staged import StagedModel
from edgewise.training import Progress, evaluate_exits

pytest.importorskip("onnxruntime")


def test_every_exit_answers_every_image_as_the_reference_does(
    tiny_proto: Callable[[int], onnx.ModelProto], tiny_preprocess: Preprocess
) -> None:
    source = OnnxSource(tiny_proto(0), name="tiny")
    model = StagedModel.from_boundaries(source, ["relu0", "relu2"], name="tiny", num_classes=10)
    model = model.with_random_heads()
    images = load_dataset("shapes", limit=12).images
    seen: list[Progress] = []
    logits = evaluate_exits(
        load_program(model, "onnxruntime"), images, tiny_preprocess, on_progress=seen.append
    )

    assert logits.shape == (2, 12, 10)
    assert seen == [Progress(phase="validate", done=12, total=12)]
    with load_program(model, "numpy", check=False).context() as context:
        context.set_boundary(0, tiny_preprocess(images[5:6]))
        for k in range(2):
            context.run_segment(k, k + 1)
            # Another order of float32 sums.
            np.testing.assert_allclose(logits[k, 5], context.run_head(k)[0], rtol=1e-4, atol=1e-5)

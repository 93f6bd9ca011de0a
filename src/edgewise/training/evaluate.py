"""What every exit answers on a set of images."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Program
from edgewise.data.preprocess import Preprocess
from edgewise.training.progress import OnProgress, Progress, ignore_progress

Float32 = npt.NDArray[np.float32]
_EVERY = 50


def evaluate_exits(
    program: Program,
    images: npt.NDArray[np.uint8],
    preprocess: Preprocess,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Float32:
    """Run every stage and head on every image, one image at a time.

    Args:
        program: The model, loaded, with a head at every exit.
        images: uint8 [N, H, W, C].
        preprocess: How images become inputs.
        on_progress: Told every 50 images.

    Returns:
        Raw logits [E, N, classes].
    """
    model = program.model
    logits = np.empty((model.num_exits, len(images), model.num_classes), dtype=np.float32)
    with program.context() as context:
        for n in range(len(images)):
            context.set_boundary(0, preprocess(images[n : n + 1]))
            for k in range(model.num_exits):
                context.run_segment(k, k + 1)
                logits[k, n] = context.run_head(k)[0]
            if (n + 1) % _EVERY == 0 or n + 1 == len(images):
                on_progress(Progress(phase="validate", done=n + 1, total=len(images)))
    return logits

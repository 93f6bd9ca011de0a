"""Fits exit heads on a frozen backbone: features are cached once, heads are fitted on the cache.

`prepare` does the whole job and can be stopped at any moment; the same call goes on where it was.
torch is needed to fit, nothing here is needed to run the result.
"""

from edgewise.training.evaluate import evaluate_exits
from edgewise.training.prepare import PreparedModel, PrepareSettings, prepare, stage_backbone
from edgewise.training.progress import Progress
from edgewise.training.temperature import expected_calibration_error, fit_temperature

__all__ = [
    "PrepareSettings",
    "PreparedModel",
    "Progress",
    "evaluate_exits",
    "expected_calibration_error",
    "fit_temperature",
    "prepare",
    "stage_backbone",
]

"""Data sets and inputs: read, checked and brought into the shape a model takes.

This package reads; it does not augment, shuffle or batch. ``import edgewise.data`` needs numpy
only; image files need the extra ``data`` (Pillow), and so do the digits (scikit-learn).
"""

from __future__ import annotations

from edgewise.data.dataset import Dataset
from edgewise.data.inputs import check_input, read_inputs
from edgewise.data.load import dataset_names, load_dataset
from edgewise.data.preprocess import Preprocess

__all__ = [
    "Dataset",
    "Preprocess",
    "check_input",
    "dataset_names",
    "load_dataset",
    "read_inputs",
]

"""What is executed: tensor specs, the operator graph, legal cuts, stages, heads, the staged model.

Pure data and protocols. Nothing here runs a model; `edgewise.backends` does.
"""

from edgewise.model.cuts import Cut, choose_cuts, legal_cuts
from edgewise.model.graph import Graph, Op, TensorSpec
from edgewise.model.heads import ExitHead, HeadSpec
from edgewise.model.staged import Exit, Stage, StagedModel
from edgewise.model.validation import Validation

__all__ = [
    "Cut",
    "Exit",
    "ExitHead",
    "Graph",
    "HeadSpec",
    "Op",
    "Stage",
    "StagedModel",
    "TensorSpec",
    "Validation",
    "choose_cuts",
    "legal_cuts",
]

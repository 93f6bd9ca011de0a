"""The record that every file of the zoo returns."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgewise.data.preprocess import Preprocess
from edgewise.errors import BackendUnavailable
from edgewise.model.staged import StagedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A network to stage, and all that a user of it must know.

    Attributes:
        name: As in ``backbone_names()``.
        module: A torch module in evaluation mode that answers with logits.
        preprocess: How images become its input.
        weights: ``"trained"``; or ``"random"``: its cost is real, its answers are not.
        provenance: Where architecture and weights come from, their licence: facts for people.
    """

    name: str
    module: Any = field(repr=False)
    preprocess: Preprocess
    weights: Literal["trained", "random"]
    provenance: Mapping[str, Any]

    def example(self) -> Any:
        """One input of zeros, as exporters want it."""
        torch = importlib.import_module("torch")
        return torch.zeros(1, *self.preprocess.output_shape)

    def stage(self, exits: int | Sequence[float] | Sequence[str] = 8) -> StagedModel:
        """Cut the whole network into stages; it keeps its own classifier as last exit.

        Args:
            exits: A count, fractions of the FLOPs, or module names.
        """
        staged = StagedModel.from_module(self.module, self.example(), exits=exits, name=self.name)
        return replace(
            staged, preprocess=self.preprocess.to_json(), provenance=dict(self.provenance)
        )


def import_transformers() -> Any:
    """Import transformers, or say which extra to install."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise BackendUnavailable(
            f"this backbone needs transformers, which is not installed ({error})",
            help="pip install 'edgewise[torch]'",
        ) from error

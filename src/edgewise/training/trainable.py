"""A staged torch model in a form that can be trained: differentiable stages, named arrays.

Stages come from the exported graph, which is in evaluation mode; here its batch normalisations
normalise by the batch and update their running statistics. Dropout was left out by the export and
stays out: joint training regularises by its intermediate exits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgewise.errors import ModelError
from edgewise.frontends.torch_module import import_torch
from edgewise.model.staged import StagedModel

_TRAINING_ARGUMENT, _MOMENTUM_ARGUMENT = 5, 6  # of aten::batch_norm
# Some modules ask for 0.997 in the sense in which others say 0.003: their running statistics would
# be those of the last batch alone.
_MOMENTUM = 0.1
_MODE_IN_NAME = ("no_training", "_no_stats", "cudnn_batch_norm", "native_batch_norm")


class TrainableBackbone:
    """The stages of a model, each in a training form and in the form that is run.

    Arrays are shared between the two forms and with the model's source: training changes them
    there.

    Attributes:
        parameters: Torch parameters by name.
        buffers: Running statistics by name.
    """

    def __init__(self, model: StagedModel) -> None:
        torch = import_torch()
        self._torch = torch
        self._running: list[Any] = []
        self._training: list[Any] = []
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        for stage in model.stages:
            segment = model.source.torch_segment(stage.start.name, stage.stop.name)
            if segment is None:
                raise ModelError(
                    f"model {model.name!r} does not come from torch, so its backbone cannot be"
                    " trained",
                    help="leave --joint out to fit heads on it as it is",
                )
            self._running.append(segment)
            self._training.append(_training_form(torch, segment, stage=stage.name))
        seen: set[int] = set()
        for segment in self._training:
            for name, array in _arrays(segment):
                if id(array) in seen:
                    continue
                seen.add(id(array))
                if isinstance(array, torch.nn.Parameter) and array.is_floating_point():
                    self.parameters[name] = array.requires_grad_(requires_grad=True)
                else:
                    self.buffers[name] = array
        if not self.parameters:
            raise ModelError(f"model {model.name!r} has no parameters to train")

    def features(self, x: Any, *, training: bool) -> list[Any]:
        """What every stage ends with, in order."""
        found = []
        for segment in self._training if training else self._running:
            x = segment(x)
            found.append(x)
        return found

    def move_to(self, device: str, *, channels_last: bool) -> None:
        """Put every array on a device; kernels with channels last are about twice as fast there."""
        for array in (*self.parameters.values(), *self.buffers.values()):
            moved = array.detach().to(device)
            if moved.ndim == 4:
                moved = with_channels_last(moved) if channels_last else moved.contiguous()
            array.data = moved


def with_channels_last(array: Any) -> Any:
    """Lay an array [B, C, H, W] out with channels last, said by its strides even where C is 1.

    Operators choose the layout of their result by the strides they are given; those of one channel,
    or of a 1x1 kernel, fit both layouts and would be read as the other.
    """
    torch = import_torch()
    form = torch.channels_last
    laid = torch.empty(array.shape, dtype=array.dtype, device=array.device, memory_format=form)
    return laid.copy_(array)


def pooled_or_positions(features: Any, *, positions: bool) -> Any:
    """Features as a head takes them: [B, C] means, or [B, P, C] for a convolutional head."""
    if features.ndim == 4:
        # No copy with channels last; and unlike that of a mean over two axes, the gradient is laid
        # out as the features are, which saves a fifth of a step.
        features = features.permute(0, 2, 3, 1).flatten(1, 2)  # [B, P, C]
    return features if positions else features.mean(1)


def _training_form(torch: Any, segment: Any, *, stage: str) -> Any:
    copies: dict[Any, Any] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(segment.graph, copies))
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name == "batch_norm":
            arguments = list(node.args)
            arguments[_TRAINING_ARGUMENT] = True
            arguments[_MOMENTUM_ARGUMENT] = _MOMENTUM
            node.args = tuple(arguments)
        elif any(part in name for part in _MODE_IN_NAME):
            raise ModelError(
                f"stage {stage} has an operator that cannot be put into training mode: {name}",
                help="leave --joint out to fit heads on the backbone as it is",
            )
    return torch.fx.GraphModule(segment, graph)


def _arrays(segment: Any) -> Iterator[tuple[str, Any]]:
    yield from segment.named_parameters()
    yield from segment.named_buffers()
    torch = import_torch()
    for node in segment.graph.nodes:  # constants that are neither parameter nor buffer
        if node.op == "get_attr":
            array = segment
            for part in node.target.split("."):
                array = getattr(array, part)
            if isinstance(array, torch.Tensor):
                yield node.target, array

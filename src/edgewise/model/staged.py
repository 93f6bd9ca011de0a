"""The staged model: what every frontend makes, every backend runs and every decider asks about."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ModelError, ShapeError, nearest_names
from edgewise.model.cuts import Cut, choose_cuts, legal_cuts
from edgewise.model.graph import Graph, TensorSpec
from edgewise.model.heads import ExitHead, default_head_spec, random_head
from edgewise.model.validation import Validation

if TYPE_CHECKING:
    from pathlib import Path

Float32 = npt.NDArray[np.float32]


class Source(Protocol):
    """Where the operators and weights live; made by a frontend, asked by backends."""

    @property
    def graph(self) -> Graph:
        """The operators, cuts and tensors."""
        ...

    @property
    def dynamic_batch(self) -> bool:
        """Whether pieces can be had for any batch size, or for one sample only."""
        ...

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        """Return the piece between two tensors as a complete ONNX model with its weights.

        Input and output have a fixed batch size, so that runtimes can plan their memory.

        Raises:
            ModelError: The piece cannot be exported.
            BackendUnavailable: The ``onnx`` package is missing.
        """
        ...

    def torch_segment(self, start: str, stop: str) -> Callable[[Any], Any] | None:
        """Return the piece as a torch callable, or ``None`` where the source is not torch's."""
        ...

    def weights_digest(self) -> str:
        """SHA-256 over the structure and weights, hexadecimal."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous piece of a model that ends where one may stop.

    Attributes:
        index: Position, from 0.
        name: Name of its end, for people.
        start: The tensor it is given.
        stop: The tensor it returns.
        flops: Work for one sample; a multiply-add counts two.
        weight_bytes: Size of its parameters, bytes.
        num_ops: How many operators it has.
    """

    index: int
    name: str
    start: TensorSpec
    stop: TensorSpec
    flops: float
    weight_bytes: int
    num_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A place where an answer can be had: the end of stage ``index``.

    Attributes:
        index: Position, from 0; equal to the index of the stage it ends.
        name: Name of the place, for people.
        depth_ratio: Work before it as a share of the backbone's, 0 to 1.
        head: What answers there; ``None`` where the stage's output is the answer (the model's own
            classifier).
        accuracy: Share of validation samples answered rightly, 0 to 1; ``None`` when unknown.
    """

    index: int
    name: str
    depth_ratio: float
    head: ExitHead | None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """Stages in order with an exit at the end of each; depth is an argument of a call, never state.

    Attributes:
        name: Name for people and profiles.
        source: Where operators and weights live.
        stages: S stages.
        exits: S exits, one per stage.
        num_classes: Classes answered, the last axis of the logits.
        class_names: Their names, or empty.
        validation: What each exit answered on held-out samples; ``None`` when unknown.
        preprocess: How images become inputs, as written in a checkpoint; ``None`` when unknown.
        provenance: Where the model and its heads came from: free-form facts for people.

    Raises:
        ModelError: The stages do not follow one another.
    """

    name: str
    source: Source = field(repr=False)
    stages: tuple[Stage, ...]
    exits: tuple[Exit, ...]
    num_classes: int
    class_names: tuple[str, ...] = ()
    validation: Validation | None = field(default=None, repr=False)
    preprocess: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.stages or len(self.stages) != len(self.exits):
            raise ModelError(
                f"expected one exit per stage, found {len(self.stages)} stages and"
                f" {len(self.exits)} exits"
            )
        for before, after in itertools.pairwise(self.stages):
            if before.stop.name != after.start.name:
                raise ModelError(
                    f"stage {after.index} starts at {after.start.name!r} but stage {before.index}"
                    f" stops at {before.stop.name!r}"
                )

    @classmethod
    def from_module(
        cls,
        module: Any,
        example_inputs: Any,
        *,
        exits: int | Sequence[float] | Sequence[str] = 8,
        name: str | None = None,
    ) -> StagedModel:
        """Stage any torch module that ``torch.export`` accepts.

        Args:
            module: In evaluation mode or not; it is exported as in evaluation mode and left as it
                was.
            example_inputs: One tensor [B, ...], or a tuple holding it.
            exits: A count (equal steps of FLOPs), fractions of the FLOPs, or module names.
            name: For people and profiles; the class name by default.

        Returns:
            A model whose last exit is the module's own output and whose other exits have no
            heads yet: `edgewise prepare`, ``with_heads`` or ``with_random_heads`` give them.

        Raises:
            BackendUnavailable: torch is not installed.
            ModelError: The module cannot be exported, or has no legal cut.
            ConfigError: ``exits`` is out of range or names nothing.
        """
        frontend = importlib.import_module("edgewise.frontends.torch_module")
        return cls.from_source(
            frontend.TorchSource.export(module, example_inputs),
            exits=exits,
            name=name or type(module).__name__,
        )

    @classmethod
    def from_onnx(
        cls,
        path: str | Path,
        *,
        exits: int | Sequence[float] | Sequence[str] = 8,
        name: str | None = None,
    ) -> StagedModel:
        """Stage an ONNX file with the same cut finder.

        Args:
            path: The file; external data is found beside it.
            exits: A count, fractions of the FLOPs, or tensor names.
            name: For people and profiles; the file's name by default.

        Raises:
            BackendUnavailable: The ``onnx`` package is not installed.
            ModelError: Not an ONNX model, damaged, or without a legal cut.
        """
        frontend = importlib.import_module("edgewise.frontends.onnx_file")
        source = frontend.OnnxSource.read(path)
        return cls.from_source(source, exits=exits, name=name or source.name)

    @classmethod
    def from_source(
        cls,
        source: Source,
        *,
        exits: int | Sequence[float] | Sequence[str] = 8,
        name: str,
    ) -> StagedModel:
        """Cut a source into stages; the seam that every frontend uses."""
        graph = source.graph
        if len(graph.inputs) != 1:
            raise ModelError(
                f"a staged model takes one input tensor, found {len(graph.inputs)}:"
                f" {', '.join(graph.inputs)}",
                help="wrap the module so that the other inputs are constants",
            )
        answer = graph.tensors.get(graph.outputs[0])
        if answer is None or len(answer.shape) != 2:
            raise ModelError(
                f"expected the first output to be logits [B, classes], found"
                f" {None if answer is None else answer.shape}",
                help="wrap the module so that it returns its logits",
            )
        given = graph.tensors.get(graph.inputs[0])
        if given is None or given.dtype != "float32" or answer.dtype != "float32":
            raise ModelError(
                f"expected a float32 input and float32 logits, found"
                f" {'no known type' if given is None else given.dtype} and {answer.dtype}",
                help="convert it first, for torch with module.float()",
            )
        cuts = [c for c in legal_cuts(graph) if c.tensor.dtype == "float32"]
        chosen = choose_cuts(graph, exits, cuts=cuts)
        bounds = [given, *(c.tensor for c in chosen), answer]
        return cls._assemble(
            source, bounds=bounds, name=name, num_classes=answer.shape[1], scopes=chosen
        )

    @classmethod
    def from_boundaries(
        cls, source: Source, boundaries: Sequence[str], *, name: str, num_classes: int
    ) -> StagedModel:
        """Stage a source at tensors that were chosen before.

        Args:
            source: Where operators and weights live.
            boundaries: Names of the tensors at which stages end, in order; what follows the last
                one is left out, so a backbone can be had without its classifier.
            name: For people and profiles.
            num_classes: Classes that the exits answer.

        Raises:
            ModelError: There is no such tensor, or a stage cannot be computed from the one before.
        """
        graph = source.graph
        names = [*graph.inputs[:1], *boundaries]
        for tensor in names:
            if tensor not in graph.tensors:
                raise ModelError(
                    f"the model has no tensor {tensor!r} that could end a stage",
                    help=nearest_names(tensor, graph.tensors),
                )
        bounds = [graph.tensors[tensor] for tensor in names]
        return cls._assemble(source, bounds=bounds, name=name, num_classes=num_classes)

    @classmethod
    def _assemble(
        cls,
        source: Source,
        *,
        bounds: Sequence[TensorSpec],
        name: str,
        num_classes: int,
        scopes: Sequence[Cut] = (),
    ) -> StagedModel:
        graph = source.graph
        labels = {c.tensor.name: c.scope for c in scopes if c.scope}
        stages = []
        for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
            ops = [graph.ops[i] for i in graph.between(start.name, stop.name)]
            stages.append(
                Stage(
                    index=k,
                    name=labels.get(stop.name, stop.name),
                    start=start,
                    stop=stop,
                    flops=float(sum(op.flops for op in ops)),
                    weight_bytes=sum(op.weight_bytes for op in ops),
                    num_ops=len(ops),
                )
            )
        total = sum(s.flops for s in stages) or 1.0
        depth = np.cumsum([s.flops for s in stages]) / total
        exits = tuple(
            Exit(index=s.index, name=s.name, depth_ratio=float(d), head=None)
            for s, d in zip(stages, depth, strict=True)
        )
        return cls(
            name=name, source=source, stages=tuple(stages), exits=exits, num_classes=num_classes
        )

    @property
    def input(self) -> TensorSpec:
        """What the model is given, for one sample."""
        return self.stages[0].start

    @property
    def num_exits(self) -> int:
        """How many exits, the last included."""
        return len(self.exits)

    @property
    def flops(self) -> float:
        """Work of the backbone for one sample, heads excluded."""
        return float(sum(s.flops for s in self.stages))

    @property
    def has_all_heads(self) -> bool:
        """Whether every exit can answer."""
        return all(e.head is not None for e in self.exits[:-1]) and (
            self.exits[-1].head is not None or self.stages[-1].stop.shape[1:] == (self.num_classes,)
        )

    def legal_cuts(self) -> tuple[Cut, ...]:
        """Every place where this model may be cut."""
        return legal_cuts(self.source.graph)

    def check_exit(self, exit_index: int) -> int:
        """Return an exit index that exists.

        Raises:
            ConfigError: It is out of range; negative indices are not accepted.
        """
        if not 0 <= exit_index < self.num_exits:
            raise ConfigError(
                f"expected an exit index from 0 to {self.num_exits - 1}, found {exit_index!r}"
                f" (model {self.name!r})",
                help="`edgewise stage MODEL` lists the exits",
            )
        return int(exit_index)

    def with_heads(
        self,
        heads: Mapping[int, ExitHead],
        *,
        accuracy: Mapping[int, float] | None = None,
        **changes: Any,
    ) -> StagedModel:
        """Return a copy with heads at some exits; this model stays as it is.

        Raises:
            ConfigError: An exit index is out of range.
            ShapeError: A head was made for other features.
        """
        accuracy = accuracy or {}
        exits = list(self.exits)
        for k, head in heads.items():
            stop = self.stages[self.check_exit(k)].stop
            if head.spec.feature_shape != stop.shape:
                raise ShapeError(
                    f"the head for exit {k} was made for features {head.spec.feature_shape}, the"
                    f" stage ends with {stop.shape}"
                )
            exits[k] = replace(exits[k], head=head)
        for k, value in accuracy.items():
            exits[k] = replace(exits[k], accuracy=value)
        return replace(self, exits=tuple(exits), **changes)

    def with_random_heads(
        self, *, kind: str = "auto", width: int = 128, seed: int = 0
    ) -> StagedModel:
        """Return a copy with an untrained head at each exit that has none: real cost, no meaning.

        The last exit keeps the model's own answer where it has one.
        """
        rng = np.random.default_rng(seed)
        own_answer = self.stages[-1].stop.shape[1:] == (self.num_classes,)
        heads = {
            e.index: random_head(
                default_head_spec(
                    self.stages[e.index].stop.shape, self.num_classes, kind=kind, width=width
                ),
                rng,
            )
            for e in self.exits
            if e.head is None and not (own_answer and e.index == self.num_exits - 1)
        }
        return self.with_heads(heads)

    def truncated(self, num_stages: int, *, num_classes: int) -> StagedModel:
        """Return a copy that ends after some stages: a backbone whose classifier is replaced."""
        kept = self.exits[: self.check_exit(num_stages - 1) + 1]
        share = kept[-1].depth_ratio
        exits = tuple(replace(e, depth_ratio=e.depth_ratio / share) for e in kept)
        return replace(self, stages=self.stages[:num_stages], exits=exits, num_classes=num_classes)

    def flops_to(self, exit_index: int, *, every_head: bool = False) -> float:
        """Work to answer at an exit, head counted, for one sample.

        Args:
            exit_index: Where the answer is taken.
            every_head: Count each head on the way too, as a network that runs them all.
        """
        k = self.check_exit(exit_index)
        heads = [e.head.spec.flops if e.head else 0.0 for e in self.exits]
        return float(
            sum(s.flops for s in self.stages[: k + 1])
            + (sum(heads[: k + 1]) if every_head else heads[k])
        )

    def version(self) -> str:
        """Digest of structure, weights, heads and cuts: what a profile was measured on.

        Returns:
            16 hexadecimal digits.
        """
        digest = hashlib.sha256(self.source.weights_digest().encode())
        digest.update(json.dumps([s.stop.name for s in self.stages]).encode())
        for e in self.exits:
            if e.head is not None:
                digest.update(repr(e.head.spec).encode())
                for key in sorted(e.head.weights):
                    digest.update(np.ascontiguousarray(e.head.weights[key]).tobytes())
        return digest.hexdigest()[:16]

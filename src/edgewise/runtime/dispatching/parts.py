"""A plan's steps found again in a model: whose forward is replaced, with which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgewise.backends.operators import Weights
from edgewise.backends.operators.weights import weight_sizes
from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.errors import ConfigError, nearest_names
from edgewise.profiles.operators import OperatorShape, parse_shape

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What one module computes in place of its own forward.

    Attributes:
        path: Of the module.
        shape: What is computed.
        backend: By whom.
        weights: The modules' own tensors; nothing is copied.
    """

    path: str
    shape: OperatorShape
    backend: str
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseParts:
    """A plan for one phase and length, as parts.

    Attributes:
        plan: Where it is from.
        parts: By path of the module.
        passing: Norms that hand on what they get, since whoever reads them computes them.
    """

    plan: PhasePlan
    parts: Mapping[str, Part]
    passing: frozenset[str]


@dataclass(slots=True)
class _Found:
    parts: dict[str, Part] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)


def find_parts(model: nn.Module, plan: DispatchPlan) -> tuple[PhaseParts, ...]:
    """Find every step of a plan in a model.

    Args:
        model: From transformers, or built as theirs are.
        plan: For it.

    Raises:
        ConfigError: The plan names a module that is not there, or has other sizes: it is of
            another model. Or parameters are not float32 on the CPU.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return tuple(_phase(modules, phase, plan.model) for phase in plan.phases)


def _phase(modules: Mapping[str, nn.Module], phase: PhasePlan, model: str) -> PhaseParts:
    found = _Found()
    for step in phase.steps:
        for path in (*step.covers, *([step.name] if step.kind in _WHOLE else [])):
            if path not in modules:
                raise ConfigError(
                    f"the plan is of {model!r} and names module {path!r}, which this model has not;"
                    f" {nearest_names(path, modules)}",
                    help="plan for this model: edgewise dispatch plan",
                )
        _add(found, modules, step)
    return PhaseParts(
        plan=phase,
        parts=found.parts,
        passing=frozenset(found.passing),
    )


_WHOLE = ("mlp", "norm_mlp", "layer")


def _add(found: _Found, modules: Mapping[str, nn.Module], step: Step) -> None:
    shapes = [parse_shape(key) for key in step.shapes]
    if step.kind == "norm_linear":
        _add_norm_linears(found, modules, step, shapes)
        return
    if len(shapes) != 1:
        raise ConfigError(f"step {step.name!r} ({step.kind}): expected one shape, found {shapes}")
    path = step.name if step.kind in _WHOLE else step.covers[0]
    weights = _GATHER[step.kind](modules, path, step.covers)
    if step.kind == "norm_mlp":
        found.passing.add(step.covers[0])
    _keep(found, modules, step, path, shapes[0], weights)


def _add_norm_linears(
    found: _Found, modules: Mapping[str, nn.Module], step: Step, shapes: Sequence[OperatorShape]
) -> None:
    norm, *readers = step.covers
    if len(readers) != len(shapes):
        raise ConfigError(
            f"step {step.name!r}: expected a shape for each of {readers}, found {len(shapes)}"
        )
    # What a norm outside the reader's block gives is seen from outside, as the last hidden state
    # is, and a reader may be asked for fewer rows than the norm.
    beside = norm.rpartition(".")[0]
    if not all(path.startswith(f"{beside}.") for path in readers):
        raise ConfigError(
            f"step {step.name!r} joins {norm!r} to {readers}, but what that norm gives is an answer"
            " of the model by itself",
            help="plan for this model: edgewise dispatch plan",
        )
    found.passing.add(norm)
    for path, shape in zip(readers, shapes, strict=True):
        if shape.kind != "norm_linear":
            _keep(found, modules, step, path, shape, _GATHER[shape.kind](modules, path, [path]))
        else:
            weights = _norm_linear(modules, path, [norm, path])
            _keep(found, modules, step, path, shape, weights)


def _keep(  # noqa: PLR0913, PLR0917 - what a part is made of
    found: _Found,
    modules: Mapping[str, nn.Module],
    step: Step,
    path: str,
    shape: OperatorShape,
    weights: Weights,
) -> None:
    _check(modules, path, shape, weights)
    found.parts[path] = Part(path=path, shape=shape, backend=step.backend, weights=weights)


# --- whose weights ---------------------------------------------------------------------------


def _tensors(path: str, **given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Parameters by role, dots for double underscores; those that are ``None`` are left out."""
    import torch

    found = {}
    for role, tensor in given.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ConfigError(
                f"parameters of {path!r} are {tensor.dtype} on {tensor.device}; dispatch runs"
                " float32 on the CPU",
                help="model.float().cpu()",
            )
        found[role.replace("__", ".")] = tensor.detach().contiguous()
    return found


def _eps(norm: Any) -> float:
    value = getattr(norm, "variance_epsilon", None)
    return float(getattr(norm, "eps", 1e-5) if value is None else value)


def _linear(modules: Mapping[str, Any], path: str, _: Sequence[str]) -> Weights:
    module = _having(modules, path, "weight")
    return Weights(tensors=_tensors(path, weight=module.weight, bias=_bias(module)))


def _norm(modules: Mapping[str, Any], path: str, _: Sequence[str]) -> Weights:
    module = _having(modules, path, "weight")
    tensors = _tensors(path, weight=module.weight, bias=_bias(module))
    return Weights(tensors=tensors, eps=_eps(module))


def _norm_linear(modules: Mapping[str, Any], path: str, covers: Sequence[str]) -> Weights:
    linear, norm = _having(modules, path, "weight"), _having(modules, covers[0], "weight")
    tensors = _tensors(path, weight=linear.weight, bias=_bias(linear))
    return Weights(tensors=tensors | _norm_tensors(covers[0], norm), eps=_eps(norm))


def _norm_tensors(path: str, norm: Any) -> dict[str, torch.Tensor]:
    return _tensors(path, norm__weight=norm.weight, norm__bias=_bias(norm))


def _mlp(modules: Mapping[str, Any], path: str, _: Sequence[str]) -> Weights:
    return Weights(tensors=_mlp_tensors(modules, path))


def _norm_mlp(modules: Mapping[str, Any], path: str, covers: Sequence[str]) -> Weights:
    norm = _having(modules, covers[0], "weight")
    tensors = _mlp_tensors(modules, path) | _norm_tensors(covers[0], norm)
    return Weights(tensors=tensors, eps=_eps(norm))


def _mlp_tensors(modules: Mapping[str, Any], path: str) -> dict[str, torch.Tensor]:
    names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    if f"{path}.Wi" in modules:
        names = {"Wi": "gate_up", "Wo": "down"}
    found: dict[str, torch.Tensor] = {}
    for name, role in names.items():
        linear = _having(modules, f"{path}.{name}", "weight")
        found |= _tensors(path, **{role: linear.weight, f"{role}__bias": _bias(linear)})
    return found


def _layer(modules: Mapping[str, Any], path: str, covers: Sequence[str]) -> Weights:
    found: dict[str, torch.Tensor] = {}
    for letter in "qkvo":
        linear = _having(modules, f"{path}.self_attn.{letter}_proj", "weight")
        found |= _tensors(path, **{letter: linear.weight, f"{letter}__bias": _bias(linear)})
    for name in ("q_norm", "k_norm"):
        norm = modules.get(f"{path}.self_attn.{name}")
        if norm is not None:
            found |= _tensors(path, **{name: norm.weight})
    # In the order they run: before or after attention, then before or after the MLP.
    norms = [c for c in covers if c.rpartition(".")[0] == path]
    if len(norms) != 2:
        raise ConfigError(f"layer {path!r}: expected two norms among what it covers, found {norms}")
    first, second = (_having(modules, name, "weight") for name in norms)
    if _eps(first) != _eps(second):
        raise ConfigError(f"layer {path!r}: its norms have different eps")
    found |= _tensors(path, input_norm=first.weight, post_norm=second.weight)
    return Weights(tensors=found | _mlp_tensors(modules, f"{path}.mlp"), eps=_eps(first))


def _nothing(*_: object) -> Weights:
    return Weights()


_GATHER: dict[str, Callable[[Mapping[str, Any], str, Sequence[str]], Weights]] = {
    "linear": _linear,
    "rmsnorm": _norm,
    "layernorm": _norm,
    "activation": _nothing,
    "mlp": _mlp,
    "norm_mlp": _norm_mlp,
    "layer": _layer,
}


def _having(modules: Mapping[str, Any], path: str, attribute: str) -> Any:
    module = modules.get(path)
    if getattr(module, attribute, None) is None:
        raise ConfigError(
            f"the plan is of another model: {path!r} is a {type(module).__name__} without"
            f" {attribute}"
        )
    return module


def _bias(module: Any) -> Any:
    return getattr(module, "bias", None)


# --- whose sizes -----------------------------------------------------------------------------


def _check(modules: Mapping[str, Any], path: str, shape: OperatorShape, weights: Weights) -> None:
    """Refuse a plan of another model before any backend sees its sizes."""
    expected = weight_sizes(shape)
    found = {role: tuple(tensor.shape) for role, tensor in weights.tensors.items()}
    wrong = [
        f"{role} {found.get(role, 'missing')} instead of {size}"
        for role, size in expected.items()
        if found.get(role) != size
    ]
    wrong += [
        f"a {role} that the plan knows nothing of"
        for role in found
        if role not in expected and role != "norm.bias"
    ]
    wrong += _other_activation(modules, path, shape)
    if wrong:
        raise ConfigError(
            f"the plan is of another model: {path!r} ({type(modules[path]).__name__}) has"
            f" {', '.join(wrong)}",
            help="plan for this model: edgewise dispatch plan",
        )


_ACTIVATIONS = {"silu": {"SiLU", "SiLUActivation"}, "gelu": {"GELU", "GELUActivation"}}


def _other_activation(modules: Mapping[str, Any], path: str, shape: OperatorShape) -> list[str]:
    """What is wrong with the activation in or at a module, in words."""
    if shape.kind not in {"activation", *_WHOLE}:
        return []
    inside = {"activation": ("",), "layer": (".mlp.act_fn",)}.get(shape.kind, (".act_fn", ".act"))
    module = next((modules[path + end] for end in inside if path + end in modules), None)
    function = shape.function.partition("-")[0]
    if type(module).__name__ not in _ACTIVATIONS.get(function, set()):
        return [f"the activation {type(module).__name__} instead of {function}"]
    return [] if getattr(module, "approximate", "none") == "none" else ["an approximate gelu"]

"""The paper's network: d-64-32-1 with ReLU, one for stages and one for heads.

Inputs are the features and, for nets whose units differ, the unit's normalised number; the target
is the logarithm of the seconds, less that unit's mean, so that all units count by their relative
error and one number need not encode how much each costs. The paper states neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError
from edgewise.predict.features import require_some_feature, training_table, unit_groups
from edgewise.predict.predictor import Predictor
from edgewise.predict.state_samples import StateSamples

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

WIDTHS = (64, 32)
_LAYERS = ("w1", "b1", "w2", "b2", "w3", "b3")
_SCALES = ("in_mean", "in_scale", "out_mean", "out_scale")
_STATES_AT_ONCE = 1024
_STATES_NEEDED = 64


class Mlp(Predictor):
    """Two small networks, or one where there are only stages or only heads.

    Args:
        arrays: By ``"stage.w1"`` and so on: weights, biases, and scales of inputs and target.
        features: [F].
        units: [U].

    Raises:
        ProfileError: The arrays do not belong to these features.
    """

    kind = "mlp"

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        features: tuple[str, ...],
        units: tuple[str, ...],
    ) -> None:
        self.features = features
        self.units = units
        self._groups = unit_groups(units)
        names = [f"{g}.{n}" for g in self._groups for n in (*_LAYERS, *_SCALES)]
        self._arrays = {name: np.asarray(arrays[name], dtype=np.float32) for name in names}
        self._nets = [
            _Net(
                {n: self._arrays[f"{group}.{n}"] for n in (*_LAYERS, *_SCALES)},
                num_features=len(features),
                num_units=where.stop - where.start,
            )
            for group, where in self._groups.items()
        ]
        self._stack()

    @property
    def num_parameters(self) -> dict[str, int]:
        """Weights and biases of each network, without the scales of inputs and target."""
        return {g: sum(self._arrays[f"{g}.{n}"].size for n in _LAYERS) for g in self._groups}

    def predict(self, state: Float64) -> Float64:
        """Logarithms in FP32, exponentiated."""
        states = np.asarray(state, dtype=np.float32)
        if states.ndim == 1:
            return self._one(states)
        logs = np.empty((len(states), len(self.units)))
        for start in range(0, len(states), _STATES_AT_ONCE):
            rows = slice(start, start + _STATES_AT_ONCE)
            for net, where in zip(self._nets, self._groups.values(), strict=True):
                logs[rows, where] = net.many(states[rows])
        return np.exp(logs)

    def _one(self, state: Float32) -> Float64:
        """All units in one batch, with both networks side by side.

        Hidden units of the other network are held at zero, so the second layers can be stacked.
        """
        first = state @ self._state + self._units  # [U, 64·nets]
        np.maximum(first, 0, out=first)
        second = first @ self._second
        second += self._second_bias
        np.maximum(second, 0, out=second)
        logs: Float64 = np.einsum("uk,uk->u", second, self._third) + self._third_bias
        return np.exp(logs, out=logs)

    def _stack(self) -> None:
        nets = self._nets
        self._state = np.hstack([net.state for net in nets])
        self._second = np.vstack([net.w2 for net in nets])
        sizes = [len(net.units) for net in nets]
        self._second_bias = np.repeat([net.b2 for net in nets], sizes, axis=0)
        self._third = np.repeat([net.w3 for net in nets], sizes, axis=0)
        self._third_bias = np.concatenate([net.b3 for net in nets]).astype(np.float64)
        self._units = np.full((sum(sizes), WIDTHS[0] * len(nets)), -1e30, dtype=np.float32)
        for k, (net, where) in enumerate(zip(nets, self._groups.values(), strict=True)):
            self._units[where, k * WIDTHS[0] : (k + 1) * WIDTHS[0]] = net.units

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Weights, biases and scales."""
        return dict(self._arrays)


class _Net:
    """One network, with the scales folded into its first and last layer."""

    def __init__(self, arrays: Mapping[str, Float32], *, num_features: int, num_units: int) -> None:
        inputs = arrays["w1"].shape[0]
        if inputs - num_features not in {0, 1}:
            raise ProfileError(
                f"expected a network of {num_features} features and perhaps a unit's number, found"
                f" {inputs} inputs"
            )
        first = arrays["w1"] / arrays["in_scale"][:, None]
        bias = arrays["b1"] - arrays["in_mean"] @ first
        ids = _unit_ids(num_units)[:, None] if inputs > num_features else np.zeros((num_units, 0))
        self.state = first[:num_features]
        self.units = (bias + ids @ first[num_features:]).astype(np.float32)  # [U, 64]
        self.w2, self.b2 = arrays["w2"], arrays["b2"]
        self.w3 = (arrays["w3"] * arrays["out_scale"]).ravel()
        self.b3 = np.broadcast_to(
            arrays["b3"] * arrays["out_scale"] + arrays["out_mean"], num_units
        )

    def many(self, states: Float32) -> Float32:
        """Logarithm of the seconds of every unit in states [N, F]: [N, U]."""
        count, units = len(states), len(self.units)
        first = ((states @ self.state)[:, None, :] + self.units).reshape(count * units, -1)
        np.maximum(first, 0, out=first)
        second = first @ self.w2
        second += self.b2
        np.maximum(second, 0, out=second)
        logs: Float32 = (second @ self.w3).reshape(count, units) + self.b3
        return logs


def _unit_ids(num_units: int) -> Float32:
    return (np.arange(num_units) / max(1, num_units - 1)).astype(np.float32)


def states_needed(features: tuple[str, ...]) -> int:  # noqa: ARG001 - the same for every kind
    """Fewest states it can be fitted to."""
    return _STATES_NEEDED


def fit(  # noqa: PLR0913 - one per setting of the training
    samples: StateSamples,
    *,
    seed: int = 0,
    unit_id: bool = True,
    steps: int = 10_000,
    batch: int = 256,
    learning_rate: float = 1e-2,
) -> Mlp:
    """Train both networks with Adam on the medians of each state.

    Args:
        samples: What to fit to.
        seed: Of the first weights and of the batches.
        unit_id: Whether the unit's number is an input, as for CNNs; without it all stages are
            taken to cost the same, and all heads, as for transformer layers.
        steps: Batches of training.
        batch: Rows, a state and a unit each, of one step.
        learning_rate: At the start; falls to nothing along half a cosine.

    Source:
        Kingma and Ba, Adam (2015); He et al., Delving Deep into Rectifiers (2015), for the first
        weights.
    """
    features, states, costs = training_table(samples, kind="mlp", needed=_STATES_NEEDED)
    require_some_feature(features, kind="mlp")
    rng = np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for group, where in unit_groups(samples.units).items():
        logs = np.log(costs[:, where])
        found = _train(
            states.astype(np.float32),
            logs.astype(np.float32),
            rng=rng,
            unit_id=unit_id,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
        )
        arrays |= {f"{group}.{name}": array for name, array in found.items()}
    return Mlp(arrays, features=features, units=samples.units)


def _train(  # noqa: PLR0913
    states: Float32,
    logs: Float32,
    *,
    rng: np.random.Generator,
    unit_id: bool,
    steps: int,
    batch: int,
    learning_rate: float,
) -> dict[str, Float32]:
    """Fit one network to the logarithms of the costs [N, U]."""
    num_states, num_units = logs.shape
    ids = _unit_ids(num_units)
    mean, scale = states.mean(axis=0), states.std(axis=0)
    if unit_id:
        mean, scale = np.append(mean, ids.mean()), np.append(scale, ids.std() or 1.0)
    out_mean = logs.mean(axis=0) if unit_id else np.full(num_units, logs.mean())
    logs = logs - out_mean
    out_scale = np.float32(logs.std() or 1.0)
    weights = _first_weights(len(mean), rng)
    if unit_id:
        weights[0][-1] *= 3  # costs of neighbouring units differ more than those of close states
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    for step in range(steps):
        rows = rng.integers(num_states, size=batch)
        units = rng.integers(num_units, size=batch)
        inputs = states[rows]
        if unit_id:
            inputs = np.column_stack([inputs, ids[units]])
        target = logs[rows, units] / out_scale
        slopes = _slopes(weights, ((inputs - mean) / scale).astype(np.float32), target)
        rate = learning_rate * 0.5 * (1 + np.cos(np.pi * step / steps))
        _adam(weights, slopes, moments, rate=rate, step=step + 1)
    scales: tuple[Any, ...] = (mean, scale, out_mean, out_scale)
    found: dict[str, Any] = {
        **dict(zip(_LAYERS, weights, strict=True)),
        **dict(zip(_SCALES, scales, strict=True)),
    }
    return {name: np.asarray(array, dtype=np.float32) for name, array in found.items()}


def _first_weights(num_inputs: int, rng: np.random.Generator) -> list[Float32]:
    weights: list[Float32] = []
    before = num_inputs
    for width in (*WIDTHS, 1):
        drawn = rng.standard_normal((before, width)) * np.sqrt(2 / before)
        weights += [drawn.astype(np.float32), np.zeros(width, dtype=np.float32)]
        before = width
    # The bends of the first layer stand all over the inputs, not all at their mean.
    weights[1] += rng.standard_normal(WIDTHS[0]).astype(np.float32)
    return weights


def _slopes(weights: list[Float32], inputs: Float32, target: Float32) -> list[Float32]:
    """Gradient of the mean squared error, by the chain rule."""
    w1, b1, w2, b2, w3, b3 = weights
    first = np.maximum(inputs @ w1 + b1, 0)
    second = np.maximum(first @ w2 + b2, 0)
    error = ((second @ w3 + b3)[:, 0] - target) * np.float32(2 / len(target))
    at_second = error[:, None] * w3[:, 0] * (second > 0)
    at_first = at_second @ w2.T * (first > 0)
    return [
        inputs.T @ at_first,
        at_first.sum(axis=0),
        first.T @ at_second,
        at_second.sum(axis=0),
        second.T @ error[:, None],
        error.sum(keepdims=True),
    ]


def _adam(
    weights: list[Float32],
    slopes: list[Float32],
    moments: list[tuple[Float32, Float32]],
    *,
    rate: float,
    step: int,
) -> None:
    """One step, in place."""
    beta, gamma = 0.9, 0.999
    size = np.float32(rate * np.sqrt(1 - gamma**step) / (1 - beta**step))
    for k, (slope, (mean, square)) in enumerate(zip(slopes, moments, strict=True)):
        np.add(mean, (1 - beta) * (slope - mean), out=mean)
        np.add(square, (1 - gamma) * (slope * slope - square), out=square)
        weights[k] -= size * mean / (np.sqrt(square) + np.float32(1e-8))


def restore(
    arrays: Mapping[str, npt.NDArray[Any]], *, features: tuple[str, ...], units: tuple[str, ...]
) -> Mlp:
    """Make it again from its arrays."""
    return Mlp(arrays, features=features, units=units)

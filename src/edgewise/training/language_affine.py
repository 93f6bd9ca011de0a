"""Affine exits in closed form: ridge least squares from sums that one pass over a text leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgewise.errors import ModelError, ShapeError
from edgewise.model.decoding import AffineExit

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class GramSums:
    """What least squares needs of any number of tokens: two matrices per layer, float64.

    With z = [x, 1] for a layer's normed state x and the final normed state y, the sums are those of
    z zᵀ and z yᵀ. Their size does not grow with the text.

    Args:
        layers: Whose maps are fitted.
        width: H.

    Attributes:
        squares: By layer, [H + 1, H + 1].
        products: By layer, [H + 1, H].
        windows: How many windows of the text are in the sums.
    """

    def __init__(self, layers: Sequence[int], *, width: int) -> None:
        self.layers = tuple(layers)
        self.squares: dict[int, Float64] = {k: np.zeros((width + 1, width + 1)) for k in layers}
        self.products: dict[int, Float64] = {k: np.zeros((width + 1, width)) for k in layers}
        self.windows = 0

    @property
    def tokens(self) -> int:
        """How many tokens are in the sums."""
        return round(float(self.squares[self.layers[0]][-1, -1]))

    def add(self, states: Mapping[int, Float32], final: Float32) -> None:
        """Take in one window.

        Args:
            states: By layer, [M, H], normed.
            final: [M, H], the final normed state of the same tokens.

        Raises:
            ModelError: A state is not a number.
        """
        target = final.astype(np.float64)
        for layer in self.layers:
            state = np.ones((len(target), target.shape[1] + 1))
            state[:, :-1] = states[layer]
            if not (np.isfinite(state).all() and np.isfinite(target).all()):
                raise ModelError(f"the states after layer {layer} are not finite numbers")
            self.squares[layer] += state.T @ state
            self.products[layer] += state.T @ target
        self.windows += 1

    def to_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All of it as arrays by name."""
        return {
            "windows": np.asarray([self.windows]),
            **{f"squares.{k}": v for k, v in self.squares.items()},
            **{f"products.{k}": v for k, v in self.products.items()},
        }

    def restore(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Go on from what :meth:`to_arrays` gave.

        Raises:
            ShapeError: They are of other layers or sizes.
        """
        own = self.to_arrays()
        if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in arrays.items()}:
            raise ShapeError("the sums that were kept are of other layers or another model")
        self.windows = int(arrays["windows"][0])
        for k in self.layers:
            self.squares[k] = np.array(arrays[f"squares.{k}"], dtype=np.float64)
            self.products[k] = np.array(arrays[f"products.{k}"], dtype=np.float64)

    def solve(self, layer: int, *, ridge: float) -> AffineExit:
        """The map that is best in the sense of ridge least squares.

        Inputs are standardised first, so that one strength means the same for every direction and
        model; the constant is not penalised.

        Args:
            layer: Which.
            ridge: Strength as a share of a standardised input's variance.

        Source:
            Hoerl and Kennard, Ridge regression, Technometrics 12(1), 1970. Any metric on the
            output, such as the head's covariance, leaves the least squares solution as it is: each
            output has its own coefficients.
        """
        squares, products = self.squares[layer], self.products[layer]
        count = squares[-1, -1]
        mean, target_mean = squares[-1, :-1] / count, products[-1] / count
        covariance = squares[:-1, :-1] / count - np.outer(mean, mean)
        cross = products[:-1] / count - np.outer(mean, target_mean)
        # A constant input has rounding for a variance; it gets no say.
        floor = 1e-12 * (np.diag(squares)[:-1] / count)
        variance = np.diag(covariance)
        scale = np.where(variance > floor, np.sqrt(np.maximum(variance, floor)), np.inf)
        standard = covariance / np.outer(scale, scale) + ridge * np.eye(len(scale))
        from scipy.linalg import solve

        found = (
            solve(standard, cross / scale[:, None], assume_a="pos") / scale[:, None]
        )  # [in, out]
        return AffineExit(
            layer=layer,
            weight=np.ascontiguousarray(found.T, dtype=np.float32),
            bias=(target_mean - mean @ found).astype(np.float32),
        )

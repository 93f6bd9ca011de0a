"""A predictor ready for use: with its upper bounds, what it read, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgewise.device.state import DeviceState
from edgewise.errors import ConfigError, ProfileError
from edgewise.predict.features import missing_features, num_stages
from edgewise.predict.predictor import Predictor, restore_predictor
from edgewise.predict.state_costs import StateCosts
from edgewise.predict.stored import read_stored, write_stored

Float64 = npt.NDArray[np.float64]

FORMAT = "edgewise-predictor"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedPredictor:
    """Costs of all units in a state, with upper bounds.

    A feature that the present state lacks is taken at the value, of those seen in training, where
    the network is slowest: what is not known cannot make a prediction hopeful. `explain` says so.

    Attributes:
        predictor: Median seconds.
        upper_ratio: [U], upper bound over prediction.
        level: Share of observations that the bound was calibrated to cover.
        coverage: Share it covered in states it was not calibrated on; ``None`` if not tried.
        slowest: [F], what stands in for each of the predictor's features when it is missing.
        left_out: Features that could not be used at the fit, each with the reason.
        provenance: ``"measured"``, ``"simulated"`` or ``"estimated"``.
        energy: Median joules, or ``None`` where there was no meter.
        facts: What else is known of the fit, as JSON can say it.
        num_stages: How many of the units are stages; they stand first.
    """

    predictor: Predictor
    upper_ratio: Float64
    level: float
    slowest: Float64
    provenance: str
    coverage: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    energy: Predictor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    num_stages: int = field(init=False)
    _gaps: tuple[tuple[str, float], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.upper_ratio.shape != (len(self.predictor.units),):
            raise ProfileError(
                f"expected {len(self.predictor.units)} upper ratios, found"
                f" {list(self.upper_ratio.shape)}"
            )
        if self.slowest.shape != (len(self.predictor.features),):
            raise ProfileError(
                f"expected {len(self.predictor.features)} values for missing features, found"
                f" {list(self.slowest.shape)}"
            )
        if self.energy is not None and self.energy.features != self.predictor.features:
            raise ProfileError(
                f"energy is predicted from {self.energy.features}, time from"
                f" {self.predictor.features}; expected the same"
            )
        gaps = tuple(zip(self.predictor.features, self.slowest.tolist(), strict=True))
        object.__setattr__(self, "num_stages", num_stages(self.predictor.units))
        object.__setattr__(self, "_gaps", gaps)

    @property
    def num_bytes(self) -> int:
        """Memory of all parameters, bytes."""
        energy = 0 if self.energy is None else self.energy.num_bytes
        return self.predictor.num_bytes + energy + self.upper_ratio.nbytes + self.slowest.nbytes

    def vector(self, state: DeviceState) -> Float64:
        """What the predictor reads of a state, gaps filled: [F]."""
        known = [(state.value(name), slowest) for name, slowest in self._gaps]
        return np.array([slowest if value is None else value for value, slowest in known])

    def predict(self, state: DeviceState) -> StateCosts:
        """Median costs of every unit."""
        vector = self.vector(state)
        seconds = self.predictor.predict(vector)
        joules = None if self.energy is None else self.energy.predict(vector)
        first = self.num_stages
        return StateCosts(
            at_s=state.at_s,
            stage_s=seconds[:first],
            head_s=seconds[first:],
            stage_j=None if joules is None else joules[:first],
            head_j=None if joules is None else joules[first:],
        )

    def upper_s(self, state: DeviceState) -> Float64:
        """Upper bound of every unit's seconds: [U]."""
        bound: Float64 = self.predictor.predict(self.vector(state)) * self.upper_ratio
        return bound

    def explain(self, state: DeviceState) -> list[str]:
        """What a prediction for this state rests on, one sentence each."""
        features = self.predictor.features
        reads = ", ".join(features) or "nothing of the state"
        said = [f"{self.predictor.kind} predictor ({self.provenance}) reads {reads}"]
        for name, reason in missing_features(state, features).items():
            value = self.slowest[features.index(name)]
            said.append(f"{name} is not known ({reason}): taken at its slowest, {value:.3g}")
        said += [f"{name} was not used: {reason}" for name, reason in self.left_out.items()]
        return said

    def check(self) -> None:
        """Predict once, which finds parameters that do not fit together.

        Raises:
            ProfileError: They give something else than costs.
        """
        for predictor in (self.predictor, self.energy):
            costs = None if predictor is None else predictor.predict(self.slowest)
            if costs is not None and not (np.isfinite(costs) & (costs > 0)).all():
                raise ProfileError("the predictor gives costs that are not above zero")
        if not (self.upper_ratio > 0).all():
            raise ProfileError("expected upper ratios above zero")

    def save(self, path: Path) -> None:
        """Write to a file, whole or not at all.

        Raises:
            ProfileError: The kind cannot be kept in files, or the file cannot be written.
        """
        arrays = {f"predictor/{n}": a for n, a in self.predictor.to_arrays().items()}
        arrays["upper_ratio"] = self.upper_ratio
        if self.slowest.size:
            arrays["slowest"] = self.slowest
        if self.energy is not None:
            arrays |= {f"energy/{n}": a for n, a in self.energy.to_arrays().items()}
        header = {
            "kind": self.predictor.kind,
            "features": list(self.predictor.features),
            "units": list(self.predictor.units),
            "energy_kind": None if self.energy is None else self.energy.kind,
            "level": self.level,
            "coverage": self.coverage,
            "left_out": dict(self.left_out),
            "provenance": self.provenance,
            "facts": dict(self.facts),
        }
        write_stored(path, arrays, header, format_name=FORMAT, version=FORMAT_VERSION)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ProfileError: The file is missing, damaged, of another kind or of a newer version.
        """
        arrays, header = read_stored(path, format_name=FORMAT, version=FORMAT_VERSION)
        damaged = sorted(n for n, a in arrays.items() if not np.isfinite(a).all())
        if damaged:
            raise ProfileError(f"{path} is damaged: {damaged[0]!r} holds NaN or infinity")

        def restored(kind: str, prefix: str) -> Predictor:
            own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            return restore_predictor(
                kind, own, features=tuple(header["features"]), units=tuple(header["units"])
            )

        try:
            fitted = cls(
                predictor=restored(header["kind"], "predictor/"),
                upper_ratio=arrays["upper_ratio"],
                level=float(header["level"]),
                coverage=header["coverage"],
                slowest=arrays.get("slowest", np.zeros(0)),
                left_out=header["left_out"],
                provenance=str(header["provenance"]),
                energy=restored(header["energy_kind"], "energy/")
                if header["energy_kind"] is not None
                else None,
                facts=header["facts"],
            )
            fitted.check()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ConfigError) as error:
            raise ProfileError(
                f"{path} is damaged: {type(error).__name__}: {error}", help="fit it again"
            ) from error
        return fitted

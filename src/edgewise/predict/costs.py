"""The static table: measured medians of every unit of one model on one backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError
from edgewise.profiles import Profile

Float64 = npt.NDArray[np.float64]
Segment = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Median costs, and the samples they come from.

    Attributes:
        backend: Where they were measured.
        stage_s: [S], median seconds of each single stage.
        head_s: [S], median seconds to answer at each exit once its stage is done.
        segment_s: Median seconds of each compiled run of stages, single ones included.
        overhead_s: Median seconds a request pays beside its units.
        samples: [R, U] measured seconds, units in the order they ran, for calibrating margins.
        medians: [U], medians of the columns of ``samples``.
        batch_ratio: Batch size to cost relative to one sample, as far as measured.
        provenance: ``"measured"``, ``"simulated"`` or ``"estimated"``.
    """

    backend: str
    stage_s: Float64
    head_s: Float64
    segment_s: Mapping[Segment, float]
    overhead_s: float = 0.0
    samples: Float64 = field(default_factory=lambda: np.zeros((0, 0)), repr=False)
    medians: Float64 = field(default_factory=lambda: np.zeros(0), repr=False)
    batch_ratio: Mapping[int, float] = field(default_factory=dict)
    provenance: str = "measured"

    @property
    def num_exits(self) -> int:
        """How many exits."""
        return len(self.stage_s)

    @classmethod
    def from_profile(cls, profile: Profile, *, backend: str, num_exits: int) -> CostTable:
        """Read the table of one backend out of a profile.

        Raises:
            ProfileError: A stage or head was not measured on that backend.
        """
        names = profile.names(backend)
        stages = [f"segment:{k}-{k + 1}" for k in range(num_exits)]
        heads = [f"head:{k}" for k in range(num_exits)]
        order = [name for pair in zip(stages, heads, strict=True) for name in pair]
        missing = [n for n in order if n not in names]
        if missing:
            raise ProfileError(
                f"the profile of {profile.model_id!r} has no measurement of {missing[0]!r} on"
                f" {backend!r}; it has {', '.join(profile.backends()) or 'nothing'}",
                help=f"edgewise profile {profile.model_id} --backend {backend}",
            )

        def median_s(name: str, batch: int = 1) -> float:
            return float(profile.cost(name, backend, batch).median_s)

        matrix = profile.matrix(order, backend)
        segments = {}
        for name in names:
            if name.startswith("segment:"):
                start, stop = name.removeprefix("segment:").split("-")
                segments[int(start), int(stop)] = median_s(name)
        whole = f"segment:0-{num_exits}"
        batches = {
            key.batch for key in profile.units if (key.name, key.backend) == (whole, backend)
        }
        return cls(
            backend=backend,
            stage_s=np.array([median_s(n) for n in stages]),
            head_s=np.array([median_s(n) for n in heads]),
            segment_s=segments,
            overhead_s=median_s("controller") if "controller" in names else 0.0,
            samples=matrix[np.isfinite(matrix).all(axis=1)],
            medians=np.array([median_s(n) for n in order]),
            batch_ratio={b: median_s(whole, b) / median_s(whole) for b in batches if 1 in batches},
            provenance=profile.provenance,
        )

    @classmethod
    def from_costs(
        cls,
        stage_s: list[float],
        head_s: list[float],
        *,
        segment_s: Mapping[Segment, float] | None = None,
        provenance: str = "estimated",
    ) -> CostTable:
        """A table from plain numbers, for tests and simulation."""
        singles = {(k, k + 1): s for k, s in enumerate(stage_s)}
        return cls(
            backend="null",
            stage_s=np.array(stage_s, dtype=float),
            head_s=np.array(head_s, dtype=float),
            segment_s={**singles, **(segment_s or {})},
            provenance=provenance,
        )

    def remaining_s(self, position: int, exit_index: int) -> float:
        """Median seconds from a position, over single stages, to the answer at an exit.

        Args:
            position: Stages finished.
            exit_index: Where to answer; at least ``position - 1``.
        """
        return math.fsum(self.stage_s[position : exit_index + 1]) + float(self.head_s[exit_index])

    def full_depth_s(self) -> float:
        """Median seconds of the whole network as one piece, last head included."""
        whole = self.segment_s.get((0, self.num_exits), math.fsum(self.stage_s))
        return float(whole + self.head_s[-1])

    def batch_factor(self, batch: int) -> float:
        """Cost of a batch relative to one sample: measured where known, else its size.

        A size not measured takes the next larger measured one; beyond all of them the cost is
        taken to grow with the size, which is the worst a runtime does.
        """
        if batch <= 1:
            return 1.0
        known = [self.batch_ratio[b] for b in sorted(self.batch_ratio) if b >= batch]
        return max(1.0, known[0]) if known else float(batch)

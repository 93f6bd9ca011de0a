"""Plain records of a comparison of policies, and their table for terminals and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgewise.report.wording import HERO, format_share, say_policy
from edgewise.units import format_duration

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over inputs with its 95 % interval.

    Attributes:
        value: The mean.
        low: Lower bound.
        high: Upper bound.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One policy at one budget.

    Attributes:
        policy: Its name.
        budget_ratio: The budget over the median of the whole network.
        budget_s: The budget, seconds.
        requests: How many inputs; refused ones count.
        dsr: Share answered within the budget.
        accuracy: Share right among the answered; ``None`` where all were refused.
        accuracy_in_time: Share right and within the budget.
        mean_depth_ratio: Mean share of the backbone's work before the exit that answered; a refused
            request counts zero.
        flops_ratio: Mean work that ran over the backbone's, every head that ran counted.
        mean_s: Mean latency, seconds; ``None`` where all were refused.
        p50_s: Median of the same.
        p99_s: 99th percentile of the same.
        energy_j: Mean energy of a request, idle included, joules; ``None`` without a meter.
        edge_over: ``accuracy_in_time`` of the hero minus this policy's, over the same inputs;
            ``None`` for the hero itself, or without it.
        is_bound: Whether the policy looks back: a bound, not a policy.
    """

    policy: str
    budget_ratio: float
    budget_s: float
    requests: int
    dsr: Estimate
    accuracy: Estimate | None
    accuracy_in_time: Estimate
    mean_depth_ratio: Estimate
    flops_ratio: Estimate
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    energy_j: Estimate | None = None
    edge_over: Estimate | None = None
    is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A comparison of policies.

    Attributes:
        model: Name of the model.
        backend: Where it ran.
        threads: Of each call.
        data: What the inputs were.
        full_depth_s: Median of the whole network, seconds: what budgets are shares of.
        provenance: ``"measured"``, ``"simulated"`` or ``"estimated"``.
        rows: By budget, then by policy.
        skipped: Policy to the reason why it was left out.
        energy_note: Why there are no joules, or what the joules count.
        notes: What a reader must know.
    """

    model: str
    backend: str
    threads: int
    data: str
    full_depth_s: float
    provenance: str
    rows: tuple[EvaluationRow, ...]
    skipped: Mapping[str, str]
    energy_note: str
    notes: tuple[str, ...] = ()

    @property
    def budgets(self) -> tuple[float, ...]:
        """Budget ratios, in order."""
        return tuple(dict.fromkeys(row.budget_ratio for row in self.rows))

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies, in order."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))


_ESTIMATES = (
    *("dsr", "accuracy", "accuracy_in_time", "mean_depth_ratio", "flops_ratio"),
    *("energy_j", "edge_over"),
)
_CSV = (
    *("model", "backend", "provenance", "policy", "budget_ratio", "budget_s", "requests"),
    *(f"{name}{end}" for name in _ESTIMATES for end in ("", "_low", "_high")),
    *("mean_s", "p50_s", "p99_s"),
)


def evaluation_csv(evaluation: Evaluation) -> str:
    """One line for each policy and budget; an empty field is not known."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _CSV, lineterminator="\n")
    writer.writeheader()
    for row in evaluation.rows:
        line: dict[str, object] = {
            "model": evaluation.model,
            "backend": evaluation.backend,
            "provenance": evaluation.provenance,
        }
        for name in _CSV:
            if hasattr(row, name) and name not in _ESTIMATES:
                line[name] = getattr(row, name)
        for name in _ESTIMATES:
            found: Estimate | None = getattr(row, name)
            if found is not None:
                line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        writer.writerow(line)
    return stream.getvalue()


_HEADINGS = (
    *("budget", "policy", "in time", "right", "right and in time", "mean depth"),
    *("FLOPs", "p50", "p99", "energy"),
)


def evaluation_table(evaluation: Evaluation, *, hero: str = HERO) -> Table:
    """Make a rich table, one section for each budget."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        caption=f"all {evaluation.provenance}; in brackets 95 % intervals; – is not known",
        caption_justify="left",
    )
    for index, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if index in (0, 1) else "right")
    ratio = None
    for row, cells in zip(evaluation.rows, evaluation_lines(evaluation), strict=True):
        if ratio is not None and row.budget_ratio != ratio:
            table.add_section()
        ratio = row.budget_ratio
        style = "bold" if row.policy == hero else "dim" if row.is_bound else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def evaluation_lines(evaluation: Evaluation) -> list[list[str]]:
    """The table's cells as text."""
    return [
        [
            f"{100 * row.budget_ratio:.4g} %",
            say_policy(row.policy) + (" (bound)" if row.is_bound else ""),
            _share(row.dsr),
            _share(row.accuracy),
            _share(row.accuracy_in_time),
            _plain(row.mean_depth_ratio),
            _plain(row.flops_ratio),
            format_duration(row.p50_s),
            format_duration(row.p99_s),
            "–" if row.energy_j is None else f"{row.energy_j.value:.3g} J",
        ]
        for row in evaluation.rows
    ]


def best_rows(rows: Sequence[EvaluationRow], *, least_dsr: float) -> list[EvaluationRow]:
    """Policies that reach a DSR, most accurate first, bounds left out."""
    kept = [r for r in rows if r.dsr.value >= least_dsr and r.accuracy and not r.is_bound]
    return sorted(kept, key=lambda r: -(r.accuracy.value if r.accuracy else 0.0))


def _share(found: Estimate | None) -> str:
    if found is None:
        return "–"
    return f"{format_share(found.value)} [{100 * found.low:.0f}–{100 * found.high:.0f}]"


def _plain(found: Estimate) -> str:
    return f"{found.value:.3f}"

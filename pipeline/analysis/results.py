"""What the parity judge hands to the report."""

from dataclasses import dataclass, field
from typing import Literal

ParityOutcome = Literal[
    "equivalent", "different", "inconclusive", "no difference seen; equivalence not established", "no valid pair"
]
ParityMode = Literal["exact", "statistical", "single pair"]


@dataclass(frozen=True)
class ParityMetric:
    """One gated metric over the gate's window. Differences are treatment minus baseline, in the metric's unit.

    None where the number does not exist (an interval from one pair, a p-value in exact mode).
    """

    name: str
    unit: str
    n_pairs: int
    mean_difference: float | None
    max_difference: float | None
    ci_low: float | None
    ci_high: float | None
    margin: float | None
    p_tost: float | None
    p_difference: float | None
    outcome: ParityOutcome


@dataclass(frozen=True)
class ExactComparison:
    """Deterministic runs: where the arms part, and how the difference grows."""

    first_step: int | None
    """None: identical in every compared metric at every step."""
    first_metric: str | None
    first_difference: float | None
    growth: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(step, largest relative difference over the gated metrics) at a few steps."""
    same_masters: bool | None = None
    """Whether the reconstructed fp32 masters are bit-identical; None where nobody measured it."""
    ties_share: float | None = None
    """Share of the differing bf16 weights that rounding ties explain; None where nobody measured it."""


@dataclass(frozen=True)
class ParityResult:
    """The verdict for one treatment arm."""

    outcome: ParityOutcome
    sentence: str
    """One sentence that can stand alone in a report."""
    mode: ParityMode
    metrics: list[ParityMetric] = field(default_factory=list[ParityMetric])
    exact: ExactComparison | None = None

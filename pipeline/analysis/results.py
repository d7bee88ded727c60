"""What the parity judge hands to the report."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.analysis.master_weights import MastersComparison

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
    better: Literal["higher", "lower", "neither"] = "neither"
    baseline_mean: float | None = None
    """The baseline's window mean, averaged over the pairs."""
    p_holm: float | None = None
    """p_difference, adjusted for the number of metrics."""
    max_limit: float | None = None
    """What max_difference may be; None where there was nothing to compare with."""
    note: str = ""
    """Why the outcome is what it is, where the numbers alone do not say."""


@dataclass(frozen=True)
class ExactComparison:
    """Deterministic runs: where the arms part, and how the difference grows."""

    first_step: int | None
    """None: identical in every compared metric at every step."""
    first_metric: str | None
    first_difference: float | None
    """Relative to the larger of the two values."""
    growth: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(step, largest relative difference over the gated metrics) at a few steps."""
    masters: MastersComparison | None = None
    """How long the fp32 masters agree, and what rounding ties explain; None where nobody measured it."""


@dataclass(frozen=True)
class ParityResult:
    """The verdict for one treatment arm."""

    outcome: ParityOutcome
    sentence: str
    """One sentence that can stand alone in a report."""
    mode: ParityMode
    metrics: list[ParityMetric] = field(default_factory=list[ParityMetric])
    exact: ExactComparison | None = None
    pairs_to_decide: int | None = None
    """Seeds that would decide an inconclusive study (statistics.pairs_to_decide states the rule); None: not known."""
    notes: list[str] = field(default_factory=list[str])
    """What a reader must know beside the outcome: gates changed, metrics not recorded, treatment runs lost."""
    excluded: list[str] = field(default_factory=list[str])
    """Pairs that were not judged, each with its reasons."""
    gates: list[str] = field(default_factory=list[str])
    """The rule and each gate in words, with units and direction."""

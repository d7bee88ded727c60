"""The parity verdict in words: plain English that a report can print as it is."""

from collections.abc import Sequence

from pipeline.analysis.gates import Gates
from pipeline.analysis.master_weights import MastersComparison
from pipeline.analysis.results import ExactComparison, ParityMetric, ParityOutcome
from pipeline.analysis.statistics import MetricVerdict

NOT_ESTABLISHED: ParityOutcome = "no difference seen; equivalence not established"


def gates_in_words(gates: Gates) -> list[str]:
    """The rule's numbers and each gate, with units and direction, a line each."""
    better = {"higher": "; higher is better", "lower": "; lower is better", "neither": ""}
    windows = (
        f"means over {_window_in_words(gates.mean_window)} of the steps; largest single-step difference over "
        f"{_window_in_words(gates.max_window)}, which may be {gates.max_ratio:g} times the margin, or times what two "
        "baselines differ by where that is larger"
    )
    tests = (
        f"equivalence: two one-sided paired t tests at {gates.alpha:g} ({1 - 2 * gates.alpha:.0%} intervals); "
        f"difference: paired t test, Holm over the metrics, at {gates.alpha:g}; at least {gates.min_pairs} seeds"
    )
    metrics = [
        f"{gate.column}: {gate.margin.in_words(gate.unit)}{better[gate.better]}{'; optional' if gate.optional else ''}"
        for gate in gates.metrics.values()
    ]
    return [windows, tests, *metrics]


def parity_sentence(
    treatment: str,
    outcome: ParityOutcome,
    rows: Sequence[ParityMetric],
    needed: int | None,
    exact: ExactComparison | None,
    obstacles: Sequence[str],
    gates: Gates,
) -> str:
    """The verdict so that it can stand alone; in exact mode a second sentence says where the arms part."""
    seeds = max(row.n_pairs for row in rows)
    if outcome == "equivalent":
        verdict = (
            f"{treatment} trains as the baseline does: all {len(rows)} gated metrics are equivalent within their "
            f"margins ({seeds} seeds)."
        )
    elif outcome == "different":
        found = ", ".join(_difference(row) for row in rows if row.outcome == "different")
        verdict = f"{treatment} does not train as the baseline does ({seeds} seeds): {found}."
    elif outcome == NOT_ESTABLISHED:
        verdict = (
            f"No difference between {treatment} and the baseline is seen in {_one(seeds)}; equivalence is not "
            f"established: that takes at least {gates.min_pairs} seeds."
        )
    else:
        verdict = (
            f"Parity of {treatment} is not settled by {_one(seeds)}: {_undecided(rows, needed, obstacles, gates)}."
        )
    return f"{verdict} {_exact_sentence(treatment, exact)}".rstrip()


def _one(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _difference(row: ParityMetric) -> str:
    assert row.mean_difference is not None
    direction = "higher" if row.mean_difference > 0 else "lower"
    judged = {"neither": "", direction: " (better)"}.get(row.better, " (worse)")
    return f"{row.name} is {abs(row.mean_difference):.3g} {row.unit} {direction}{judged}, margin {row.margin:.3g}"


def _undecided(rows: Sequence[ParityMetric], needed: int | None, obstacles: Sequence[str], gates: Gates) -> str:
    open_rows = [row.name for row in rows if row.outcome == "inconclusive"]
    parts = [*obstacles]
    if open_rows:
        parts.append(f"undecided: {', '.join(open_rows)}")
        if needed is not None:
            parts.append(f"about {needed} seeds would decide it (power {gates.power:.0%})")
        elif max(row.n_pairs for row in rows) < 2:
            parts.append(f"run at least {gates.min_pairs} seeds")
    return "; ".join(parts)


def _exact_sentence(treatment: str, exact: ExactComparison | None) -> str:
    if exact is None:
        return ""
    if exact.first_step is None:
        return (
            f"Runs repeat bit for bit, and {treatment} agrees with the baseline bit for bit in every metric and step."
        )
    return (
        f"Runs repeat bit for bit; {treatment} parts from the baseline at step {exact.first_step}, first in "
        f"{exact.first_metric} (relative difference {exact.first_difference:.2g}). {_masters_sentence(exact.masters)}"
    ).rstrip()


def _masters_sentence(masters: MastersComparison | None) -> str:
    if masters is None:
        return ""
    if masters.same_updates == 0:
        return "The fp32 master weights differ after the first optimizer step already."
    steps = "optimizer step" if masters.same_updates == 1 else f"{masters.same_updates} optimizer steps"
    agreed = f"The fp32 master weights are bit-identical after the first {steps} of every seed"
    if not masters.differing:
        return f"{agreed}, and so are the bf16 weights."
    return (
        f"{agreed}; as long as they are, {masters.differing:,} of {masters.weights:,} bf16 weights differ, "
        f"{100 * masters.at_ties / masters.differing:.3g} % of them at exact rounding ties."
    )


def growth_in_words(treatment: str, exact: ExactComparison | None) -> str:
    """How the difference grows from where the arms part; empty where there is nothing to tell."""
    if exact is None or not exact.growth:
        return ""
    steps = ", ".join(f"{size:.2g} at step {step}" for step, size in exact.growth)
    return f"{treatment}, largest relative difference of a gated metric in any seed: {steps}"


def exact_notes(exact: ExactComparison | None) -> list[str]:
    """What exact mode could have shown and the run folders do not hold."""
    if exact is None or exact.first_step is None or exact.masters is not None:
        return []
    note = (
        "not recorded in the run folders: whether the fp32 masters agree, and the share of differing bf16 weights that "
        "rounding ties explain"
    )
    return [note]


def metric_note(verdict: MetricVerdict, pairs: int, seed: int, step: int, gates: Gates) -> str:
    """Why a metric's outcome is what it is, where its numbers do not say. seed, step: of the largest difference."""
    notes: list[str] = []
    detected = verdict.p_holm is not None and verdict.p_holm < gates.alpha
    if verdict.n_pairs < pairs:
        notes.append(f"recorded in {verdict.n_pairs} of {pairs} pairs")
    if verdict.n_pairs > 1 and verdict.test.spread is None:
        notes.append("every pair shows the same difference, so its spread is not known")
    if verdict.breaks_max_gate:
        notes.append(
            f"step {step} of seed {seed} differs by {verdict.max_difference:.3g}, more than {verdict.max_limit:.3g}"
        )
    if verdict.test.interval is not None and verdict.outcome == "inconclusive":
        inside = max(map(abs, verdict.test.interval)) < verdict.margin
        if inside and (verdict.test.p_equivalence or 0) >= gates.alpha:
            notes.append("the interval is inside the margin, but that is a share of a baseline known no better")
    if detected and verdict.outcome == "equivalent":
        notes.append("a difference is detectable, but smaller than the margin")
    if detected and verdict.outcome == "inconclusive":
        notes.append("a difference is detectable; whether it exceeds the margin is open")
    return "; ".join(notes)


def _window_in_words(window: tuple[float, float]) -> str:
    start, end = window
    if (start, end) == (0, 1):
        return "all"
    return f"the last {1 - start:.0%}" if end == 1 else f"{start:.0%} to {end:.0%}"

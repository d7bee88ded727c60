"""Does training stay the same? From the pairs of one treatment arm to its verdict.

The rule is in statistics.py, its numbers in the gates, the comparison of deterministic runs in exact.py, the words in
parity_words.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

import numpy as np

from pipeline.analysis.columns import FloatArray, IntArray
from pipeline.analysis.exact import compare_exactly, repeats_exactly
from pipeline.analysis.gates import Gates, MetricGate, read_gates
from pipeline.analysis.load import BASELINE_REPEAT, Pair, Run, Study
from pipeline.analysis.parity_words import NOT_ESTABLISHED, exact_notes, gates_in_words, metric_note, parity_sentence
from pipeline.analysis.results import ParityMetric, ParityOutcome, ParityResult
from pipeline.analysis.statistics import (
    Curves,
    MetricVerdict,
    judge_metrics,
    judge_study,
    noise_between,
    pairs_to_decide,
    values_in_both,
)
from pipeline.study.gates_hash import gates_hash


@dataclass(frozen=True)
class _Metric:
    """A gated column in the pairs of one setting."""

    column: str
    gate: MetricGate
    pairs: Sequence[Pair]
    """Rows of the curves."""
    steps: IntArray
    """Columns of the curves."""
    curves: Curves

    @property
    def setting(self) -> str:
        return self.pairs[0].setting


def judge_parity(study: Study, pairs: Sequence[Pair], treatment: str) -> ParityResult:
    """The verdict for one treatment arm.

    pairs: those of other arms are ignored, invalid ones excluded and listed. Pairs replicate each other where their
    swept values are the same: the metrics of each setting are judged for themselves, and Holm's family is all of them.
    A/A pairs are taken from the study.
    """
    notes = _gates_notes(study)
    try:
        gates = read_gates(study.gates)
    except ValueError as error:
        return ParityResult("inconclusive", f"No verdict on parity: {error}.", "statistical", notes=notes)
    own = sorted((p for p in pairs if p.treatment.arm == treatment), key=lambda p: (p.setting, p.seed, p.id))
    reasons = {pair.id: _reasons(pair, gates) for pair in own}
    valid = [pair for pair in own if not reasons[pair.id]]
    excluded = [f"{pair.id}: {'; '.join(found)}" for pair in own if (found := reasons[pair.id])]
    repeats = [pair for pair in study.pairs_of(BASELINE_REPEAT) if not _reasons(pair, gates)]
    metrics = [m for _, group in groupby(valid, lambda p: p.setting) for m in _metrics(list(group), repeats, gates)]
    if not metrics:
        why = "the valid pairs recorded no gated metric" if valid else "no valid pair with the baseline"
        sentence = f"No verdict on the parity of {treatment}: {why}."
        notes += [*_diverged(own, gates), *_not_succeeded(own)]
        in_words = gates_in_words(gates)
        return ParityResult("no valid pair", sentence, "statistical", notes=notes, excluded=excluded, gates=in_words)

    verdicts = judge_metrics([(metric.curves, metric.gate.margin) for metric in metrics], gates)
    exact = compare_exactly(valid, {m.column for m in metrics}) if repeats_exactly(repeats) else None
    single = all(verdict.n_pairs == 1 for verdict in verdicts)
    obstacles = [*_missing(metrics, gates), *_diverged(own, gates)]
    outcome = _outcome(verdicts, single, bool(obstacles))
    needed = pairs_to_decide(verdicts, gates) if outcome == "inconclusive" else None
    rows = [_row(metric, verdict, single, gates) for metric, verdict in zip(metrics, verdicts, strict=True)]
    return ParityResult(
        outcome,
        parity_sentence(treatment, outcome, rows, needed, exact, obstacles, gates),
        "exact" if exact else "single pair" if single else "statistical",
        metrics=rows,
        exact=exact,
        pairs_to_decide=needed,
        notes=[*notes, *obstacles, *_missing(metrics, gates, optional=True), *_not_succeeded(own), *exact_notes(exact)],
        excluded=excluded,
        gates=gates_in_words(gates),
    )


def _gates_notes(study: Study) -> list[str]:
    """Gates that were changed after the launch, or that differ between runs."""
    changed = [run.id for run in study.runs if gates_hash(run.config.gates) != run.config.gates_hash]
    differing = [run.id for run in study.runs if run.config.gates_hash != study.gates_hash]
    notes: list[str] = []
    if changed:
        notes.append(f"GATES CHANGED AFTER THE LAUNCH (their hash is not the stored one) in {', '.join(changed)}")
    if differing:
        notes.append(
            f"GATES DIFFER between runs: judged by those of {study.runs[0].id}, unlike those of {', '.join(differing)}"
        )
    return notes


def _matching(columns: Iterable[str], gate: MetricGate) -> list[str]:
    return sorted(column for column in columns if fnmatchcase(column, gate.column))


def _non_finite(run: Run, gates: Gates) -> list[str]:
    """Gated metrics of the run that were measured as NaN or infinite at some step."""
    columns = {found.metric for found in run.steps.non_finite}
    return sorted({column for gate in gates.metrics.values() for column in _matching(columns, gate)})


def _reasons(pair: Pair, gates: Gates) -> list[str]:
    return pair.reasons or [
        f"NaN or infinite in {run.arm}: {', '.join(found)}"
        for run in (pair.baseline, pair.treatment)
        if (found := _non_finite(run, gates))
    ]


def _metrics(pairs: list[Pair], repeats: Sequence[Pair], gates: Gates) -> list[_Metric]:
    """The gated columns that both arms of at least one of the pairs (all of one setting) have in the mean window."""
    steps = np.unique(np.concatenate([run.steps.step for p in pairs for run in (p.baseline, p.treatment)]))
    columns = {column for p in pairs for run in (p.baseline, p.treatment) for column in run.steps.columns}
    repeated = [repeat for repeat in repeats if repeat.setting == pairs[0].setting]
    found: list[_Metric] = []
    for gate in gates.metrics.values():
        for column in _matching(columns, gate):
            baseline = _curves([p.baseline for p in pairs], column, steps)
            treatment = _curves([p.treatment for p in pairs], column, steps)
            repeat = _curves([p.treatment for p in repeated], column, steps)
            noise = noise_between(repeat - _curves([p.baseline for p in repeated], column, steps), baseline)
            curves = Curves(baseline, treatment, noise)
            if values_in_both(curves, gates).any():
                found.append(_Metric(column, gate, pairs, steps, curves))
    return found


def _curves(runs: Sequence[Run], column: str, steps: IntArray) -> FloatArray:
    """The metric of each run at the given steps, (runs, steps); NaN where it was not measured."""
    curves = np.full((len(runs), len(steps)), np.nan)
    for curve, run in zip(curves, runs, strict=True):
        at = np.searchsorted(steps, run.steps.step)
        known = np.isin(run.steps.step, steps)
        curve[at[known]] = run.metric(column)[known]
    return curves


def _missing(metrics: Sequence[_Metric], gates: Gates, *, optional: bool = False) -> list[str]:
    """Gates without a judged metric, in any setting, as a note."""
    settings = {metric.setting for metric in metrics}
    judged = {(metric.setting, metric.gate.column) for metric in metrics}
    missing = [
        gate.column
        for gate in gates.metrics.values()
        if gate.optional == optional and any((setting, gate.column) not in judged for setting in settings)
    ]
    return [f"not recorded by both arms, so not judged: {', '.join(missing)}"] if missing else []


def _diverged(own: Sequence[Pair], gates: Gates) -> list[str]:
    """Pairs lost because of the treatment: leaving them out must not make it look better than it is."""
    ids = [p.treatment.id for p in own if _non_finite(p.treatment, gates) and not _non_finite(p.baseline, gates)]
    return [f"the treatment became NaN or infinite where its baseline did not: {', '.join(ids)}"] if ids else []


def _not_succeeded(own: Sequence[Pair]) -> list[str]:
    ids = [
        pair.treatment.id
        for pair in own
        if pair.treatment.status is not None
        and pair.treatment.status.state == "failed"
        and pair.baseline.status is not None
        and pair.baseline.status.state == "succeeded"
    ]
    return [f"the treatment failed where its baseline succeeded: {', '.join(ids)}"] if ids else []


def _outcome(verdicts: Sequence[MetricVerdict], single: bool, obstacles: bool) -> ParityOutcome:
    outcome = judge_study(verdicts)
    if single:
        seen = obstacles or any(verdict.beyond_margin or verdict.breaks_max_gate for verdict in verdicts)
        return "inconclusive" if seen else NOT_ESTABLISHED
    return "inconclusive" if outcome == "equivalent" and obstacles else outcome


def _row(metric: _Metric, verdict: MetricVerdict, single: bool, gates: Gates) -> ParityMetric:
    test = verdict.test
    unseen = single and not (verdict.beyond_margin or verdict.breaks_max_gate)
    pair, step = verdict.max_at
    return ParityMetric(
        name=f"{metric.column} ({metric.setting})" if metric.setting else metric.column,
        unit=metric.gate.unit,
        n_pairs=verdict.n_pairs,
        mean_difference=test.mean,
        max_difference=verdict.max_difference,
        ci_low=test.interval[0] if test.interval else None,
        ci_high=test.interval[1] if test.interval else None,
        margin=verdict.margin,
        p_tost=test.p_equivalence,
        p_difference=test.p_difference,
        outcome=NOT_ESTABLISHED if unseen else verdict.outcome,
        better=metric.gate.better,
        baseline_mean=verdict.baseline_mean,
        p_holm=verdict.p_holm,
        max_limit=verdict.max_limit,
        note=metric_note(verdict, len(metric.pairs), metric.pairs[pair].seed, int(metric.steps[step]), gates),
    )

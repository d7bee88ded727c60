"""The tables of the report, each as Markdown; "" where there is nothing to show."""

from collections.abc import Iterator

from pipeline.analysis.conclusions import Conclusions, Verdict
from pipeline.analysis.cost import TimeRatio
from pipeline.analysis.diagnosis import Diagnosis
from pipeline.analysis.load import BASELINE
from pipeline.analysis.memory import PHASE_WORDS, source_words
from pipeline.analysis.results import ExactComparison, ParityMetric
from pipeline.analysis.treatment import kind_words
from pipeline.analysis.words import gib, in_setting, number, table

_ROWS = 40


def diagnosed(conclusions: Conclusions) -> Iterator[tuple[str, Diagnosis]]:
    """Every arm in each of its settings, in words, with its diagnosis."""
    for arm, found in conclusions.arms.items():
        for setting, diagnosis in found.diagnoses.items():
            yield in_setting(arm, setting), diagnosis


def diagnosis_table(conclusions: Conclusions) -> str:
    rows = [[arm, f"**{found.outcome}**", found.evidence] for arm, found in diagnosed(conclusions)]
    return table(["arm", "diagnosis", "evidence"], rows, limit=_ROWS)


def savings_table(conclusions: Conclusions) -> str:
    rows = [
        _savings_row(conclusions, arm, setting)
        for arm, found in conclusions.arms.items()
        for setting in found.ledgers or {"": None}
    ]
    degrees = {ledger.distributed_optimizer_degree for ledger in conclusions.ledgers.values()}
    d = f" (d = {', '.join(map(str, sorted(degrees)))})" if degrees else ""
    head = ["arm", "treatment check", f"bytes/param predicted{d}", "found", "buffer padding", "unexplained"]
    return table([*head, "GiB saved per rank", "saving"], rows)


def _savings_row(conclusions: Conclusions, arm: str, setting: str) -> list[object]:
    found, verdict = conclusions.arms[arm], conclusions.verdicts.get(arm)
    ledger, treatment = found.ledgers.get(setting), found.treatment
    if len(found.ledgers) > 1:
        treatment, verdict = found.treatments[setting], verdict and verdict.by_setting[setting]
    per_rank = [gib_found for _, _, gib_found in verdict.savings.gib_per_rank] if verdict else []
    return [
        in_setting(arm, setting),
        treatment.outcome,
        None if ledger is None else f"{ledger.predicted:.2f}",
        None if ledger is None else f"{ledger.found:.2f}",
        None if ledger is None else f"{ledger.per_parameter('padding'):.2f}",
        None if ledger is None else f"{ledger.per_parameter('unexplained'):.2f}",
        _spread(per_rank) if per_rank else None,
        verdict.savings.outcome if verdict else None,
    ]


def _spread(values: list[float]) -> str:
    low, high = gib(min(values)), gib(max(values))
    return low if low == high else f"{low} to {high}"


def memory_table(conclusions: Conclusions) -> str:
    verdicts = list(conclusions.verdicts.values())
    keys = list(dict.fromkeys((item.source, item.phase) for verdict in verdicts for item in verdict.memory))
    sources = {source: source_words(source, rollout=conclusions.study.has_rollout) for source, _ in keys}
    rows: list[list[object]] = []
    for source, phase in keys:
        found = [next((i for i in v.memory if (i.source, i.phase) == (source, phase)), None) for v in verdicts]
        baseline = next(item.baseline for item in found if item is not None)
        differences = [None if item is None else gib(item.difference, sign=True) for item in found]
        of_source = f"{PHASE_WORDS[phase]}: {sources[source]}" if len(sources) > 1 else PHASE_WORDS[phase]
        rows.append([of_source, gib(baseline), *differences])
    head = "phase" if len(sources) > 1 else f"phase ({', '.join(sources.values())})"
    return table([head, BASELINE, *map(_difference_head, verdicts)], rows)


def _difference_head(verdict: Verdict) -> str:
    return f"{_measured(verdict)} − {BASELINE}{' (not valid)' if verdict.memory and not verdict.valid_pairs else ''}"


def _measured(verdict: Verdict) -> str:
    """The arm; and the setting, where memory and times are of one of several."""
    settings = {pair.setting for pair in verdict.valid_pairs or verdict.pairs}
    return in_setting(verdict.arm, settings.pop()) if verdict.by_setting and len(settings) == 1 else verdict.arm


def ledger_table(conclusions: Conclusions) -> str:
    rows = [
        [
            in_setting(arm, setting),
            row.rank,
            kind_words(row.kind),
            row.predicted_dtype or "–",
            row.found_dtype or "none",
            gib(row.predicted_bytes / 2**30),
            gib(row.found_bytes / 2**30),
            gib(row.padding_bytes / 2**30),
            gib(row.uneven_bytes / 2**30, sign=True),
            gib(row.unexplained_bytes / 2**30, sign=True),
        ]
        for (arm, setting), ledger in conclusions.ledgers.items()
        for row in ledger.rows
    ]
    head = ["arm", "rank", "kind", "dtype predicted", "found", "GiB predicted", "found", "padding", "uneven shard"]
    return table([*head, "unexplained"], rows, limit=_ROWS)


def candidates_table(conclusions: Conclusions) -> str:
    rows = [
        [arm, finding.candidate, "**yes**" if finding.holds else "no", finding.evidence]
        for arm, found in diagnosed(conclusions)
        for finding in found.findings
    ]
    return table(["arm", "candidate", "holds", "evidence"], rows, limit=_ROWS)


def parity_table(conclusions: Conclusions) -> str:
    rows = [
        [
            verdict.arm,
            metric.name,
            metric.unit,
            metric.n_pairs,
            number(metric.mean_difference),
            _interval(metric),
            None if metric.margin is None else f"± {metric.margin:.3g}",
            number(metric.max_difference),
            number(metric.p_tost),
            number(metric.p_difference),
            metric.outcome + (f": {metric.note}" if metric.note else ""),
        ]
        for verdict in conclusions.verdicts.values()
        for metric in verdict.parity.metrics
    ]
    head = ["arm", "metric", "unit", "pairs", "mean difference", "90 % interval", "margin", "largest difference"]
    return table([*head, "p (TOST)", "p (difference)", "outcome"], rows, limit=_ROWS)


def _interval(metric: ParityMetric) -> str | None:
    if metric.ci_low is None or metric.ci_high is None:
        return None
    return f"{metric.ci_low:.3g} to {metric.ci_high:.3g}"


def difference_table(conclusions: Conclusions) -> str:
    rows: list[list[object]] = []
    for pair in conclusions.study.pairs:
        found = conclusions.first_differences.get((pair.id, pair.treatment.arm))
        rows.append([in_setting(pair.treatment.arm, pair.setting), pair.seed, *_where_they_part(found)])
    head = ["arm", "seed", "first step that differs", "metric that differs most there", "relative"]
    masters_head = ["fp32 masters identical", "bf16 weights that differ there", "of them rounding ties"]
    return table([*head, *masters_head], rows, limit=_ROWS)


def _where_they_part(found: ExactComparison | None) -> list[object]:
    if found is None:
        return [None, "not compared: the pair is not valid", None, None, None, None]
    same = found.first_step is None
    where = "no difference in any metric but times and memory" if same else f"`{found.first_metric}`"
    return [found.first_step, where, number(found.first_difference), *_masters(found)]


def _masters(found: ExactComparison) -> list[object]:
    masters = found.masters
    if masters is None:
        return [None, None, None]
    steps = f"first {masters.same_updates} of {masters.compared_updates} optimizer steps"
    if not masters.same_updates:
        return [steps, None, None]
    ties = None if masters.ties_share is None else f"{100 * masters.ties_share:.4g} %"
    return [steps, f"{masters.differing:,} of {masters.weights:,}", ties]


def cost_table(conclusions: Conclusions) -> str:
    rows: list[list[object]] = []
    for verdict in conclusions.verdicts.values():
        invalid = "" if verdict.valid_pairs else " (from pairs that are not valid)"
        for name, ratio in (("optimizer step", verdict.optimizer_step), ("whole step", verdict.step)):
            if ratio is not None:
                rows.append([_measured(verdict) + invalid, name, *_seconds(ratio), str(ratio), ratio.basis])
    return table(["arm", "what", f"{BASELINE}, s", "arm, s", "ratio (interval)", "interval"], rows)


def _seconds(ratio: TimeRatio) -> tuple[str, str]:
    return f"{ratio.baseline_s:.3g}", f"{ratio.treatment_s:.3g}"

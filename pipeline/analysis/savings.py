"""What an arm saves, beside what it can save. More than it can explain is an alarm, not a success."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.analysis.ledger import RunLedger, predict_and_compare
from pipeline.analysis.load import Pair, Run
from pipeline.analysis.memory import MemoryDifference, allocator_rounding_gib
from pipeline.analysis.treatment import check_treatment, kind_words

SavingsOutcome = Literal["as predicted", "less than predicted", "alarm", "not measured"]

_TOLERANCE = 0.05  # bytes per parameter; tensors are counted, not estimated, so this covers rounding alone

_Judged = tuple[Pair, RunLedger, RunLedger]
"""With the ledgers of baseline and treatment."""


@dataclass(frozen=True)
class Savings:
    """Bytes per trainable parameter that the arm has less than its baseline, and the same per rank in GiB."""

    outcome: SavingsOutcome
    sentence: str
    """With the alarm's reasons."""
    explained: float | None = None
    """What the arm's dtypes can save: predicted baseline minus predicted treatment."""
    found: float | None = None
    gib_per_rank: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    """(rank, explained, found)."""


def judge_savings(pairs: list[Pair], memory: list[MemoryDifference]) -> Savings:
    """Judge one treatment arm: its valid pairs. But any pair raises an alarm, that of an arm without effect as well."""
    judged = [
        (pair, baseline, treatment)
        for pair in pairs
        if (baseline := predict_and_compare(pair.baseline)) and (treatment := predict_and_compare(pair.treatment))
    ]
    return _alarm(judged, memory) or _judge_valid([item for item in judged if item[0].valid])


def _alarm(judged: list[_Judged], memory: list[MemoryDifference]) -> Savings | None:
    if not judged:
        return None
    # One run with missing masters is an alarm, however many others are as they should be.
    pair, baseline, treatment = max(judged, key=_found)
    explained, found = baseline.predicted - treatment.predicted, baseline.found - treatment.found
    alarms = [*_alarms(pair.treatment, treatment, explained, found), *_allocator_alarms(baseline, treatment, memory)]
    if not alarms:
        return None
    told = "; ".join([_told(found, explained), *alarms])
    return Savings("alarm", told, explained, found, _gib_per_rank(baseline, treatment))


def _judge_valid(judged: list[_Judged]) -> Savings:
    if not judged:
        return Savings("not measured", "no valid pair")
    _, baseline, treatment = most = max(judged, key=_found)
    explained, per_rank = baseline.predicted - treatment.predicted, _gib_per_rank(baseline, treatment)
    least = min(map(_found, judged))
    if least < explained - _TOLERANCE:
        told = f"{least:.2f} bytes per parameter saved, {explained:.2f} predicted"
        return Savings("less than predicted", told, explained, least, per_rank)
    return Savings("as predicted", _told(_found(most), explained), explained, _found(most), per_rank)


def _found(judged: _Judged) -> float:
    _, baseline, treatment = judged
    return baseline.found - treatment.found


def _told(found: float, explained: float) -> str:
    return f"{found:.2f} bytes per parameter saved, {explained:.2f} explained by the arm's dtypes"


def _gib_per_rank(baseline: RunLedger, treatment: RunLedger) -> list[tuple[int, float, float]]:
    return [
        (
            rank,
            baseline.gib("predicted", rank) - treatment.gib("predicted", rank),
            _less_gib("found", baseline, treatment, rank),
        )
        for rank in sorted({row.rank for row in baseline.rows} & {row.rank for row in treatment.rows})
    ]


def _less_gib(what: str, baseline: RunLedger, treatment: RunLedger, rank: int) -> float:
    return baseline.gib(what, rank) - treatment.gib(what, rank)


def _alarms(run: Run, ledger: RunLedger, explained: float, found: float) -> list[str]:
    alarms: list[str] = []
    if found > explained + _TOLERANCE:
        missing = [
            kind_words(kind)
            for kind in dict.fromkeys(row.kind for row in ledger.rows)
            if ledger.per_parameter("found", kind) < ledger.per_parameter("predicted", kind) - _TOLERANCE
        ]
        alarms.append(
            f"{found - explained:.2f} bytes more than this arm can save"
            + (f": {' and '.join(missing)} are missing or smaller than they must be" if missing else "")
        )
    if found > _TOLERANCE and check_treatment(run).outcome == "not in effect":
        alarms.append("the state found in the workers is not what the arm demands")
    return alarms


def _allocator_alarms(baseline: RunLedger, treatment: RunLedger, memory: list[MemoryDifference]) -> list[str]:
    """The allocator must not save more than the tensors that were counted. (RSS is too noisy to be held to this.)"""
    steady = [item for item in memory if item.source == "allocated" and item.phase == "after_update"]
    if not steady:
        return []
    ranks = {row.rank for row in baseline.rows} & {row.rank for row in treatment.rows}
    counted = sum(_less_gib("found", baseline, treatment, rank) for rank in ranks) / len(ranks)
    saved = -steady[0].difference
    if saved <= counted + allocator_rounding_gib(counted):
        return []
    return [f"the allocator holds {saved:.2f} GiB less per rank, the counted tensors explain {counted:.2f} GiB"]

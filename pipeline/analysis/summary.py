"""summary.json: every conclusion as data, for other programs and for the reader who wants to know more."""

from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.analysis.conclusions import ArmConclusion, Conclusions, Verdict
from pipeline.analysis.cost import TimeRatio
from pipeline.analysis.diagnosis import Diagnosis
from pipeline.analysis.headline import in_words, one_line
from pipeline.analysis.ledger import RunLedger
from pipeline.analysis.load import Pair, Run
from pipeline.analysis.memory import lifetime_peak_gib
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.provenance import recorded_environment

FORMAT = 1


def summarise(conclusions: Conclusions) -> dict[str, Any]:
    """The content of summary.json. Depends on the study's files alone: no clock, no path of this machine."""
    study = conclusions.study
    environment = recorded_environment(study)
    return {
        "format": FORMAT,
        "study": study.name,
        "one_line": one_line(conclusions),
        "arms": {arm: _arm(found) for arm, found in conclusions.arms.items()},
        "pairs": [_pair(conclusions, pair) for pair in study.pairs],
        "verdicts": {arm: _verdict(verdict) for arm, verdict in conclusions.verdicts.items()},
        "runs": [_run(conclusions, run) for run in study.runs],
        "environment": None if environment is None else environment.model_dump(mode="json"),
        "gates": study.gates,
        "gates_hash": study.gates_hash,
        "notes": study.notes,
    }


def _arm(arm: ArmConclusion) -> dict[str, Any]:
    liveness = np.concatenate([run.updates.column("liveness") for run in arm.runs])
    known = liveness[np.isfinite(liveness)]
    return {
        "runs": [run.id for run in arm.runs],
        "bytes_per_param": _bytes_per_parameter(arm.ledger),
        "liveness": {
            "min": float(known.min()) if len(known) else None,
            "median": float(np.median(known)) if len(known) else None,
            "method": sorted({method for run in arm.runs for method in run.updates.labels.get("liveness_method", [])}),
        },
        "treatment": {
            "outcome": arm.treatment.outcome,
            "problems": arm.treatment.problems,
            "found": arm.treatment.found,
        },
        "diagnosis": {"run": arm.diagnosed, **_diagnosis(arm.diagnosis)},
        "diagnosis_by_setting": {setting: found.outcome for setting, found in arm.diagnoses.items()},
        "ledger": None if arm.ledger is None else _ledger(arm.ledger),
        "ledgers_differ_between_runs": arm.ledgers_differ,
    }


def _bytes_per_parameter(ledger: RunLedger | None) -> dict[str, Any]:
    if ledger is None:
        return {"predicted": None, "found": None}
    return {
        "predicted": ledger.predicted,
        "found": ledger.found,
        "padding": ledger.per_parameter("padding"),
        "unexplained": ledger.per_parameter("unexplained"),
    }


def _ledger(ledger: RunLedger) -> dict[str, Any]:
    return {
        "distributed_optimizer_degree": ledger.distributed_optimizer_degree,
        "ranks": ledger.ranks,
        "trainable_elements_of_all_ranks": ledger.trainable_elements,
        "frozen_elements_of_all_ranks": ledger.frozen_elements,
        "rows": [{**asdict(row), "unexplained_bytes": row.unexplained_bytes} for row in ledger.rows],
    }


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "outcome": diagnosis.outcome,
        "evidence": diagnosis.evidence,
        "note": diagnosis.note,
        "candidates": [asdict(finding) for finding in diagnosis.findings],
    }


def _pair(conclusions: Conclusions, pair: Pair) -> dict[str, Any]:
    difference = conclusions.first_differences.get((pair.id, pair.treatment.arm))
    return {
        "id": pair.id,
        "arm": pair.treatment.arm,
        "seed": pair.seed,
        "setting": pair.setting,
        "baseline": pair.baseline.id,
        "treatment": pair.treatment.id,
        "valid": pair.valid,
        "reasons": pair.reasons,
        "compared": difference is not None,
        "first_difference_step": difference and difference.first_step,
        "first_difference_metric": difference and difference.first_metric,
        "first_difference_relative": difference and difference.first_difference,
        "masters": difference and difference.masters and asdict(difference.masters),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    savings = verdict.savings
    return {
        "treatment": verdict.treatment.outcome,
        "updates": verdict.updates.outcome,
        "savings": savings.outcome,
        "parity": verdict.parity.outcome,
        "sentences": {
            "trade": in_words(verdict),
            "treatment": verdict.treatment.sentence,
            "updates": verdict.updates.evidence,
            "savings": savings.sentence,
            "parity": verdict.parity.sentence,
        },
        "pairs": {"valid": len(verdict.valid_pairs), "all": len(verdict.pairs)},
        "saved_bytes_per_param": {"explained": savings.explained, "found": savings.found},
        "saved_gib_per_rank": [
            {"rank": rank, "explained": explained, "found": found} for rank, explained, found in savings.gib_per_rank
        ],
        "device_gib": verdict.device_gib,
        "memory_gib": [asdict(item) for item in verdict.memory],
        "time_ratio": {"optimizer_step": _time(verdict.optimizer_step), "step": _time(verdict.step)},
        "parity_details": asdict(verdict.parity),
    }


def _time(ratio: TimeRatio | None) -> dict[str, Any] | None:
    return None if ratio is None else {**asdict(ratio), "interval": ratio.basis}


def _run(conclusions: Conclusions, run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "arm": run.arm,
        "seed": run.seed,
        "swept": run.config.swept,
        "fault": run.fault,
        "state": run.status.state if run.status else "not ended",
        "why": why_it_ended(run),
        "step_rows": len(run.steps),
        "update_rows": len(run.updates),
        "diagnosis": conclusions.diagnoses[run.id].outcome,
        "evidence": conclusions.diagnoses[run.id].evidence,
        "lifetime_peak_gib": lifetime_peak_gib(run),
        "notes": [*run.notes, *conclusions.memory[run.id].notes],
    }

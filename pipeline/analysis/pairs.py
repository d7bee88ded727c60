"""Which runs form pairs, and why a pair cannot be judged."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.analysis.load import BASELINE, Pair, Run, Study, arm_order, load_runs, nested
from pipeline.analysis.non_finite import non_finite_metrics
from pipeline.analysis.treatment import check_treatment
from pipeline.analysis.words import brief


def load_study(folder: Path, meanwhile: Callable[[], None] | None = None) -> Study:
    """Read a study's runs and find its pairs. Raises NotAStudyError when there is no run at all.

    meanwhile: called once while other processes read, where there are any.
    """
    runs, notes = load_runs(folder, meanwhile)
    pairs, pairing_notes = find_pairs(runs)
    return Study(folder, runs, pairs, notes + pairing_notes)


def find_pairs(runs: list[Run]) -> tuple[list[Pair], list[str]]:
    """Each run of another arm with the baseline of the same pair id; notes on runs that find none."""
    by_pair: dict[str, dict[str, Run]] = {}
    notes: list[str] = []
    for run in runs:
        arms = by_pair.setdefault(run.config.pair, {})
        if run.arm in arms:
            notes.append(f"{run.id}: not paired, {arms[run.arm].id} has the same arm and pair")
        else:
            arms[run.arm] = run
    pairs: list[Pair] = []
    for pair_id, arms in by_pair.items():
        baseline = arms.pop(BASELINE, None)
        if baseline is None:
            notes.extend(f"{run.id}: not paired, there is no baseline run of {pair_id}" for run in arms.values())
        else:
            pairs.extend(Pair(pair_id, baseline, run, list(_reasons(baseline, run))) for run in arms.values())
    return sorted(pairs, key=lambda pair: (arm_order(pair.treatment.arm), pair.setting, pair.seed)), notes


def _reasons(baseline: Run, treatment: Run) -> Iterator[str]:
    for run in (baseline, treatment):
        for reason in _run_reasons(run):
            yield f"{run.id}: {reason}"
    if baseline.environment is None or treatment.environment is None:
        yield "versions and hardware are not known for both runs (env.json)"
    else:
        yield from _environment_differences(baseline, treatment)
    different = sorted(_differing_keys(baseline.config.recipe, treatment.config.recipe, "recipe"))
    if different:
        yield f"settings differ beside the arm: {', '.join(different[:5])}"
    if baseline.config.gates_hash != treatment.config.gates_hash:
        yield "the gates differ (gates_hash)"


def _run_reasons(run: Run) -> Iterator[str]:
    if run.status is None:
        yield "has not ended (still running, or killed before it could say how)"
    elif run.status.state != "succeeded":
        yield f"{run.status.state}{f' ({told})' if (told := brief(why_it_ended(run))) else ''}"
    check = check_treatment(run)
    if check.outcome != "in effect":
        yield f"treatment {check.outcome}: {check.sentence}"
    for found in non_finite_metrics(run):
        yield f"{found.metric} is NaN or infinite from step {found.first_step} on ({found.count} values)"
    if nested(run.config.recipe, ("verl", "trainer", "resume_mode")) not in (None, "disable"):
        yield "may have been resumed (trainer.resume_mode is not disable)"
    yield from _row_reasons(run)


def _row_reasons(run: Run) -> Iterator[str]:
    for table, name in ((run.steps, "steps.jsonl"), (run.updates, "updates.jsonl")):
        if len(table) == 0:
            yield f"{name} holds no row"
            continue
        if table.duplicates:
            yield f"{name} has several rows for step {table.duplicates[0]}: was the run resumed or written twice?"
        last = max(int(table.step.max()), run.status.steps_done if run.status else 0)
        missing = np.setdiff1d(np.arange(1, last + 1), table.step)
        if len(missing):
            yield f"{name} lacks step {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"


def why_it_ended(run: Run) -> str:
    """The first failing process's error, or the reason that the status gives, in one line."""
    if run.status is None:
        return ""
    if run.status.failure is not None:
        return f"{run.status.failure.where}: {run.status.failure.error}"
    return " ".join(run.status.reason.split())


def _environment_differences(baseline: Run, treatment: Run) -> Iterator[str]:
    left, right = baseline.environment, treatment.environment
    assert left is not None
    assert right is not None
    if left.platform != right.platform:
        yield f"platforms differ: {left.platform} and {right.platform}"
    versions = [
        f"{name} {left.packages.get(name, 'absent')} and {right.packages.get(name, 'absent')}"
        for name in sorted({*left.packages, *right.packages})
        if left.packages.get(name) != right.packages.get(name)
    ]
    if left.python != right.python:
        versions.append(f"Python {left.python} and {right.python}")
    if left.git.get("commit") != right.git.get("commit"):
        versions.append(f"commit {str(left.git.get('commit'))[:9]} and {str(right.git.get('commit'))[:9]}")
    if versions:
        yield f"versions differ: {', '.join(versions[:5])}"
    parts = [key for key in ("processor", "cores", "gpus") if left.hardware.get(key) != right.hardware.get(key)]
    if parts:
        yield f"hardware differs: {', '.join(parts)}"


def _differing_keys(left: Any, right: Any, path: str) -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        mine, other = cast(dict[str, Any], left), cast(dict[str, Any], right)
        for key in {*mine, *other}:
            yield from _differing_keys(mine.get(key), other.get(key), f"{path}.{key}")
    elif left != right:
        yield path

"""What the analysis found, as W&B shows it: values in each run's summary, and the study's artifact."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.study import json_lines

if TYPE_CHECKING:
    import wandb

_SUMMARY = "summary.json"
_FILES = ("report.md", "pr_comment.md", _SUMMARY)
JOB_TYPE = "study"
"""Of the W&B run that carries the artifact; runs that trained have their arm's name."""


def read_results(study: Path) -> dict[str, Any] | None:
    """summary.json; None where the study has not been analysed. Raises ValueError when it cannot be read."""
    file = study / _SUMMARY
    return json_lines.loads(file.read_bytes()) if file.exists() else None


def of_run(results: dict[str, Any], run_id: str) -> dict[str, Any]:
    """W&B summary values of one run: its diagnosis, bytes per parameter; for a treatment the verdict and the saving."""
    run = next((run for run in results["runs"] if run["id"] == run_id), None)
    if run is None:
        return {}
    found: dict[str, Any] = {"study/diagnosis": run["diagnosis"]}
    if run["arm"] in results["arms"]:
        found["study/bytes_per_param"] = results["arms"][run["arm"]]["bytes_per_param"]["found"]
    if run["arm"] in results["verdicts"]:
        found |= _verdict(results["verdicts"][run["arm"]])
    return {name: value for name, value in found.items() if value is not None}


def _verdict(verdict: dict[str, Any]) -> dict[str, Any]:
    per_rank = [rank["found"] for rank in verdict["saved_gib_per_rank"] if rank["found"] is not None]
    return {
        "study/verdict": verdict["sentences"]["trade"],
        "study/treatment": verdict["treatment"],
        "study/updates": verdict["updates"],
        "study/savings": verdict["savings"],
        "study/parity": verdict["parity"],
        "study/saved_bytes_per_param": verdict["saved_bytes_per_param"]["found"],
        "study/saved_gib_on_the_fullest_rank": max(per_rank, default=None),
    }


def artifact_of(study: Path, results: dict[str, Any]) -> "wandb.Artifact":
    """Report, figures and ledgers. The same content makes the same version, however often it is uploaded."""
    import wandb

    artifact = wandb.Artifact(study.name, type="study", description=results["one_line"])
    for name in _FILES:
        if (study / name).exists():
            artifact.add_file(str(study / name), name=name)
    for figure in sorted((study / "figures").glob("*.png")):
        artifact.add_file(str(figure), name=f"figures/{figure.name}")
    for ledger in sorted((study / "runs").glob("*/ledger.json")):
        artifact.add_file(str(ledger), name=f"ledgers/{ledger.parent.name}.json")
    return artifact

"""Build or update a study's dashboard in W&B: a workspace view of its runs, and a report with its text and figures.

Doing it again updates the same view and report; their ids are kept in <study>/wandb_dashboard.json. Without an API
key, or without a server that answers, the specifications are written to <study>/wandb_workspace.json and
<study>/wandb_report.json instead. Needs what `python -m pipeline.analyze` writes; the runs should be in W&B (online,
or by `python -m pipeline.dashboard sync`), else the view is empty.

Exit status: 0 when it was built or the specifications were written, 1 when W&B failed, 2 when the input is wrong.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder, write_atomically
from pipeline.tracking.study_in_wandb import StudyInWandb
from pipeline.tracking.study_results import read_results
from pipeline.tracking.sync import BadInput, NoKey, connect, run_folders

_MEMORY = "wandb_dashboard.json"
_ENTITY_UNKNOWN = "entity"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="the study's folder, for example results/embedded")


def run(arguments: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    folder: Path = arguments.study.absolute()
    try:
        runs = run_folders(folder)
        results = _results(folder)
        try:
            api = connect()
        except (NoKey, ConnectionError) as error:
            print(f"{error}. In place of W&B, files:")
            for file in _write_specifications(_study(folder, runs, results, _ENTITY_UNKNOWN)):
                print(file)
            return 0
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _build(_study(folder, runs, results, api.settings["entity"] or api.default_entity), api.settings["base_url"])


def _results(folder: Path) -> dict[str, Any]:
    results = read_results(folder)
    if results is None or not (folder / "report.md").exists():
        raise BadInput(f"{folder} has no report yet: python -m pipeline.analyze {folder}")
    return results


def _study(folder: Path, runs: list[RunFolder], results: dict[str, Any], own_entity: str) -> StudyInWandb:
    tracking = runs[0].read_config().tracking
    return StudyInWandb(folder, runs, results, tracking.get("entity") or own_entity, tracking["project"])


def _build(study: StudyInWandb, server: str) -> int:
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    from pipeline.tracking.workspace import build_workspace
    from pipeline.tracking.written_report import build_report, upload_figures

    place = {"server": server, "entity": study.entity, "project": study.project}
    file = study.folder / _MEMORY
    memory: dict[str, Any] = json_lines.loads(file.read_bytes()) if file.exists() else {}
    if {name: memory.get(name) for name in place} != place:
        memory = dict(place)
    try:
        view = build_workspace(study)
        if former := memory.get("workspace"):
            view._internal_id, view._internal_name = former["id"], former["name"]
        view.save()
        memory["workspace"] = {"id": view._internal_id, "name": view._internal_name, "url": view.url}
        _remember(file, memory)
        with tempfile.TemporaryDirectory(prefix="wandb-create-") as scratch:
            upload_figures(study, Path(scratch))
        report = build_report(study)
        report.id = memory.get("report", {}).get("id", "")
        report.save()
        memory["report"] = {"id": report.id, "url": report.url}
        _remember(file, memory)
    except (wandb.Error, WandbApiFailedError, TimeoutError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = f" (if the view or the report was deleted in W&B, remove {file})" if file.exists() else ""
        print(f"error: W&B failed: {told}{hint}", file=sys.stderr)
        return 1
    print(f"workspace: {view.url}\nreport: {report.url}")
    return 0


def _remember(file: Path, memory: dict[str, Any]) -> None:
    write_atomically(file, json_lines.dumps(memory, indent=True) + b"\n")


def _write_specifications(study: StudyInWandb) -> list[Path]:
    from pipeline.tracking.workspace import build_workspace
    from pipeline.tracking.written_report import build_report

    models = {
        "wandb_workspace.json": build_workspace(study)._to_model(),
        "wandb_report.json": build_report(study)._to_model(),
    }
    for name, model in models.items():
        specification = json_lines.loads(model.model_dump_json(by_alias=True, exclude_none=True))
        write_atomically(study.folder / name, json_lines.dumps(specification, indent=True) + b"\n")
    return [study.folder / name for name in models]

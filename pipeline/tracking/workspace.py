"""The W&B workspace view of a study, in the same sections as dashboard.html."""

import hashlib
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from pipeline.analysis.arm_styles import arm_style
from pipeline.analysis.curves import Curve
from pipeline.analysis.sections import curves_by_section
from pipeline.tracking.study_in_wandb import StudyInWandb, arm_of, group_of
from pipeline.tracking.wandb_run import axis_of

_MOST_PINNED = 20  # more are refused by W&B's app
_COLUMNS = (
    "run:displayName",
    "run:jobType",
    "run:state",
    "summary:study/bytes_per_param",
    "summary:study/saved_gib_on_the_fullest_rank",
    "summary:study/diagnosis",
    "summary:study/parity",
)
_BARS = {
    "Memory": [
        ("Ledger: bytes per parameter", "bytes per trainable parameter", "study/bytes_per_param"),
        ("Saved on the fullest rank", "GiB", "study/saved_gib_on_the_fullest_rank"),
    ]
}
"""Section -> (title, unit, summary metric): values that `pipeline.dashboard sync` puts into the runs' summaries."""


def build_workspace(study: StudyInWandb) -> ws.Workspace:
    """Runs are grouped by pair and arm, arms have their colours, deltas refer to the first pair's baseline."""
    sections = [
        _section(name, [*_bars(name), *_lines(curves, study.series)])
        for name, curves in curves_by_section(study.series).items()
    ]
    colours = {arm: arm_style(study.arms, arm)[0] for arm in study.arms}
    baselines = study.baselines
    runset = ws.RunsetSettings(
        filters=[expr.Config("study_name") == study.name],
        groupby=[expr.Metric("Group"), expr.Metric("JobType")],
        order=[expr.Ordering(expr.Metric("Name"), ascending=True)],
        run_settings={config.run_id: ws.RunSettings(color=colours[arm_of(config)]) for config in study.configs},
        group_colors={
            ws.GroupPath(group_of(config), arm_of(config)): colours[arm_of(config)] for config in study.configs
        },
        pinned_columns=list(_COLUMNS),
        baseline_run=baselines[0] if baselines else None,
        pinned_runs=list(baselines[:_MOST_PINNED]),
    )
    workspace = ws.Workspace(
        entity=study.entity,
        project=study.project,
        name=f"Study {study.name}",
        sections=[section for section in sections if section.panels],
        settings=ws.WorkspaceSettings(max_runs=max(10, len(study.configs))),
        runset_settings=runset,
    )
    workspace._internal_runset_id = fixed_id("runset", study.name)
    return workspace


def _section(name: str, panels: list[Any]) -> ws.Section:
    for panel in panels:
        panel._id = fixed_id(name, panel.title)
    return ws.Section(
        name=name, panels=panels, is_open=True, layout_settings=ws.SectionLayoutSettings(columns=2, rows=3)
    )


def _bars(section: str) -> list[wr.BarPlot]:
    return [
        wr.BarPlot(title=title, metrics=[metric], title_x=unit, groupby=wr.Metric("JobType"))
        for title, unit, metric in _BARS.get(section, [])
    ]


def _lines(curves: list[Curve], series: set[str]) -> list[wr.LinePlot]:
    """A curve that no run logs is left out."""
    plots: list[wr.LinePlot] = []
    for curve in curves:
        if names := _names(curve, series):
            title = curve.title.replace("largest rank", "by rank") if len(names) > 1 else curve.title
            plots.append(
                wr.LinePlot(title=title, x=axis_of(names[0]), y=list(names), title_x=curve.x_label, title_y=curve.unit)
            )
    return plots


def _names(curve: Curve, series: set[str]) -> list[str]:
    """What W&B has of a curve: one series, or for memory one for each rank."""
    for name in curve.names:
        for whole in (name, f"update/{name}"):
            if whole in series:
                return [whole]
        if by_rank := [found for found in series if found.startswith(f"memory/{name}/")]:
            return sorted(by_rank, key=lambda found: (len(found), found))  # rank2 before rank10
    return []


def fixed_id(*parts: str) -> str:
    """An id that is the same each time, so that a view which is built again differs only where the study does."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:12]

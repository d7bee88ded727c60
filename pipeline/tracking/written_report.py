"""The W&B report of a study: the words and tables of report.md, with its figures where they stand there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb_workspaces.reports.v2.interface as wr
from wandb_workspaces import expr

from pipeline.tracking.study_in_wandb import StudyInWandb
from pipeline.tracking.study_results import JOB_TYPE
from pipeline.tracking.workspace import fixed_id

_PICTURE = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<file>figures/(?P<name>[^)]+)\.png)\)$", re.MULTILINE)
_LONGEST_TITLE = 128  # W&B's limit


def figures_run(study: StudyInWandb) -> str:
    """The id of the W&B run that carries the figures, for a report can show pictures of runs only."""
    return f"{study.name}-figures"


def media_key(figure: str) -> str:
    return f"figures/{figure}"


def build_report(study: StudyInWandb) -> wr.Report:
    """Out of report.md as it stands in the study's folder."""
    heading, _, text = (study.folder / "report.md").read_text().partition("\n")
    return wr.Report(
        entity=study.entity,
        project=study.project,
        title=heading.removeprefix("# ")[:_LONGEST_TITLE],
        description=study.results["one_line"],
        blocks=[*_blocks(study, text)],
        width="fluid",
    )


def _blocks(study: StudyInWandb, text: str) -> Iterator[Any]:
    end = 0
    for picture in _PICTURE.finditer(text):
        if words := text[end : picture.start()].strip():
            yield wr.MarkdownBlock(_unfolded(words))
        if (study.folder / picture["file"]).exists():
            yield _figure(study, picture["name"], picture["alt"])
        end = picture.end()
    if words := text[end:].strip():
        yield wr.MarkdownBlock(_unfolded(words))


def _unfolded(markdown: str) -> str:
    """W&B's Markdown has no folded parts."""
    return re.sub(r"<details><summary>(.*?)</summary>", r"**\1**", markdown).replace("</details>", "")


def _figure(study: StudyInWandb, name: str, alt: str) -> wr.PanelGrid:
    # Without entity and project, which W&B would be asked for: the report's own.
    runset = wr.Runset(name="figures", filters=[expr.Metric("Name") == figures_run(study)])
    runset._id = fixed_id("figures", study.name, name)
    panel = wr.MediaBrowser(title=alt, media_keys=[media_key(name)], num_columns=1, layout=wr.Layout(w=24, h=14))
    panel._id = fixed_id("figure", study.name, name)
    return wr.PanelGrid(runsets=[runset], panels=[panel], hide_run_sets=True)


def upload_figures(study: StudyInWandb, files_in: Path) -> None:
    """Replace the figures that W&B has. files_in: where W&B's client keeps its own files meanwhile."""
    import wandb

    run = wandb.init(
        entity=study.entity,
        project=study.project,
        id=figures_run(study),
        name=figures_run(study),
        group=study.name,
        job_type=JOB_TYPE,
        notes=study.results["one_line"],
        dir=str(files_in),
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=60),
    )
    figures = sorted((study.folder / "figures").glob("*.png"))
    run.log({media_key(figure.stem): wandb.Image(str(figure)) for figure in figures})
    run.finish(exit_code=0)

"""Analyse a study: run folders in; report.md, dashboard.html, figures, pr_comment.md and summary.json out.

Everything is made again from the study's files alone; running it twice gives the same bytes. No GPU, no network.

    python -m pipeline.analyze results/embedded
    python -m pipeline.analyze results/embedded --pr --image-prefix https://example.org/embedded/

Exit status: 0 when the analysis worked, whatever it found (failed runs and alarms are findings, told in the report);
2 when the folder cannot be analysed.
"""

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.analysis.load import NotAStudyError

# What is heavy to import (matplotlib, scipy, statsmodels) is imported in functions: the processes that read a large
# study import this module as well, and this process imports the rest while they read.

if TYPE_CHECKING:
    from pipeline.analysis.conclusions import Conclusions
    from pipeline.analysis.figures import Picture


@dataclass(frozen=True)
class AnalysisOutcome:
    """What was written, and the study's answer in one line."""

    report: Path
    summary: dict[str, Any]
    one_line: str


def analyze(study_folder: Path, image_prefix: str = "") -> AnalysisOutcome:
    """Write report.md, dashboard.html, figures/, pr_comment.md and summary.json into the study's folder.

    image_prefix: what stands before the pictures' paths in pr_comment.md.
    Raises NotAStudyError (a ValueError) with a message for the user, OSError when the folder cannot be written.
    """
    from pipeline.analysis.pairs import load_study

    study = load_study(study_folder, meanwhile=_import_the_rest)

    from pipeline.analysis.conclusions import conclude
    from pipeline.analysis.figures import draw

    conclusions = conclude(study)
    pictures = draw(conclusions, study_folder / "figures")
    return _write(study_folder, conclusions, pictures, image_prefix)


def _import_the_rest() -> None:
    for name in ("conclusions", "dashboard_page", "figures", "report", "summary"):
        import_module(f"pipeline.analysis.{name}")


def _write(folder: Path, conclusions: "Conclusions", pictures: "list[Picture]", image_prefix: str) -> AnalysisOutcome:
    from pipeline.analysis.dashboard_page import render_dashboard
    from pipeline.analysis.report import render_pr_comment, render_report
    from pipeline.analysis.summary import summarise
    from pipeline.study import json_lines
    from pipeline.study.run_folder import write_atomically

    summary = summarise(conclusions)
    report = folder / "report.md"
    write_atomically(folder / "summary.json", json_lines.dumps(summary, indent=True) + b"\n")
    write_atomically(report, render_report(conclusions, pictures).encode())
    write_atomically(folder / "pr_comment.md", render_pr_comment(conclusions, pictures, image_prefix).encode())
    write_atomically(folder / "dashboard.html", render_dashboard(conclusions).encode())
    return AnalysisOutcome(report, summary, summary["one_line"])


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.analyze",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("study", type=Path, help="the study's folder, for example results/embedded")
    parser.add_argument("--pr", action="store_true", help="print pr_comment.md (and nothing else); posts nothing")
    parser.add_argument(
        "--image-prefix",
        default="",
        metavar="URL",
        help="what stands before figures/<name>.png in pr_comment.md (default: nothing, relative paths)",
    )
    options = parser.parse_args(arguments)
    try:
        outcome = analyze(options.study, options.image_prefix)
    except (NotAStudyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.pr:
        print((options.study / "pr_comment.md").read_text(), end="")
    else:
        print(f"{outcome.report}\n{outcome.one_line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

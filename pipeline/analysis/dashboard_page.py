"""dashboard.html: the study as one page that opens from disk, without network, with zoom and hover.

The page holds BokehJS (which bokeh's package brings), the series and a script that draws them; nothing in it depends
on the clock or on chance.
"""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.analysis.arm_styles import arm_style
from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.curves import CLIP_FRACTION, PPO_KL
from pipeline.analysis.dashboard_bars import ledger_plot, mini_batch_plot, phases_plot, ranks_plot, time_ratio_plot
from pipeline.analysis.dashboard_curves import Plot, curve_plots
from pipeline.analysis.headline import headlines, one_line
from pipeline.analysis.load import Run, Study
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.report import stands_on, warnings
from pipeline.analysis.sections import curves_by_section
from pipeline.analysis.words import brief

_DASHES = {"-": [], ":": [2, 3], "--": [7, 4], "-.": [8, 3, 2, 3]}  # pixels


@dataclass(frozen=True)
class Section:
    """A part of the page; a plot without data is left out."""

    name: str
    plots: list[Plot]

    @property
    def anchor(self) -> str:
        return self.name.lower().replace(" ", "-")


def render_dashboard(conclusions: Conclusions) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("pipeline.analysis"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = partial(_source, environment)
    sections = _sections(conclusions)
    study = conclusions.study
    return environment.get_template("dashboard.html.j2").render(
        study=study,
        headlines={arm: headlines(verdict) for arm, verdict in conclusions.verdicts.items()},
        one_line=one_line(conclusions),
        stands_on=stands_on(study),
        warnings=list(warnings(conclusions)),
        sections=sections,
        arms=[_arm(study, arm) for arm in study.arms],
        pairs=_pairs(study),
        runs=[_run_row(conclusions, run) for run in study.runs],
        style=source("dashboard.css"),
        script=source("dashboard.js"),
        bokeh=[_bokeh("bokeh"), _bokeh("bokeh-api")],
        data=_json(_data(conclusions, sections)),
    )


def _sections(conclusions: Conclusions) -> list[Section]:
    ahead: dict[str, list[Plot | None]] = {
        "Memory": [ledger_plot(conclusions), phases_plot(conclusions), ranks_plot(conclusions)],
        "Policy drift": [
            mini_batch_plot(conclusions, "ppo_kl", "ppo_kl by mini-batch", PPO_KL.unit),
            mini_batch_plot(conclusions, "pg_clipfrac", "Clip fraction by mini-batch", CLIP_FRACTION.unit),
        ],
        "Cost": [time_ratio_plot(conclusions)],
    }
    study = conclusions.study
    curves = curves_by_section({name for run in study.runs for name in run.steps.columns})
    drawn = curve_plots(study, [curve for group in curves.values() for curve in group])
    return [
        Section(name, [*filter(None, ahead.get(name, [])), *(drawn[c.title] for c in group if c.title in drawn)])
        for name, group in curves.items()
    ]


def _arm(study: Study, arm: str) -> dict[str, Any]:
    colour, line = arm_style(study.arms, arm)
    dash = _DASHES[line] if isinstance(line, str) else [2 * pixels for pixels in line[1]]
    return {"name": arm, "colour": colour, "dash": dash, "runs": len(study.runs_of(arm))}


def _pairs(study: Study) -> dict[str, str]:
    """Pair id -> what tells it from the others."""
    return {
        pair.id: f"seed {pair.seed}{f', {pair.setting}' if pair.setting else ''}"
        for pair in sorted(study.pairs, key=lambda pair: (pair.setting, pair.seed))
    }


def _run_row(conclusions: Conclusions, run: Run) -> dict[str, Any]:
    ended = run.status.state if run.status else "not ended"
    why = brief(why_it_ended(run))
    return {
        "id": run.id,
        "arm": run.arm,
        "seed": run.seed,
        "ended": f"{ended}: {why}" if why else ended,
        "steps": len(run.steps),
        "updates": conclusions.diagnoses[run.id].outcome,
    }


def _data(conclusions: Conclusions, sections: list[Section]) -> dict[str, Any]:
    study = conclusions.study
    number = {run.id: i for i, run in enumerate(study.runs)}
    baseline_of: dict[str, int] = {}
    for arm in study.arms:
        pairs = study.pairs_of(arm)
        for pair in [pair for pair in pairs if pair.valid] or pairs:
            baseline_of[pair.treatment.id] = number[pair.baseline.id]
    return {
        "arms": [_arm(study, arm) for arm in study.arms],
        "runs": [
            {"id": run.id, "arm": run.arm, "pair": run.config.pair, "baseline": baseline_of.get(run.id)}
            for run in study.runs
        ],
        "plots": [{"kind": plot.kind, **plot.data} for section in sections for plot in section.plots],
    }


def _json(data: dict[str, Any]) -> Markup:
    """JSON for a script element, which "</script>" inside a name must not end."""
    text = orjson.dumps(data).decode()
    return Markup(text.replace("<", "\\u003c"))


def _source(environment: Environment, name: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _bokeh(component: str) -> Markup:
    """The script that bokeh's package brings. Read from its folder: importing bokeh takes longer than the analysis."""
    found = find_spec("bokeh")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "server" / "static" / "js" / f"{component}.min.js"
    return Markup(path.read_text(encoding="utf-8").replace("</script", "<\\/script"))

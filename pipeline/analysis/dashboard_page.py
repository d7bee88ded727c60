"""dashboard.html: the study as one page that opens from disk, without network, with zoom and hover.

The page holds BokehJS (which bokeh's package brings), the series and a script that draws them; nothing in it depends
on the clock or on chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.curves import CLIP_FRACTION, GRAD_NORM, LIVENESS, MEMORY, PPO_KL, REWARD, Curve
from pipeline.analysis.dashboard_bars import ledger_plot, mini_batch_plot, phases_plot, ranks_plot, time_ratio_plot
from pipeline.analysis.dashboard_curves import Plot, curve_plots
from pipeline.analysis.figure_style import arm_style
from pipeline.analysis.load import Run, Study
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.report import stands_on, warnings
from pipeline.analysis.words import shortened

_DASHES = {"-": [], ":": [2, 3], "--": [7, 4], "-.": [8, 3, 2, 3]}  # pixels
_VALIDATION_CURVES = 4


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
        conclusions=conclusions,
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
    groups: dict[str, Sequence[Curve | Plot | None]] = {
        "Memory": [
            ledger_plot(conclusions),
            phases_plot(conclusions),
            ranks_plot(conclusions),
            MEMORY,
            _peak("optimizer step", "optimizer_step"),
            _peak("forward and backward", "forward_backward"),
            Curve(
                "Whole device by NVML after each optimizer step, largest rank",
                "GiB",
                ("device_after_update_gib",),
                "largest",
            ),
        ],
        "Policy drift": [
            PPO_KL,
            mini_batch_plot(conclusions, "ppo_kl", "ppo_kl by mini-batch", PPO_KL.unit),
            CLIP_FRACTION,
            mini_batch_plot(conclusions, "pg_clipfrac", "Clip fraction by mini-batch", CLIP_FRACTION.unit),
            Curve("ppo_kl of each mini-batch", PPO_KL.unit, ("ppo_kl",), "mean"),
            Curve("Clip fraction of each mini-batch", CLIP_FRACTION.unit, ("pg_clipfrac",), "mean"),
            Curve("Entropy (actor/entropy)", "nats per token", ("actor/entropy",)),
            Curve("Rollout against actor (training/rollout_probs_diff_mean)", "mean difference of probabilities",
                  ("training/rollout_probs_diff_mean",)),
        ],
        "Liveness": [
            LIVENESS,
            Curve("Tensors left as they were, worst rank", "tensors", ("tensors_still",), "largest"),
            GRAD_NORM,
            Curve("Learning rate (actor/lr)", "learning rate", ("actor/lr",)),
        ],
        "Reward and validation": [
            REWARD,
            *_validation(conclusions.study),
            Curve("Reward spread within groups (rewards/within_group_std_mean)", "mean standard deviation",
                  ("rewards/within_group_std_mean",)),
            Curve("Response length (response_length/mean)", "tokens", ("response_length/mean",)),
        ],
        "Cost": [
            time_ratio_plot(conclusions),
            Curve("Whole step (timing_s/step)", "seconds", ("timing_s/step",)),
            Curve("Optimizer step, slowest rank", "seconds", ("time_optimizer_step_s",), "largest"),
            Curve("Update of the actor (timing_s/update_actor)", "seconds", ("timing_s/update_actor",)),
            Curve("Rollout (timing_s/gen)", "seconds", ("timing_s/gen",)),
            Curve("Throughput (perf/throughput)", "tokens per second and GPU", ("perf/throughput",)),
        ],
    }  # fmt: skip
    every = [curve for group in groups.values() for curve in group if isinstance(curve, Curve)]
    drawn = curve_plots(conclusions.study, every)
    return [
        Section(name, [plot for item in group if (plot := _drawn(item, drawn)) is not None])
        for name, group in groups.items()
    ]


def _drawn(item: Curve | Plot | None, drawn: dict[str, Plot]) -> Plot | None:
    return drawn.get(item.title) if isinstance(item, Curve) else item


def _peak(words: str, phase: str) -> Curve:
    names = (f"allocated_peak_{phase}_gib", f"rss_peak_{phase}_gib")
    return Curve(f"Peak in {words}, largest rank", "GiB", names, "largest")


def _validation(study: Study) -> list[Curve]:
    names = sorted({name for run in study.runs for name in run.steps.columns if name.startswith("val-")})
    core = [name for name in names if name.startswith("val-core/")]
    return [Curve(f"Validation ({name})", "score", (name,)) for name in (core or names)[:_VALIDATION_CURVES]]


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
    why = shortened(why_it_ended(run))
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

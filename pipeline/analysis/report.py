"""report.md and pr_comment.md: one template, filled with what was concluded."""

import re
from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.cost import observer_time, on_two_machines
from pipeline.analysis.diagnosis import ALIVE
from pipeline.analysis.figures import Picture
from pipeline.analysis.headline import headlines, one_line
from pipeline.analysis.load import BASELINE, Study
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.parity_words import growth_in_words
from pipeline.analysis.peaks import high_peak
from pipeline.analysis.provenance import (
    environment_in_words,
    hardware_in_words,
    recorded_environment,
    reproduce_command,
    settings_by_arm,
)
from pipeline.analysis.report_tables import (
    candidates_table,
    cost_table,
    diagnosed,
    diagnosis_table,
    difference_table,
    ledger_table,
    memory_table,
    parity_table,
    savings_table,
)
from pipeline.analysis.words import alike, brief, in_setting, short_list, shortened

PR_LIMIT = 60_000
"""Characters; GitHub refuses comments above 65,536."""
_LONGEST_ERROR = 1000


def render_report(conclusions: Conclusions, pictures: list[Picture]) -> str:
    """report.md, with pictures by relative path."""
    return _render(conclusions, pictures, "", pr=False)


def render_pr_comment(conclusions: Conclusions, pictures: list[Picture], image_prefix: str = "") -> str:
    """pr_comment.md: the "Test" section of verl's pull request template. At most PR_LIMIT characters.

    image_prefix: what stands before "figures/<name>.png", a URL where the comment cannot see the files.
    """
    text = _render(conclusions, pictures, image_prefix, pr=True)
    if len(text) <= PR_LIMIT:
        return text
    note = f"\n\n(cut here: a comment holds {PR_LIMIT:,} characters; report.md has the rest)\n"
    return text[: PR_LIMIT - len(note)].rsplit("\n", 1)[0] + note


def _render(conclusions: Conclusions, pictures: list[Picture], image_prefix: str, *, pr: bool) -> str:
    environment = Environment(
        loader=PackageLoader("pipeline.analysis"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    by_name = {picture.file: picture for picture in pictures}

    def picture(name: str) -> str:
        found = by_name.get(f"figures/{name}.png")
        return f"![{found.alt}]({image_prefix}{found.file})\n" if found else ""

    text = environment.get_template("report.md.j2").render(
        pr=pr, picture=picture, details=_details, **_context(conclusions)
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>\n" if content else ""


def _context(conclusions: Conclusions) -> dict[str, Any]:
    study = conclusions.study
    treatments = ", ".join(study.treatments)
    return {
        "title": f"{study.name}: {BASELINE} against {treatments}" if study.pairs else study.name,
        "answer": _answer(conclusions),
        "stands_on": stands_on(study),
        "warnings": list(warnings(conclusions)),
        "savings_table": savings_table(conclusions),
        "savings_sentences": list(_savings_sentences(conclusions)),
        "memory_table": memory_table(conclusions),
        "memory_note": _memory_note(conclusions),
        "ledger_table": ledger_table(conclusions),
        "diagnosis_table": diagnosis_table(conclusions),
        "diagnosis_notes": [(arm, trace) for arm, found in diagnosed(conclusions) for trace in found.traces],
        "candidates_table": candidates_table(conclusions),
        "parity_sentences": _parity_sentences(conclusions),
        "parity_table": parity_table(conclusions),
        "gates": _gates(conclusions),
        "difference_table": difference_table(conclusions) + _growth(conclusions),
        "cost_table": cost_table(conclusions),
        "observing": _observing(study),
        "left_out": short_list(list(_left_out(conclusions)), 16),
        "command": reproduce_command(study),
        "environment": environment_in_words(study),
        "overrides": settings_by_arm(study),
        "not_shown": list(_not_shown(conclusions)),
    }


def _observing(study: Study) -> str:
    found = observer_time(study.runs)
    if found is None:
        return ""
    told = f"{1e3 * found.per_update_s:.3g} ms per optimizer step, {100 * found.share:.2g} % of the step time"
    return f"Observing took {told} (the observers' own clock, slowest rank, first step left out)."


def _answer(conclusions: Conclusions) -> str:
    """One line of Markdown, however many arms there are."""
    if not conclusions.verdicts:
        return f"**{one_line(conclusions)}**"
    return "<br>".join(f"**{line}**" for verdict in conclusions.verdicts.values() for line in headlines(verdict))


def _growth(conclusions: Conclusions) -> str:
    grown = [growth_in_words(arm, verdict.parity.exact) for arm, verdict in conclusions.verdicts.items()]
    lines = [f"- {words}" for words in grown if words]
    return "\n".join(["\n", *lines]) if lines else ""


def stands_on(study: Study) -> str:
    """What the answer rests on: pairs, runs, seeds, hardware."""
    judged = [pair for pair in study.pairs if not pair.is_noise_floor]
    valid = sum(pair.valid for pair in judged)
    seeds = sorted({run.seed for run in study.runs})
    steps = sorted({len(run.steps) for run in study.runs})
    repeats = sum(pair.is_noise_floor and pair.valid for pair in study.pairs)
    parts = [
        f"{valid} of {len(judged)} pairs valid",
        f"{repeats} A/A pairs",
        f"{len(study.runs)} runs of {steps[0]}{f' to {steps[-1]}' if len(steps) > 1 else ''} steps",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(short_list([str(seed) for seed in seeds], 10))}",
    ]
    random = " Random weights and a made-up reward: rewards and parity mean nothing here." if _random(study) else ""
    return f"Stands on: {'; '.join(parts)}. {hardware_in_words(study)}.{random}"


def _random(study: Study) -> bool:
    return any(run.config.recipe.get("random_weights") for run in study.runs)


def warnings(conclusions: Conclusions) -> Iterator[str]:
    """What a reader must see before any number: alarms, updates that are not alive."""
    for arm, diagnosis in diagnosed(conclusions):
        if diagnosis.note:
            yield f"{arm}: {diagnosis.note}"
    for arm, verdict in conclusions.verdicts.items():
        settings = [found for found in verdict.by_setting.values() if found.savings.outcome == "alarm"]
        for found in settings or [verdict]:
            if found.savings.outcome == "alarm":
                name = in_setting(arm, found.setting)
                yield f"{name}: the saving is an alarm, not a success: {found.savings.sentence}"
    for arm, diagnosis in diagnosed(conclusions):
        if diagnosis.outcome not in (*ALIVE, "not enough data"):
            yield f"{arm}: {diagnosis.outcome}: {diagnosis.evidence}"


def _savings_sentences(conclusions: Conclusions) -> Iterator[str]:
    for arm, found in conclusions.arms.items():
        for setting, check in found.treatments.items():
            if check.problems:
                yield f"{in_setting(arm, setting)}, treatment check: {'; '.join(check.problems)}"
        if found.ledgers_differ:
            yield f"{arm}: the ledgers of runs of the same setting differ; the first one is shown"
    for arm, verdict in conclusions.verdicts.items():
        if verdict.savings.outcome in ("less than predicted", "not measured"):
            yield f"{arm}: {verdict.savings.sentence}"
        for found in verdict.by_setting.values() or [verdict]:
            if found.valid_pairs and (peak := high_peak(found.memory)) is not None:
                yield f"{in_setting(arm, found.setting)}: {peak.sentence}"


def _memory_note(conclusions: Conclusions) -> str:
    if not any(item.source == "rss" for verdict in conclusions.verdicts.values() for item in verdict.memory):
        return ""
    return (
        "A process's resident memory moves by megabytes for reasons of its own, more than a tiny model's state: "
        "the saving is what the ledger counts, tensor by tensor."
    )


def _parity_sentences(conclusions: Conclusions) -> list[str]:
    if not conclusions.verdicts:
        return ["No treatment arm ran: there is nothing to compare."]
    sentences: list[str] = []
    for verdict in conclusions.verdicts.values():
        mode = f" ({verdict.parity.mode})" if verdict.parity.metrics else ""
        sentences.append(f"**{verdict.arm}: {verdict.parity.outcome}**{mode}. {verdict.parity.sentence}")
        sentences.extend(f"{verdict.arm}: {note}" for note in short_list(verdict.parity.notes))
    return sentences


def _gates(conclusions: Conclusions) -> str:
    verdicts = list(conclusions.verdicts.values())
    if not verdicts:
        return ""
    lines = verdicts[0].parity.gates
    listed = "\n".join(f"- {line}" for line in lines)
    return f"{listed}\n\nSHA-256 stored with the runs: `{conclusions.study.gates_hash}`"


def _left_out(conclusions: Conclusions) -> Iterator[str]:
    study = conclusions.study
    for pair in study.pairs:
        if not pair.valid:
            reasons = "; ".join(short_list([shortened(reason) for reason in pair.reasons], 4))
            yield f"pair {pair.id} with {pair.treatment.arm}: {reasons}"
        elif on_two_machines(pair):
            yield f"times of pair {pair.id} with {pair.treatment.arm}: its runs were made on two machines"
    yield from _ended_otherwise(study)
    yield from map(shortened, study.notes)
    notes = [(run.id, note) for run in study.runs for note in [*run.notes, *conclusions.memory[run.id].notes]]
    yield from map(shortened, alike(notes))


def _ended_otherwise(study: Study) -> Iterator[str]:
    """The one place where a run's error stands in full."""
    paired = {run.id for pair in study.pairs for run in (pair.baseline, pair.treatment)}
    for run in study.runs:
        why = why_it_ended(run)
        told_with_its_pair = run.id in paired and brief(why) == shortened(why).removesuffix(".")
        if (run.status is None or run.status.state != "succeeded") and not told_with_its_pair:
            yield f"{run.id}: {run.status.state if run.status else 'not ended'}: {shortened(why, _LONGEST_ERROR)}"


def _not_shown(conclusions: Conclusions) -> Iterator[str]:
    study = conclusions.study
    environment = recorded_environment(study)
    if environment is not None and environment.stand_ins:
        yield (
            "Nothing here was measured on a GPU. In place of the GPU stack stood: "
            f"{'; '.join(environment.stand_ins)}. Memory is a process's resident memory; times are those of a CPU"
        )
    recipe = study.runs[0].config.recipe
    longest = max(len(run.steps) for run in study.runs)
    model = recipe.get("model_name") or recipe.get("name")
    yield f"Training longer than {longest} steps, models other than {model}, other parallel layouts"
    if _random(study):
        yield "Anything about learning: the weights are random, and the reward is made up from the response's text"
    for arm, verdict in conclusions.verdicts.items():
        if not verdict.valid_pairs:
            yield f"Anything about the parity of {arm}: no pair is valid"
        elif len(verdict.valid_pairs) == 1:
            yield f"Equivalence of {arm}: one pair never establishes it"
    if conclusions.verdicts and not any(pair.is_noise_floor and pair.valid for pair in study.pairs):
        yield "The noise floor: there is no valid A/A pair (arm baseline_repeat)"
    if any(ledger.frozen_elements for ledger in conclusions.ledgers.values()):
        yield "Frozen parameters: they lie outside the DDP buffers and the ledger (2 bytes each in every arm)"
    yield "Resuming from a checkpoint"

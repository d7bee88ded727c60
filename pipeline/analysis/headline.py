"""The study's answer in a line for each arm (or setting), for those who read no more. Only valid pairs give numbers."""

from dataclasses import dataclass

from pipeline.analysis.conclusions import Conclusions, Verdict
from pipeline.analysis.diagnosis import ALIVE, Diagnosis
from pipeline.analysis.load import Pair
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.peaks import high_peak
from pipeline.analysis.treatment import check_treatment
from pipeline.analysis.words import alike, brief, gib, in_setting, short_list

_MOST_REASONS = 3


@dataclass(frozen=True)
class Headline:
    """The whole trade of an arm: GiB saved, percent of the device, updates, times, parity, and what was left out."""

    name: str
    parts: list[str]
    """The most important first."""

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.parts)}"


def one_line(conclusions: Conclusions) -> str:
    """The study's answer."""
    if conclusions.verdicts:
        return " | ".join(map(in_words, conclusions.verdicts.values()))
    arms = ", ".join(f"{name} {arm.diagnosis.outcome}" for name, arm in conclusions.arms.items())
    return f"no treatment arm, so nothing to compare; updates: {arms}"


def in_words(verdict: Verdict) -> str:
    return " | ".join(map(str, headlines(verdict)))


def headlines(verdict: Verdict) -> list[Headline]:
    """One for all settings together, or one for each where they come out differently."""
    settings = list(verdict.by_setting.values())
    has_numbers = any(found.valid_pairs or found.savings.outcome == "alarm" for found in settings)
    if has_numbers and len({_came_out(found) for found in settings}) > 1:
        together = " (all settings together)" if sum(bool(found.valid_pairs) for found in settings) > 1 else ""
        return [_headline(found, in_setting(found.arm, found.setting), together) for found in settings]
    return [_headline(verdict, verdict.arm)]


def _came_out(verdict: Verdict) -> tuple[object, ...]:
    """Times are left aside: they always differ a little."""
    return bool(verdict.valid_pairs), verdict.updates.outcome, _saved(verdict)


def _headline(verdict: Verdict, name: str, of_parity: str = "") -> Headline:
    """Where no pair is valid, that comes in the place of saving, times and parity."""
    if verdict.valid_pairs:
        parity = f"parity: {verdict.parity.outcome}{of_parity}"
        parts = [_saved(verdict), _updates(verdict), _times(verdict), parity, _left_out(verdict)]
        return Headline(name, [part for part in parts if part])
    alarm = _saved(verdict) if verdict.savings.outcome == "alarm" else ""
    # Runs that broke off before they could tell: why they did is told already.
    updates = "" if verdict.updates.outcome == "not enough data" else _updates(verdict)
    return Headline(name, [part for part in (alarm, _left_out(verdict), updates) if part])


def _saved(verdict: Verdict) -> str:
    savings = verdict.savings
    if savings.found is None or savings.explained is None:
        return "saving not measured"
    if savings.outcome == "alarm":
        return f"ALARM: {savings.found:.2f} bytes per parameter gone where this arm can save {savings.explained:.2f}"
    per_rank = [found for _, _, found in savings.gib_per_rank]
    mean = sum(per_rank) / len(per_rank) if per_rank else 0.0
    saved = f"saves {gib(mean)} GiB per {verdict.device}{_share(verdict, mean)}"
    of_each = f"{savings.found:.2f} bytes per parameter"
    peak = high_peak(verdict.memory)
    return f"{saved}, {of_each}" if peak is None else f"{saved} in steady state, {of_each}, but {peak.in_short}"


def _share(verdict: Verdict, saved_gib: float) -> str:
    if not verdict.device_gib:
        return ""
    size = f"{verdict.device_gib:.0f} GiB{'' if verdict.device == 'GPU' else ' host memory'}"
    return f" ({100 * saved_gib / verdict.device_gib:.2g} % of {size})"


def _updates(verdict: Verdict) -> str:
    by_setting = verdict.updates_by_setting
    if len({found.outcome for found in by_setting.values()}) > 1:
        return f"updates: {', '.join(f'{_outcome(found)} ({setting})' for setting, found in by_setting.items())}"
    told = _outcome(verdict.updates)
    return f"updates: {told}" if verdict.updates.outcome in ALIVE else told


def _outcome(diagnosis: Diagnosis) -> str:
    return diagnosis.outcome if diagnosis.outcome in ALIVE else diagnosis.outcome.upper()


def _times(verdict: Verdict) -> str:
    parts = [
        f"{name} {ratio.ratio:.2f} x"
        for name, ratio in (("optimizer step", verdict.optimizer_step), ("whole step", verdict.step))
        if ratio is not None
    ]
    return f"time: {', '.join(parts)}" if parts else ""


def _left_out(verdict: Verdict) -> str:
    lost = [pair for pair in verdict.pairs if not pair.valid]
    if not verdict.pairs:
        return "no valid pair: no baseline run to compare with"
    if not lost:
        return ""
    what = f"{len(lost)} of {len(verdict.pairs)} pairs left out" if verdict.valid_pairs else "no valid pair"
    if len(verdict.pairs) == 1:
        return f"{what}: {_why(lost[0])}"
    reasons = alike((_name(pair, verdict), _why(pair)) for pair in lost)
    return f"{what}: {', '.join(short_list(reasons, _MOST_REASONS))}"


def _name(pair: Pair, verdict: Verdict) -> str:
    return f"seed {pair.seed}{f' with {pair.setting}' if pair.setting != verdict.setting else ''}"


def _why(pair: Pair) -> str:
    """The first thing that is wrong; the report's "Left out" has them all."""
    for run in (pair.baseline, pair.treatment):
        if run.status is None:
            return f"{run.arm} has not ended"
        if run.status.state != "succeeded":
            told = brief(why_it_ended(run))
            return f"{run.arm} {run.status.state}{f' ({told})' if told else ''}"
    for run in (pair.baseline, pair.treatment):
        check = check_treatment(run)
        if check.outcome != "in effect":
            return f"{run.arm}'s treatment {check.outcome}"
    return brief(pair.reasons[0])

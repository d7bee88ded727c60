"""Everything that the analysis concludes from a study, before it is put into words, numbers and pictures."""

from dataclasses import dataclass, replace

from pipeline.analysis.cost import TimeRatio, optimizer_step_ratio, step_ratio
from pipeline.analysis.diagnosis import Diagnosis, diagnose, worst
from pipeline.analysis.exact import compare_exactly
from pipeline.analysis.ledger import RunLedger, predict_and_compare
from pipeline.analysis.load import BASELINE, Pair, Run, Study
from pipeline.analysis.memory import MemoryDifference, RunMemory, memory_differences, run_memory
from pipeline.analysis.parity import judge_parity
from pipeline.analysis.results import ExactComparison, ParityResult
from pipeline.analysis.savings import Savings, judge_savings
from pipeline.analysis.treatment import TreatmentCheck, check_treatment


@dataclass(frozen=True)
class ArmConclusion:
    """One arm: what its runs hold and whether their updates are alive."""

    runs: list[Run]
    ledgers: dict[str, RunLedger]
    """By `Run.setting`, of its first run that has one. One entry, "", where all settings hold the same bytes."""
    ledgers_differ: bool
    """Whether runs of one setting do not hold the same bytes."""
    treatment: TreatmentCheck
    """The worst of the runs' checks."""
    treatments: dict[str, TreatmentCheck]
    """The worst of each setting's checks, by `Run.setting`."""
    diagnosis: Diagnosis
    """The worst of the runs' diagnoses."""
    diagnoses: dict[str, Diagnosis]
    """The worst of each setting's diagnoses, by `Run.setting`."""
    diagnosed: str
    """The run that `diagnosis` is of."""

    @property
    def ledger(self) -> RunLedger | None:
        """The first of `ledgers`."""
        return next(iter(self.ledgers.values()), None)


@dataclass(frozen=True)
class Verdict:
    """One treatment arm against its baseline, in all settings together or in one."""

    arm: str
    setting: str
    """As `Run.setting`; empty for all settings together."""
    pairs: list[Pair]
    treatment: TreatmentCheck
    updates: Diagnosis
    """The worst, runs left aside that broke off before they could tell; likewise by `Run.setting`."""
    updates_by_setting: dict[str, Diagnosis]
    savings: Savings
    parity: ParityResult
    memory: list[MemoryDifference]
    optimizer_step: TimeRatio | None
    step: TimeRatio | None
    device_gib: float | None
    device: str
    """ "GPU" or "worker": what a rank runs on."""
    by_setting: dict[str, "Verdict"]
    """The same of each setting by itself, but for parity, which is judged over all of them. Empty for one setting."""

    @property
    def valid_pairs(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.valid]

    @property
    def steady(self) -> MemoryDifference | None:
        """The trainer's own steady state: the allocator's, or the process's on the host."""
        found = [item for item in self.memory if item.phase == "after_update" and item.source in ("allocated", "rss")]
        return found[0] if found else None


@dataclass(frozen=True)
class Conclusions:
    """All of a study."""

    study: Study
    arms: dict[str, ArmConclusion]
    verdicts: dict[str, Verdict]
    diagnoses: dict[str, Diagnosis]
    """By run id."""
    memory: dict[str, RunMemory]
    """By run id."""
    first_differences: dict[tuple[str, str], ExactComparison]
    """By pair id and treatment arm, of the valid pairs: that a run which broke off shows no difference says nothing."""

    @property
    def ledgers(self) -> dict[tuple[str, str], RunLedger]:
        """By arm and setting, as `ArmConclusion.ledgers`."""
        return {(arm, setting): ledger for arm, found in self.arms.items() for setting, ledger in found.ledgers.items()}


def conclude(study: Study) -> Conclusions:
    """Judge every run, arm, pair and treatment of a study."""
    diagnoses = {run.id: diagnose(run) for run in study.runs}
    memory = {run.id: run_memory(run) for run in study.runs}
    return Conclusions(
        study,
        arms={arm: _arm(study.runs_of(arm), diagnoses) for arm in study.arms},
        verdicts={arm: _verdict(study, arm, diagnoses, memory) for arm in study.treatments},
        diagnoses=diagnoses,
        memory=memory,
        first_differences={
            (pair.id, pair.treatment.arm): compare_exactly([pair], []) for pair in study.pairs if pair.valid
        },
    )


def _arm(runs: list[Run], diagnoses: dict[str, Diagnosis]) -> ArmConclusion:
    by_setting = {setting: _ledgers(group) for setting, group in _by_setting(runs).items()}
    diagnosis = worst([diagnoses[run.id] for run in runs])
    return ArmConclusion(
        runs,
        _first_ledgers(by_setting),
        any(len({ledger.found for ledger in ledgers}) > 1 for ledgers in by_setting.values()),
        _worst_check(runs),
        {setting: _worst_check(group) for setting, group in _by_setting(runs).items()},
        diagnosis,
        _worst_by_setting(runs, diagnoses),
        next(run.id for run in runs if diagnoses[run.id] is diagnosis),
    )


def _ledgers(runs: list[Run]) -> list[RunLedger]:
    return [ledger for run in runs if (ledger := predict_and_compare(run)) is not None]


def _first_ledgers(by_setting: dict[str, list[RunLedger]]) -> dict[str, RunLedger]:
    first = {setting: ledgers[0] for setting, ledgers in by_setting.items() if ledgers}
    alike = len({(ledger.predicted, ledger.found) for ledger in first.values()}) == 1
    return {"": next(iter(first.values()))} if alike else first


def _by_setting(runs: list[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def _worst_by_setting(runs: list[Run], diagnoses: dict[str, Diagnosis]) -> dict[str, Diagnosis]:
    return {setting: worst([diagnoses[run.id] for run in group]) for setting, group in _by_setting(runs).items()}


def _worst_check(runs: list[Run]) -> TreatmentCheck:
    order = ("not in effect", "not checked", "in effect")
    return min((check_treatment(run) for run in runs), key=lambda check: order.index(check.outcome))


def _verdict(study: Study, arm: str, diagnoses: dict[str, Diagnosis], memory: dict[str, RunMemory]) -> Verdict:
    """Of all settings, with those of each."""
    runs, pairs, parity = study.runs_of(arm), study.pairs_of(arm), judge_parity(study, study.pairs, arm)
    whole = _verdict_of(arm, "", runs, pairs, parity, diagnoses, memory)
    by_setting = _by_setting(runs)
    if len(by_setting) == 1:
        return whole
    return replace(
        whole,
        by_setting={
            setting: _verdict_of(
                arm, setting, own, [pair for pair in pairs if pair.setting == setting], parity, diagnoses, memory
            )
            for setting, own in by_setting.items()
        },
    )


def _verdict_of(
    arm: str,
    setting: str,
    runs: list[Run],
    pairs: list[Pair],
    parity: ParityResult,
    diagnoses: dict[str, Diagnosis],
    memory: dict[str, RunMemory],
) -> Verdict:
    # Times and memory of an arm that is not what it says would be misleading; where no pair is valid they are all
    # there is, and the report says that they are.
    measured = [pair for pair in pairs if pair.valid] or pairs
    differences = memory_differences(measured, memory)
    sizes = [size for run in runs if (size := memory[run.id].device_gib)]
    on_gpu = any(run.environment is not None and run.environment.platform == "cuda" for run in runs)
    return Verdict(
        arm,
        setting,
        pairs,
        _worst_check(runs),
        worst([diagnoses[run.id] for run in _telling(runs, diagnoses)]),
        _worst_by_setting(_telling(runs, diagnoses), diagnoses),
        judge_savings(pairs, differences),
        parity,
        differences,
        optimizer_step_ratio(measured),
        step_ratio(measured),
        max(sizes) if sizes else None,
        "GPU" if on_gpu else "worker",
        {},
    )


def _telling(runs: list[Run], diagnoses: dict[str, Diagnosis]) -> list[Run]:
    """A run that broke off too early says nothing of the arm where others do."""
    return [
        run
        for run in runs
        if diagnoses[run.id].outcome != "not enough data" or (run.status and run.status.state == "succeeded")
    ] or runs


def baseline_of(conclusions: Conclusions) -> ArmConclusion | None:
    """The baseline arm, when it ran."""
    return conclusions.arms.get(BASELINE)

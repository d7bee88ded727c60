"""The treatment check: did the arm's setting take effect inside the workers?"""

from dataclasses import dataclass
from typing import Literal

from pipeline.analysis.declared import KINDS, DeclaredOptimizer, declared_optimizer, dtype_name
from pipeline.analysis.load import Run
from pipeline.study.records import FoundOptimizer, Ledger

TreatmentOutcome = Literal["in effect", "not in effect", "not checked"]

_KIND_WORDS = {
    "param": "parameters",
    "main_grad": "main gradients",
    "master_param": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "other": "other tensors",
}


@dataclass(frozen=True)
class TreatmentCheck:
    """The check's outcome, its contradictions (empty when in effect) and what was found, in words."""

    outcome: TreatmentOutcome
    problems: list[str]
    found: str

    @property
    def sentence(self) -> str:
        return "; ".join(self.problems) or self.found


def kind_words(kind: str) -> str:
    """exp_avg -> first moments."""
    return _KIND_WORDS[kind]


def check_treatment(run: Run) -> TreatmentCheck:
    """Compare the optimizer found in the workers with what the run's settings demand."""
    if run.ledger is None:
        return TreatmentCheck("not checked", ["no ledger: nothing was found in the workers"], "nothing")
    declared = declared_optimizer(run)
    problems = [
        *_class_problems(run.ledger.optimizer, declared),
        *_flag_problems(run.ledger.optimizer, declared),
        *_state_problems(run.ledger, declared),
    ]
    return TreatmentCheck("not in effect" if problems else "in effect", problems, _found_in_words(run.ledger))


def _class_problems(found: FoundOptimizer, declared: DeclaredOptimizer) -> list[str]:
    problems: list[str] = []
    if found.flags.get("use_distributed_optimizer") and not found.megatron_class.endswith("DistributedOptimizer"):
        problems.append(f"the distributed optimizer is asked for, {found.megatron_class} was found")
    if declared.precision_aware and not found.inner_class.endswith("FusedAdam"):
        problems.append(f"PAO needs FusedAdam, {found.inner_class} was found")
    return problems


def _flag_problems(found: FoundOptimizer, declared: DeclaredOptimizer) -> list[str]:
    demanded: dict[str, object] = {"use_precision_aware_optimizer": declared.precision_aware}
    if declared.precision_aware:
        demanded |= {
            "store_param_remainders": declared.remainders,
            "exp_avg_dtype": declared.dtypes["exp_avg"],
            "exp_avg_sq_dtype": declared.dtypes["exp_avg_sq"],
            "master_weights": True,
            "use_decoupled_grad": True,
        }
    problems: list[str] = []
    for flag, wanted in demanded.items():
        if flag in found.flags:
            value = found.flags[flag]
            if (dtype_name(value) if isinstance(value, str) else bool(value)) != wanted:
                problems.append(f"{flag} is {value} in the worker, {wanted} is needed")
    return problems


def _state_problems(ledger: Ledger, declared: DeclaredOptimizer) -> list[str]:
    """Kinds whose dtype on some rank is not the declared one, or that are missing."""
    problems: list[str] = []
    for kind in KINDS:
        wanted = declared.dtypes[kind]
        wrong: dict[str, list[int]] = {}
        for rank in ledger.ranks:
            found = "+".join(sorted(entry.dtype for entry in rank.entries if entry.kind == kind and entry.elements))
            # A rank without a shard of its own holds no state; a stage without parameters, nothing at all.
            needed = rank.trainable_elements if kind in ("param", "main_grad") else rank.optimizer_elements
            if found != wanted and (found or needed):
                wrong.setdefault(found, []).append(rank.rank)
        for found, ranks in wrong.items():
            where = "" if len(ranks) == len(ledger.ranks) else f" on rank {', '.join(map(str, ranks))}"
            problems.append(f"{kind_words(kind)} are {found or 'missing'}{where}, {wanted} is needed")
    return problems


def _found_in_words(ledger: Ledger) -> str:
    inner = ledger.optimizer.inner_class.rsplit(".", 1)[-1]
    outer = ledger.optimizer.megatron_class.rsplit(".", 1)[-1]
    dtypes: dict[str, set[str]] = {}
    for rank in ledger.ranks:
        for entry in rank.entries:
            dtypes.setdefault(entry.kind, set()).add(entry.dtype)
    state = ", ".join(f"{kind_words(kind)} {'+'.join(sorted(dtypes[kind]))}" for kind in KINDS if kind in dtypes)
    return f"{inner} inside {outer}; {state}"

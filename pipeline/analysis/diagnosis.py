"""Is the update alive? One table decides, from what each run recorded. ppo_kl alone decides nothing.

ppo_kl is exactly 0 in the first mini-batch of every step (the policy is still the one that sampled), in every
mini-batch when there is one optimizer step per batch, and when nothing moves. Only what the optimizer did to the
weights tells these apart: liveness, the share of trainable elements whose bits an optimizer step changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.analysis.columns import BoolArray, FloatArray
from pipeline.analysis.ledger import predict_and_compare
from pipeline.analysis.library_versions import megatron_core_in_words
from pipeline.analysis.load import Run
from pipeline.analysis.non_finite import non_finite_metrics
from pipeline.analysis.pairs import why_it_ended
from pipeline.analysis.treatment import kind_words
from pipeline.analysis.words import brief
from pipeline.study.faults import FAULTS

DiagnosisOutcome = Literal[
    "non-finite",
    "lr still zero",
    "no learning signal",
    "dead optimizer",
    "weights not reaching the rollout",
    "on-policy by design",
    "healthy",
    "not enough data",
]
ALIVE: tuple[DiagnosisOutcome, ...] = ("healthy", "on-policy by design")

# The rollout engine rounds otherwise than the trainer, so their probabilities differ a little even with equal weights:
# step 1 shows by how much. Weights that stay behind make the difference grow with every step.
_ROLLOUT_GROWTH = 10.0
_ROLLOUT_FLOOR = 0.005  # mean probability difference below which no growth is alarming


@dataclass(frozen=True)
class Finding:
    """One candidate of the diagnosis table: whether it holds, and the evidence in one sentence."""

    candidate: DiagnosisOutcome
    holds: bool
    evidence: str
    traces: tuple[str, ...] = ()
    """Further facts that point to the cause, each a sentence; for a candidate that holds."""


@dataclass(frozen=True)
class Diagnosis:
    """The first candidate that holds, with the whole table."""

    outcome: DiagnosisOutcome
    findings: list[Finding]
    note: str = ""
    """What a reader must know beside the table: a fault that was injected on purpose."""

    @property
    def evidence(self) -> str:
        """The sentence of the candidate that holds."""
        return next((found.evidence for found in self.findings if found.holds), "nothing was recorded")

    @property
    def traces(self) -> tuple[str, ...]:
        """The facts that point to the cause of the candidate that holds."""
        return next((found.traces for found in self.findings if found.holds), ())


class _Signs:
    """What a run's optimizer steps show."""

    def __init__(self, run: Run) -> None:
        self.run = run
        table = run.updates
        self.liveness = table.column("liveness")
        self.lr = table.column("lr")
        self.grad_norm = table.column("grad_norm")
        self.rank = table.column("rank")
        self.kl = table.column("ppo_kl")
        self.mini_batch = table.column("mini_batch")
        # On a GPU the share is that of a sample; checksums of every tensor say whether anything moved at all.
        tensors = table.column("tensors")
        self.moved = (self.liveness > 0) | (tensors > table.column("tensors_still"))
        self.updates = len(np.unique(table.column("update")))
        self.per_batch = int(np.nanmax(self.mini_batch)) + 1 if np.isfinite(self.mini_batch).any() else 0
        self.spread = run.metric("rewards/within_group_std_mean")
        self.spread = self.spread[np.isfinite(self.spread)]

    @property
    def able(self) -> BoolArray:
        """Rows in which a working optimizer must change something: lr and gradients are not 0, there are elements."""
        elements = self.run.updates.column("elements")
        return ~(self.lr == 0) & ~(self.grad_norm == 0) & ~(elements == 0) & np.isfinite(self.liveness)

    def dead_ranks(self) -> list[int]:
        """Ranks on which no optimizer step that could change anything changed a single bit."""
        ranks = np.unique(self.rank[self.able])
        return [int(rank) for rank in ranks if not self.moved[self.able & (self.rank == rank)].any()]


def diagnose(run: Run) -> Diagnosis:
    """Decide from the whole table; the candidates are tried in an order in which a cause comes before its effects."""
    signs = _Signs(run)
    note = ""
    if run.fault is not None:
        note = f"A fault was injected on purpose ({run.fault}): {FAULTS.get(run.fault, 'unknown to this version')}."
    if not len(run.updates) or (not np.isfinite(signs.liveness).any() and not non_finite_metrics(run)):
        sentence = f"no optimizer step recorded its liveness{_ended(run)}"
        return Diagnosis("not enough data", [Finding("not enough data", True, sentence)], note)
    candidates: tuple[Callable[[_Signs], Finding], ...] = (
        _non_finite,
        _lr_zero,
        _no_signal,
        _dead,
        _stale_rollout,
        _on_policy,
    )
    findings = [candidate(signs) for candidate in candidates]
    without: DiagnosisOutcome = "healthy" if signs.able.any() else "not enough data"
    holding: list[DiagnosisOutcome] = [found.candidate for found in findings if found.holds]
    outcome = holding[0] if holding else without
    findings.append(_healthy(signs, outcome == "healthy"))
    if outcome == "not enough data":
        findings.append(Finding(outcome, True, "no optimizer step had a learning rate and gradients above 0"))
    return Diagnosis(outcome, findings, note)


def worst(diagnoses: list[Diagnosis]) -> Diagnosis:
    """The most alarming of several runs' diagnoses (one at least)."""
    order: tuple[DiagnosisOutcome, ...] = (
        "non-finite",
        "dead optimizer",
        "weights not reaching the rollout",
        "no learning signal",
        "lr still zero",
        "not enough data",
        "on-policy by design",
        "healthy",
    )
    return min(diagnoses, key=lambda diagnosis: order.index(diagnosis.outcome))


def _ended(run: Run) -> str:
    told = brief(why_it_ended(run))
    return f"; the run ended with: {told}" if told else ""


def _non_finite(signs: _Signs) -> Finding:
    found = non_finite_metrics(signs.run)
    if not found:
        return Finding("non-finite", False, "every recorded training metric is finite")
    first = found[0].first_step
    names = ", ".join(sorted({item.metric for item in found if item.first_step == first}))
    return Finding("non-finite", True, f"NaN or infinite from step {first} on: {names}{_ended(signs.run)}")


def _lr_zero(signs: _Signs) -> Finding:
    known = signs.lr[np.isfinite(signs.lr)]
    if not len(known):
        return Finding("lr still zero", False, "the learning rate was not recorded")
    if not known.any():
        evidence = f"the learning rate is 0 in all {signs.updates} optimizer steps: nothing can move yet (warm-up)"
        return Finding("lr still zero", True, evidence)
    zero = len(np.unique(signs.run.updates.column("update")[signs.lr == 0]))
    some = f"; it was 0 in {zero} of {signs.updates} optimizer steps" if zero else ""
    return Finding("lr still zero", False, f"the learning rate is {_range(known)}{some}")


def _no_signal(signs: _Signs) -> Finding:
    gradients = signs.grad_norm[np.isfinite(signs.grad_norm)]
    no_gradient = len(gradients) > 0 and not gradients.any()
    told = f"grad_norm {_range(gradients)}" if len(gradients) else "grad_norm was not recorded"
    if len(signs.spread):
        flat = float(signs.spread.max()) == 0
        if flat:
            evidence = (
                "all samples of a prompt got the same reward in every step, so every advantage is 0 and the policy "
                f"has nothing to learn from ({told})"
            )
            return Finding("no learning signal", True, evidence)
        told = f"rewards within a prompt spread by {_range(signs.spread)}; {told}"
    evidence = f"every gradient is exactly 0 ({told})" if no_gradient else told
    return Finding("no learning signal", no_gradient, evidence)


def _dead(signs: _Signs) -> Finding:
    able = signs.able
    dead = signs.dead_ranks()
    able_updates = len(np.unique(signs.run.updates.column("update")[able]))
    if not able.any():
        return Finding("dead optimizer", False, "no optimizer step had a learning rate and gradients above 0")
    if not dead:
        still = int((~signs.moved[able]).sum())
        some = f"; {still} of {int(able.sum())} changed nothing on their rank" if still else ""
        return Finding("dead optimizer", False, f"{_changed(signs)}{some}")
    where = "" if len(dead) == len(np.unique(signs.rank)) else f" on rank {', '.join(map(str, dead))}"
    held = [rank.trainable_elements for rank in signs.run.ledger.ranks] if signs.run.ledger else []
    counted = f"{max(held):,} " if held else ""
    evidence = (
        f"none of {able_updates} optimizer steps changed a single bit of the {counted}trainable elements{where}, "
        f"although the learning rate was {_range(signs.lr[able])} and grad_norm {_range(signs.grad_norm[able])}"
    )
    return Finding("dead optimizer", True, evidence, tuple(_causes_of_death(signs)))


def _causes_of_death(signs: _Signs) -> Iterator[str]:
    """What whoever switched the optimizer on needs to find the cause."""
    run = signs.run
    yield (
        "grad_norm, gradient clipping and the step's success flag come before the update: they look healthy in a dead "
        "optimizer too"
    )
    later = signs.kl[(signs.mini_batch > 0) & np.isfinite(signs.kl)]
    if len(later) and not later.any():
        yield (
            f"ppo_kl is exactly 0 in all {signs.per_batch} mini-batches of every step; after the first one a living "
            "update must show, so this is not on-policy training"
        )
    ledger = predict_and_compare(run)
    if ledger is not None:
        missing = [
            kind_words(kind)
            for kind in dict.fromkeys(row.kind for row in ledger.rows)
            if ledger.per_parameter("predicted", kind) and not ledger.per_parameter("found", kind)
        ]
        if missing:
            yield (
                f"the optimizer holds no {' and no '.join(missing)}: {ledger.predicted - ledger.found:.2f} bytes per "
                "parameter that a working one needs. What looks like memory saved is state that was never made"
            )
    flags = run.ledger.optimizer.flags if run.ledger else {}
    off = [f"{flag}=False" for flag in ("use_decoupled_grad", "master_weights") if flags.get(flag) is False]
    if flags.get("use_precision_aware_optimizer") and off:
        yield (
            f"FusedAdam was built with {' and '.join(off)}: with PAO Megatron leaves the gradients in .decoupled_grad, "
            "this FusedAdam reads .grad, finds None and skips every parameter without a word"
        )
    yield megatron_core_in_words(run.environment)


def _stale_rollout(signs: _Signs) -> Finding:
    name = "weights not reaching the rollout"
    values = signs.run.metric("training/rollout_probs_diff_mean")
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Finding(name, False, "the rollout-vs-actor probability difference was not recorded for two steps")
    first, later = float(values[0]), float(np.median(values[-max(1, len(values) // 3) :]))
    holds = later > _ROLLOUT_FLOOR and later > _ROLLOUT_GROWTH * first
    evidence = (
        f"the mean rollout-vs-actor probability difference is {first:.2g} at step 1, before any update, and "
        f"{later:.2g} in the last steps: the rollout "
        + ("still samples from old weights" if holds else "follows the actor")
    )
    return Finding(name, holds, evidence)


def _on_policy(signs: _Signs) -> Finding:
    if signs.per_batch == 1:
        evidence = "one optimizer step per rollout batch: the policy is the one that sampled, ppo_kl = 0 is expected"
        return Finding("on-policy by design", True, evidence)
    return Finding("on-policy by design", False, f"{signs.per_batch} optimizer steps per rollout batch")


def _healthy(signs: _Signs, holds: bool) -> Finding:
    if not holds or not signs.able.any():
        return Finding("healthy", holds, "every optimizer step is alive" if holds else "see the line above that holds")
    first, later = signs.kl[signs.mini_batch == 0], signs.kl[signs.mini_batch > 0]
    kl = ""
    if np.isfinite(first).any() and np.isfinite(later).any():
        largest = float(np.nanmax(np.abs(first)))
        told = "exactly 0" if largest == 0 else f"at most {largest:.2g}"
        kl = f"; ppo_kl is {told} in the first mini-batch of a step and {_range(later)} in the later ones"
    return Finding("healthy", True, f"{_changed(signs)}{kl}")


def _changed(signs: _Signs) -> str:
    compared = ", ".join(signs.run.updates.labels.get("liveness_method", []))
    how = "" if compared in ("", "every element") else f" ({compared})"
    return f"each optimizer step changed {_percent(signs.liveness[signs.able])} of the elements{how}"


def _range(values: FloatArray) -> str:
    if not np.isfinite(values).any():
        return "not recorded"
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _percent(shares: FloatArray) -> str:
    low, high = 100 * float(shares.min()), 100 * float(shares.max())
    return f"{low:.3g} %" if low == high else f"{low:.3g} % to {high:.3g} %"

"""Can the saving be used? What must fit on a device is the highest peak, not the steady state.

An optimizer may hold little between its steps and much within them: TransformerEngine before 2.14 expands bf16 moments
to fp32 in each step.

The rule: the saving cannot be used in full where the arm's highest peak, of all phases, is the one in its optimizer
step, and lies below the baseline's highest by less than the steady state does, beyond the allocator's rounding. The
allocator alone can show this: a process's resident memory is too noisy. An arm whose highest peak is in another phase
is not judged: activations grow with the sampled responses, which differ between arms, and the optimizer's state is
smaller there by what the steady state tells.
"""

from dataclasses import dataclass

from pipeline.analysis.memory import PHASE_WORDS, MemoryDifference, allocator_rounding_gib
from pipeline.analysis.words import gib

_OPTIMIZER_STEP = "peak_optimizer_step"


@dataclass(frozen=True)
class HighPeak:
    """A peak that eats up the saving: rows of the table of memory by phase."""

    steady: MemoryDifference
    highest_of_baseline: MemoryDifference
    optimizer_step: MemoryDifference
    """Where the arm's highest peak is."""

    @property
    def steady_gib(self) -> float:
        return self.steady.baseline - self.steady.treatment

    @property
    def usable_gib(self) -> float:
        """How far the highest peak falls; below 0 where it rises."""
        return self.highest_of_baseline.baseline - self.optimizer_step.treatment

    @property
    def in_short(self) -> str:
        """To go on with behind the saving: "its peak ..."."""
        above = self.optimizer_step.treatment - self.optimizer_step.baseline
        there = f"{gib(abs(above))} GiB {'above' if above > 0 else 'below'} the baseline's"
        usable = f"falls by {gib(self.usable_gib)} GiB only" if self.usable_gib > 0 else "does not fall"
        return f"its peak in the optimizer step is {there}, so its highest peak {usable}"

    @property
    def sentence(self) -> str:
        baseline, step = self.highest_of_baseline, self.optimizer_step
        usable = f"{gib(self.usable_gib)} GiB" if self.usable_gib > 0 else "nothing"
        return (
            f"of the {gib(self.steady_gib)} GiB that the trainer holds less in steady state, {usable} can be used: the "
            f"highest of the arm's peaks is {gib(step.treatment)} GiB ({PHASE_WORDS[step.phase]}), of the baseline's "
            f"{gib(baseline.baseline)} GiB ({PHASE_WORDS[baseline.phase]})"
        )


def high_peak(memory: list[MemoryDifference]) -> HighPeak | None:
    """None where the saving can be used, or where nobody measured whether it can."""
    allocated = {item.phase: item for item in memory if item.source == "allocated"}
    peaks = [item for phase, item in allocated.items() if phase.startswith("peak")]
    steady = allocated.get("after_update")
    if steady is None or not peaks:
        return None
    highest = max(peaks, key=lambda item: item.treatment)
    found = HighPeak(steady, max(peaks, key=lambda item: item.baseline), highest)
    kept = found.steady_gib - found.usable_gib
    in_full = kept <= allocator_rounding_gib(found.steady_gib)
    return None if in_full or found.steady_gib <= 0 or highest.phase != _OPTIMIZER_STEP else found

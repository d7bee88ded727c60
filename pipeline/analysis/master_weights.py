"""The fp32 master weights of two runs, optimizer step by optimizer step, from the digests in their update rows."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.analysis.columns import FloatArray
from pipeline.analysis.load import Pair, Run


@dataclass(frozen=True)
class MastersComparison:
    """Over the first optimizer steps, as long as both runs' masters agree bit for bit on every rank."""

    compared_updates: int
    """Optimizer steps of which both runs recorded the masters' digests."""
    same_updates: int
    weights: int
    """Weights (elements on all ranks) after the steps that agree."""
    differing: int
    """How many of these bf16 weights differ between the runs, although their masters agree."""
    at_ties: int
    """How many of those are exact rounding ties."""

    @property
    def ties_share(self) -> float | None:
        """Share of the differing weights that rounding ties explain; None where none differ."""
        return self.at_ties / self.differing if self.differing else None


def compare_masters(pair: Pair) -> MastersComparison | None:
    """None where either run recorded no digests (a GPU's runs do not, see pipeline/callbacks/engine_observer.py)."""
    keys = sorted(_digests(pair.baseline).keys() & _digests(pair.treatment).keys())
    if not keys:
        return None
    baseline, treatment = _digests(pair.baseline), _digests(pair.treatment)
    apart = {update for update, rank in keys if baseline[update, rank] != treatment[update, rank]}
    updates = sorted({update for update, _ in keys})
    same = [update for update in updates if update < min(apart, default=np.inf)]

    def off(column: str) -> int:
        return _count(pair.treatment, same, column) - _count(pair.baseline, same, column)

    return MastersComparison(
        compared_updates=len(updates),
        same_updates=len(same),
        weights=_count(pair.treatment, same, "masters"),
        # Equal masters: a weight differs where one run rounded it otherwise than to nearest, ties to even.
        differing=abs(off("weights_off_nearest")),
        at_ties=abs(off("weights_off_at_ties")),
    )


def compare_masters_of(pairs: Iterable[Pair]) -> MastersComparison | None:
    """Several pairs as one: the shortest agreement, the counts summed. None where no pair can be compared."""
    found = [comparison for pair in pairs if (comparison := compare_masters(pair)) is not None]
    if not found:
        return None
    return MastersComparison(
        compared_updates=min(one.compared_updates for one in found),
        same_updates=min(one.same_updates for one in found),
        weights=sum(one.weights for one in found),
        differing=sum(one.differing for one in found),
        at_ties=sum(one.at_ties for one in found),
    )


def _digests(run: Run) -> dict[tuple[int, int], float]:
    """(update, rank) -> digest of the masters on that rank."""
    digests = run.updates.column("masters_digest")
    known = np.isfinite(digests)
    update, rank = run.updates.column("update")[known], run.updates.column("rank")[known]
    return {(int(u), int(r)): float(digest) for u, r, digest in zip(update, rank, digests[known], strict=True)}


def _count(run: Run, updates: list[int], column: str) -> int:
    values: FloatArray = run.updates.column(column)[np.isin(run.updates.column("update"), updates)]
    return int(np.nansum(values))

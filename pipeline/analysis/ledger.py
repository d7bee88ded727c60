"""The ledger: bytes by kind of tensor and rank, predicted beside found.

The prediction knows nothing of what was found. From the rank's trainable elements N, the arm's dtypes and the degree d
of the distributed optimizer: parameters and main gradients take N elements, master weights (or remainders) and both
moments N/d each. In bytes per parameter: baseline 6 + 12/d, PAO 6 + 10/d, with bf16 moments 6 + 6/d, with bf16 main
gradients as well 4 + 6/d.
"""

from dataclasses import dataclass

from pipeline.analysis.declared import DTYPE_BYTES, KINDS, SHARDED_KINDS, declared_optimizer
from pipeline.analysis.load import Run
from pipeline.study.records import LedgerEntry, RankLedger

GIB = 1024**3


@dataclass(frozen=True)
class LedgerRow:
    """One kind of tensor on one rank. found = predicted + padding + uneven + unexplained, bytes."""

    rank: int
    kind: str
    predicted_dtype: str
    found_dtype: str
    """Empty when nothing of this kind was found."""
    predicted_bytes: float
    found_bytes: int
    padding_bytes: int
    """Elements of the DDP buffers that belong to no parameter (alignment)."""
    uneven_bytes: float
    """The distributed optimizer's shards are not all of N/d elements; over its ranks this sums to zero."""

    @property
    def unexplained_bytes(self) -> float:
        return self.found_bytes - self.predicted_bytes - self.padding_bytes - self.uneven_bytes


@dataclass(frozen=True)
class RunLedger:
    """A run's ledger with its prediction."""

    rows: list[LedgerRow]
    trainable_elements: int
    """Summed over ranks: a parameter counts once on every rank that holds it."""
    frozen_elements: int
    distributed_optimizer_degree: int
    """d: ranks that the distributed optimizer shards over; 1 without it."""
    ranks: int

    def per_parameter(self, what: str, kind: str | None = None) -> float:
        """Bytes per trainable parameter of the rank, all ranks together.

        what: "predicted", "found" (everything, padding included), "padding", "uneven" or "unexplained"; kind: of one
        kind of tensor alone.
        """
        rows = [row for row in self.rows if kind is None or row.kind == kind]
        return sum(float(getattr(row, f"{what}_bytes")) for row in rows) / self.trainable_elements

    @property
    def predicted(self) -> float:
        return self.per_parameter("predicted")

    @property
    def found(self) -> float:
        """Without the buffers' padding, which belongs to no parameter and is shown apart."""
        return self.per_parameter("found") - self.per_parameter("padding")

    def gib(self, what: str, rank: int) -> float:
        """Bytes of one rank in GiB; `what` as in `per_parameter`."""
        return sum(float(getattr(row, f"{what}_bytes")) for row in self.rows if row.rank == rank) / GIB


def predict_and_compare(run: Run) -> RunLedger | None:
    """None when the run left no ledger, or one without trainable parameters."""
    if run.ledger is None or not sum(rank.trainable_elements for rank in run.ledger.ranks):
        return None
    sharded = bool(run.ledger.optimizer.flags.get("use_distributed_optimizer", True))
    degree = run.ledger.data_parallel if sharded else 1
    dtypes = declared_optimizer(run).dtypes
    rows = [
        _row(rank, kind, dtypes.get(kind, ""), degree)
        for rank in run.ledger.ranks
        for kind in (*KINDS, "other")
        if kind != "other" or any(entry.kind == "other" for entry in rank.entries)
    ]
    return RunLedger(
        rows,
        sum(rank.trainable_elements for rank in run.ledger.ranks),
        sum(rank.frozen_elements for rank in run.ledger.ranks),
        degree,
        len(run.ledger.ranks),
    )


def _row(rank: RankLedger, kind: str, dtype: str, degree: int) -> LedgerRow:
    found = [entry for entry in rank.entries if entry.kind == kind and entry.elements]
    size = DTYPE_BYTES.get(dtype, 0)
    share = rank.trainable_elements / degree if kind in SHARDED_KINDS else float(rank.trainable_elements)
    found_bytes = sum(entry.bytes for entry in found)
    uneven = (rank.optimizer_elements - share) * size if kind in SHARDED_KINDS and found else 0.0
    return LedgerRow(
        rank=rank.rank,
        kind=kind,
        predicted_dtype=dtype,
        found_dtype="+".join(sorted(entry.dtype for entry in found)),
        predicted_bytes=share * size,
        found_bytes=found_bytes,
        padding_bytes=_padding(rank, kind, found),
        uneven_bytes=uneven,
    )


def _padding(rank: RankLedger, kind: str, found: list[LedgerEntry]) -> int:
    if kind not in ("param", "main_grad") or not found:
        return 0
    surplus = sum(entry.elements for entry in found) - rank.trainable_elements
    padding = min(max(surplus, 0), rank.buffer_elements - rank.trainable_elements)
    return padding * found[0].bytes // found[0].elements

"""W&B's copy of a run held against the run's files: which rows there are, and what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.study.records import RunConfig
from pipeline.tracking.rows import STEP, TIMESTAMP, UPDATE
from pipeline.tracking.wandb_run import KILLED

_PAGE = 10_000  # rows that are asked for at a time
_SAME_TIME_S = 0.001
_STATES = {0: ("finished",), 1: ("failed",), KILLED: ("killed", "failed")}
"""What W&B shows for an exit code. ("crashed" and "running" mean that it was never told one.)"""


@dataclass(frozen=True)
class RowIndex:
    """What tells a row from the others. update: None for a training step's own row. time: Unix seconds, where known."""

    step: int
    update: int | None
    time: float | None

    def is_same(self, other: "RowIndex") -> bool:
        same_time = None in (self.time, other.time) or abs((self.time or 0) - (other.time or 0)) < _SAME_TIME_S
        return (self.step, self.update) == (other.step, other.update) and same_time


Rows = Sequence[RowIndex]


def indices(rows: Sequence[dict[str, Any]]) -> Rows:
    """Of rows from a run folder (rows.all_rows)."""
    return [RowIndex(row[STEP], row.get(UPDATE), row.get(TIMESTAMP)) for row in rows]


def indices_in_wandb(run: Any) -> Rows:
    """run: of wandb.Api. Asks for every row's indices, not for its metrics. (W&B adds "_step" by itself.)"""

    def scan(*keys: str) -> list[dict[str, Any]]:
        return list(run.scan_history(keys=list(keys), page_size=_PAGE, use_cache=False))

    updates = {row["_step"]: row[UPDATE] for row in scan(UPDATE)}
    found = sorted(scan(STEP, TIMESTAMP), key=lambda row: row["_step"])
    return [RowIndex(row[STEP], updates.get(row["_step"]), row[TIMESTAMP]) for row in found]


def find_run(api: Any, config: RunConfig) -> Any:
    """The run in W&B as it is now; None where W&B has none. api: of wandb.Api."""
    from wandb.errors import CommError

    api.flush()  # it remembers runs
    # Without an entity W&B takes the key owner's default one.
    path = "/".join(filter(None, (config.tracking.get("entity"), config.tracking["project"], config.run_id)))
    try:
        return api.run(path)
    except (CommError, ValueError) as error:
        if "Could not find run" in str(error):
            return None
        raise


def is_beginning(found: Rows, files: Rows) -> bool:
    """Whether W&B has the first rows of the files and no others: the rest can be added."""
    return len(found) <= len(files) and all(map(RowIndex.is_same, found, files))


def last_step(rows: Rows) -> int | None:
    return max((row.step for row in rows), default=None)


def last_update(rows: Rows) -> int | None:
    return max((row.update for row in rows if row.update is not None), default=None)


def gaps(files: Rows, found: Rows | None, exit_code: int, state: str) -> list[str]:
    """What W&B lacks or has wrong, in words; empty when its copy is complete. found: None when it has no such run."""
    if found is None:
        return ["no such run in W&B"]
    words: list[str] = []
    if len(found) != len(files):
        words.append(f"{len(found)} of {len(files)} rows")
    if last_step(found) != last_step(files):
        words.append(f"last training step {last_step(found)}, not {last_step(files)}")
    if last_update(found) != last_update(files):
        words.append(f"last optimizer step {last_update(found)}, not {last_update(files)}")
    if not is_beginning(found, files):
        words.append("rows of another attempt or study")
    if state not in _STATES[exit_code]:
        words.append(f"state {state}, not {_STATES[exit_code][0]}")
    return words

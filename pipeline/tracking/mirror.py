"""The live mirror of a run, seen from outside: start it, know whether it is at work, and what it could not do."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder, write_atomically
from pipeline.tracking.rows import all_rows

FINISH_TIMEOUT_S = 30.0
"""How long after a run's end W&B may take to receive the rest. A dead network costs a run this much, once."""
DONE, GAVE_UP = b"done", b"gave up"
"""The mirror's answers on its standard output. GAVE_UP: with tracking_error.json written."""


def start(folder: RunFolder, finish_timeout_s: float = FINISH_TIMEOUT_S) -> "subprocess.Popen[bytes]":
    """Start the mirror of a run folder whose configuration is written; returns at once.

    It is pipeline.tracking.mirror_process, and wants the exit code on its stdin when the run ends.
    """
    # A W&B service that this process may have would be shared, and go down with it.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    _wandb_folder(folder).mkdir(exist_ok=True)
    with (_wandb_folder(folder) / "mirror.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.tracking.mirror_process", str(folder.path), str(finish_timeout_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            cwd=PROJECT, env=environment, start_new_session=True,
        )  # fmt: skip


def write_error(folder: RunFolder, error: str, rows_sent: int | None) -> None:
    """Write tracking_error.json: why the W&B run is incomplete, and how to complete it. rows_sent: None if unknown."""
    what_to_do = f"python -m pipeline.dashboard sync {folder.path.parent.parent}"
    _write(folder, {"error": error, "rows_sent": rows_sent, "what_to_do": what_to_do})


def count_rows_again(folder: RunFolder) -> None:
    """Bring tracking_error.json's `rows_written` up to date: the mirror may have given up long before the run's end."""
    _write(folder, json_lines.loads(folder.tracking_error_file.read_bytes()))


def _write(folder: RunFolder, note: dict[str, Any]) -> None:
    content = {**note, "rows_written": len(all_rows(folder))}
    write_atomically(folder.tracking_error_file, json_lines.dumps(content, indent=True))


@contextlib.contextmanager
def following(folder: RunFolder) -> Iterator[None]:
    """Within it `is_followed` is true; also for a process that is killed it ends with the process."""
    with _lock_file(folder).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_followed(folder: RunFolder) -> bool:
    """Whether a mirror follows this run folder right now, on this host or one that shares its file locks."""
    if not _lock_file(folder).exists():
        return False
    with _lock_file(folder).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _wandb_folder(folder: RunFolder) -> Path:
    return folder.path / "wandb"


def _lock_file(folder: RunFolder) -> Path:
    return _wandb_folder(folder) / "mirror.lock"

"""The first failing process writes down why, before Ray wraps the error and kills the rest."""

import contextlib
import os
import time
import traceback
from collections.abc import Iterator

from pipeline.study import json_lines
from pipeline.study.records import Failure
from pipeline.study.run_folder import RunFolder


@contextlib.contextmanager
def recording_failure(where: str, rank: int | None = None) -> Iterator[None]:
    """Let an exception through, after writing failure.json unless another process was first.

    where: "rank 3", "trainer", "rollout server", ... as in records.Failure. Outside a run nothing is written.
    """
    try:
        yield
    except Exception as error:
        folder = RunFolder.from_environment()
        if folder is not None:
            record_failure(folder, error, where, rank)
        raise


def record_failure(folder: RunFolder, error: BaseException, where: str, rank: int | None = None) -> None:
    """Write failure.json; a file that is there stays (the first failure is the cause of the others)."""
    cause = getattr(error, "cause", None) or error  # Ray wraps what a remote function raised
    failure = Failure(
        error=f"{type(cause).__name__}: {cause}".strip().splitlines()[0],
        where=where,
        rank=rank,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
    )
    try:
        descriptor = os.open(folder.failure_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(json_lines.dumps(failure.model_dump(), indent=True))

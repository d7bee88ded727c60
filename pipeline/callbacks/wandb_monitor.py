"""W&B as a monitor: the rows go by way of the run folder, through a process of their own (pipeline.tracking.mirror)."""

import contextlib
import select
import subprocess

from pipeline.study.run_folder import RunFolder
from pipeline.tracking import mirror

_ANSWER_GRACE_S = 5.0  # on top of what the mirror allows itself


class WandbMonitor:
    """Starts the mirror and tells it how the run ended. Only `finish` waits for W&B, and not for long.

    What the mirror could not do is in tracking_error.json; it never reaches the training process.
    """

    def __init__(self, folder: RunFolder, finish_timeout_s: float = mirror.FINISH_TIMEOUT_S) -> None:
        """finish_timeout_s: how long after the run's end W&B may take to receive the rest."""
        self._folder = folder
        self._finish_timeout_s = finish_timeout_s
        self._mirror: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        self._mirror = mirror.start(self._folder, self._finish_timeout_s)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Nothing to do: the mirror reads the row from the run folder."""

    def finish(self, exit_code: int) -> None:
        """Wait until W&B has the rest, or gave up in time. Without this call the mirror takes the run for killed."""
        assert self._mirror is not None
        assert self._mirror.stdin is not None
        assert self._mirror.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._mirror.stdin as talk:  # then it gave up before, and said why
            talk.write(b"%d\n" % exit_code)
        answered, _, _ = select.select([self._mirror.stdout], [], [], self._finish_timeout_s + _ANSWER_GRACE_S)
        answer = self._mirror.stdout.read() if answered else b""
        self._mirror.stdout.close()
        self._mirror.wait()
        if answer == mirror.GAVE_UP:
            mirror.count_rows_again(self._folder)
        elif answer != mirror.DONE:
            mirror.write_error(self._folder, "the W&B mirror ended without a word (wandb/mirror.log)", rows_sent=None)

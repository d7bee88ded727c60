"""The live mirror's own process: it follows one run folder and keeps its W&B run up to date.

Apart from training, so that no state of W&B or of the network can slow a step or end a run: it reads the files that
training writes anyway. It detaches from the training process, because Ray kills a worker's children with it, and a
stopped run must still be told to W&B as such. Whatever happens, it ends a given time after it learnt of the end.

The training process holds a pipe to its stdin and writes the exit code there when training has ended; a pipe that
closes without one means that training was killed, and then status.json says how the run ended.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.study.run_folder import RunFolder
from pipeline.tracking.copy_of_run import Rows, find_run, gaps, indices, indices_in_wandb
from pipeline.tracking.mirror import DONE, GAVE_UP, following, write_error
from pipeline.tracking.rows import RunRows, all_rows
from pipeline.tracking.wandb_run import KILLED, WandbRun, exit_code_of

_POLL_S = 1.0
_INIT_TIMEOUT_S = 60.0
_RETRY_S = 30.0  # from one attempt to reach W&B to the next
_STATUS_WAIT_S = 15.0  # the launcher writes status.json some seconds after a job's end
_ARRIVAL_S = 10.0  # W&B shows what it has received some seconds later
_NICENESS = 10  # training goes first

_log = logging.getLogger(__name__)


class NotArrived(Exception):  # noqa: N818 - nothing raised it but the comparison
    """W&B took the run and lacks some of it; the message says what."""


class End:
    """The run's end, awaited in a thread of its own: it comes at any time, also while W&B keeps us waiting."""

    def __init__(self, folder: RunFolder, finish_timeout_s: float) -> None:
        self._folder = folder
        self._finish_timeout_s = finish_timeout_s
        self._came = threading.Event()
        self.exit_code = KILLED

    def await_in_background(self, on_timeout: Any) -> None:
        """on_timeout: called `finish_timeout_s` after the end."""
        threading.Thread(target=self._await, args=(on_timeout,), daemon=True).start()

    def came_within(self, seconds: float) -> bool:
        return self._came.wait(seconds)

    def _await(self, on_timeout: Any) -> None:
        said = sys.stdin.buffer.readline().strip()
        self.exit_code = int(said) if said else self._exit_code_of_killed_run()
        self._came.set()
        time.sleep(self._finish_timeout_s)
        on_timeout()

    def _exit_code_of_killed_run(self) -> int:
        deadline = time.monotonic() + _STATUS_WAIT_S
        while time.monotonic() < deadline and not self._folder.status_file.exists():
            time.sleep(0.2)
        return exit_code_of(self._folder.read_status())


class Follower:
    """Follows one run folder until its end."""

    def __init__(self, folder: RunFolder, end: End) -> None:
        self._folder = folder
        self._end = end
        self._rows = RunRows(folder)
        self._run: WandbRun | None = None
        self._trouble = ""

    def follow(self) -> bool:
        """Returns at the run's end whether everything was handed to W&B and W&B said that it took it."""
        try:
            self._run = self._open()
            if self._run is None:
                self.give_up(f"W&B could not be reached: {self._trouble}")
                return False
            while not self._end.came_within(_POLL_S):
                self._send(self._run, self._rows.new())
            self._send(self._run, [*self._rows.new(), *self._rows.rest()])
            self._run.finish(self._end.exit_code)
            self._check_arrival()
            _end_service()
        except Exception as error:  # noqa: BLE001 - whatever W&B raises belongs into the file, training goes on
            self.give_up(f"{type(error).__name__}: {error}")
            return False
        return True

    def _open(self) -> WandbRun | None:
        """The W&B run, as soon as W&B answers; None when it did not before the run's end."""
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        while True:
            try:
                mode = self._folder.read_config().tracking["mode"]
                return WandbRun(self._folder, mode, self._folder.path, init_timeout=_INIT_TIMEOUT_S)
            except (AuthenticationError, UsageError):
                raise  # no key or a wrong one: asking again does not help
            except (wandb.Error, TimeoutError, OSError) as error:
                self._trouble = f"{type(error).__name__}: {error}"
                _log.warning("W&B does not answer: %s", self._trouble)
            if self._end.came_within(_RETRY_S):
                return None

    def _send(self, run: WandbRun, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            run.send(row)

    def _check_arrival(self) -> None:
        """Ask the server: when W&B refuses rows, its client stops sending them and says nothing."""
        config = self._folder.read_config()
        if config.tracking["mode"] != "online":
            return
        import wandb

        api, files = wandb.Api(), indices(all_rows(self._folder))
        deadline = time.monotonic() + _ARRIVAL_S
        while missing := self._missing(find_run(api, config), files):
            if time.monotonic() > deadline:
                raise NotArrived("; ".join(missing))
            time.sleep(_POLL_S)

    def _missing(self, found: Any, files: Rows) -> list[str]:
        if found is None:
            return gaps(files, None, self._end.exit_code, "")
        return gaps(files, indices_in_wandb(found), self._end.exit_code, found.state)

    def give_up(self, error: str) -> None:
        _log.error("%s", error)
        write_error(self._folder, error, self._run.sent if self._run else 0)


def _end_service() -> None:
    import wandb

    wandb.teardown()


def _detach() -> int:
    """Become nobody's child, with the log for standard output too; returns the descriptor that takes the answer."""
    if os.fork():
        os._exit(0)
    os.nice(_NICENESS)
    answer = os.dup(sys.stdout.fileno())  # not inherited by W&B's service: its end is ours alone
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return answer


def main() -> None:
    folder, finish_timeout_s = RunFolder(Path(sys.argv[1])), float(sys.argv[2])
    answer = _detach()
    end = End(folder, finish_timeout_s)
    follower = Follower(folder, end)

    def leave(word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # a killed training process listens no more
            os.write(answer, word)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)

    def time_is_up() -> None:
        follower.give_up(
            f"W&B had not received everything {finish_timeout_s:g} s after the run's end; what has arrived is not known"
        )
        leave(GAVE_UP)

    with following(folder):
        end.await_in_background(time_is_up)
        leave(DONE if follower.follow() else GAVE_UP)


if __name__ == "__main__":
    main()

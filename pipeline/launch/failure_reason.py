"""Why a job failed: the first failing process's own error, not the errors of those that it took down."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pydantic

from pipeline.study import json_lines
from pipeline.study.records import Failure
from pipeline.study.run_folder import RunFolder

# Ray's messengers: they say that something failed, not what.
_MESSENGERS = {
    "ActorDiedError",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "OwnerDiedError",
    "RayActorError",
    "RayTaskError",
    "TaskCancelledError",
    "WorkerCrashedError",
    "KeyboardInterrupt",
    "SystemExit",
}
# What the others say when one of them has failed: the surviving ranks of a process group, and verl's trainer, whose
# agent loops log the errors of a rollout or a reward function and go on without the sample.
_CONSEQUENCE = re.compile(
    r"connection closed by peer|connection reset by peer|remote process exited|broken pipe|watchdog caught collective"
    r"|DistBackendError|socket timeout|Connection refused|no materializable trajectories",
    re.IGNORECASE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# In front of every line that Ray forwards from a worker: "(WorkerDict pid=123, ip=10.0.0.1) "
_WORKER = re.compile(r"^\((?P<name>[^()]*?) pid=(?P<pid>\d+)(?:, ip=[^)]*)?\) ?")
# The last line of a traceback: "torch.OutOfMemoryError: text", "ray.exceptions.RayTaskError(ValueError): ray::..."
_EXCEPTION = re.compile(r"^(?P<module>(?:\w+\.)*)(?P<name>[A-Z]\w*[a-z]\w*)(?:\(\w+\))?(?::\s*(?P<text>.*))?$")
_CRASH = re.compile(r"^(?:Fatal Python error: .*|\*{3} SIG[A-Z]+ received.*|terminate called after throwing .*)$")
# How ActorDiedError begins when the actor's own constructor raised.
_RAISED_AT_CREATION = "because of an error raised in its creation task"
_TRACEBACK_LINES_KEPT = 80


@dataclass
class _Raised:
    """An exception as a log shows it."""

    where: str
    name: str
    error: str
    traceback: list[str]

    @property
    def meaningful(self) -> bool:
        return self.name not in _MESSENGERS

    @property
    def consequence(self) -> bool:
        return _CONSEQUENCE.search(self.error) is not None


@dataclass
class _Stream:
    """The lines of one process, which Ray interleaves with those of the others."""

    where: str
    inside: bool = False
    ignored: bool = False
    lines: list[str] = field(default_factory=list)

    def feed(self, line: str) -> _Raised | None:
        if _CRASH.match(line):
            return _Raised(self.where, "crash", line, [line])
        if line.startswith("Exception ignored in"):
            # An object's __del__ at exit: never why a run failed.
            self.ignored = True
            return None
        if line.startswith("Traceback (most recent call last):"):
            self.inside, self.lines = True, [line]
            return None
        return self._inside(line) if self.inside else None

    def _inside(self, line: str) -> _Raised | None:
        self.lines.append(line)
        found = None if line.startswith((" ", "\t")) else _EXCEPTION.match(line)
        if found is None:
            return None
        # These are followed by the remote traceback, which ends with the exception itself.
        self.inside = found["name"] == "RayTaskError" or _RAISED_AT_CREATION in (found["text"] or "")
        ignored, self.ignored = self.ignored, False
        error = f"{found['module']}{found['name']}" + (f": {found['text']}" if found["text"] else "")
        return None if ignored else _Raised(self.where, found["name"], error, list(self.lines))


def failure_of(folder: RunFolder, ray_message: str) -> Failure:
    """The failing process's own account, else the last meaningful exception in job.log, else Ray's message.

    An account that only tells of another process's failure comes after a cause that job.log shows.
    """
    recorded = _recorded(folder)
    if recorded is not None and not _CONSEQUENCE.search(recorded.error):
        return recorded
    log = folder.job_log_file.read_text(errors="replace") if folder.job_log_file.exists() else ""
    causes = [raised for raised in _exceptions(log) if raised.meaningful and not raised.consequence]
    if recorded is not None and not causes:
        return recorded
    return failure_in_log(log) or Failure(
        error=_first_line(ray_message) or "the job ended without a message: see job.log", where="launcher"
    )


def _recorded(folder: RunFolder) -> Failure | None:
    try:
        return Failure.model_validate(json_lines.loads(folder.failure_file.read_bytes()))
    except (FileNotFoundError, ValueError, pydantic.ValidationError):
        # Not written, or its writer was killed while writing: the log is the next best witness.
        return None


def failure_in_log(log: str) -> Failure | None:
    """The last exception in a job's log that is neither a messenger nor a consequence of another process's failure.

    Only where there is none: a consequence, then a messenger. None when the log shows no exception at all.
    """
    raised = list(_exceptions(log))
    ranked = (
        [one for one in raised if one.meaningful and not one.consequence]
        or [one for one in raised if one.meaningful]
        or raised
    )
    if not ranked:
        return None
    last = ranked[-1]
    return Failure(
        error=last.error, where=last.where, traceback="\n".join(last.traceback[-_TRACEBACK_LINES_KEPT:]), rank=None
    )


def _exceptions(log: str) -> Iterator[_Raised]:
    streams: dict[str, _Stream] = {}
    for raw in log.splitlines():
        line = _COLOUR.sub("", raw).rstrip()
        worker = _WORKER.match(line)
        where = f"{worker['name']} (pid {worker['pid']})" if worker else "trainer"
        raised = streams.setdefault(where, _Stream(where)).feed(line[worker.end() :] if worker else line)
        if raised is not None:
            yield raised


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")

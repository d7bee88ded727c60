"""What a starting run is doing, in words, from its job's log."""

import re
from pathlib import Path

# The last one that occurs in the log is shown. Lines of Ray, verl 0.9.1 and Megatron-core.
_STAGES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Connecting to existing Ray cluster"), "connecting to Ray"),
)


class StageReader:
    """Reads a growing log; `read` returns the newest stage when there is a new one."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0

    def read(self) -> str:
        """The stage that the new lines show; empty when they show none."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        found = ""
        for line in complete.decode(errors="replace").splitlines():
            found = next((stage for pattern, stage in _STAGES if pattern.search(line)), found)
        return found

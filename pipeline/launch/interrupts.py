"""Ctrl-C, SIGTERM and SIGHUP: the first asks the sweep to stop in order, the second ends it at once."""

import signal
import time
import types
from typing import Any


class EndedAtOnce(SystemExit):
    """A second signal: unwinds through every `finally`, and ends the process with the signal's exit status."""


class Interrupts:
    """Context manager around a sweep; only for the main thread."""

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "Interrupts":
        for number in _IN_WORDS:
            # Under nohup, SIGHUP is ignored and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: types.FrameType | None) -> None:
        if self.signal is not None:
            raise EndedAtOnce(128 + number)
        self.signal = signal.Signals(number)

    @property
    def asked(self) -> bool:
        return self.signal is not None

    @property
    def reason(self) -> str:
        """In words, for status.json."""
        return "" if self.signal is None else f"stopped by {_IN_WORDS[self.signal]}"

    def pause(self, seconds: float) -> None:
        """Sleep, but return soon after a first signal. (threading.Event is not safe to set in a signal handler.)"""
        asked_before, end = self.asked, time.monotonic() + seconds
        while self.asked == asked_before and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


_IN_WORDS = {
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the end of its terminal (SIGHUP)",
}

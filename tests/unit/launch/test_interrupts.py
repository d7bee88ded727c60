"""The first signal asks, the second ends; a sleeping sweep wakes."""

import os
import signal
import threading
import time

import pytest

from pipeline.launch.interrupts import EndedAtOnce, Interrupts


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals, words: str) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), number)
        assert interrupts.asked
        assert words in interrupts.reason
        with pytest.raises(EndedAtOnce) as ended:
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_a_pause_ends_soon_after_the_first_signal() -> None:
    with Interrupts() as interrupts:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        interrupts.pause(20)
        assert time.monotonic() - began < 5
        began = time.monotonic()
        interrupts.pause(0.2)
        assert time.monotonic() - began >= 0.2


def test_under_nohup_the_end_of_the_terminal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.asked
    finally:
        signal.signal(signal.SIGHUP, before)

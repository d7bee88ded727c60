"""Carries the sweep's outcome past Hydra, whose main function returns nothing."""

from pipeline.launch.runner import SweepOutcome

_latest: list[SweepOutcome] = []


def record(outcome: SweepOutcome) -> None:
    _latest.append(outcome)


def take() -> SweepOutcome | None:
    """The outcome of the sweep that just ended; None when Hydra only showed something (--help, --cfg)."""
    return _latest.pop() if _latest else None

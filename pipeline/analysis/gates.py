"""The gates: what counts as "training stays the same", kept as data with units (conf/gates/)."""

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FloatArray = npt.NDArray[np.float64]

Window = tuple[float, float]
"""From and to, as shares of the run's steps: (0.5, 1.0) is the last half."""


class _Strict(BaseModel):
    # Gates are written by people: a misspelt key must not pass as an unknown field of a newer version.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Margin(_Strict):
    """Half-width of the equivalence interval: `absolute`, or `share` of the baseline with the floor `at_least`.

    A share is one of the baseline's mean absolute value, for a metric such as ppo_kl can be near zero on average while
    each of its steps is not.
    """

    absolute: float | None = Field(default=None, gt=0)
    share: float | None = Field(default=None, gt=0, lt=1)
    at_least: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one_kind(self) -> "Margin":
        if (self.absolute is None) == (self.share is None):
            raise ValueError("give either `absolute` or `share`")
        if self.absolute is not None and self.at_least:
            raise ValueError("`at_least` belongs to `share`")
        return self

    def of_pairs(self, sizes: FloatArray) -> FloatArray:
        """Each pair's half-width, (pairs,), in the metric's unit, from the means of the baseline's absolute values.

        The margin is their mean. For a share it is known only as well as the baseline, and pair by pair the tests can
        take that into account (Sasabuchi's test of a ratio of means: T - (1 ± share) B against zero).
        """
        if self.share is not None and self.share * float(sizes.mean()) >= self.at_least:
            return self.share * sizes
        return np.full(len(sizes), self.at_least if self.absolute is None else self.absolute)

    def in_words(self, unit: str) -> str:
        """Such as "± 0.05 reward" or "± 25 % of the baseline's mean size, at least 0.001 share of tokens"."""
        if self.absolute is not None:
            return f"± {self.absolute:g} {unit}"
        floor = f", at least {self.at_least:g} {unit}" if self.at_least else ""
        return f"± {100 * (self.share or 0):g} % of the baseline's mean size{floor}"


class MetricGate(_Strict):
    """One gated metric."""

    column: str
    """verl's name for it in steps.jsonl; `*` stands for any part of a name."""
    unit: str
    better: Literal["higher", "lower", "neither"]
    margin: Margin
    optional: bool = False
    """Whether a study that never recorded it can still be found equivalent."""


class Gates(_Strict):
    """conf/gates/*.yaml; that file says what each value means."""

    name: str
    alpha: float = Field(gt=0, lt=0.5)
    min_pairs: int = Field(ge=2)
    power: float = Field(gt=0, lt=1)
    mean_window: Window
    max_window: Window
    max_ratio: float = Field(ge=1)
    metrics: dict[str, MetricGate] = Field(min_length=1)

    @model_validator(mode="after")
    def _windows(self) -> "Gates":
        for name, (start, end) in (("mean_window", self.mean_window), ("max_window", self.max_window)):
            if not 0 <= start < end <= 1:
                raise ValueError(f"{name}: [{start:g}, {end:g}] is no part of a run; need 0 <= from < to <= 1")
        return self


def read_gates(raw: dict[str, Any]) -> Gates:
    """Gates from the `gates` of a run's configuration. Raises ValueError with one line per mistake."""
    try:
        return Gates.model_validate(raw)
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(['gates', *map(str, mistake['loc'])])}: {mistake['msg'].removeprefix('Value error, ')}"
            for mistake in error.errors()
        ]
        raise ValueError("; ".join(mistakes)) from None


def window_slice(window: Window, steps: int) -> slice:
    """The window's positions among `steps` steps: [0.5, 1.0] of 8 steps is the last four, of 3 the last two."""
    return slice(math.floor(window[0] * steps), math.ceil(window[1] * steps))

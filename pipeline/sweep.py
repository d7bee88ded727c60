"""`python -m pipeline.sweep [overrides]`: paired runs as Ray jobs, followed, analysed and reported."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.launch.bad_input import BadInput

if TYPE_CHECKING:
    from pipeline.launch.runner import SweepOutcome

CONF = Path(__file__).resolve().parents[1] / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="sweep")
def launch(_: DictConfig) -> None:
    """Hydra's task function. The launcher plugin runs the jobs; this is reached only without it (hydra.mode=RUN)."""
    raise BadInput("hydra.mode=RUN: a sweep is always a multirun; leave hydra.mode out (one run: arm=pao seed=1)")


def main() -> int:
    """Run the sweep that sys.argv describes; returns the exit status."""
    from pipeline.launch import latest_outcome
    from pipeline.launch.cluster import ClusterError

    try:
        with _errors_as_exceptions():
            launch()
        outcome = latest_outcome.take()
        return 0 if outcome is None else report(outcome)
    except (BadInput, HydraException, OmegaConfBaseException) as error:
        from pipeline.launch.hydra_errors import in_words

        print(f"error: {in_words(error, CONF)}", file=sys.stderr)
        return 2
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _errors_as_exceptions() -> Iterator[None]:
    """Hydra prints errors with parts of a traceback and exits with status 1, unless this variable is set."""
    former = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if former is not None:
            os.environ["HYDRA_FULL_ERROR"] = former


def report(outcome: "SweepOutcome") -> int:
    """Analyse the study, say where the report is and what it answers; returns the exit status."""
    from pipeline.analyze import analyze

    analysed = analyze(outcome.study.path)
    print(f"report: {analysed.report}\n{analysed.one_line}")
    return outcome.exit_status


if __name__ == "__main__":
    sys.exit(main())

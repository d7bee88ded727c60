"""`python -m pipeline.sweep [overrides]`: paired runs as Ray jobs, followed, analysed and reported."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.launch.errors import BadInput, ClusterError
from pipeline.launch.handover import HANDOVER
from pipeline.study.paths import PROJECT  # which also registers ${in_project:...}

if TYPE_CHECKING:
    from pipeline.launch.runner import SweepOutcome

CONF = PROJECT / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="sweep")
def launch(_: DictConfig) -> None:
    """Hydra's task function. The launcher plugin runs the jobs; this is reached only without it (hydra.mode=RUN)."""
    # Not a BadInput: Hydra would add lines of its own.
    print(
        "error: hydra.mode=RUN: leave hydra.mode out, a sweep is always a multirun (one run: arm=pao)", file=sys.stderr
    )
    sys.exit(2)


def main() -> int:
    """Run the sweep that sys.argv describes; returns the exit status."""
    try:
        with _errors_as_exceptions():
            launch()  # pyright: ignore[reportCallIssue] - Hydra fills the configuration in
    except (BadInput, HydraException, OmegaConfBaseException) as error:
        from pipeline.launch.hydra_errors import in_words

        print(f"error: {in_words(error, CONF)}", file=sys.stderr)
        return 2
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before any run was started", file=sys.stderr)
        return 130
    finally:
        if HANDOVER.study is not None:
            HANDOVER.study.remove_if_unused()
    return 0 if HANDOVER.outcome is None else report(HANDOVER.outcome)


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
    try:
        if outcome.study.has_runs:
            from pipeline.analyze import analyze

            analysed = analyze(outcome.study.path)
            print(f"report: {analysed.report}\n{analysed.one_line}")
    except KeyboardInterrupt:
        print(f"stopped; the report is written by: python -m pipeline.analyze {outcome.study.path}", file=sys.stderr)
        return 130
    finally:
        if outcome.ending is not None:
            outcome.ending.stop()
    return outcome.exit_status


if __name__ == "__main__":
    sys.exit(main())

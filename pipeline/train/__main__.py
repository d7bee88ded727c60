"""`python -m pipeline.train`: the entrypoint of a run's Ray job. Runs verl as config.yaml of the run folder says."""

import sys

from pipeline.callbacks.failure import record_failure
from pipeline.study.run_folder import RUN_FOLDER_VARIABLE, RunFolder


def main() -> int:
    folder = RunFolder.from_environment()
    if folder is None:
        print(f"pipeline.train runs inside a job of pipeline.sweep, which sets {RUN_FOLDER_VARIABLE}", file=sys.stderr)
        return 2
    try:
        from pipeline.train.run import run

        run(folder)
    except Exception as error:
        record_failure(folder, error, "trainer")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

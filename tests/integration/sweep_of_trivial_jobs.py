"""`python -m pipeline.sweep` with trivial jobs in place of training: run as a script with Hydra overrides."""

import sys
from pathlib import Path

from pipeline import sweep
from pipeline.launch import jobs

if __name__ == "__main__":
    jobs.TRAIN = (sys.executable, str(Path(__file__).with_name("trivial_job.py")))
    sys.exit(sweep.main())

"""What a starting run is doing, in words, from its job's log."""

from pathlib import Path

from pipeline.launch.growing_file import GrowingFile

# In order: text in a line of Ray, verl 0.9.1, Megatron-core or ourselves -> what begins there.
_STAGES = {
    b"Runtime env is setting up": "setting up the job",
    b"Running entrypoint for job": "importing the training code",
    b"making the model (": "making the model and its data",
    b"All configuration checks passed": "connecting to Ray",
    b"Connected to Ray cluster": "starting the trainer",
    b"Using dataset class": "loading the data",
    b"worker group kwargs": "starting the workers",
    b"TF config: ": "building the model",
    b"actor and ref model engine initialized": "starting the rollout server",
    b"checkpoint engine manager initialized": "starting the agent loops",
    b"ready to fit": "first step",
}


class StageReader:
    """Follows a growing log."""

    def __init__(self, log: Path) -> None:
        self._log = GrowingFile(log)
        self._reached = -1

    def read(self) -> str:
        """The stage that the new lines reach; empty when they reach none. Never goes back: workers repeat lines."""
        before = self._reached
        for line in self._log.new_lines():
            for number, text in enumerate(_STAGES):
                if number > self._reached and text in line:
                    self._reached = number
        return list(_STAGES.values())[self._reached] if self._reached > before else ""

"""A Ray job that stands in for training: writes the rows that the launcher follows, or fails in a chosen way.

What it does is said by the recipe's `trivial`, which a test sets with `+recipe.trivial=fails`.
"""

import os
import sys
import time

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder


def main() -> None:
    folder = RunFolder.from_environment()
    assert folder is not None
    recipe = folder.read_config().recipe
    what = recipe["trivial"]
    (folder.path / "pid").write_text(str(os.getpid()))
    say(f"trivial job: {what}")
    say("its cluster has a key" if "WANDB_API_KEY" in os.environ else "its cluster has no key")
    if what == "remote_error":
        fail_in_an_actor()
    for step in range(1, recipe["steps"] + 1):
        time.sleep(recipe.get("step_s", 0.2))
        row = {"step": step, "critic/rewards/mean": 0.1 * step, "actor/ppo_kl": 0.01, "perf/time_per_step": 0.2}
        json_lines.append_row(folder.steps_file, row)
        if what == "fails" and step == 2:
            raise ValueError("the second step went wrong")
    say("trivial job: done")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail_in_an_actor() -> None:
    """As verl does: the error is raised in a worker, reaches the driver wrapped, and more of the log follows."""
    import ray

    @ray.remote(resources={"verl_slot": 1})
    class Worker:
        def work(self) -> None:
            raise RuntimeError("rank 0 ran out of luck")

    ray.init()
    ray.get(Worker.remote().work.remote())  # pyright: ignore[reportAttributeAccessIssue] - Ray adds it


if __name__ == "__main__":
    sys.exit(main())

"""A Ray job that stands in for training: writes the rows that the launcher follows, or fails in a chosen way.

What it does is said by the recipe's `trivial` (set by a test with `+recipe.trivial=fails`).
"""

import sys
import time

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder


def main() -> None:
    folder = RunFolder.from_environment()
    assert folder is not None
    recipe = folder.read_config().recipe
    what = recipe.get("trivial", "succeeds")
    print(f"trivial job: {what}", flush=True)  # noqa: T201
    if what == "remote_error":
        _fail_in_an_actor()
    for step in range(1, recipe["steps"] + 1):
        time.sleep(recipe.get("step_s", 0.2))
        json_lines.append_row(
            folder.steps_file,
            {
                "step": step,
                "critic/rewards/mean": 0.1 * step,
                "actor/ppo_kl": 0.01,
                "actor/pg_clipfrac": 0.1,
                "timing_s/step": 0.2,
            },
        )
        json_lines.append_row(folder.updates_file, {"step": step, "rank": 0, "rss_peak_optimizer_step_gib": 0.5})
        if what == "fails" and step == 2:
            raise ValueError("the second step went wrong")
    print("trivial job: done", flush=True)  # noqa: T201


def _fail_in_an_actor() -> None:
    import ray

    @ray.remote(resources={"verl_slot": 1})
    class Worker:
        def work(self) -> None:
            raise RuntimeError("rank 0 ran out of luck")

    ray.init()
    ray.get(Worker.remote().work.remote())


if __name__ == "__main__":
    sys.exit(main())

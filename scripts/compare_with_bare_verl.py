"""What the pipeline costs, measured side by side with bare verl on this machine.

  python scripts/compare_with_bare_verl.py overhead [--steps 60] [--rounds 3]   callbacks: step time, observed : bare
  python scripts/compare_with_bare_verl.py sweep                                wall time of a sweep : two runs by hand

`bare` is `python -m verl.trainer.main_ppo` by hand on a running Ray cluster with the same settings and stand-ins, no
run folder, nothing observed. Orders alternate, so that drift of the machine cancels. Writes nothing but its answer.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.launch.cluster import ClusterSettings, LocalCluster, forget_other_clusters
from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.train.by_hand import compose_sweep, verl_command, worker_environment
from pipeline.train.plugin import make_assets

PORT = 8299
ARMS = ("baseline", "pao")


def composed_for(arm: str, steps: int) -> dict[str, Any]:
    composed = compose_sweep([f"arm={arm}", f"recipe.steps={steps}", f"cluster.dashboard_port={PORT}"])
    make_assets(Path(composed["recipe"]["assets_dir"]))
    return composed


class RunningCluster:
    """A local cluster like the sweep's own."""

    def __enter__(self) -> "RunningCluster":
        forget_other_clusters()
        composed = compose_sweep([f"cluster.dashboard_port={PORT}"])
        settings = ClusterSettings.model_validate(composed["cluster"])
        self._cluster = LocalCluster(settings, composed["recipe"]["n_workers"])
        self._cluster.start()
        while not self._cluster.is_ready():
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    def run_bare(self, arm: str, steps: int, metrics: Path) -> float:
        """Seconds of wall time of `ray job submit -- python -m verl.trainer.main_ppo ...`, submission to end.

        verl's own file logger writes its metrics to `metrics`.
        """
        from ray.job_submission import JobStatus, JobSubmissionClient

        composed = composed_for(arm, steps)
        environment = {**worker_environment(composed["cluster"]), "VERL_FILE_LOGGER_PATH": str(metrics)}
        command = verl_command(composed, ["trainer.logger=[console,file]"], on_cluster=True)
        dashboard = self._cluster.dashboard
        client = JobSubmissionClient(dashboard.address, headers=dashboard.headers)
        started = time.perf_counter()
        job = client.submit_job(entrypoint=shlex.join(command), runtime_env={"env_vars": environment})
        while not (status := client.get_job_status(job)).is_terminal():
            time.sleep(0.5)
        took = time.perf_counter() - started
        if status != JobStatus.SUCCEEDED:
            sys.exit(client.get_job_logs(job)[-3000:])
        return took


def run_sweep(arms: tuple[str, ...], steps: int, results: Path) -> float:
    """Seconds of wall time of a sweep, from nothing running to the report."""
    command = [
        sys.executable, "-m", "pipeline.sweep", f"arm={','.join(arms)}", f"recipe.steps={steps}", "study_name=compared",
        f"results_dir={results}", f"cluster.dashboard_port={PORT}",
    ]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def bare_step_times(metrics: Path) -> list[float]:
    return [json.loads(line)["data"]["timing_s/step"] for line in metrics.read_text().splitlines()]


def observed_step_times(results: Path) -> list[float]:
    (steps,) = results.glob("compared/runs/*/steps.jsonl")
    return [json_lines.loads(line)["timing_s/step"] for line in steps.read_text().splitlines()]


def overhead(steps: int, rounds: int) -> None:
    """Step time with callbacks and W&B (offline) over bare verl's: the median over steps, each against its like.

    Both runs of a round compute the same thing bit for bit, so step k is compared with step k, and the work, which
    changes as the policy learns, cancels. The first two steps of a run warm up and do not count.
    """
    ratios: list[float] = []
    for number in range(rounds):
        times: dict[str, list[float]] = {}
        for kind in ("bare", "observed") if number % 2 == 0 else ("observed", "bare"):
            with tempfile.TemporaryDirectory() as folder:
                if kind == "bare":
                    with RunningCluster() as cluster:
                        cluster.run_bare("baseline", steps, Path(folder) / "metrics.jsonl")
                    times[kind] = bare_step_times(Path(folder) / "metrics.jsonl")[2:]
                else:
                    run_sweep(("baseline",), steps, Path(folder))
                    times[kind] = observed_step_times(Path(folder))[2:]
        of_round = [observed / bare for observed, bare in zip(times["observed"], times["bare"], strict=True)]
        ratios += of_round
        bare, observed = (statistics.median(times[kind]) for kind in ("bare", "observed"))
        print(
            f"round {number + 1}: medians of {len(of_round)} steps: bare {bare:.3f} s, observed {observed:.3f} s; "
            f"median ratio of steps {statistics.median(of_round):.3f}",
            flush=True,
        )
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"observed : bare = {statistics.median(ratios):.3f} (median of {len(ratios)} steps, each against its like; "
        f"middle half of the steps {low:.3f} to {high:.3f})"
    )


def sweep() -> None:
    """Wall time of the default sweep over that of the same two runs by hand on a running cluster."""
    steps = composed_for("baseline", 8)["recipe"]["steps"]
    with tempfile.TemporaryDirectory() as folder:
        with RunningCluster() as cluster:
            by_hand = sum(cluster.run_bare(arm, steps, Path(folder) / f"{arm}.jsonl") for arm in ARMS)
        print(f"by hand: {by_hand:.1f} s", flush=True)
        swept = run_sweep(ARMS, steps, Path(folder))
    print(f"sweep : by hand = {swept:.1f} s : {by_hand:.1f} s = {swept / by_hand:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "sweep"])
    parser.add_argument("--steps", type=int, default=60, help="steps of each run of `overhead` (default: 60)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs of `overhead` (default: 3)")
    arguments = parser.parse_args()
    if arguments.what == "overhead":
        overhead(arguments.steps, arguments.rounds)
    else:
        sweep()


if __name__ == "__main__":
    main()

"""What W&B costs a step, and whether every row arrives: sweeps of one run with each kind of tracking, side by side.

  python scripts/measure_tracking.py [--steps 40] [--rounds 3]

disabled   run folder only: what the others are compared with
offline    W&B's files in the run folder
online     streamed to a stand-in of the W&B server on this machine (tests/support/wandb_stand_in.py)
dead       the same, but the server takes connections and never says a word

The order of the kinds turns round from round to round, so that drift of the machine cancels. Writes nothing but its
answer. Rows sent are counted where they arrived: at the stand-in, or in the offline run's file.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from offline_run import history_of
from wandb_stand_in import WandbStandIn, dead_address

from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import all_rows

PORT = 8298
KINDS = ("disabled", "offline", "online", "dead")
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """One sweep of one run. Seconds; rows as W&B counts them (optimizer steps and training steps)."""

    step_times: list[float]
    wall: float
    rows_written: int
    rows_sent: int | None


def measure(kind: str, steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as results, WandbStandIn() as server, dead_address() as dead:
        environment = {**os.environ, **server.environment}
        if kind == "dead":
            environment["WANDB_BASE_URL"] = dead
        mode = "online" if kind == "dead" else kind
        command = [
            sys.executable, "-m", "pipeline.sweep", "arm=baseline", f"recipe.steps={steps}", "study_name=measured",
            f"tracking={mode}", f"results_dir={results}", f"cluster.dashboard_port={PORT}",
        ]  # fmt: skip
        started = time.perf_counter()
        subprocess.run(command, cwd=PROJECT, env=environment, check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - started
        (path,) = Path(results).glob("measured/runs/*")
        folder = RunFolder(path)
        rows = [json_lines.loads(line) for line in folder.steps_file.read_text().splitlines()]
        times = [row["timing_s/step"] for row in rows][_WARM_UP_STEPS:]
        return Measured(times, wall, len(all_rows(folder)), _rows_sent(kind, folder, server))


def _rows_sent(kind: str, folder: RunFolder, server: WandbStandIn) -> int | None:
    if kind == "disabled":
        return None
    if kind == "offline":
        (file,) = folder.path.glob("wandb/offline-run-*/*.wandb")
        return len(history_of(file))
    return sum(len(run.history) for run in server.runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"of each run, {_WARM_UP_STEPS} warm up (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is run (default: 3)")
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    equal = True
    for number in range(arguments.rounds):
        found: dict[str, Measured] = {}
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            found[kind] = measure(kind, arguments.steps)
            one = found[kind]
            median, sent = statistics.median(one.step_times), "-" if one.rows_sent is None else one.rows_sent
            print(
                f"round {number + 1} {kind}: median step {median:.3f} s, sweep {one.wall:.1f} s, "
                f"rows written {one.rows_written}, sent {sent}",
                flush=True,
            )
        for kind, of_kind in ratios.items():
            # Runs compute the same thing bit for bit: step k is compared with step k.
            pairs = zip(found[kind].step_times, found["disabled"].step_times, strict=True)
            of_kind += [one / other for one, other in pairs]
        equal &= all(found[kind].rows_sent == found[kind].rows_written for kind in ("offline", "online"))
    for kind, of_kind in ratios.items():
        median = statistics.median(of_kind)
        print(f"{kind} : disabled = {median:.3f} (median of {len(of_kind)} steps, each against its like)")
    print(f"rows sent equal rows written (offline and online): {'yes' if equal else 'NO'}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()

"""Megatron's optimizer alone: optimizer steps of each arm on a model shape, without verl and rollout, as a study.

    python -m pipeline.train.optimizer_probe --study h200-qwen2-7b-memory --shape qwen2_7b
    python -m pipeline.train.optimizer_probe --study try --shape tiny --device cpu

Each arm (conf/arm) runs in a fresh process and leaves an ordinary run folder, with two files more: bandwidth.json, the
optimizer step's time beside the time that its bytes need at the copy bandwidth of the same process, and
probe_overhead.json, updates with and without the observer. Then `python -m pipeline.analyze results/<study>`. An arm
that does not fit in memory is a failed run, with the error. Runs that succeeded before are kept.

Exit status: 0 every arm succeeded; 1 an arm failed; 2 the input cannot work.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from pipeline.callbacks.failure import record_failure
from pipeline.study import json_lines
from pipeline.study.naming import check_study_name
from pipeline.study.paths import PROJECT
from pipeline.study.planning import PlannedRun, in_running_order, planned_run, success_in_the_way
from pipeline.study.records import Failure, Status
from pipeline.study.run_folder import RUN_FOLDER_VARIABLE, RunFolder, write_atomically
from pipeline.train.by_hand import compose_sweep
from pipeline.train.environment import gpus
from pipeline.train.probe_shapes import SHAPES

WORKER = (sys.executable, "-m", "pipeline.train.probe_worker")
TABLE_FILE = "optimizer_steps.md"
_ARMS = "baseline,pao,pao_bf16_moments,pao_bf16_all"
_MINI_BATCHES = 4  # per training step, as in the 7B recipe
_SEQUENCES = 2
_SEQUENCE_LENGTH = 128
_TABLE_NOTES = (
    "Bytes to move: the fewest that a step must read and write (pipeline/train/probe_worker.py,",
    "step_bytes_per_parameter). Bandwidth: a large copy in the same process, bytes read and written counted. Observer:",
    "median of pairs of updates, with it and without. It takes the same time however many tokens an update has:",
    "here they are few, in the 7B recipe they are those of 1,280 samples.",
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    runs = in_running_order([_planned(options, arm) for arm in options.arms.split(",")])
    study = options.results_dir.absolute() / options.study
    if problem := _in_the_way(study, runs):
        _parser().error(problem)
    states = [_run(run, study, options.timeout_s) for run in runs]
    table = table_of(study)
    write_atomically(study / TABLE_FILE, table.encode())
    print(table)
    return int(any(state != "succeeded" for state in states))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.train.optimizer_probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", required=True, help="results/<study>")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--arms", default=_ARMS, help="names of conf/arm, with commas (default: %(default)s)")
    parser.add_argument("--seed", type=_at_least(0), default=1, help="of the tokens (default: %(default)s)")
    parser.add_argument(
        "--steps", type=_at_least(1), default=3, help=f"of {_MINI_BATCHES} optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--overhead-micro-batches",
        type=_at_least(1),
        default=1,
        help="what observing costs is measured with updates of so many micro-batches (default: %(default)s)",
    )
    parser.add_argument("--lr", type=_learning_rate, default=1e-6, help="default: %(default)s, the 7B recipe's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--results-dir", type=Path, default=PROJECT / "results")
    parser.add_argument("--timeout-s", type=_at_least(1), default=300, help="of one arm (default: %(default)s)")
    parser.add_argument(
        "--compare-megatron-core",
        action="store_true",
        help="the study compares releases of megatron-core: note the one that is installed as a swept value",
    )
    return parser


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.shape != "tiny":
        parser.error(f"--shape {options.shape} needs a GPU: with --device cpu give --shape tiny")
    try:
        check_study_name(options.study)
    except ValueError as error:
        parser.error(str(error))
    if len(set(options.arms.split(","))) < len(options.arms.split(",")):
        parser.error(f"--arms {options.arms}: an arm is named twice")
    known = {path.stem for path in (PROJECT / "conf" / "arm").glob("*.yaml")}
    unknown = [arm for arm in options.arms.split(",") if arm not in known]
    if unknown:
        parser.error(f"--arms {','.join(unknown)}: known arms are {', '.join(sorted(known))}")
    if options.device == "cuda" and not _has_gpu():
        parser.error("no NVIDIA GPU is found here: to try the probe on the host give --device cpu --shape tiny")
    return options


def _at_least(lowest: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {lowest} on is needed")
        return int(text)

    return whole_number


def _learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 on is needed")
    return value


def _has_gpu() -> bool:
    import pynvml

    try:
        return bool(gpus())
    except pynvml.NVMLError:
        return False


def _in_the_way(study: Path, runs: list[PlannedRun]) -> str:
    """Why `study` cannot take these runs; empty when it can."""
    try:
        (study / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{study}: cannot write there ({error.strerror}). Give another --results-dir"
    for run in runs:
        folder = RunFolder(study / "runs" / run.run_id)
        former = folder.read_status()
        if former is None or former.state != "succeeded":
            continue
        if told := success_in_the_way(folder.read_config(), run.config):
            return f"{folder.path} {told}\nGive another --study"
    return ""


def _planned(options: argparse.Namespace, arm: str) -> PlannedRun:
    overrides = [
        f"arm={arm}",
        f"seed={options.seed}",
        f"study_name={options.study}",
        f"cluster={'embedded' if options.device == 'cpu' else 'one_gpu'}",
        "tracking=disabled",
    ]
    swept = {"megatron_core": metadata.version("megatron-core")} if options.compare_megatron_core else {}
    composed = {**compose_sweep(overrides), "recipe": _recipe(options)}
    return planned_run(composed, swept, overrides, command=_command(options))


def _command(options: argparse.Namespace) -> str:
    """This program with what shapes the result: neither where it is written nor how long it may take."""
    parser = _parser()
    told = [f"--study {options.study}", f"--shape {options.shape}", f"--arms {options.arms}"]
    told += [
        f"--{name.replace('_', '-')} {value}"
        for name in ("seed", "steps", "overhead_micro_batches", "lr", "device")
        if (value := getattr(options, name)) != parser.get_default(name)
    ]
    if options.compare_megatron_core:
        told.append("--compare-megatron-core")
    return " ".join(["python -m pipeline.train.optimizer_probe", *told])


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """In the shape of conf/recipe, as far as it applies."""
    return {
        "name": "optimizer_probe",
        "algorithm": "probe",
        "model_name": options.shape,
        "parameters": SHAPES[options.shape].parameters,
        "steps": options.steps,
        "mini_batches": _MINI_BATCHES,
        "mini_batch_size": _SEQUENCES,
        "train_batch_size": _MINI_BATCHES * _SEQUENCES,
        "sequence_length": _SEQUENCE_LENGTH,
        "overhead_micro_batches": options.overhead_micro_batches,
        "n_workers": 1,
        "run_prefix": f"probe-{options.shape}-1n1g-tp1pp1",
        # verl's defaults but for lr
        "verl": {"actor_rollout_ref": {"actor": {"optim": {"lr": options.lr, "weight_decay": 0.01, "clip_grad": 1.0}}}},
    }


def _run(run: PlannedRun, study: Path, timeout_s: float) -> str:
    """Run one arm to its end; returns the state."""
    folder = RunFolder(study / "runs" / run.run_id)
    former = folder.read_status()
    if former is not None and former.state == "succeeded":
        print(f"{run.run_id}: succeeded before, kept", flush=True)
        return "succeeded"
    attempt = _set_aside(folder, study)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False))
    folder.overrides_file.write_text(yaml.safe_dump(list(run.overrides)))
    started_at = time.time()
    code = _work(folder, run, timeout_s)
    failure = None if code == 0 else _failure(folder, code, timeout_s)
    status = Status(
        state="failed" if failure else "succeeded",
        reason=failure.error if failure else "",
        failure=failure,
        attempt=attempt,
        steps_done=sum(1 for _ in json_lines.read_rows(folder.steps_file)),
        started_at=started_at,
        ended_at=time.time(),
    )
    folder.write_status(status)
    took = f"{status.ended_at - started_at:.0f} s"
    print(f"{run.run_id}: {status.state} after {took}{f': {failure.error}' if failure else ''}", flush=True)
    return status.state


def _set_aside(folder: RunFolder, study: Path) -> int:
    """Move what an earlier attempt left to attempts/; returns the number of the new attempt."""
    attempts = study / "attempts"
    number = 1 + len(list(attempts.glob(f"{folder.path.name}-a*")))
    if not folder.path.exists():
        return number
    attempts.mkdir(parents=True, exist_ok=True)
    folder.path.rename(attempts / f"{folder.path.name}-a{number}")
    return number + 1


def _work(folder: RunFolder, run: PlannedRun, timeout_s: float) -> int | None:
    """The worker's exit status; None when it took too long."""
    on_cpu = run.config.cluster["worker_resource"] != "GPU"
    environment = {
        **os.environ,
        # The verl platform of cluster=embedded stays out: there is no verl here.
        **{name: str(value) for name, value in run.config.cluster["env"].items() if name != "VERL_PLATFORM"},
        # 7 B parameters fill the device to a few GiB: no room for holes between blocks.
        **({} if on_cpu else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        RUN_FOLDER_VARIABLE: str(folder.path),
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(PROJECT)]),
    }
    with folder.job_log_file.open("wb") as log:
        try:
            return subprocess.run(
                WORKER, env=environment, cwd=PROJECT, stdout=log, stderr=log, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def _failure(folder: RunFolder, code: int | None, timeout_s: float) -> Failure:
    """The worker's own account; where it could not give one, how it ended."""
    told = f"did not end within {timeout_s:g} s" if code is None else f"ended with exit status {code}"
    last = folder.job_log_file.read_text(errors="replace").splitlines()[-1:]
    # A file that is there stays.
    record_failure(folder, RuntimeError(": ".join([told, *last])), "rank 0", 0)
    return Failure.model_validate(json_lines.loads(folder.failure_file.read_bytes()))


# -- the table --------------------------------------------------------------------------------------------------------


def table_of(study: Path) -> str:
    """Markdown: each run's optimizer step beside its bytes, and what observing it costs."""
    runs = sorted((study / "runs").iterdir())
    head = (
        "run",
        "parameters",
        "bytes per parameter to move",
        "at the copy bandwidth, ms",
        "optimizer step, median ms",
        "ratio",
        "copy bandwidth, TB/s",
        "observer per update, ms",
        "share of an update",
        "observer's memory, MiB: kept / at most",
    )
    rows = [_table_row(run) for run in runs]
    filled = [(*row, *[""] * (len(head) - len(row))) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *filled)]
    return "\n".join(["# Optimizer step, bytes and bandwidth", "", *lines, "", *_TABLE_NOTES]) + "\n"


def _table_row(run: Path) -> list[str]:
    files = [run / "bandwidth.json", run / "probe_overhead.json"]
    if not all(file.exists() for file in files):
        status = RunFolder(run).read_status()
        return [run.name, "not ended" if status is None else f"{status.state}: {status.reason[:120]}"]
    speed, overhead = (json_lines.loads(file.read_bytes()) for file in files)
    share = 100 * overhead["overhead_per_update_s"] / overhead["update_without_s"]
    memory = [overhead.get(f"memory_{name}_mib") for name in ("kept", "at_most")]
    return [
        run.name,
        f"{speed['parameters']:,}",
        f"{speed['bytes_per_parameter_total']}",
        f"{1e3 * speed['floor_s']:.3g}",
        f"{1e3 * speed['optimizer_step_s']['median']:.3g}",
        f"{speed['ratio']:.2f}",
        f"{speed['copy_bandwidth_bytes_per_s'] / 1e12:.3g}",
        f"{1e3 * overhead['overhead_per_update_s']:.3g}",
        f"{share:.2f} % ({overhead['tokens_per_update']:,} tokens)",
        " / ".join("–" if size is None else f"{size:.1f}" for size in memory),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""What was measured, as read from a study's folder. Nothing is judged here; what could not be read becomes a note."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import yaml
from pydantic import ValidationError

from pipeline.analysis.columns import FloatArray, IntArray, Table, read_table
from pipeline.study import json_lines
from pipeline.study.records import Environment, Ledger, Record, RunConfig, Status
from pipeline.study.run_folder import RunFolder

_WORTH_WORKERS_BYTES = 1 << 26  # below, starting a process costs more than it saves
_MOST_WORKERS = 4

BASELINE = "baseline"
BASELINE_REPEAT = "baseline_repeat"
_KNOWN_ARMS = (BASELINE, BASELINE_REPEAT, "pao", "pao_bf16_moments", "pao_bf16_all")

MEMORY_PHASES = ("after_update", "peak_forward_backward", "peak_optimizer_step", "peak_before_update")
MEMORY_SOURCES = ("rss", "allocated", "reserved", "device")
_UPDATE_FIELDS = frozenset(
    {
        "mini_batch",
        "liveness",
        "elements_changed",
        "elements",
        "tensors",
        "tensors_still",
        "grad_norm",
        "lr",
        "ppo_kl",
        "pg_clipfrac",
        "entropy",
        "pg_loss",
        "kl_loss",
        "time_forward_backward_s",
        "time_optimizer_step_s",
        "time_observer_s",
        "optimizer_step_succeeded",
        "masters",
        "masters_digest",
        "weights_off_nearest",
        "weights_off_at_ties",
        *(f"{source}_{phase}_gib" for source in MEMORY_SOURCES for phase in MEMORY_PHASES),
    }
)


class NotAStudyError(ValueError):
    """The folder cannot be analysed; the message says what is wrong and what to do."""


def nested(settings: Any, path: tuple[str, ...]) -> Any:
    """The value at `path` in nested mappings; None where it ends early."""
    for key in path:
        settings = cast(dict[str, Any], settings).get(key) if isinstance(settings, dict) else None
    return settings


@dataclass
class Run:
    """One training job: an arm, a seed, and the values of any other swept key."""

    folder: RunFolder
    config: RunConfig
    environment: Environment | None
    status: Status | None
    """None: the run has not ended, or was killed before anybody could write how."""
    ledger: Ledger | None
    overrides: list[str]
    steps: Table
    """One row per training step, sorted; every number that verl logged, under verl's names."""
    updates: Table
    """One row per optimizer step and rank, sorted by step, update, rank."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def id(self) -> str:
        return self.folder.path.name

    @property
    def arm(self) -> str:
        return str(self.config.arm.get("name", "unnamed"))

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def setting(self) -> str:
        """Swept values other than arm and seed, in words ("recipe.lr=0.001"); empty when nothing else was swept."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.config.swept.items()))

    @property
    def fault(self) -> str | None:
        """The fault that a positive control injects; None in a real run."""
        fault = self.config.arm.get("fault") or self.config.recipe.get("fault")
        return str(fault) if fault else None

    def metric(self, name: str) -> FloatArray:
        """A step metric at steps 1, 2, ... of `steps.step`; NaN where it was not measured (or is NaN)."""
        return self.steps.column(name)

    def optimizer_setting(self, name: str) -> Any:
        """A setting of `actor_rollout_ref.actor.optim`: the arm's, else the recipe's, else None (verl's default)."""
        path = ("verl", "actor_rollout_ref", "actor", "optim", name)
        arms_own = nested(self.config.arm, path)
        return nested(self.config.recipe, path) if arms_own is None else arms_own


@dataclass(frozen=True)
class Pair:
    """A baseline run and a treatment run that differ in the arm alone."""

    id: str
    baseline: Run
    treatment: Run
    reasons: list[str]
    """Why the pair cannot be judged; empty for a valid pair."""

    @property
    def seed(self) -> int:
        return self.treatment.seed

    @property
    def swept(self) -> dict[str, Any]:
        """Swept keys other than arm and seed: pairs replicate each other only where these are equal."""
        return self.treatment.config.swept

    @property
    def setting(self) -> str:
        """`swept` in words, as `Run.setting`."""
        return self.treatment.setting

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def is_noise_floor(self) -> bool:
        """An A/A pair: the baseline against its repetition with the same seed."""
        return self.treatment.arm == BASELINE_REPEAT


@dataclass
class Study:
    """One sweep and its folder."""

    folder: Path
    runs: list[Run]
    pairs: list[Pair]
    """Every pair, valid or not, A/A pairs among them; sorted by arm, setting and seed."""
    notes: list[str]
    """What could not be read, study-wide; each run has its own as well."""

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def arms(self) -> list[str]:
        """The arms that ran: the baseline and its repetition first, then by name."""
        return sorted({run.arm for run in self.runs}, key=arm_order)

    @property
    def treatments(self) -> list[str]:
        return [arm for arm in self.arms if arm not in (BASELINE, BASELINE_REPEAT)]

    @property
    def has_rollout(self) -> bool:
        """Whether responses were sampled: the optimizer probe does without."""
        return any(run.config.recipe.get("algorithm") != "probe" for run in self.runs)

    def runs_of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]

    def pairs_of(self, arm: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.treatment.arm == arm]

    @property
    def gates(self) -> dict[str, Any]:
        """The gates stored with the runs (of the first run; `notes` tell where others differ)."""
        return self.runs[0].config.gates

    @property
    def gates_hash(self) -> str:
        return self.runs[0].config.gates_hash


def arm_order(arm: str) -> tuple[int, str]:
    """The order of arms everywhere: from the baseline to what saves most, then others by name."""
    return (_KNOWN_ARMS.index(arm) if arm in _KNOWN_ARMS else len(_KNOWN_ARMS), arm)


def load_runs(study_folder: Path, meanwhile: Callable[[], None] | None = None) -> tuple[list[Run], list[str]]:
    """Every run that says what it is, and notes on folders that do not.

    meanwhile: called once while other processes read, where there are any.

    Raises NotAStudyError when there is no run at all.
    """
    runs_folder = study_folder / "runs"
    if not study_folder.is_dir():
        raise NotAStudyError(f"{study_folder} is not a folder. Name a study's folder, for example results/embedded")
    if not runs_folder.is_dir():
        reported = (study_folder / "summary.json").exists()
        kept = " (of a study that is kept in git only the report is there: run it again)" if reported else ""
        raise NotAStudyError(f"{study_folder} is not a study's folder: it has no folder 'runs'{kept}")
    folders = [RunFolder(path) for path in sorted(runs_folder.iterdir()) if path.is_dir()]
    loaded = _load_all(folders, meanwhile)
    runs = [run for run in loaded if isinstance(run, Run)]
    notes = [note for note in loaded if isinstance(note, str)]
    if not runs:
        told = "".join(f"\n  {note}" for note in notes)
        raise NotAStudyError(f"{runs_folder} holds no run that can be read{told or ': it is empty'}")
    return runs, notes


def _load_all(folders: list[RunFolder], meanwhile: Callable[[], None] | None) -> list["Run | str"]:
    size = sum(folder.updates_file.stat().st_size for folder in folders if folder.updates_file.exists())
    workers = min(len(folders), os.cpu_count() or 1, _MOST_WORKERS)
    if size < _WORTH_WORKERS_BYTES or workers < 2:
        return [_load_run(folder) for folder in folders]
    # Not forked: the sweep that calls the analysis has threads (Ray, the display).
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        loading = pool.map(_load_run, folders)
        if meanwhile is not None:
            meanwhile()
        return list(loading)


def _load_run(folder: RunFolder) -> "Run | str":
    """The run, or why it was left out."""
    try:
        config = folder.read_config()
    except (OSError, ValueError, yaml.YAMLError) as error:  # pydantic's ValidationError is a ValueError
        return f"{folder.path.name} left out: config.yaml cannot be read ({_one_line(error)})"
    notes: list[str] = []
    environment = _read(folder.environment_file, lambda: _environment(folder.environment_file), notes)
    status = _read(folder.status_file, folder.read_status, notes)
    ledger = _read(folder.ledger_file, folder.read_ledger, notes)
    overrides: Any = _read(folder.overrides_file, lambda: yaml.safe_load(folder.overrides_file.read_text()), notes)
    if folder.overrides_file.exists() and not isinstance(overrides, list):
        notes.append("overrides.yaml: not a list of overrides")
    steps = read_table(folder.steps_file, ("step",))
    updates = read_table(folder.updates_file, ("step", "update", "rank"), _UPDATE_FIELDS, ("liveness_method",))
    for record in (config, environment, status, ledger):
        if isinstance(record, Record) and record.unknown_fields():
            name = type(record).__name__
            notes.append(f"{name}: fields that this version does not know: {', '.join(record.unknown_fields())}")
    if config.run_id != folder.path.name:
        notes.append(f"config.yaml names the run {config.run_id}, unlike its folder")
    return Run(
        folder,
        config,
        environment,
        status,
        ledger,
        [str(item) for item in cast(list[Any], overrides)] if isinstance(overrides, list) else [],
        steps,
        updates,
        notes + steps.notes + updates.notes,
    )


_T = TypeVar("_T")


def _environment(path: Path) -> Environment:
    return Environment.model_validate(json_lines.loads(path.read_bytes()))


def _read(path: Path, read: Callable[[], _T], notes: list[str]) -> _T | None:
    """What `read` returns; None and a note when the file is missing or damaged."""
    if not path.exists():
        notes.append(f"{path.name}: missing")
        return None
    try:
        return read()
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name}: cannot be read ({_one_line(error)})")
        return None


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
    return " ".join(str(error).split())[:200]


def steps_in_common(baseline: Run, treatment: Run) -> tuple[IntArray, IntArray, IntArray]:
    """The steps that both runs have, and the row numbers of each in its own table (as index arrays)."""
    steps, left, right = np.intersect1d(baseline.steps.step, treatment.steps.step, return_indices=True)
    return steps.astype(np.int64), left.astype(np.int64), right.astype(np.int64)

"""From composed Hydra configurations to runs that are ready to start: planned, validated, nothing touched yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from pipeline.launch import checks
from pipeline.launch.errors import BadInput
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, decide
from pipeline.study.planning import ARM_AND_SEED, in_running_order, planned_run


@dataclass(frozen=True)
class SweepPlan:
    """The runs in their order, and the cluster that they share (conf/cluster/*.yaml)."""

    runs: Sequence[LaunchableRun]
    cluster: Mapping[str, Any]


def study_folder(config: DictConfig) -> StudyFolder:
    """The folder of the study that a configuration (conf/sweep.yaml) names. Raises BadInput."""
    if config.hydra.sweeper.get("max_batch_size") is not None:
        raise BadInput("hydra.sweeper.max_batch_size has no use here: all runs are planned together, then run in turn")
    return StudyFolder(checks.check_study(config.study_name, config.results_dir, config.rerun))


def plan(
    composed: Sequence[DictConfig], job_overrides: Sequence[Sequence[str]], study: StudyFolder, rerun: bool
) -> SweepPlan:
    """Plan and validate every run. Raises BadInput at the first thing that cannot work."""
    swept = swept_values(job_overrides)
    runs = [
        planned_run(_checked(_resolved(config)), values, overrides)
        for config, values, overrides in zip(composed, swept, job_overrides, strict=True)
    ]
    checks.check_runs(runs)
    launchable = decide(in_running_order(runs), study, rerun)
    cluster = runs[0].config.cluster
    if to_start := [run.planned for run in launchable if not run.kept]:
        checks.check_cluster(cluster)
        checks.check_api_key(to_start)
    return SweepPlan(launchable, cluster)


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Everything but Hydra's own settings, interpolations replaced by their values."""
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        resolved = OmegaConf.to_container(task, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise BadInput(f"{error.full_key} has no default: give it a value ({error.full_key}=...)") from error
    except OmegaConfBaseException as error:
        raise BadInput(str(error).splitlines()[0]) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _checked(composed: dict[str, Any]) -> dict[str, Any]:
    checks.check_seed(composed["seed"])
    checks.check_recipe(composed["recipe"])
    checks.check_tracking(composed["tracking"])
    return {**composed, "study_name": str(composed["study_name"])}


def swept_values(job_overrides: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """For each job the keys, other than arm and seed, that take more than one value in the sweep, with the job's value.

    `[["arm=pao", "recipe.lr=1e-3"], ["arm=pao", "recipe.lr=1e-4"]]` -> `[{"recipe.lr": 0.001}, {"recipe.lr": 0.0001}]`
    """
    parser = OverridesParser.create()
    jobs = [
        {
            override.key_or_group: override.value()
            for override in parser.parse_overrides(list(job))
            if not override.is_delete()
        }
        for job in job_overrides
    ]
    varying = [
        key
        for key in dict.fromkeys(key for job in jobs for key in job)
        if key not in ARM_AND_SEED and len({repr(job.get(key)) for job in jobs}) > 1
    ]
    return [{key: _plain(job[key]) for key in varying if key in job} for job in jobs]


def _plain(value: Any) -> Any:
    """Hydra's quoted strings as strings; the other values are plain already."""
    return value if value is None or isinstance(value, bool | int | float | list | dict) else _text(value)


def _text(value: Any) -> str:
    return str(getattr(value, "text", value))

"""Hydra's launcher plugin: every job of a multirun becomes a Ray job. The work is done in `pipeline.launch`."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class RayJobsLauncherConfig:
    """hydra/launcher: ray_jobs. (Hydra demands that the target lies in this namespace.)"""

    _target_: str = "hydra_plugins.ray_jobs_launcher.RayJobsLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="ray_jobs", node=RayJobsLauncherConfig, provider="ray_jobs_launcher"
)


class RayJobsLauncher(Launcher):
    """Plans and validates all jobs, then runs them; a failed run is a record, never an exception."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called before Hydra writes anything. Raises BadInput for a study that has no place to go."""
        from pipeline.launch import sweep_plan
        from pipeline.launch.handover import HANDOVER

        self._context = hydra_context
        self._config = config
        self._study = sweep_plan.study_folder(config)
        HANDOVER.study = self._study

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises BadInput before anything starts, ClusterError when there is no cluster to run on."""
        from hydra.core.utils import JobStatus

        from pipeline.launch import sweep_plan
        from pipeline.launch.handover import HANDOVER
        from pipeline.launch.runner import Sweep

        composed = [self._context.config_loader.load_sweep_config(self._config, list(job)) for job in job_overrides]
        plan = sweep_plan.plan(composed, job_overrides, self._study, rerun=self._config.rerun)
        HANDOVER.outcome = Sweep(self._study, plan.runs, plan.cluster).run()
        returns = [JobReturn(overrides=list(job), cfg=cfg) for job, cfg in zip(job_overrides, composed, strict=True)]
        for returned in returns:
            # Hydra raises for any other status; how the runs ended is in their folders and in the outcome.
            returned.status = JobStatus.COMPLETED
        return returns

"""Does the cluster have, and has it free, what a run needs? verl itself raises instead of waiting."""

from collections.abc import Sequence

from pipeline.launch.errors import BadInput
from pipeline.launch.kept_runs import LaunchableRun
from pipeline.launch.ray_dashboard import RayDashboard

# verl's v1 trainer names this actor, so a cluster can hold one trainer at a time.
_ONE_PER_CLUSTER = "TransferQueueController"


class Capacity:
    """Resources of a cluster. Every method raises requests.RequestException when the dashboard does not answer."""

    def __init__(self, dashboard: RayDashboard, worker_resource: str, shared: bool) -> None:
        """worker_resource: what one worker takes (GPU, verl_slot). shared: others may use the cluster too."""
        self._dashboard = dashboard
        self._resource = worker_resource
        self._shared = shared
        self._former_job: str | None = None

    def check(self, runs: Sequence[LaunchableRun]) -> None:
        """Raises BadInput for a run that the cluster could not take even when it is idle."""
        totals = [node["resources_total"].get(self._resource, 0.0) for node in self._dashboard.alive_nodes()]
        if self._resource == "GPU" and not any(totals):
            raise BadInput(self._no_gpu(runs[0].planned.config.cluster["name"]))
        for run in runs:
            recipe = run.planned.config.recipe
            nodes, workers = recipe["n_nodes"], recipe["n_workers"]
            if sum(total >= workers for total in totals) < nodes:
                found = " + ".join(f"{total:g}" for total in sorted(totals, reverse=True))
                raise BadInput(
                    f"recipe.n_workers={workers} on recipe.n_nodes={nodes}: the cluster at {self._dashboard.address} "
                    f"has too little {self._resource} (its nodes offer {found or 'none'}). "
                    "Give a smaller recipe.n_workers, or another cluster"
                )

    def _no_gpu(self, cluster: str) -> str:
        where = f"the cluster at {self._dashboard.address}" if self._shared else "this machine"
        return (
            f"cluster={cluster}: {where} has no GPU that Ray can use. Run on a host with GPUs, or without one give "
            "cluster=embedded and an embedded recipe (recipe=tiny_cpu)"
        )

    def remember(self, driver_job_id: str | None) -> None:
        """The job whose actors must be gone before the next run starts."""
        self._former_job = driver_job_id

    def blocked_by(self, run: LaunchableRun) -> str:
        """What keeps `run` from starting now, in words; empty when nothing does."""
        living = self._dashboard.living_actors()
        ending = sum(actor["job_id"] == self._former_job for actor in living)
        if ending:
            return f"{ending} actors of the run before are still ending"
        if any(actor["name"] == _ONE_PER_CLUSTER for actor in living):
            return "another verl trainer is running on this cluster, which can hold one at a time"
        return self._taken_by_others(run) if self._shared else ""

    def _taken_by_others(self, run: LaunchableRun) -> str:
        use = self._dashboard.in_use(self._resource)
        recipe = run.planned.config.recipe
        needed = recipe["n_nodes"] * recipe["n_workers"]
        if use is None or use[1] - use[0] >= needed:
            return ""
        return f"{use[0]:g} of {use[1]:g} {self._resource} are in use, this run needs {needed}"

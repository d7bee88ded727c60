"""Does the cluster have, and has it free, what a run needs? verl itself raises instead of waiting."""

from collections.abc import Sequence
from typing import Any

from pipeline.launch.bad_input import BadInput
from pipeline.launch.cluster import actors_not_dead, alive_nodes
from pipeline.launch.kept_runs import LaunchableRun


class Capacity:
    """Resources of the cluster behind a dashboard."""

    def __init__(self, address: str, worker_resource: str) -> None:
        self._address = address
        self._resource = worker_resource
        self._former_job: str | None = None

    def check(self, runs: Sequence[LaunchableRun]) -> None:
        """Raises BadInput for a run that the cluster could not take even when it is idle."""
        offered = sorted((_offered(node, self._resource) for node in alive_nodes(self._address)), reverse=True)
        for run in runs:
            recipe = run.planned.config.recipe
            nodes, workers = recipe["n_nodes"], recipe["n_workers"]
            if sum(count >= workers for count in offered) < nodes:
                found = " + ".join(f"{count:g}" for count in offered) or "none"
                raise BadInput(
                    f"recipe.n_workers={workers}, recipe.n_nodes={nodes}: the cluster at {self._address} has not "
                    f"enough {self._resource} (its nodes offer {found}). Give a smaller recipe.n_workers or another cluster"
                )

    def remember(self, driver_job_id: str | None) -> None:
        """The job whose actors must be gone before the next run starts."""
        self._former_job = driver_job_id

    def blocked_by(self, run: LaunchableRun) -> str:
        """What keeps `run` from starting now, in words; empty when nothing does."""
        alive = [actor for actor in actors_not_dead(self._address) if actor["job_id"] == self._former_job]
        return f"{len(alive)} actors of the run before are still ending" if alive else ""


def _offered(node: dict[str, Any], resource: str) -> float:
    return float(node["resources_total"].get(resource, 0.0))

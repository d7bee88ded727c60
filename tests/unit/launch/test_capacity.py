"""What a cluster has too little of is told, with what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.launch.capacity import Capacity
from pipeline.launch.errors import BadInput
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, decide
from pipeline.launch.ray_dashboard import RayDashboard
from pipeline.study.planning import PlannedRun


@dataclass(frozen=True)
class Nodes(RayDashboard):
    """The dashboard of a cluster whose nodes have these resources."""

    resources: tuple[dict[str, float], ...] = ()

    def alive_nodes(self) -> list[dict[str, Any]]:
        return [{"resources_total": resources} for resources in self.resources]


def capacity(*resources: dict[str, float], shared: bool = False) -> Capacity:
    return Capacity(Nodes("http://host:8265", "", resources), "GPU", shared)


@pytest.fixture
def runs(planned: Callable[..., PlannedRun], study: StudyFolder) -> list[LaunchableRun]:
    """One run of one worker."""
    run = planned()
    run.config.cluster.update(name="one_gpu", worker_resource="GPU")
    return decide([run], study, rerun=False)


@pytest.mark.parametrize(("shared", "where"), [(False, "this machine"), (True, "the cluster at http://host:8265")])
def test_a_host_without_a_gpu_is_told_as_such(runs: list[LaunchableRun], shared: bool, where: str) -> None:
    with pytest.raises(BadInput) as raised:
        capacity({"CPU": 2.0}, shared=shared).check(runs)
    assert str(raised.value).startswith(f"cluster=one_gpu: {where} has no GPU")
    assert "cluster=embedded" in str(raised.value)
    assert "recipe.n_workers" not in str(raised.value)


def test_too_few_gpus_ask_for_fewer_workers(runs: list[LaunchableRun]) -> None:
    capacity({"GPU": 1.0}).check(runs)
    runs[0].planned.config.recipe["n_workers"] = 4
    with pytest.raises(BadInput, match=r"its nodes offer 2 \+ 1\)\. Give a smaller recipe\.n_workers"):
        capacity({"GPU": 1.0}, {"GPU": 2.0}).check(runs)

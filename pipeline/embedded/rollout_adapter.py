"""How verl reaches the CPU rollout server: the replica that launches it, the adapter that feeds it weights."""

import os
from collections.abc import Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from pipeline.embedded.rollout_server import RolloutServer
from pipeline.study import faults


def _server_name(replica_rank: int, suffix: str = "") -> str:
    return f"hf_cpu_server_{replica_rank}{suffix}"


class HostReplica(RolloutReplica):
    """One rollout server per replica, as an actor beside the trainer's workers."""

    async def launch_servers(self) -> None:
        server = (
            ray.remote(RolloutServer)
            .options(
                name=_server_name(self.replica_rank, self.name_suffix),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config["path"])
        )
        address, _ = await server.launch.remote()
        replica: Any = self
        replica.servers, replica._server_handle = [server], server
        self._server_address = f"{address}:{_server_name(self.replica_rank)}"

    def rollout_worker_use_gpu(self) -> bool:
        return False


class ServerAdapter(BaseRollout):
    """Lives in each trainer rank; the first rank of a replica ships the exported weights to its server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        replica_size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // replica_size if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % replica_size
        self.is_leader_rank = self.rollout_rank == 0
        self._updates = 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Every rank drains the generator (exporting may be collective); the leader sends."""
        if wire_format != "named_tensors":
            raise ValueError(f"the CPU rollout takes whole tensors, not {wire_format!r}")
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        self._updates += 1
        if not self.is_leader_rank:
            return
        server = ray.get_actor(_server_name(self.replica_rank))
        if self._updates == 1 or faults.active() != "stale_rollout":
            await server.load_weights.remote(named)
        await server.set_version.remote(global_steps)

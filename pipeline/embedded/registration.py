"""Registers the CPU stand-ins with verl. Light: what is heavy is imported when verl first needs it."""

from types import ModuleType

from wrapt import register_post_import_hook


def install() -> None:
    """Register platform, process group backend, rollout and resource check; each as soon as verl's module exists."""
    from pipeline.embedded import platform  # noqa: F401  registers the platform

    register_post_import_hook(_gloo_for_the_only_device, "verl.utils.distributed")
    register_post_import_hook(_register_rollout, "verl.workers.rollout.replica")
    register_post_import_hook(_count_slots, "verl.single_controller.ray.base")


def _gloo_for_the_only_device(distributed: ModuleType) -> None:
    # verl builds "cpu:gloo,<device>:<backend>"; with device "cpu" that names cpu twice and torch refuses it.
    distributed.initialize_global_process_group_ray.__defaults__ = (None, "cpu:gloo")


def _register_rollout(replica: ModuleType) -> None:
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[("hf_cpu", "async")] = "pipeline.embedded.rollout_adapter.ServerAdapter"

    def load() -> type:
        from pipeline.embedded.rollout_adapter import HostReplica

        return HostReplica

    replica.RolloutReplicaRegistry.register("hf_cpu", load)


def _count_slots(ray_base: ModuleType) -> None:
    # verl's own check counts only "GPU" and "NPU".
    from ray._private.state import available_resources_per_node

    from pipeline.embedded.platform import SLOT_RESOURCE

    def check(manager: object) -> None:
        available = sum(node.get(SLOT_RESOURCE, 0) for node in available_resources_per_node().values())
        wanted = manager.get_n_gpus()  # type: ignore[attr-defined]
        if available < wanted:
            raise ValueError(f"the Ray cluster has {available:g} free {SLOT_RESOURCE}, the recipe needs {wanted}")

    ray_base.ResourcePoolManager._check_resource_available = check

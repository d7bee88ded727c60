"""The verl plugin: verl imports it in every process (VERL_USE_EXTERNAL_MODULES=pipeline.train.plugin).

It registers, and edits nothing: the observed trainer and engine where the process belongs to a run (its run folder is
named by PIPELINE_RUN_FOLDER), and on the cpu platform the stand-ins of `pipeline.embedded`. Heavy modules are
touched only when verl itself imports them.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from pipeline.study import faults
from pipeline.study.run_folder import RunFolder

_ON_CPU = os.environ.get("VERL_PLATFORM", "").lower() == "cpu"

if _ON_CPU:
    from pipeline.embedded import registration

    registration.install()


def make_assets(folder: Path, size: str | None = None) -> None:
    """Make the model and its data under `folder`, unless they are there. size: see pipeline.embedded.assets."""
    from pipeline.embedded.assets import make_assets as make

    make(folder, size)


def megatron_on_host() -> AbstractContextManager[None]:
    """Within it megatron-core alone (no verl) runs on host memory, with the reference FusedAdam."""
    from pipeline.embedded import megatron_on_cpu

    megatron_on_cpu.install()
    return megatron_on_cpu.cuda_means_cpu()


def _register_trainer(_: ModuleType) -> None:
    folder = RunFolder.from_environment()
    if folder is None:
        return
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from pipeline.train.observed_trainer import ObservedTrainer

    # Not a new mode name: verl's own code tests `trainer_mode == "sync"`.
    TRAINER_REGISTRY["sync"] = ObservedTrainer


def _engine_class() -> type[Any]:
    if _ON_CPU:
        from pipeline.embedded.engine import HostMegatronEngine

        return HostMegatronEngine
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return MegatronEngineWithLMHead


def _register_engine(_: ModuleType) -> None:
    try:
        from verl.workers.engine.base import EngineRegistry

        engine_class = _engine_class()
        if faults.active() == "dead_optimizer":
            from pipeline.train import dead_optimizer

            dead_optimizer.install()
        if RunFolder.from_environment() is not None:
            from pipeline.train.observed_engine import observed

            engine_class = observed(engine_class)
        if _ON_CPU:
            EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(engine_class)
        else:
            # verl looks (device, vendor) up first and leaves this key free.
            EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="nvidia")(
                engine_class
            )
    except ImportError as error:
        # verl.workers.engine swallows ImportError and would go on without a Megatron engine.
        raise RuntimeError(f"the Megatron engine could not be set up: {error!r}") from error


register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1.trainer_sync")
register_post_import_hook(_register_engine, "verl.workers.engine.megatron")

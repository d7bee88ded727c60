"""verl's MegatronEngine on host memory. Imported right after verl.workers.engine.megatron."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mbridge.core.llm_bridge as llm_bridge
import torch
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from pipeline.embedded import megatron_on_cpu
from pipeline.embedded.local_layers import block_spec

megatron_on_cpu.install()


def _local_block_spec(config: Any, use_transformer_engine: bool = True, vp_stage: int | None = None) -> Any:
    return block_spec(config, vp_stage=vp_stage)


# mbridge asks for TransformerEngine's layers, which need a GPU.
llm_bridge.get_gpt_decoder_block_spec = _local_block_spec


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with megatron_on_cpu.cuda_means_cpu():
            return method(*args, **kwargs)

    return run


class HostMegatronEngine(MegatronEngineWithLMHead):
    """The engine's own methods, each run where "cuda" means host memory (the redirection holds per thread)."""

    @_on_host
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from megatron.core import tensor_parallel

        engine: Any = self
        tensor_parallel.model_parallel_cuda_manual_seed(engine.engine_config.seed)  # verl skips this without a GPU

    initialize = _on_host(MegatronEngineWithLMHead.initialize)
    forward_backward_batch = _on_host(MegatronEngineWithLMHead.forward_backward_batch)
    optimizer_zero_grad = _on_host(MegatronEngineWithLMHead.optimizer_zero_grad)
    optimizer_step = _on_host(MegatronEngineWithLMHead.optimizer_step)
    lr_scheduler_step = _on_host(MegatronEngineWithLMHead.lr_scheduler_step)
    save_checkpoint = _on_host(MegatronEngineWithLMHead.save_checkpoint)
    load_checkpoint = _on_host(MegatronEngineWithLMHead.load_checkpoint)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """There is one memory: nothing to offload."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        with megatron_on_cpu.cuda_means_cpu():
            tensors, adapter = super().get_per_tensor_param(*args, **kwargs)
            copies = [(name, tensor.detach().clone()) for name, tensor in tensors]
        return iter(copies), adapter

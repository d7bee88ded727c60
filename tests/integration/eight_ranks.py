"""Run as a script: the shards of the 8-GPU recipe's layout (TP 4, PP 2, VPP 2), one rank after the other, on the host.

Megatron's own GPTModel, DDP and DistributedOptimizer make the shards and take one optimizer step; PyTorch's "fake"
process group answers the collectives, so that a single process can be any rank. The numbers mean nothing; which rank
holds how many elements of what dtype does. Prints one RankLedger a line. Argument: the arm's optimizer settings, JSON.
"""

import gc
import json
import sys
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.callbacks.ledger import rank_ledger
from pipeline.study import json_lines
from pipeline.study.records import RankMemory
from pipeline.train.bare_megatron import optimizer_config, transformer_config
from pipeline.train.plugin import megatron_on_host
from pipeline.train.probe_shapes import Shape

RANKS, TP, PP, VPP = 8, 4, 2, 2
# Qwen2-7B with every width divided by 16: 28 layers, 28 heads, 4 groups of keys and values.
SHAPE = Shape(layers=28, hidden=224, heads=28, kv_heads=4, ffn=1184, vocabulary=9504)


def model_chunk(stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = transformer_config(SHAPE, on_cpu=True)
    config.tensor_model_parallel_size = TP
    config.pipeline_model_parallel_size = PP
    config.virtual_pipeline_model_parallel_size = VPP
    return config, GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=SHAPE.vocabulary,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )


def shards_of(rank: int, optim: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(TP, PP, VPP, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=optim.get("main_grads_dtype") != "bf16"
    )
    chunks: list[Any] = [
        DistributedDataParallel(config, ddp, Float16Module(config, model), disable_bucketing=stage > 0)
        for stage in range(VPP)
        for config, model in [model_chunk(stage)]
    ]
    optimizer = get_megatron_optimizer(optimizer_config(optim), chunks, use_gloo_process_groups=False)
    for chunk in chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.fill_(1e-3)
    optimizer.step()  # which makes moments and remainders
    memory = RankMemory(source="rss", after_load_gib=0.0, after_first_update_gib=0.0)
    found = rank_ledger(rank, chunks, optimizer, memory).model_dump()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    with megatron_on_host():
        for number in range(RANKS):
            sys.stdout.write(json_lines.dumps(shards_of(number, json.loads(sys.argv[1]))).decode() + "\n")
            gc.collect()

"""A Qwen2 of real size with random weights: its memory and its time are the real ones, its answers mean nothing.

For hosts that cannot download a checkpoint. Written shard by shard, so that it needs far less memory than the model.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipeline.embedded import task
from pipeline.embedded.tokenizer import byte_tokenizer

_SHARD_BYTES = 2**30
_WRITERS = 8  # shards at a time, each about 1 GiB of memory
_PROMPTS = 4096
# Of Qwen/Qwen2-7B-Instruct's config.json, what does not change with the width.
_QWEN2_7B: dict[str, Any] = {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class RandomModel:
    """A Qwen2's width, and the length of its prompts in letters; the chat template adds 19 tokens."""

    hidden: int
    ffn: int
    vocabulary: int
    prompt: int


SHAPES = {
    # The 7B recipe's: prompts of up to 1024 tokens.
    "qwen2_7b": RandomModel(hidden=3584, ffn=18944, vocabulary=152064, prompt=960),
    # The same layers and groups of heads for two cores.
    "qwen2_7b_narrow": RandomModel(hidden=224, ffn=256, vocabulary=512, prompt=90),
}


def make(folder: Path, size: str) -> None:
    """Model, tokenizer and parquet files under `folder`, which is empty. size: of SHAPES."""
    config: Any = shape_config(size)
    tokenizer = byte_tokenizer(config.vocab_size)
    tokenizer.save_pretrained(folder / "model")
    config.bos_token_id = config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    write_model(folder / "model", config)
    task.write_random_prompts(folder, _PROMPTS, SHAPES[size].prompt)


def shape_config(size: str) -> Qwen2Config:
    """transformers' configuration of SHAPES[size], in bf16."""
    shape = SHAPES[size]
    return Qwen2Config(
        **_QWEN2_7B,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocabulary,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )


def write_model(folder: Path, config: Qwen2Config) -> None:
    """A Hugging Face checkpoint in bf16: matrices normal with the configuration's deviation, norms 1, biases 0.

    The same bytes each time, however many writers there are.
    """
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = dict(Qwen2ForCausalLM(config).state_dict())
    shards = list(_shards(tensors))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        weights = {
            name: _initial(name, tensor.shape, config.initializer_range, generator)
            for name, tensor in shards[number].items()
        }
        save_file(weights, folder / names[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(len(shards))))
    index = {
        "metadata": {"total_size": sum(2 * tensor.numel() for tensor in tensors.values())},
        "weight_map": {name: names[number] for number, shard in enumerate(shards) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if shard and 2 * sum(held.numel() for held in (*shard.values(), tensor)) > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _initial(name: str, shape: torch.Size, deviation: float, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, deviation, generator=generator)

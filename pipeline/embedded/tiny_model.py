"""A Qwen2 small enough for two cores, and its task: same bytes on the same versions, nothing downloaded.

GRPO from random weights would need thousands of steps. A short supervised phase teaches the task together with bad
habits: most of the answers that it sees last are noise. What is left for GRPO is to prefer the right answers, which it
does within a few steps, so that reward moves and parity means something.
"""

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pipeline.embedded import task
from pipeline.embedded.tokenizer import byte_tokenizer

# Steps, learning rate, share of the shown answers that are noise: learn the task, settle, take up bad habits.
_PHASES = ((200, 2e-3, 0.0), (60, 5e-4, 0.0), (40, 5e-4, 0.8))
_SUPERVISED_BATCH = 32
_NOISE = "0123456789abcdefghij"
_VOCABULARY = 64


@dataclass(frozen=True)
class Size:
    """A Qwen2's shape; with 2 key-value heads."""

    layers: int
    hidden: int
    ffn: int
    heads: int


SMALLEST = "heads_of_32"
SIZES = {
    # About 0.3 million parameters: for two cores.
    SMALLEST: Size(layers=2, hidden=128, ffn=256, heads=4),
    # The same for a GPU: SGLang's rotary embedding kernel takes heads of 64 elements and more.
    "heads_of_64": Size(layers=2, hidden=128, ffn=256, heads=2),
}


def make(folder: Path, size: str) -> None:
    """Model, tokenizer and parquet files under `folder`, which is empty. size: of SIZES. About 20 s on one core."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    _supervised(tokenizer, SIZES[size]).save_pretrained(folder / "model")
    task.write_parquet(folder)


def model_config(tokenizer: Any, size: Size) -> Qwen2Config:
    """A small Qwen2, input and output embedding apart."""
    return Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def _supervised(tokenizer: PreTrainedTokenizerFast, size: Size) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    chance = random.Random(0)
    model: Any = Qwen2ForCausalLM(model_config(tokenizer, size)).float()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order wherever this runs
    try:
        for steps, lr, noise in _PHASES:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
            for _ in range(steps):
                tokens, labels = _batch(tokenizer, chance, noise)
                loss = model(input_ids=tokens, labels=labels).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return model.to(torch.bfloat16)


def _batch(
    tokenizer: PreTrainedTokenizerFast, chance: random.Random, noise: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions with an answer, tokens [batch, length], and labels that count the answer only."""
    rows, prompt_length = [], 0
    for question, answer in chance.sample(task.problems(), _SUPERVISED_BATCH):
        shown = chance.choice(_NOISE) if chance.random() < noise else answer
        prompt = _prompt(tokenizer, question)
        prompt_length = len(prompt)
        rows.append([*prompt, tokenizer.convert_tokens_to_ids(shown), tokenizer.eos_token_id])
    tokens = torch.tensor(rows)
    labels = tokens.clone()
    labels[:, :prompt_length] = -100
    return tokens, labels


@functools.cache
def _prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    message = [{"role": "user", "content": question}]
    tokens: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return list(tokens)

"""Checkpoints of random weights: whole, readable, the same each time, and of the real model's size."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from pipeline.embedded import random_model, task
from pipeline.embedded.assets import make_assets
from pipeline.train.probe_shapes import SHAPES

NARROW = "qwen2_7b_narrow"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets") / NARROW
    make_assets(folder, NARROW)
    return folder


def read(folder: Path) -> Any:
    """The checkpoint as a model, with nothing missing and nothing left over."""
    found: Any = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, loading = found
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_the_real_shape_has_qwen2_7bs_parameters() -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(random_model.shape_config("qwen2_7b"))
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES["qwen2_7b"].parameters == 7_615_616_512


def test_transformers_reads_every_weight(assets: Path) -> None:
    for name, weight in read(assets / "model").named_parameters():
        assert weight.dtype == torch.bfloat16, name
        if name.endswith("norm.weight"):
            assert torch.all(weight == 1), name
        elif name.endswith("bias"):
            assert not weight.any(), name
        else:
            assert float(weight.detach().float().std()) == pytest.approx(0.02, rel=0.1), name


def test_the_same_bytes_each_time_in_as_many_shards_as_it_takes(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted((assets / "model").glob("*.safetensors"))
    random_model.write_model(tmp_path / "again", random_model.shape_config(NARROW))
    assert [file.read_bytes() for file in sorted((tmp_path / "again").glob("*.safetensors"))] == [
        file.read_bytes() for file in files
    ]
    monkeypatch.setattr(random_model, "_SHARD_BYTES", 2**20)
    random_model.write_model(tmp_path / "many", random_model.shape_config(NARROW))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    read(tmp_path / "many")


def test_what_a_stopped_maker_left_is_removed_and_what_a_running_one_makes_is_not(tmp_path: Path) -> None:
    stopped, running, other = (tmp_path / f"{NARROW}.{suffix}" for suffix in (2**22 + 1, os.getppid(), "kept"))
    for folder in (stopped, running, other):
        (folder / "model").mkdir(parents=True)
    make_assets(tmp_path / NARROW, NARROW)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([NARROW, running.name, other.name])


def test_every_id_has_a_text_and_prompts_have_the_recipes_length(assets: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    assert len(tokenizer) == random_model.shape_config(NARROW).vocab_size
    assert tokenizer.decode([511]) == "<511>"
    prompts = pd.read_parquet(assets / "train.parquet")["prompt"]
    lengths = {
        len(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
        for prompt in prompts[:20]
    }
    around = lengths.pop() - random_model.SHAPES[NARROW].prompt
    assert not lengths
    for size, limit in ((NARROW, 128), ("qwen2_7b", 1024)):  # max_prompt_length of their recipes
        assert limit - 60 < random_model.SHAPES[size].prompt + around <= limit
    assert len({prompt[0]["content"] for prompt in prompts}) == len(prompts)


def test_the_made_up_reward_varies_with_the_response_alone() -> None:
    scores = [task.made_up_score("any", f"response {number}", "") for number in range(200)]
    assert all(0 <= score < 1 for score in scores)
    assert len(set(scores)) == 200
    assert task.made_up_score("other", "response 7", "x", extra_info={}) == scores[7]

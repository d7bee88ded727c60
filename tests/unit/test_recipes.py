"""The recipes, as verl's own resolved configuration sees them."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipeline.study.planning import flattened
from pipeline.train.by_hand import compose_sweep
from pipeline.train.run import compose_verl_config
from pipeline.train.verl_overrides import verl_overrides

pytestmark = pytest.mark.slow  # verl's configuration takes seconds to compose

HOME = str(Path.home())
# The overrides of verl's examples/grpo_trainer/run_qwen2-7b_sgl_megatron.sh (v0.6.1 to v0.7.1), in the script's order.
SCRIPT = f"""
algorithm.adv_estimator=grpo
data.train_files=[{HOME}/data/gsm8k/train.parquet,{HOME}/data/math/train.parquet]
data.val_files=[{HOME}/data/gsm8k/test.parquet,{HOME}/data/math/test.parquet]
data.train_batch_size=1024
data.max_prompt_length=1024
data.max_response_length=1024
data.filter_overlong_prompts=true
data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
actor_rollout_ref.actor.use_kl_loss=true
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
algorithm.use_kl_in_reward=false
trainer.critic_warmup=0
trainer.logger=[console,wandb]
trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=qwen2_7b_function_rm_megatron
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=-1
trainer.test_freq=5
trainer.total_epochs=15
""".split()

# Everything in which the recipe's resolved configuration differs from the script's: (the script's, the recipe's value).
BEYOND_THE_SCRIPT = {
    # Seeds, so that a pair shares them.
    "actor_rollout_ref.actor.data_loader_seed": (42, 1),
    "actor_rollout_ref.actor.megatron.seed": (42, 1),
    "actor_rollout_ref.ref.megatron.seed": (42, 1),
    "actor_rollout_ref.rollout.seed": (42, 1),
    "critic.data_loader_seed": (42, 1),  # follows the actor's; GRPO has no critic
    "data.seed": (None, 1),
    # mbridge in place of megatron-bridge, whose dependencies conflict.
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": (False, True),
    "actor_rollout_ref.ref.megatron.vanilla_mbridge": (False, True),
    # A run is measured from its first step, never resumed, and mirrored to W&B by the pipeline itself.
    "trainer.val_before_train": (True, False),
    "trainer.resume_mode": ("auto", "disable"),
    "trainer.logger": (["console", "wandb"], ["console"]),
    # Names.
    "trainer.project_name": ("verl_grpo_example_gsm8k", "verl-bf16-pao"),
    "trainer.experiment_name": ("qwen2_7b_function_rm_megatron", "qwen2_7b_sgl_megatron"),
    "trainer.default_local_dir": (
        "checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm_megatron",
        "checkpoints/verl-bf16-pao/qwen2_7b_sgl_megatron",
    ),
    "actor_rollout_ref.rollout.trace.project_name": ("verl_grpo_example_gsm8k", "verl-bf16-pao"),
    "actor_rollout_ref.rollout.trace.experiment_name": ("qwen2_7b_function_rm_megatron", "qwen2_7b_sgl_megatron"),
}

# Keys of verl that repeat another key's value.
ECHOES = re.compile(
    r"critic\..*|distillation\..*|trainer\.default_local_dir|trainer\.experiment_name"
    r"|actor_rollout_ref\.rollout\.(prometheus\.served_model_name|trace\..*|n_gpus_per_node|prompt_length|response_length)"
    r"|actor_rollout_ref\.(actor|ref)\.rollout_n"
)
SIZES = {
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.agent.num_workers",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "reward.num_workers",
    "trainer.n_gpus_per_node",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.v1.sampler.custom_sampler.name",
    "trainer.v1.sampler.custom_sampler.path",
}


@cache
def resolved(*overrides: str) -> dict[str, Any]:
    """verl's whole configuration with overrides: {"a.b.c": leaf}."""
    return dict(flattened(OmegaConf.to_container(compose_verl_config(list(overrides)), resolve=True)))  # type: ignore[arg-type]


@cache
def of_recipe(name: str, cluster: str) -> dict[str, Any]:
    composed = compose_sweep([f"recipe={name}", f"cluster={cluster}"])
    return resolved(*verl_overrides(composed["recipe"], composed["arm"]))


def difference(left: dict[str, Any], right: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted({*left, *right})
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def own_changes(name: str, cluster: str) -> set[str]:
    """Keys that a small recipe changes against the 7B recipe, less those that only repeat others."""
    changed = difference(of_recipe("qwen2_7b_sgl_megatron", "node_8gpu"), of_recipe(name, cluster))
    return {key for key in changed if not ECHOES.fullmatch(key)}


@pytest.mark.parametrize("setting", SCRIPT)
def test_the_scripts_setting_is_the_recipes(setting: str) -> None:
    key, _, _ = setting.partition("=")
    if key not in BEYOND_THE_SCRIPT:
        assert of_recipe("qwen2_7b_sgl_megatron", "node_8gpu")[key] == resolved(*SCRIPT)[key]


def test_the_recipe_differs_from_the_script_in_what_is_listed_and_nothing_else() -> None:
    assert difference(resolved(*SCRIPT), of_recipe("qwen2_7b_sgl_megatron", "node_8gpu")) == BEYOND_THE_SCRIPT


def test_four_optimizer_steps_per_batch() -> None:
    for name, cluster in (
        ("qwen2_7b_sgl_megatron", "node_8gpu"),
        ("qwen2_7b_random", "node_8gpu"),
        ("tiny_cpu", "embedded"),
        ("qwen2_7b_narrow_cpu", "embedded"),
        ("qwen2_tiny_1gpu", "one_gpu"),
    ):
        recipe = of_recipe(name, cluster)
        assert recipe["data.train_batch_size"] == 4 * recipe["actor_rollout_ref.actor.ppo_mini_batch_size"], name


# What saves a tiny run processes that import for longer than they work.
CHEAPER = {"data.dataloader_num_workers", "transfer_queue.backend.SimpleStorage.num_data_storage_units"}


def test_tiny_cpu_changes_sizes_and_what_a_cpu_needs() -> None:
    transformer = {
        f"actor_rollout_ref.{role}.megatron.override_transformer_config.{name}"
        for role in ("actor", "ref")
        for name in (
            "attention_backend",
            "use_cpu_initialization",
            "masked_softmax_fusion",
            "persist_layer_norm",
            "apply_rope_fusion",
            "bias_activation_fusion",
        )
    }
    stand_ins = {"actor_rollout_ref.rollout.name", "trainer.device"}
    recomputation = repeated_recomputation()
    changed = own_changes("tiny_cpu", "embedded") - SIZES - recomputation
    assert changed == transformer | stand_ins | CHEAPER | {"actor_rollout_ref.rollout.n"}


# What a host without flash-attn needs (conf/recipe/part/no_flash_attn.yaml).
NO_FLASH_ATTENTION = {
    *(f"actor_rollout_ref.{role}.megatron.override_transformer_config.attention_backend" for role in ("actor", "ref")),
    *(
        f"actor_rollout_ref.rollout.engine_kwargs.sglang.{name}"
        for name in ("attention_backend", "sampling_backend", "disable_piecewise_cuda_graph")
    ),
    "actor_rollout_ref.rollout.engine_kwargs.sglang",  # the leaf {} that the settings above replace
    "actor_rollout_ref.rollout.enforce_eager",
}


def test_random_weights_change_what_cannot_be_downloaded_and_what_the_host_lacks() -> None:
    not_downloaded = {"data.train_files", "data.val_files", "actor_rollout_ref.model.path"}
    reward = {f"reward.custom_reward_function.{name}" for name in ("path", "name")}
    shorter = {"trainer.total_training_steps", "trainer.test_freq"}
    changed = own_changes("qwen2_7b_random", "node_8gpu") - repeated_recomputation()
    assert changed == not_downloaded | reward | shorter | NO_FLASH_ATTENTION


def test_the_narrow_model_has_the_7b_recipes_layout() -> None:
    narrow, full = of_recipe("qwen2_7b_narrow_cpu", "embedded"), of_recipe("qwen2_7b_sgl_megatron", "node_8gpu")
    layout = {key for key in full if key.endswith("_parallel_size") and ".megatron." in key and "actor_rollout" in key}
    same = {*layout, "trainer.n_gpus_per_node", "actor_rollout_ref.actor.optim.lr"}
    assert len(layout) > 6
    assert {key: narrow[key] for key in same} == {key: full[key] for key in same}


def test_one_gpu_changes_sizes_and_what_the_host_lacks() -> None:
    smaller_pool = {"actor_rollout_ref.rollout.gpu_memory_utilization"}
    changed = own_changes("qwen2_tiny_1gpu", "one_gpu") - SIZES - repeated_recomputation()
    assert changed == NO_FLASH_ATTENTION | smaller_pool | CHEAPER
    recipe = of_recipe("qwen2_tiny_1gpu", "one_gpu")
    assert recipe["actor_rollout_ref.rollout.name"] == "sglang"
    assert recipe["trainer.device"] == "cuda"


def repeated_recomputation() -> set[str]:
    """verl's reference model takes the actor's transformer settings as a whole unless it has some of its own.

    With its own, the (inactive) settings of recomputation are not repeated for it.
    """
    path = "actor_rollout_ref.ref.megatron.override_transformer_config.recompute_"
    inactive = {f"{path}{name}" for name in ("granularity", "method", "num_layers")}
    assert all(of_recipe("qwen2_7b_sgl_megatron", "node_8gpu")[key] is None for key in inactive)
    return inactive | {f"{path}modules"}

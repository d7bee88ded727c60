"""One run: compose verl's configuration, note the environment, start verl's trainer."""

import os
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder, write_atomically
from pipeline.train import plugin
from pipeline.train.environment import find_environment
from pipeline.train.verl_overrides import VERL_CONFIG_MODULE, VERL_CONFIG_NAME, verl_overrides


def compose_verl_config(overrides: list[str]) -> DictConfig:
    """verl's configuration with `overrides` applied. Raises hydra's errors for keys that verl does not have."""
    with initialize_config_module(VERL_CONFIG_MODULE, version_base=None):
        return compose(VERL_CONFIG_NAME, overrides=overrides)


def run(folder: RunFolder) -> None:
    """Train the run of `folder` on the Ray cluster that this job belongs to; returns when training has ended."""
    run_config = folder.read_config()
    environment = find_environment(os.environ.get("VERL_PLATFORM", "cuda"))
    write_atomically(folder.environment_file, json_lines.dumps(environment.model_dump(), indent=True))
    if run_config.recipe.get("make_assets"):
        plugin.make_assets(Path(run_config.recipe["assets_dir"]), run_config.recipe.get("assets_size"))
    config = compose_verl_config(verl_overrides(run_config.recipe, run_config.arm))
    folder.verl_config_file.write_text(OmegaConf.to_yaml(config, resolve=True))

    # verl takes seconds to import: what can fail cheaply has been done above.
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=TaskRunnerV1)

"""`python -m pipeline.train.by_hand`: verl's own trainer with the settings of one arm, started by hand.

No sweep, no run folder, nothing observed: bare verl, as its users know it. Further arguments are verl's overrides.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from pipeline.study.paths import PROJECT
from pipeline.train.verl_overrides import VERL_CONFIG_MODULE, VERL_CONFIG_NAME, verl_overrides


def compose_sweep(overrides: list[str]) -> dict[str, Any]:
    """The project's configuration (conf/sweep.yaml) with `overrides`, resolved. Raises hydra's errors."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        config = compose("sweep", overrides=overrides)
    composed = OmegaConf.to_container(config, resolve=True)
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


def verl_command(composed: dict[str, Any], extra: list[str], on_cluster: bool = False) -> list[str]:
    """`python -m verl.trainer.main_ppo ...` for the recipe and arm of `composed`; `extra` overrides come last.

    on_cluster: the command becomes a Ray job, whose runtime environment brings the variables (`worker_environment`).
    """
    return [
        sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo",
        f"--config-path=pkg://{VERL_CONFIG_MODULE}", f"--config-name={VERL_CONFIG_NAME}",
        "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout",
        *verl_overrides(composed["recipe"], composed["arm"]),
        *([] if on_cluster else _ray_overrides(composed)), *extra,
    ]  # fmt: skip


def _ray_overrides(composed: dict[str, Any]) -> list[str]:
    """The workers' environment; and, where verl starts Ray itself, what the sweep's own cluster would offer."""
    cluster, recipe = composed["cluster"], composed["recipe"]
    variables = ",".join(f"{name}:'{value}'" for name, value in worker_environment(cluster).items())
    overrides = [f"++ray_kwargs.ray_init.runtime_env.env_vars={{{variables}}}"]
    if "RAY_ADDRESS" in os.environ:
        return overrides
    if cluster["num_cpus"] is not None:
        overrides.append(f"ray_kwargs.ray_init.num_cpus={cluster['num_cpus']}")
    if cluster["worker_resource"] != "GPU":
        slots = f"{{{cluster['worker_resource']}:{recipe['n_workers']}}}"
        overrides += [f"++ray_kwargs.ray_init.resources={slots}", "++ray_kwargs.ray_init.include_dashboard=false"]
    return overrides


def worker_environment(cluster: dict[str, Any]) -> dict[str, str]:
    """The variables that every process of the run needs (without PIPELINE_RUN_FOLDER: nothing is observed)."""
    return {**cluster["env"], "VERL_USE_EXTERNAL_MODULES": "pipeline.train.plugin", "PYTHONPATH": str(PROJECT)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.train.by_hand", description=__doc__)
    parser.add_argument("--recipe", default="tiny_cpu", help="conf/recipe/ (default: tiny_cpu)")
    parser.add_argument("--cluster", default="embedded", help="conf/cluster/ (default: embedded)")
    parser.add_argument("--arm", default="baseline", help="conf/arm/ (default: baseline)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the command, do not run it")
    arguments, extra = parser.parse_known_args()
    composed = compose_sweep(
        [
            f"recipe={arguments.recipe}",
            f"cluster={arguments.cluster}",
            f"arm={arguments.arm}",
            f"seed={arguments.seed}",
        ]
    )
    command = verl_command(composed, extra)
    if arguments.only_print:
        print(shlex.join(command))
        return
    os.environ.update(worker_environment(composed["cluster"]))
    if composed["recipe"].get("make_assets"):
        from pipeline.train.plugin import make_assets

        make_assets(Path(composed["recipe"]["assets_dir"]), composed["recipe"].get("assets_size"))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

"""Everything that can be known to be wrong before a job starts. Each check raises BadInput, naming key and value."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import pydantic
import requests
from pydantic import ConfigDict, Field, PositiveInt

from pipeline.launch.cluster import ClusterSettings
from pipeline.launch.dashboard_port import check_port_free
from pipeline.launch.errors import BadInput, shown
from pipeline.launch.ray_dashboard import RayDashboard, users_token
from pipeline.study import faults, naming
from pipeline.study.paths import PROJECT
from pipeline.study.planning import PlannedRun, repeated_run_ids


class RecipeKnobs(pydantic.BaseModel):
    """The knobs on top of a recipe (conf/recipe/base.yaml) by type and range; a recipe may have more."""

    model_config = ConfigDict(extra="allow")

    steps: PositiveInt | None
    epochs: PositiveInt
    train_batch_size: PositiveInt
    mini_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    samples_per_prompt: PositiveInt
    max_prompt_length: PositiveInt
    max_response_length: PositiveInt
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    n_nodes: PositiveInt
    n_workers: PositiveInt
    tp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt | None
    rollout_tp: PositiveInt
    test_freq: int
    model_path: str
    train_files: str | list[str]
    val_files: str | list[str]
    verl: dict[str, Any]
    make_assets: bool = False
    """The project makes what lies in assets_dir itself on first use: it need not exist beforehand."""
    assets_dir: str | None = None

    def is_made(self, path: str) -> bool:
        return self.make_assets and self.assets_dir is not None and Path(path).is_relative_to(self.assets_dir)

    @property
    def workers(self) -> int:
        """Ranks in all."""
        return self.n_nodes * self.n_workers

    @property
    def data_parallel(self) -> int:
        return self.workers // (self.tp * self.pp)


def check_study(study_name: Any, results_dir: Any, rerun: Any) -> Path:
    """Return the study's folder, created and writable. Raises BadInput."""
    if not isinstance(rerun, bool):
        raise BadInput(f"rerun={shown(rerun)} must be true or false")
    if study_name is None:
        raise BadInput("study_name=null: a study needs a name, for example study_name=pao_lr_sweep")
    try:
        naming.check_study_name(str(study_name))
    except ValueError as error:
        raise BadInput(str(error)) from error
    folder = Path(str(results_dir)).expanduser().absolute() / str(study_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(_not_writable(results_dir, folder, error.strerror)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(_not_writable(results_dir, folder, "Permission denied"))
    return folder


def _not_writable(results_dir: Any, folder: Path, why: str | None) -> str:
    return f"results_dir={results_dir}: cannot write to {folder} ({why}). Choose another with results_dir=/some/folder"


def check_seed(seed: Any) -> int:
    """Raises BadInput unless `seed` is a whole number from 0 to 2^31 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise BadInput(f"seed={shown(seed)}: a seed is a whole number from 0 to 2147483647 (for example seed=1,2,3)")
    return seed


def check_recipe(recipe: dict[str, Any]) -> RecipeKnobs:
    """Types, ranges, batch sizes that divide, layout that fits, files that exist."""
    knobs = validated(RecipeKnobs, recipe, "recipe")
    _check_layout(knobs)
    _check_batches(knobs)
    _check_fault(recipe)
    _check_files(knobs)
    return knobs


Model = TypeVar("Model", bound=pydantic.BaseModel)


def validated(model: type[Model], values: Mapping[str, Any], group: str) -> Model:
    """`values` of the config group as a model. Raises BadInput for the first that has the wrong type or range."""
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join((group, *(part for part in first["loc"] if isinstance(part, str) and part in (*values,))))
        value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        raise BadInput(f"{key}{value}: {first['msg'][0].lower()}{first['msg'][1:]}") from error


def _check_layout(knobs: RecipeKnobs) -> None:
    if knobs.workers % (knobs.tp * knobs.pp):
        raise BadInput(
            f"recipe.n_workers={knobs.n_workers} x recipe.n_nodes={knobs.n_nodes} must be a multiple of "
            f"recipe.tp={knobs.tp} x recipe.pp={knobs.pp}"
        )
    if knobs.workers % knobs.rollout_tp:
        raise BadInput(
            f"recipe.rollout_tp={knobs.rollout_tp} must divide the number of workers, "
            f"recipe.n_workers={knobs.n_workers} x recipe.n_nodes={knobs.n_nodes}"
        )
    if knobs.vpp and knobs.vpp > 1 and knobs.pp == 1:
        raise BadInput(f"recipe.vpp={knobs.vpp} needs recipe.pp above 1 (it is 1): give recipe.vpp=null")


def _check_batches(knobs: RecipeKnobs) -> None:
    if knobs.train_batch_size % knobs.mini_batch_size:
        raise BadInput(
            f"recipe.train_batch_size={knobs.train_batch_size} is not divisible by "
            f"recipe.mini_batch_size={knobs.mini_batch_size}: every optimizer step needs a whole mini-batch"
        )
    samples = knobs.mini_batch_size * knobs.samples_per_prompt
    if samples % knobs.data_parallel:
        raise BadInput(
            f"recipe.mini_batch_size={knobs.mini_batch_size} x recipe.samples_per_prompt={knobs.samples_per_prompt} "
            f"= {samples} samples cannot be shared evenly by {knobs.data_parallel} data-parallel workers"
        )
    share = samples // knobs.data_parallel
    if share % knobs.micro_batch_size:
        raise BadInput(
            f"recipe.micro_batch_size={knobs.micro_batch_size} does not divide the {share} samples of a mini-batch "
            f"on each data-parallel worker"
        )
    if knobs.vpp and knobs.vpp > 1:
        _check_interleaving(knobs, share)


def _check_interleaving(knobs: RecipeKnobs, share: int) -> None:
    """Virtual pipelining takes micro-batches in groups of `pp`."""
    whole = share * knobs.train_batch_size // knobs.mini_batch_size
    roles = knobs.verl.get("actor_rollout_ref", {})
    setting = "log_prob_micro_batch_size_per_gpu"
    batches = [("recipe.micro_batch_size", knobs.micro_batch_size, share, "a mini-batch")]
    batches += [
        (f"recipe.verl.actor_rollout_ref.{role}.{setting}", size, whole, "a batch")
        for role in ("rollout", "ref")
        if isinstance(size := roles.get(role, {}).get(setting), int) and size > 0
    ]
    for name, size, samples, of_what in batches:
        if (number := -(-samples // size)) % knobs.pp:
            raise BadInput(
                f"{name}={size} makes {number} micro-batches of the {samples} samples of {of_what} on each "
                f"data-parallel worker: with recipe.vpp={knobs.vpp} their number must be a multiple of "
                f"recipe.pp={knobs.pp}"
            )


def _check_fault(recipe: dict[str, Any]) -> None:
    fault = recipe.get("fault")
    if fault is not None and fault not in faults.FAULTS:
        raise BadInput(f"recipe.fault={fault}: known faults are {', '.join(faults.FAULTS)}")


def _check_files(knobs: RecipeKnobs) -> None:
    made = knobs.is_made(knobs.model_path)
    if not made and looks_local(knobs.model_path) and not Path(knobs.model_path).expanduser().is_dir():
        raise BadInput(
            f"recipe.model_path={knobs.model_path}: there is no such folder. Give the folder of a Hugging Face "
            "checkpoint, or a hub name such as Qwen/Qwen2-7B-Instruct"
        )
    for key, files in (("train_files", knobs.train_files), ("val_files", knobs.val_files)):
        for file in [files] if isinstance(files, str) else files:
            if not knobs.is_made(file) and not Path(file).expanduser().exists():
                raise BadInput(f"recipe.{key}={file}: there is no such file. docs/gpu.md tells how to prepare the data")


def looks_local(model_path: str) -> bool:
    """A path rather than a hub name (`owner/name`): absolute, relative with a dot or ~, or of another depth."""
    return model_path.startswith(("/", ".", "~")) or model_path.count("/") != 1


def check_runs(runs: Sequence[PlannedRun]) -> None:
    """What only the whole sweep shows: runs listed twice, more than one cluster."""
    repeated = repeated_run_ids(runs)
    if repeated:
        raise BadInput(
            f"the sweep lists {', '.join(repeated)} more than once. Every combination of swept values must be "
            "different (for A/A pairs there is arm=baseline,baseline_repeat)"
        )
    if any(run.config.cluster != runs[0].config.cluster for run in runs):
        raise BadInput("cluster.* cannot be swept: all runs of a sweep share one cluster")


class Tracking(pydantic.BaseModel):
    """conf/tracking/*.yaml, as far as the launcher cares."""

    model_config = ConfigDict(extra="allow")

    mode: Literal["offline", "online", "disabled"]


def check_tracking(tracking: Mapping[str, Any]) -> None:
    validated(Tracking, tracking, "tracking")


def check_api_key(runs: Sequence[PlannedRun]) -> None:
    """Raises BadInput for an online run whose job would find no W&B API key on this machine.

    A cluster that is running already has an environment of its own, which is not known here.
    """
    cluster = runs[0].config.cluster
    if cluster["address"] is not None or all(run.config.tracking["mode"] != "online" for run in runs):
        return
    # In the environment of the jobs, and where they start W&B: both may hold settings of W&B.
    environment = {**os.environ, **{name: str(value) for name, value in cluster["env"].items()}}
    asked = subprocess.run(
        [sys.executable, "-m", "pipeline.tracking.api_key"],
        cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    if wrong := asked.stdout.strip().removesuffix("."):
        raise BadInput(
            f"tracking=online: {wrong}. Give a key with `wandb login` or in WANDB_API_KEY, or track with "
            "tracking=offline and upload later"
        )


def check_cluster(cluster: Mapping[str, Any]) -> None:
    """Types; then, that a cluster can be reached or started. Raises BadInput."""
    settings = validated(ClusterSettings, cluster, "cluster")
    if settings.address is None:
        check_port_free(settings.dashboard_port)
    else:
        check_cluster_address(settings.address)


def check_cluster_address(address: str) -> None:
    """Raises BadInput unless `address` is an http address and somebody listens there."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise BadInput(
            f"cluster.address={address} must be the address of the Ray dashboard, "
            "for example cluster.address=http://127.0.0.1:8265"
        )
    try:
        response = RayDashboard(address.rstrip("/"), users_token()).get("/api/version", timeout_s=10)
    except requests.RequestException as error:
        raise BadInput(
            f"cluster.address={address}: no Ray dashboard answers there ({type(error).__name__}). Start a cluster with "
            "`ray start --head`, or leave cluster.address out to have one started here"
        ) from error
    _check_is_our_ray(address, response)


def _check_is_our_ray(address: str, response: requests.Response) -> None:
    if response.status_code in (401, 403):
        raise BadInput(
            f"cluster.address={address}: the cluster asks for another token than this user has. "
            "Set RAY_AUTH_TOKEN_PATH to the file with its token"
        )
    try:
        theirs = response.json()["ray_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"cluster.address={address}: what listens there is not a Ray dashboard") from error
    ours = importlib.metadata.version("ray")
    if theirs != ours:
        raise BadInput(
            f"cluster.address={address}: the cluster runs Ray {theirs}, here is Ray {ours}. Install the same version"
        )

"""Bad input gives one message that names key and value, before anything starts."""

import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.launch import checks
from pipeline.launch.errors import BadInput, nearest
from pipeline.study.planning import PlannedRun


def test_a_good_recipe_passes(recipe: dict[str, Any]) -> None:
    knobs = checks.check_recipe(recipe)
    assert knobs.workers == knobs.data_parallel == 1


PIPELINE = {"n_workers": 2, "pp": 2}
LOG_PROB = {"verl": {"actor_rollout_ref": {"rollout": {"log_prob_micro_batch_size_per_gpu": 64}}}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_batch_size": 15}, ["recipe.train_batch_size=15", "recipe.mini_batch_size=4"]),
        ({"n_workers": 3}, ["recipe.mini_batch_size=4", "16 samples", "3 data-parallel workers"]),
        ({"micro_batch_size": 5}, ["recipe.micro_batch_size=5", "16 samples"]),
        ({"n_workers": 4, "tp": 2, "pp": 4}, ["recipe.n_workers=4", "recipe.tp=2", "recipe.pp=4"]),
        ({"rollout_tp": 2}, ["recipe.rollout_tp=2"]),
        ({"vpp": 2}, ["recipe.vpp=2", "recipe.vpp=null"]),
        (
            {"vpp": 2, **PIPELINE, "micro_batch_size": 16},
            ["recipe.micro_batch_size=16 makes 1", "multiple of recipe.pp=2"],
        ),
        (
            {"vpp": 2, **PIPELINE, **LOG_PROB},
            ["rollout.log_prob_micro_batch_size_per_gpu=64 makes 1 micro-batches of the 64"],
        ),
        ({"lr": "abc"}, ["recipe.lr=abc", "number"]),
        ({"lr": -1.0}, ["recipe.lr=-1.0", "greater than or equal to 0"]),
        ({"lr": float("nan")}, ["recipe.lr=nan", "finite"]),
        ({"steps": 0}, ["recipe.steps=0", "greater than 0"]),
        ({"steps": 1.5}, ["recipe.steps=1.5", "integer"]),
        ({"tp": None}, ["recipe.tp=null"]),
        ({"verl": 3}, ["recipe.verl=3"]),
        ({"fault": "sabotage"}, ["recipe.fault=sabotage", "nan_gradient"]),
        ({"model_path": "/nowhere/model"}, ["recipe.model_path=/nowhere/model", "no such folder"]),
        ({"train_files": ["/nowhere/a.parquet"]}, ["recipe.train_files=/nowhere/a.parquet", "no such file"]),
        ({"val_files": "/nowhere/b.parquet"}, ["recipe.val_files=/nowhere/b.parquet"]),
    ],
)
def test_a_bad_recipe_is_told(recipe: dict[str, Any], changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadInput) as raised:
        checks.check_recipe({**recipe, **changed})
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_hub_name_is_not_looked_for_on_disk(recipe: dict[str, Any]) -> None:
    checks.check_recipe({**recipe, "model_path": "Qwen/Qwen2-7B-Instruct"})


def test_what_the_project_makes_itself_need_not_exist_but_only_that(tmp_path: Path, recipe: dict[str, Any]) -> None:
    checks.check_recipe(
        {**recipe, "assets_dir": str(tmp_path), "model_path": f"{tmp_path}/model", "train_files": [], "val_files": []}
    )
    with pytest.raises(BadInput, match="no such folder"):
        checks.check_recipe({**recipe, "assets_dir": str(tmp_path), "model_path": "/elsewhere/model"})
    with pytest.raises(BadInput, match="no such folder"):
        checks.check_recipe({**recipe, "make_assets": False})


@pytest.mark.parametrize("seed", ["abc", 1.0, True, None, -1, 2**31])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(BadInput, match="seed="):
        checks.check_seed(seed)


def test_seeds() -> None:
    assert [checks.check_seed(seed) for seed in (0, 1, 2**31 - 1)] == [0, 1, 2**31 - 1]


def test_the_study_gets_its_folder(tmp_path: Path) -> None:
    assert checks.check_study("mine", tmp_path / "results", rerun=False) == tmp_path / "results" / "mine"
    assert (tmp_path / "results" / "mine").is_dir()


@pytest.mark.parametrize("name", ["a/b", "..", "", None, "a b", ".hidden"])
def test_a_study_name_must_name_a_folder(tmp_path: Path, name: Any) -> None:
    with pytest.raises(BadInput, match="study_name="):
        checks.check_study(name, tmp_path, rerun=False)
    assert list(tmp_path.iterdir()) == []


def test_results_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match=r"results_dir=.*file: cannot write to .*Not a directory"):
        checks.check_study("mine", tmp_path / "file", rerun=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="Permission denied"):
        checks.check_study("mine", tmp_path, rerun=False)


def test_a_sweep_has_each_run_once_and_one_cluster(planned: Callable[..., PlannedRun]) -> None:
    checks.check_runs([planned("baseline"), planned("pao")])
    with pytest.raises(BadInput, match=r"baseline-s1 more than once.*baseline_repeat"):
        checks.check_runs([planned(), planned()])
    other = planned("pao")
    other.config.cluster["dashboard_port"] = 9000
    with pytest.raises(BadInput, match="share one cluster"):
        checks.check_runs([planned(), other])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dashboard_port": "abc"}, "cluster.dashboard_port=abc"),
        ({"dashboard_port": 80}, "cluster.dashboard_port=80"),
        ({"num_cpus": 0}, "cluster.num_cpus=0"),
        ({"stop_timeout_s": -1}, "cluster.stop_timeout_s=-1"),
        ({"address": "127.0.0.1:6379"}, "cluster.address=127.0.0.1:6379 must be the address of the Ray dashboard"),
        ({"surprise": 1}, "cluster.surprise=1"),
    ],
)
def test_cluster_settings(cluster: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        checks.check_cluster({**cluster, **changed})


def test_a_dashboard_port_in_use_is_told_with_both_ways_out(cluster: dict[str, Any]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BadInput) as raised:
            checks.check_cluster({**cluster, "dashboard_port": port})
    assert f"cluster.dashboard_port={port} is in use" in str(raised.value)
    assert f"cluster.address=http://127.0.0.1:{port}" in str(raised.value)
    checks.check_cluster({**cluster, "dashboard_port": port})


def test_an_address_where_nobody_listens_is_told(cluster: dict[str, Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(BadInput, match=f"cluster.address=http://127.0.0.1:{port}: no Ray dashboard answers there"):
        checks.check_cluster({**cluster, "address": f"http://127.0.0.1:{port}"})


KEY = "0" * 40


@pytest.fixture
def online(planned: Callable[..., PlannedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlannedRun:
    """A run with tracking=online, of a user whom W&B does not know."""
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run = planned()
    run.config.tracking["mode"] = "online"
    return run


def test_tracking_online_without_an_api_key_is_told(
    online: PlannedRun, planned: Callable[..., PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput) as raised:
        checks.check_api_key([planned(), online])
    words = ["tracking=online: there is no W&B API key for http://127.0.0.1:9", "WANDB_API_KEY", "tracking=offline"]
    assert all(word in str(raised.value) for word in words), raised.value
    monkeypatch.setenv("WANDB_API_KEY", "tooshort")
    with pytest.raises(BadInput, match="must have 40") as raised:
        checks.check_api_key([online])
    assert "tooshort" not in str(raised.value)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    checks.check_api_key([online])


def test_an_api_key_in_netrc_is_for_its_server_only(online: PlannedRun, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(f"machine wandb.example.com\n  login user\n  password {KEY}\n")
    with pytest.raises(BadInput, match="no W&B API key for http://127"):
        checks.check_api_key([online])
    online.config.cluster["env"]["WANDB_BASE_URL"] = "https://wandb.example.com"
    checks.check_api_key([online])


def test_a_server_of_w_and_b_that_is_no_address_is_told(online: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "nonsense")
    with pytest.raises(BadInput, match="tracking=online: W&B's setting base_url: Input should be a valid URL"):
        checks.check_api_key([online])


def test_other_tracking_and_a_running_cluster_need_no_api_key_here(
    online: PlannedRun, planned: Callable[..., PlannedRun]
) -> None:
    checks.check_api_key([planned()])
    online.config.cluster["address"] = "http://host:8265"
    checks.check_api_key([online])


class Answer(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[tuple[type[Answer], str]]:
    class Mine(Answer):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield Mine, f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "asks for another token"),
        (403, b"", "asks for another token"),
        (404, b"no", "is not a Ray dashboard"),
        (200, b"<html>", "is not a Ray dashboard"),
        (200, b'{"ray_version": "1.0.0"}', "the cluster runs Ray 1.0.0"),
    ],
)
def test_who_listens_at_the_address_must_be_our_ray(
    server: tuple[type[Answer], str], status: int, body: bytes, words: str
) -> None:
    answer, address = server
    answer.status, answer.body = status, body
    with pytest.raises(BadInput, match=words):
        checks.check_cluster_address(address)


def test_nearest_names() -> None:
    assert nearest("baselin", ["baseline", "pao"]) == "Did you mean baseline?"
    assert nearest("qwen2_7b", ["qwen2_7b_sgl_megatron", "tiny"]) == "Did you mean qwen2_7b_sgl_megatron?"
    assert nearest("xyz", ["pao", "baseline"]) == "Known are baseline, pao."
    assert nearest("lrr", ["lr", "tp"], prefix="recipe.") == "Did you mean recipe.lr?"

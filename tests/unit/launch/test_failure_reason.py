"""From a job's log to the error that made the run fail. The logs are of Ray 2.60 and verl 0.9.1, shortened."""

from pathlib import Path

import pytest

from pipeline.launch.failure_reason import failure_in_log, failure_of
from pipeline.study import json_lines
from pipeline.study.records import Failure
from pipeline.study.run_folder import RunFolder

# A worker raises; verl's task runner and the driver pass it on, each with Ray's wrapper around it.
WORKER_RAISED = """\
2026-12-01 04:36:40,080\tINFO worker.py:2029 -- Connected to Ray cluster. View the dashboard at http://127.0.0.1:8265
\x1b[36m(WorkerDict pid=19305)\x1b[0m INFO:2026-12-01 04:38:00,011:Platform override from VERL_PLATFORM: cpu
\x1b[36m(TaskRunnerV1 pid=18257)\x1b[0m Unhandled error (suppress with 'RAY_IGNORE_UNHANDLED_ERRORS=1'): ray::WorkerDict
Traceback (most recent call last):
  File "/project/pipeline/train/__main__.py", line 20, in main
    run(folder)
  File "/venv/verl/trainer/main_ppo.py", line 101, in run_ppo
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=18257, ip=192.0.2.2, actor_id=4f)
  File "/venv/verl/trainer/main_ppo.py", line 170, in run
    trainer.fit()
  File "/venv/verl/single_controller/ray/base.py", line 48, in func
    output = ray.get(output)
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::WorkerDict.update_actor()\x1b[39m (pid=19305, ip=192.0.2.2)
  File "/venv/verl/workers/engine_workers.py", line 522, in update_actor
    output = self.actor.train_mini_batch(data=data)
ValueError: optimizer state of parameter 3 has dtype torch.int16,
expected torch.float32
"""

# The node ran out of memory: the driver only learns that an actor died.
ACTOR_DIED = """\
\x1b[33m(raylet)\x1b[0m [2026-12-01 04:40:00,000 E 1 1] (raylet) 1 Workers killed due to memory pressure (OOM)
Traceback (most recent call last):
  File "/project/pipeline/train/__main__.py", line 20, in main
    run(folder)
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 8f3ddfd5ad0a9aabf0d5c9a601000000
\tpid: 19305
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file.
"""

# Rank 1 fails; rank 0, which ray.get asks first, only sees that its peer is gone.
PEER_LOST = """\
\x1b[36m(WorkerDict pid=202)\x1b[0m Traceback (most recent call last):
\x1b[36m(WorkerDict pid=201)\x1b[0m [rank0]:[W1201 04:40:01 ProcessGroupGloo.cpp:68] Connection closed by peer
\x1b[36m(WorkerDict pid=202)\x1b[0m   File "/venv/verl/workers/engine/megatron/x.py", line 700, in optimizer_step
\x1b[36m(WorkerDict pid=201)\x1b[0m Traceback (most recent call last):
\x1b[36m(WorkerDict pid=202)\x1b[0m     success, grad_norm, _ = self.optimizer.step()
\x1b[36m(WorkerDict pid=201)\x1b[0m   File "/venv/torch/distributed/distributed_c10d.py", line 83, in wrapper
\x1b[36m(WorkerDict pid=202)\x1b[0m torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
\x1b[36m(WorkerDict pid=201)\x1b[0m     return func(*args, **kwargs)
\x1b[36m(WorkerDict pid=201)\x1b[0m RuntimeError: [pair.cc:547] Connection closed by peer [192.0.2.2]:1234
Traceback (most recent call last):
  File "/project/pipeline/train/__main__.py", line 20, in main
    run(folder)
ray.exceptions.RayTaskError(RuntimeError): ray::WorkerDict.update_actor() (pid=201, ip=192.0.2.2)
  File "/venv/torch/distributed/distributed_c10d.py", line 83, in wrapper
    return func(*args, **kwargs)
RuntimeError: [pair.cc:547] Connection closed by peer [192.0.2.2]:1234
Exception ignored in: <function Cleaner.__del__ at 0x7f>
Traceback (most recent call last):
  File "/venv/wandb/sdk/wandb_run.py", line 9, in __del__
    self.finish()
AttributeError: 'NoneType' object has no attribute 'finish'
"""

# A reward worker cannot be made; verl's agent loop logs that and goes on, until the trainer has no samples.
SWALLOWED = """\
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m ERROR:2026-12-01 09:21:16,451:Error in _run_prompt for uid=9024b77a
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m Traceback (most recent call last):
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m   File "/venv/verl/experimental/agent_loop/agent_loop.py", line 1026
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m     result = await reward_loop_worker_handle.compute_score.remote(data)
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m ray.exceptions.ActorDiedError: The actor died because of an error \
raised in its creation task, ray::reward_loop_worker_0:RewardLoopWorker.__init__() (pid=4328, ip=192.0.2.2)
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m   File "/venv/verl/utils/import_utils.py", line 259, in load_extern_object
\x1b[36m(AgentLoopWorkerTQ pid=4551)\x1b[0m AttributeError: Object not found in module: object_name='no_such_function'
Traceback (most recent call last):
  File "/venv/verl/trainer/ppo/v1/replay_buffer.py", line 510, in sample
    raise RuntimeError(message)
RuntimeError: Sync replay buffer selected terminal groups with no materializable trajectories.
"""

SEGMENTATION_FAULT = """\
\x1b[36m(WorkerDict pid=7)\x1b[0m *** SIGSEGV received at time=1796100000 on cpu 1 ***
\x1b[36m(WorkerDict pid=7)\x1b[0m Fatal Python error: Segmentation fault
\x1b[36m(WorkerDict pid=7)\x1b[0m
Traceback (most recent call last):
  File "/project/pipeline/train/__main__.py", line 20, in main
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
"""

CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    {}["x"]
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise RuntimeError("the Megatron engine could not be set up") from error
RuntimeError: the Megatron engine could not be set up
"""


@pytest.mark.parametrize(
    ("log", "error", "where"),
    [
        (WORKER_RAISED, "ValueError: optimizer state of parameter 3 has dtype torch.int16,", "trainer"),
        (PEER_LOST, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "WorkerDict (pid 202)"),
        (
            SWALLOWED,
            "AttributeError: Object not found in module: object_name='no_such_function'",
            "AgentLoopWorkerTQ (pid 4551)",
        ),
        (SEGMENTATION_FAULT, "Fatal Python error: Segmentation fault", "WorkerDict (pid 7)"),
        (CHAINED, "RuntimeError: the Megatron engine could not be set up", "trainer"),
        (
            ACTOR_DIED,
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
            "trainer",
        ),
    ],
)
def test_the_cause_is_found(log: str, error: str, where: str) -> None:
    failure = failure_in_log(log)
    assert failure is not None
    assert (failure.error, failure.where) == (error, where)


def test_the_traceback_is_that_of_the_error_without_the_other_ranks() -> None:
    failure = failure_in_log(PEER_LOST)
    assert failure is not None
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "optimizer_step" in lines[1]
    assert lines[-1].startswith("torch.OutOfMemoryError")
    assert len(lines) == 4


@pytest.mark.parametrize(
    "log",
    [
        "",
        "INFO: all well\nValueError: printed, not raised\n",
        "Traceback (most recent call last):\n  File 'cut off",
        "Exception ignored in: <x>\nTraceback (most recent call last):\n  File 'a'\nOSError: late\n",
    ],
)
def test_a_log_without_an_exception_has_no_cause(log: str) -> None:
    assert failure_in_log(log) is None


def test_a_handled_exception_before_the_last_is_not_the_cause() -> None:
    handled = "Traceback (most recent call last):\n  File 'a'\nImportError: optional part is missing\ngoing on\n"
    failure = failure_in_log(handled + WORKER_RAISED)
    assert failure is not None
    assert failure.error.startswith("ValueError")


def test_the_first_failing_process_s_own_account_comes_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.job_log_file.write_text(WORKER_RAISED)
    own = Failure(error="RuntimeError: rank 3 lost it", where="rank 3", rank=3, traceback="...", time=1.0)
    folder.failure_file.write_bytes(json_lines.dumps(own.model_dump()))
    assert failure_of(folder, "Job failed") == own


@pytest.mark.parametrize(
    ("log", "error"),
    [(SWALLOWED, "AttributeError"), (ACTOR_DIED, "RuntimeError: Sync"), ("", "RuntimeError: Sync")],
)
def test_an_account_of_a_consequence_comes_after_the_cause_in_the_log(tmp_path: Path, log: str, error: str) -> None:
    folder = RunFolder(tmp_path)
    folder.job_log_file.write_text(log)
    own = Failure(error="RuntimeError: Sync replay buffer ... no materializable trajectories.", where="trainer")
    folder.failure_file.write_bytes(json_lines.dumps(own.model_dump()))
    assert failure_of(folder, "Job failed").error.startswith(error)


def test_a_cut_account_is_replaced_by_the_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.job_log_file.write_text(WORKER_RAISED)
    folder.failure_file.write_text('{"error": "Runti')
    assert failure_of(folder, "Job failed").error.startswith("ValueError")


def test_without_log_and_account_ray_has_the_word(tmp_path: Path) -> None:
    failure = failure_of(RunFolder(tmp_path), "\nFailed to set up the runtime environment\nmore")
    assert (failure.error, failure.where) == ("Failed to set up the runtime environment", "launcher")
    assert "job.log" in failure_of(RunFolder(tmp_path), "").error

"""The records of a run folder. Unknown fields of a newer version are kept, not refused."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TensorKind = Literal["param", "main_grad", "master_param", "exp_avg", "exp_avg_sq", "other"]


class Record(BaseModel):
    """A record that tolerates fields it does not know: `unknown_fields` names them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_fields(self) -> list[str]:
        return sorted(self.model_extra or {})


class RunConfig(Record):
    """config.yaml: what was asked for. `recipe`, `arm` etc. are the composed Hydra groups, fully resolved."""

    study_name: str
    run_id: str
    pair: str
    """The run id without its arm: runs with the same pair and different arms form a pair."""
    seed: int
    swept: dict[str, Any] = Field(default_factory=dict)
    """Swept keys other than arm and seed, and this run's values."""
    arm: dict[str, Any]
    """`name` and `verl` (the nested verl settings that make the arm); controls also have `fault`."""
    recipe: dict[str, Any]
    """`name`, the recipe's own knobs (steps, train_batch_size, mini_batch_size, ...) and `verl` (nested settings)."""
    cluster: dict[str, Any]
    tracking: dict[str, Any]
    gates: dict[str, Any]
    gates_hash: str
    """SHA-256 of the gates as they stood when the run was launched."""
    command: str | None = None
    """What makes this run again, where that is not `python -m pipeline.sweep` with its overrides."""


class LedgerEntry(Record):
    """Bytes of one kind of tensor in one dtype on one rank."""

    kind: TensorKind
    dtype: str
    """torch's name without the prefix: float32, bfloat16, int16."""
    elements: int
    bytes: int


class RankMemory(Record):
    """Memory of one rank, GiB. `source` says what was read: "rss" (process) or "allocated" (torch's allocator)."""

    source: Literal["rss", "allocated"]
    after_load_gib: float
    after_first_update_gib: float
    device_total_gib: float | None = None
    """The device's size; a reading above it is invalid. Host memory on CPU."""


class RankLedger(Record):
    """What one rank holds, found by walking DDP buffers and the optimizer's state after the first optimizer step."""

    rank: int
    tensor_parallel_rank: int
    pipeline_parallel_rank: int
    data_parallel_rank: int
    trainable_elements: int
    """Elements of this rank's trainable parameters (its TP/PP shard), without buffer padding."""
    frozen_elements: int
    buffer_elements: int
    """Elements of the DDP parameter and gradient buffers, padding included."""
    optimizer_elements: int
    """Elements whose optimizer state lives on this rank (the distributed optimizer's shard)."""
    entries: list[LedgerEntry]
    memory: RankMemory


class FoundOptimizer(Record):
    """The treatment check's evidence from inside the workers."""

    megatron_class: str
    inner_class: str
    flags: dict[str, Any]
    """use_precision_aware_optimizer, store_param_remainders, main_grads_dtype, exp_avg_dtype, exp_avg_sq_dtype,
    use_distributed_optimizer (of OptimizerConfig); master_weights, use_decoupled_grad (of the inner optimizer, when it
    has them). dtypes as in LedgerEntry."""


class Ledger(Record):
    """ledger.json."""

    optimizer: FoundOptimizer
    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int
    data_parallel: int
    ranks: list[RankLedger]


class Environment(Record):
    """env.json."""

    platform: Literal["cpu", "cuda"]
    python: str
    packages: dict[str, str]
    git: dict[str, Any]
    """commit and dirty, where the project is a git checkout; commit alone where PIPELINE_COMMIT tells it."""
    hardware: dict[str, Any]
    """machine (one and the same until it restarts), processor, cores, memory_gib, gpus: [{name, memory_gib}]."""
    stand_ins: list[str]
    """What replaced parts of the GPU stack on CPU, in words; empty on a GPU."""


class Failure(Record):
    """Why a run failed, told by the first process that raised."""

    error: str
    """One line: exception class and message."""
    where: str
    """"rank 3", "trainer", "rollout server", "launcher"."""
    rank: int | None = None
    traceback: str = ""
    time: float | None = None


class Status(Record):
    """status.json, the terminal marker."""

    state: Literal["succeeded", "failed", "stopped"]
    reason: str = ""
    failure: Failure | None = None
    attempt: int = 1
    submission_id: str | None = None
    steps_done: int
    started_at: float
    """Unix seconds."""
    ended_at: float

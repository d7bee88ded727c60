"""Which runs a sweep consists of, and in which order they run."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline.study import naming
from pipeline.study.gates_hash import gates_hash
from pipeline.study.records import RunConfig

ARM_AND_SEED = ("arm", "seed")
_MOST_TOLD = 20

# How a run was started, where it took place and where its metrics were mirrored: one that succeeded stays valid when
# these change.
_OF_NO_INFLUENCE = (
    "command",
    "tracking",
    "cluster.address",
    "cluster.dashboard_port",
    "cluster.num_cpus",
    "cluster.object_store_memory_mb",
    "cluster.start_timeout_s",
    "cluster.free_timeout_s",
    "cluster.stop_timeout_s",
)


@dataclass(frozen=True)
class PlannedRun:
    """One run: its whole configuration and the Hydra overrides that made it."""

    config: RunConfig
    overrides: tuple[str, ...]

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def arm(self) -> str:
        return self.config.arm["name"]


def planned_run(
    composed: Mapping[str, Any], swept: Mapping[str, Any], overrides: Sequence[str], command: str | None = None
) -> PlannedRun:
    """Turn a composed and resolved configuration (conf/sweep.yaml) into a run.

    composed: has study_name, seed, arm, recipe, cluster, tracking and gates.
    swept: swept keys other than arm and seed, with this run's values.
    command: what makes the run again, where that is not a sweep with `overrides`.
    """
    seed, prefix = composed["seed"], composed["recipe"]["run_prefix"]
    config = RunConfig(
        study_name=composed["study_name"],
        run_id=naming.run_id(prefix, composed["arm"]["name"], seed, dict(swept)),
        pair=naming.pair_id(prefix, seed, dict(swept)),
        seed=seed,
        swept=dict(swept),
        arm=composed["arm"],
        recipe=composed["recipe"],
        cluster=composed["cluster"],
        tracking=composed["tracking"],
        gates=composed["gates"],
        gates_hash=gates_hash(composed["gates"]),
        command=command,
    )
    return PlannedRun(config, tuple(overrides))


def in_running_order(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Pairs one after the other; within a pair the arms as given, and reversed in every second pair (AB, BA, AB, ...).

    Slow drift of the machine (heat, other users) then falls on all arms alike.
    """
    by_pair: dict[str, list[PlannedRun]] = {}
    for run in runs:
        by_pair.setdefault(run.config.pair, []).append(run)
    ordered = (group[::-1] if number % 2 else group for number, group in enumerate(by_pair.values()))
    return list(itertools.chain.from_iterable(ordered))


def repeated_run_ids(runs: Iterable[PlannedRun]) -> list[str]:
    """Run ids that the sweep contains more than once."""
    return [run_id for run_id, times in Counter(run.run_id for run in runs).items() if times > 1]


def flattened(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b.c", leaf) for every leaf; lists and empty mappings are leaves."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from flattened(cast(Mapping[str, Any], item), f"{name}.")
        else:
            yield name, item


def differing_keys(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that can change a run's result and differ: {key: (one's value, other's value)}; None stands for absent."""
    left, right = (dict(flattened(config.model_dump())) for config in (one, other))
    names = [name for name in (*left, *(name for name in right if name not in left)) if not _without_influence(name)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def success_in_the_way(former: RunConfig, run: RunConfig) -> str:
    """What to tell of a run that succeeded as `former` and is now wanted as `run`; empty where its result holds."""
    told = [f"  {key}: {was!r} then, {now!r} now" for key, (was, now) in differing_keys(former, run).items()]
    return "\n".join(["succeeded with another configuration:", *told[:_MOST_TOLD]]) if told else ""


def _without_influence(name: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in _OF_NO_INFLUENCE)

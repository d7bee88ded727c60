"""Which runs a sweep has, what they are called and in which order they run."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.launch.sweep_plan import swept_values
from pipeline.study.planning import (
    PlannedRun,
    differing_keys,
    flattened,
    in_running_order,
    repeated_run_ids,
    success_in_the_way,
)

Planned = Callable[..., PlannedRun]


def order(planned: Planned, arms: list[str], seeds: list[int]) -> list[str]:
    # As Hydra's sweeper lists them: the last key varies fastest.
    runs = [planned(arm, seed) for arm in arms for seed in seeds]
    return [f"{run.arm}-{run.config.seed}" for run in in_running_order(runs)]


def test_pairs_run_one_after_the_other_and_arms_alternate_by_seed(planned: Planned) -> None:
    assert order(planned, ["A", "B"], [1, 2, 3]) == ["A-1", "B-1", "B-2", "A-2", "A-3", "B-3"]


def test_more_than_two_arms_are_reversed_in_every_second_pair(planned: Planned) -> None:
    assert order(planned, ["A", "B", "C"], [1, 2]) == ["A-1", "B-1", "C-1", "C-2", "B-2", "A-2"]


def test_swept_values_make_pairs_of_their_own(planned: Planned) -> None:
    runs = [planned(arm, 1, {"recipe.lr": lr}, lr=lr) for arm in ("baseline", "pao") for lr in (0.001, 0.0001)]
    ordered = in_running_order(runs)
    assert [run.run_id.removeprefix("grpo-tiny-1n1g-tp1pp1-") for run in ordered] == [
        "baseline-s1-lr0.001",
        "pao-s1-lr0.001",
        "pao-s1-lr0.0001",
        "baseline-s1-lr0.0001",
    ]
    assert ordered[0].config.pair == ordered[1].config.pair == "grpo-tiny-1n1g-tp1pp1-s1-lr0.001"


@given(st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(0, 4)), unique=True))
def test_order_loses_and_adds_nothing_and_keeps_pairs_together(planned: Planned, chosen: list[tuple[str, int]]) -> None:
    runs = [planned(arm, seed) for arm, seed in chosen]
    ordered = in_running_order(runs)
    assert sorted(run.run_id for run in ordered) == sorted(run.run_id for run in runs)
    pairs = [run.config.pair for run in ordered]
    changes = sum(one != other for one, other in itertools.pairwise(pairs))
    assert changes == max(len(set(pairs)) - 1, 0)


def test_repeated_runs_are_found(planned: Planned) -> None:
    assert repeated_run_ids([planned("pao"), planned("pao"), planned("pao", 2)]) == ["grpo-tiny-1n1g-tp1pp1-pao-s1"]


def test_flattened_keeps_empty_mappings_and_lists_as_leaves() -> None:
    assert dict(flattened({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}


def test_differing_keys_name_what_can_change_a_result(planned: Planned) -> None:
    one, other = planned("pao", lr=0.1).config, planned("pao", lr=0.2, fault="nan_gradient").config
    assert differing_keys(one, other) == {"recipe.lr": (0.1, 0.2), "recipe.fault": (None, "nan_gradient")}


def test_a_success_in_the_way_is_told_with_what_differs(planned: Planned) -> None:
    former = planned("pao", lr=0.1).config
    assert success_in_the_way(former, planned("pao", lr=0.1).config) == ""
    assert success_in_the_way(former, planned("pao", lr=0.2, fault="nan_gradient").config) == (
        "succeeded with another configuration:\n"
        "  recipe.lr: 0.1 then, 0.2 now\n"
        "  recipe.fault: None then, 'nan_gradient' now"
    )


def test_where_a_run_took_place_is_no_difference(planned: Planned) -> None:
    one = planned().config
    moved = one.model_copy(
        update={
            "cluster": {**one.cluster, "address": "http://x:1", "dashboard_port": 9},
            "tracking": {"mode": "online"},
        }
    )
    assert differing_keys(one, moved) == {}
    slower = one.model_copy(update={"cluster": {**one.cluster, "env": {"OMP_NUM_THREADS": "2"}}})
    assert set(differing_keys(one, slower)) == {"cluster.env.OMP_NUM_THREADS", "cluster.env.VERL_PLATFORM"}


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([["arm=a", "seed=1"], ["arm=b", "seed=2"]], [{}, {}]),
        ([["arm=a", "recipe.steps=3"], ["arm=b", "recipe.steps=3"]], [{}, {}]),
        (
            [["arm=a", "recipe.lr=1e-3"], ["arm=a", "recipe.lr=1e-4"]],
            [{"recipe.lr": 0.001}, {"recipe.lr": 0.0001}],
        ),
        ([["recipe=x", "+recipe.new=true"], ["recipe=y", "+recipe.new=null"]], None),
        ([["recipe.name='a b'"], ["recipe.name=c"]], [{"recipe.name": "a b"}, {"recipe.name": "c"}]),
    ],
)
def test_swept_keys_are_those_that_vary(jobs: list[list[str]], expected: list[dict[str, Any]] | None) -> None:
    found = swept_values(jobs)
    if expected is None:
        expected = [{"recipe": "x", "recipe.new": True}, {"recipe": "y", "recipe.new": None}]
    assert found == expected
    assert all(type(value) in (str, int, float, bool, type(None)) for job in found for value in job.values())

"""Memory that cannot be true is left out and told; sources stay apart; times are ratios with an interval."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis.conclusions import conclude
from pipeline.analysis.cost import observer_time, optimizer_step_ratio, step_ratio
from pipeline.analysis.load import Study
from pipeline.analysis.memory import memory_differences, run_memory
from pipeline.analysis.pairs import load_study
from pipeline.analysis.report import render_report
from pipeline.study import json_lines

MakeStudy = Callable[..., Study]
Row = dict[str, Any]
GPU = {"platform": "cuda", "trainable": 950_000_000}


def differences(study: Study) -> dict[tuple[str, str], float]:
    memory = {run.id: run_memory(run) for run in study.runs}
    return {(item.source, item.phase): item.difference for item in memory_differences(study.pairs, memory)}


def test_phases_and_sources_stay_apart(made_up: MakeStudy) -> None:
    found = differences(made_up({"arm": "baseline", **GPU}, {"arm": "pao", **GPU}))
    saved = -2 * 950_000_000 / 2**30
    assert found["allocated", "after_load"] == 0
    assert found["allocated", "after_first_update"] == pytest.approx(saved)
    for source, phase in (("allocated", "after_update"), ("reserved", "after_update"), ("device", "after_update")):
        assert found[source, phase] == pytest.approx(saved)
    assert ("device", "peak_optimizer_step") not in found
    assert not any(source == "rss" for source, _ in found)


@pytest.mark.parametrize(
    ("algorithm", "row"),
    [
        ("grpo", "| steady state: whole device by NVML, rollout engine included |"),
        ("probe", "| steady state: whole device by NVML |"),
    ],
)
def test_the_device_holds_a_rollout_engine_where_there_is_one(made_up: MakeStudy, algorithm: str, row: str) -> None:
    runs = [{"arm": arm, "recipe": {"algorithm": algorithm}, **GPU} for arm in ("baseline", "pao")]
    assert row in render_report(conclude(made_up(*runs)), [])


def test_each_rank_is_compared_with_itself(made_up: MakeStudy) -> None:
    def heavier(row: Row) -> None:
        row["rss_after_update_gib"] += row["rank"]

    runs = [{"arm": arm, "dp": 2, "edit_update": heavier} for arm in ("baseline", "pao")]
    assert differences(made_up(*runs))["rss", "after_update"] == pytest.approx(-2 * 128_000 / 2**30)


@pytest.mark.parametrize("value", [-0.5, 141.0, math.inf])
def test_an_impossible_reading_is_left_out_and_told(made_up: MakeStudy, value: float) -> None:
    def wrong(row: Row) -> None:
        if row["update"] == 7:
            row["allocated_peak_optimizer_step_gib"] = value

    memory = run_memory(made_up({**GPU, "edit_update": wrong}).runs[0])
    assert memory.readings["allocated", "peak_optimizer_step", 0] < 20
    (note,) = memory.notes
    assert "allocated_peak_optimizer_step_gib" in note
    assert f"{value:g} at step 2" in note


def test_a_lifetime_peak_must_not_fall(made_up: MakeStudy) -> None:
    def falling(row: Row) -> None:
        if row["step"] in (4, 5):
            row["actor/perf/max_memory_allocated_gb"] = 39.0

    (note,) = run_memory(made_up({**GPU, "edit_step": falling}).runs[0]).notes
    assert "falls at step 4:" in note
    assert not run_memory(made_up({**GPU, "seed": 2}).runs[1]).notes


def test_the_steady_state_leaves_out_the_first_update(made_up: MakeStudy) -> None:
    def first_is_small(row: Row) -> None:
        if row["update"] == 1:
            row["rss_after_update_gib"] = 0.001

    memory = run_memory(made_up({"steps": 1, "updates_per_step": 2, "edit_update": first_is_small}).runs[0])
    assert memory.readings["rss", "after_update", 0] > 1


def test_ratios_of_one_pair_and_of_several(made_up: MakeStudy) -> None:
    one = optimizer_step_ratio(made_up({"arm": "baseline"}, {"arm": "pao"}).pairs)
    assert one is not None
    assert one.low < 1.2 < one.high
    assert "says nothing about other runs" in one.basis
    runs = [{"arm": arm, "seed": seed} for seed in (2, 3, 4) for arm in ("baseline", "pao")]
    study = made_up(*runs)
    several = step_ratio(study.pairs)
    assert several is not None
    assert several.ratio == pytest.approx(1.04, rel=1e-3)
    assert several.pairs == 4
    assert "4 pairs" in several.basis


def test_the_slowest_rank_counts(made_up: MakeStudy) -> None:
    def slow(row: Row) -> None:
        row["time_optimizer_step_s"] = 0.1 + 0.3 * row["rank"]

    study = made_up({"arm": "baseline", "dp": 2}, {"arm": "pao", "dp": 2, "edit_update": slow})
    ratio = optimizer_step_ratio(study.pairs)
    assert ratio is not None
    assert ratio.treatment_s == pytest.approx(0.4)


def test_what_observing_took(made_up: MakeStudy) -> None:
    def not_timed(row: Row) -> None:
        del row["time_observer_s"]

    assert observer_time(made_up({"arm": "baseline", "edit_update": not_timed}).runs) is None

    def timed(row: Row) -> None:
        row["time_observer_s"] = (1 if row["step"] == 1 else 0.01) * (1 + row["rank"])

    study = made_up({"arm": "pao", "dp": 2, "steps": 5, "updates_per_step": 2, "edit_update": timed})
    whole = [run.metric("timing_s/step")[1:].sum() for run in study.runs if run.arm == "pao"]
    found = observer_time(study.runs)
    assert found is not None
    assert found.per_update_s == pytest.approx(0.02)
    assert found.share == pytest.approx(4 * 2 * 0.02 / whole[0])
    assert "Observing took 20 ms per optimizer step" in render_report(conclude(study), [])


def test_times_of_two_machines_make_no_ratio(write_study: Callable[..., Path]) -> None:
    folder = write_study({"arm": "baseline"}, {"arm": "pao"})
    for number, run in enumerate(sorted((folder / "runs").iterdir())):
        environment = json_lines.loads((run / "env.json").read_bytes())
        environment["hardware"]["machine"] = f"machine {number}"
        (run / "env.json").write_bytes(json_lines.dumps(environment))
    study = load_study(folder)
    assert study.pairs[0].valid
    assert optimizer_step_ratio(study.pairs) is None
    assert step_ratio(study.pairs) is None
    assert "with pao: its runs were made on two machines" in render_report(conclude(study), [])


def test_no_times_no_ratio(made_up: MakeStudy) -> None:
    untimed = {"edit_step": lambda row: row.pop("timing_s/step"), "steps": 2}
    assert step_ratio(made_up({"arm": "baseline"}, {"arm": "pao", **untimed}).pairs) is None

"""A study may be run again: what succeeded is kept, the rest is tried again, nothing is lost."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.launch.errors import BadInput
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, decide, prepare_folder
from pipeline.study.planning import PlannedRun
from pipeline.study.records import Status

Planned = Callable[..., PlannedRun]


def run_once(run: PlannedRun, study: StudyFolder, state: Any) -> LaunchableRun:
    """Start the run once, and let it end in `state` (None: it never ended)."""
    (launchable,) = decide([run], study, rerun=False)
    prepare_folder(launchable, study)
    if state is not None:
        launchable.folder.write_status(Status(state=state, steps_done=8, started_at=1.0, ended_at=2.0))
    return launchable


def test_a_new_run_starts_as_attempt_1(planned: Planned, study: StudyFolder) -> None:
    (run,) = decide([planned()], study, rerun=False)
    assert (run.kept, run.attempt) == (False, 1)
    assert list(study.path.iterdir()) == []
    prepare_folder(run, study)
    assert run.folder.read_config() == run.planned.config
    assert run.folder.overrides_file.read_text() == "- arm=baseline\n- seed=1\n"


def test_a_succeeded_run_with_the_same_configuration_is_kept(planned: Planned, study: StudyFolder) -> None:
    run_once(planned(), study, "succeeded")
    (run,) = decide([planned()], study, rerun=False)
    assert run.kept


@pytest.mark.parametrize("state", ["failed", "stopped", None])
def test_any_other_run_moves_to_attempts_and_runs_again(
    planned: Planned, study: StudyFolder, state: str | None
) -> None:
    first = run_once(planned(), study, state)
    for attempt in (2, 3):
        (run,) = decide([planned()], study, rerun=False)
        assert (run.kept, run.attempt) == (False, attempt)
        (first.folder.path / "trace").write_text(f"attempt {attempt - 1}")
        prepare_folder(run, study)
        assert not (run.folder.path / "trace").exists()
        former = study.attempts / f"{run.run_id}-a{attempt - 1}"
        assert (former / "trace").read_text() == f"attempt {attempt - 1}"


def test_rerun_runs_a_succeeded_run_again(planned: Planned, study: StudyFolder) -> None:
    run_once(planned(), study, "succeeded")
    (run,) = decide([planned()], study, rerun=True)
    assert (run.kept, run.attempt) == (False, 2)
    prepare_folder(run, study)
    assert run.folder.read_status() is None


def test_a_succeeded_run_with_another_configuration_is_an_error(planned: Planned, study: StudyFolder) -> None:
    run_once(planned(), study, "succeeded")
    with pytest.raises(BadInput) as raised:
        decide([planned(lr=0.5)], study, rerun=False)
    assert "recipe.lr: 0.001 then, 0.5 now" in str(raised.value)
    assert "rerun=true" in str(raised.value)
    (run,) = decide([planned(lr=0.5)], study, rerun=True)
    assert not run.kept


def test_a_failed_run_with_another_configuration_is_simply_run_again(planned: Planned, study: StudyFolder) -> None:
    run_once(planned(), study, "failed")
    (run,) = decide([planned(lr=0.5)], study, rerun=False)
    assert run.attempt == 2


def test_a_status_that_cannot_be_read_is_told(planned: Planned, study: StudyFolder) -> None:
    run = run_once(planned(), study, "succeeded")
    run.folder.status_file.write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        decide([planned()], study, rerun=False)


def test_attempts_of_a_run_whose_name_begins_alike_are_not_counted(planned: Planned, study: StudyFolder) -> None:
    (study.attempts / f"{planned().run_id}-a7x-a3").mkdir(parents=True)
    (study.attempts / f"{planned(seed=11).run_id}-a4").mkdir()
    assert decide([planned()], study, rerun=False)[0].attempt == 1


def test_a_study_that_did_not_start_leaves_no_trace(study: StudyFolder) -> None:
    study.launcher.mkdir()
    (study.launcher / "multirun.yaml").write_text("hydra's")
    study.remove_if_unused()
    assert not study.path.exists()


def test_a_study_with_a_report_is_left_alone(study: StudyFolder) -> None:
    (study.path / "report.md").write_text("kept")
    study.launcher.mkdir()
    study.remove_if_unused()
    assert (study.path / "report.md").exists()

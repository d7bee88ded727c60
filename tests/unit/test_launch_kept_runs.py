"""A study may be run again: what succeeded is kept, the rest is tried again, nothing is lost."""

from pathlib import Path

import pytest

from pipeline.launch.errors import BadInput
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, decide, prepare_folder
from tests.unit.launch_examples import end_run, planned, study_in


def launch(tmp_path: Path, state: str | None) -> tuple[LaunchableRun, Path]:
    """A study whose only run was started once and ended in `state` (None: it never ended)."""
    study = study_in(tmp_path)
    (run,) = decide([planned()], study, rerun=False)
    prepare_folder(run, study)
    if state is not None:
        end_run(study, run.run_id, state)
    return run, study.path


def test_a_new_run_starts_as_attempt_1(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    (run,) = decide([planned()], study, rerun=False)
    assert (run.kept, run.attempt) == (False, 1)
    assert list(study.path.iterdir()) == []
    prepare_folder(run, study)
    assert run.folder.read_config() == run.planned.config
    assert run.folder.overrides_file.read_text() == "- arm=baseline\n- seed=1\n"


def test_a_succeeded_run_with_the_same_configuration_is_kept(tmp_path: Path) -> None:
    launch(tmp_path, "succeeded")
    study = study_in_again(tmp_path)
    (run,) = decide([planned()], study, rerun=False)
    assert run.kept


@pytest.mark.parametrize("state", ["failed", "stopped", None])
def test_any_other_run_moves_to_attempts_and_runs_again(tmp_path: Path, state: str | None) -> None:
    first, path = launch(tmp_path, state)
    study = study_in_again(tmp_path)
    for attempt in (2, 3):
        (run,) = decide([planned()], study, rerun=False)
        assert (run.kept, run.attempt) == (False, attempt)
        (first.folder.path / "trace").write_text(f"attempt {attempt - 1}")
        prepare_folder(run, study)
        assert not (run.folder.path / "trace").exists()
        former = path / "attempts" / f"{run.run_id}-a{attempt - 1}"
        assert (former / "trace").read_text() == f"attempt {attempt - 1}"


def test_rerun_runs_a_succeeded_run_again(tmp_path: Path) -> None:
    launch(tmp_path, "succeeded")
    study = study_in_again(tmp_path)
    (run,) = decide([planned()], study, rerun=True)
    assert (run.kept, run.attempt) == (False, 2)
    prepare_folder(run, study)
    assert run.folder.read_status() is None


def test_a_succeeded_run_with_another_configuration_is_an_error(tmp_path: Path) -> None:
    launch(tmp_path, "succeeded")
    with pytest.raises(BadInput) as raised:
        decide([planned(lr=0.5)], study_in_again(tmp_path), rerun=False)
    assert "recipe.lr: 0.001 then, 0.5 now" in str(raised.value)
    assert "rerun=true" in str(raised.value)
    (run,) = decide([planned(lr=0.5)], study_in_again(tmp_path), rerun=True)
    assert not run.kept


def test_a_failed_run_with_another_configuration_is_simply_run_again(tmp_path: Path) -> None:
    launch(tmp_path, "failed")
    (run,) = decide([planned(lr=0.5)], study_in_again(tmp_path), rerun=False)
    assert run.attempt == 2


def test_a_status_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    run, _ = launch(tmp_path, "succeeded")
    run.folder.status_file.write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        decide([planned()], study_in_again(tmp_path), rerun=False)


def test_attempts_of_a_run_whose_name_begins_alike_are_not_counted(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    (study.attempts / f"{planned().run_id}-a7x-a3").mkdir(parents=True)
    (study.attempts / f"{planned(seed=11).run_id}-a4").mkdir()
    assert decide([planned()], study, rerun=False)[0].attempt == 1


def test_a_study_that_did_not_start_leaves_no_trace(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    study.launcher.mkdir()
    (study.launcher / "multirun.yaml").write_text("hydra's")
    study.remove_if_unused()
    assert not study.path.exists()


def test_a_study_with_a_report_is_left_alone(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    (study.path / "report.md").write_text("kept")
    study.launcher.mkdir()
    study.remove_if_unused()
    assert (study.path / "report.md").exists()


def study_in_again(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path / "results" / "study")

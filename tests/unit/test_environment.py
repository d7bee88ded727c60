"""What env.json says of the stand-ins and the project's commit."""

import subprocess
from pathlib import Path

import pytest

from pipeline.train.environment import COMMIT_VARIABLE, find_environment, git_state


def test_only_the_stand_ins_in_use_are_named() -> None:
    kernel, *others = find_environment("cpu").stand_ins
    assert [stand_in.split(":")[0] for stand_in in (kernel, *others)] == [
        "optimizer kernel",
        "rollout engine",
        "layers",
        "attention",
    ]
    assert find_environment("cpu", optimizer_alone=True).stand_ins == [kernel]


def test_a_checkout_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=n", "-c", "user.email=e@example.invalid")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *name, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "report.md").touch()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    # A copied tree can lie above a checkout that knows nothing of it.
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc")
    assert git_state(tmp_path) == {"commit": "0123abc"}


def test_where_there_is_no_checkout_the_environment_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert git_state(tmp_path) == {}
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc")
    assert git_state(tmp_path) == {"commit": "0123abc"}

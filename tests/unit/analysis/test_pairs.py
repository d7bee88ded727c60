"""A pair differs in the arm alone; every reason why it cannot be judged is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from pipeline.analysis.pairs import load_study

WriteStudy = Callable[..., Path]


def rewrite_json(path: Path, **changes: Any) -> None:
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **changes}))


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    change(config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def keep_lines(path: Path, keep: Callable[[int], bool]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for number, line in enumerate(lines, start=1) if keep(number)))


def fail(folder: Path) -> None:
    failure = {"error": "ValueError: loss went missing", "where": "rank 3", "rank": 3}
    rewrite_json(folder / "status.json", state="failed", failure=failure)


def add_row_twice(folder: Path) -> None:
    lines = (folder / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "steps.jsonl").write_bytes(b"".join([*lines, lines[4]]))


def other_version(folder: Path) -> None:
    packages = orjson.loads((folder / "env.json").read_bytes())["packages"]
    rewrite_json(folder / "env.json", packages={**packages, "megatron-core": "0.13.1"})


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "failed": (fail, "failed (rank 3: ValueError: loss went missing)"),
    "stopped": (lambda f: rewrite_json(f / "status.json", state="stopped", reason="Ctrl-C"), "stopped (Ctrl-C)"),
    "running": (lambda f: (f / "status.json").unlink(), "has not ended"),
    "no ledger": (lambda f: (f / "ledger.json").unlink(), "treatment not checked"),
    "no env": (lambda f: (f / "env.json").unlink(), "versions and hardware are not known"),
    "empty steps": (lambda f: (f / "steps.jsonl").write_bytes(b""), "steps.jsonl holds no row"),
    "missing step": (lambda f: keep_lines(f / "steps.jsonl", lambda number: number != 3), "steps.jsonl lacks step 3"),
    "lost end": (lambda f: keep_lines(f / "steps.jsonl", lambda number: number < 7), "lacks step 7 and 1 more"),
    "begins late": (lambda f: keep_lines(f / "steps.jsonl", lambda number: number > 2), "lacks step 1 and 1 more"),
    "twice": (add_row_twice, "several rows for step 5"),
    "version": (other_version, "versions differ: megatron-core 0.16.1 and 0.13.1"),
    "commit": (lambda f: rewrite_json(f / "env.json", git={"commit": "abc"}), "commit 000000000 and abc"),
    "hardware": (lambda f: rewrite_json(f / "env.json", hardware={"cores": 4}), "hardware differs: processor, cores"),
    "lr": (
        lambda f: rewrite_config(f, lambda c: c["recipe"].update(lr=9.0)),
        "settings differ beside the arm: recipe.lr",
    ),
    "gates": (lambda f: rewrite_config(f, lambda c: c.update(gates_hash="other")), "the gates differ"),
    "resumed": (
        lambda f: rewrite_config(f, lambda c: c["recipe"]["verl"]["trainer"].update(resume_mode="auto")),
        "may have been resumed",
    ),
}


def test_a_pair_that_differs_in_the_arm_alone_is_valid(write_study: WriteStudy) -> None:
    (pair,) = load_study(write_study({"arm": "baseline"}, {"arm": "pao"})).pairs
    assert pair.valid
    assert (pair.baseline.arm, pair.treatment.arm, pair.seed) == ("baseline", "pao", 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_invalid_pair_says_why(write_study: WriteStudy, damage: str) -> None:
    folder = write_study({"arm": "baseline"}, {"arm": "pao"})
    change, told = DAMAGES[damage]
    change(next((folder / "runs").glob("*-pao-*")))
    (pair,) = load_study(folder).pairs
    assert not pair.valid
    assert any(told in reason for reason in pair.reasons), pair.reasons


def test_nan_makes_the_pair_invalid(write_study: WriteStudy) -> None:
    nan = {"edit_step": lambda row: row.update({"critic/rewards/mean": float("nan")})}
    (pair,) = load_study(write_study({"arm": "baseline"}, {"arm": "pao", **nan})).pairs
    assert any("critic/rewards/mean is NaN or infinite from step 1" in reason for reason in pair.reasons)


def test_a_validation_before_training_is_step_0_and_no_gap(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline"}, {"arm": "pao"})
    for steps in (folder / "runs").glob("*/steps.jsonl"):
        steps.write_bytes(b'{"step":0,"val-core/x/acc/mean@1":0.1}\n' + steps.read_bytes())
    assert load_study(folder).pairs[0].valid


def test_swept_values_make_pairs_of_their_own(write_study: WriteStudy) -> None:
    runs = [{"arm": arm, "swept": {"recipe.lr": lr}} for lr in (1e-3, 1e-4) for arm in ("baseline", "pao")]
    study = load_study(write_study(*runs))
    assert [(pair.setting, pair.valid) for pair in study.pairs] == [
        ("recipe.lr=0.0001", True),
        ("recipe.lr=0.001", True),
    ]


def test_a_run_without_a_baseline_is_told(write_study: WriteStudy) -> None:
    study = load_study(write_study({"arm": "pao"}))
    assert not study.pairs
    assert "there is no baseline run" in study.notes[0]


def test_a_folder_that_does_not_say_what_it_is_is_left_out_and_told(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline"})
    (folder / "runs" / "stray").mkdir()
    (folder / "runs" / "odd").mkdir()
    (folder / "runs" / "odd" / "config.yaml").write_text("- a\n- list\n")
    study = load_study(folder)
    assert len(study.runs) == 1
    assert [note.split(" left out")[0] for note in study.notes] == ["odd", "stray"]


def test_reading_in_processes_gives_the_same(write_study: WriteStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_study({"arm": "baseline"}, {"arm": "pao"})
    alone = load_study(folder)
    monkeypatch.setattr("pipeline.analysis.load._WORTH_WORKERS_BYTES", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    called: list[bool] = []
    together = load_study(folder, meanwhile=lambda: called.append(True))
    assert called
    for one, other in zip(alone.runs, together.runs, strict=True):
        assert one.config == other.config
        assert one.notes == other.notes
        assert all((one.updates.columns[name] == other.updates.column(name)).all() for name in ("update", "liveness"))

"""What a reader sees: the answer first, nothing that misleads, and the same bytes every time."""

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.analysis.conclusions import Conclusions, conclude
from pipeline.analysis.dashboard_page import render_dashboard
from pipeline.analysis.figures import Picture
from pipeline.analysis.pairs import load_study
from pipeline.analysis.report import PR_LIMIT, render_pr_comment, render_report
from pipeline.analysis.summary import summarise
from pipeline.analysis.words import brief, shortened
from pipeline.analyze import analyze, main
from pipeline.study import json_lines

WriteStudy = Callable[..., Path]
PICTURES = [Picture("figures/reward.png", "Reward")]
BOTH = ({"arm": "baseline"}, {"arm": "pao"})


def concluded(folder: Path) -> Conclusions:
    return conclude(load_study(folder))


def test_random_weights_are_told_first_and_last(write_study: WriteStudy) -> None:
    made_up = [{**run, "recipe": {"random_weights": True}} for run in BOTH]
    text = render_report(concluded(write_study(*made_up)), PICTURES)
    assert "rewards and parity mean nothing here" in "\n".join(text.split("\n")[:3])
    assert "Anything about learning" in text.split("## What was not shown")[1]
    assert "mean nothing" not in render_report(concluded(write_study(*BOTH, name="trained")), PICTURES)


def test_the_answer_stands_in_the_first_three_lines(write_study: WriteStudy) -> None:
    first = render_report(concluded(write_study(*BOTH)), PICTURES).split("\n")[:3]
    told = " ".join(first)
    for part in ("GiB per worker", "2.00 bytes per parameter", "healthy", "1.04 x", "equivalence not established"):
        assert part in told
    assert "1 of 1 pairs valid" in told


def test_one_pair_establishes_nothing(write_study: WriteStudy) -> None:
    conclusions = concluded(write_study(*BOTH))
    assert summarise(conclusions)["verdicts"]["pao"]["parity"] == "no difference seen; equivalence not established"
    assert "one pair never establishes it" in render_report(conclusions, [])


def test_the_dead_optimizers_report_shouts(write_study: WriteStudy) -> None:
    conclusions = concluded(write_study({"arm": "baseline"}, {"arm": "dead_optimizer"}))
    report = render_report(conclusions, [])
    first = " ".join(report.split("\n")[:3])
    assert "ALARM: 4.00 bytes per parameter gone where this arm can save 2.00" in first
    assert "DEAD OPTIMIZER" in first
    assert "A fault was injected on purpose" in report
    verdict = summarise(conclusions)["verdicts"]["dead_optimizer"]
    wanted = ("not in effect", "dead optimizer", "alarm", "no valid pair")
    assert tuple(verdict[key] for key in ("treatment", "updates", "savings", "parity")) == wanted


def test_the_summary_has_the_agreed_fields(write_study: WriteStudy) -> None:
    summary = summarise(concluded(write_study(*BOTH)))
    assert summary["arms"]["pao"]["bytes_per_param"]["predicted"] == 16
    assert summary["arms"]["pao"]["bytes_per_param"]["found"] == 16
    assert 0 < summary["arms"]["pao"]["liveness"]["min"] <= summary["arms"]["pao"]["liveness"]["median"] < 1
    (pair,) = summary["pairs"]
    assert pair["seed"] == 1
    assert pair["valid"] is True
    assert pair["baseline"].endswith("-baseline-s1")
    assert pair["treatment"].endswith("-pao-s1")
    assert pair["first_difference_step"] == 2
    assert json_lines.loads(json_lines.dumps(summary)) == json_lines.loads(json_lines.dumps(summary))


def test_identical_arms_have_no_first_difference(write_study: WriteStudy) -> None:
    summary = summarise(concluded(write_study({"arm": "baseline"}, {"arm": "baseline_repeat"})))
    assert summary["pairs"][0]["first_difference_step"] is None
    assert not summary["verdicts"]


OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    f"which 460.12 MiB is free. {'Including non-PyTorch memory, this process has 139.34 GiB memory in use. ' * 7}See "
    "the end of this message"
)


def test_a_long_error_stands_in_full_once(write_study: WriteStudy) -> None:
    folder = write_study(*BOTH, {"arm": "pao_bf16_all"})
    for name in ("baseline", "pao"):  # the baseline belongs to two pairs
        run = folder / "runs" / f"grpo-made_up-1n1w-tp1pp1-{name}-s1"
        status = json_lines.loads((run / "status.json").read_bytes())
        status |= {"state": "failed", "failure": {"error": f"{OUT_OF_MEMORY} of {name}", "where": "rank 0"}}
        (run / "status.json").write_bytes(json_lines.dumps(status))
        (run / "updates.jsonl").unlink()
    conclusions = concluded(folder)
    for text in (render_report(conclusions, []), render_pr_comment(conclusions, [])):
        for name in ("baseline", "pao"):
            assert text.count(f"the end of this message of {name}") == 1
        assert "no optimizer step recorded its liveness; the run ended with: rank 0: OutOfMemoryError: CUDA out" in text
        assert text.count("Tried to allocate") == 2
    page = render_dashboard(conclusions)
    assert "CUDA out of memory" in page
    assert "Tried to allocate" not in page


def test_the_first_sentence_is_enough_in_passing() -> None:
    assert brief("OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.") == (
        "OutOfMemoryError: CUDA out of memory"
    )
    assert brief("needs megatron-core 0.16.1 or later.") == "needs megatron-core 0.16.1 or later"
    assert brief("x" * 500) == f"{'x' * 159}…"


def test_arms_that_were_not_compared_are_not_called_the_same(write_study: WriteStudy) -> None:
    folder = write_study(*BOTH)
    for rows in ("steps.jsonl", "updates.jsonl"):
        (folder / "runs" / "grpo-made_up-1n1w-tp1pp1-pao-s1" / rows).unlink()
    conclusions = concluded(folder)
    report = render_report(conclusions, [])
    assert "| pao | 1 | – | not compared: the pair is not valid | – |" in report
    assert "no difference in any metric" not in report
    assert summarise(conclusions)["pairs"][0]["compared"] is False


def test_a_study_without_treatment_still_has_diagnoses(write_study: WriteStudy) -> None:
    report = render_report(concluded(write_study({"updates_per_step": 1})), [])
    assert "on-policy by design" in "".join(report.split("\n")[:3])


def test_the_pr_comment_is_the_test_section(write_study: WriteStudy) -> None:
    conclusions = concluded(write_study(*BOTH))
    comment = render_pr_comment(conclusions, PICTURES, "https://example.org/x/")
    assert comment.startswith("### Test\n")
    assert "![Reward](https://example.org/x/figures/reward.png)" in comment
    assert "![Reward](figures/reward.png)" in render_pr_comment(conclusions, PICTURES)
    assert "actor_rollout_ref.actor.optim.use_precision_aware_optimizer=true" in comment
    assert "actor_rollout_ref.actor.optim.lr=0.001" in comment
    assert "python -m pipeline.sweep arm=baseline,pao seed=1" in comment
    for version in ("verl 0.9.1", "megatron-core 0.16.1", "transformer-engine 2.12.0"):
        assert version in comment


@pytest.mark.parametrize(("many", "length"), [(1, 100_000), (200, 3000), (5000, 20)])
def test_the_pr_comment_fits_whatever_the_study_says(write_study: WriteStudy, many: int, length: int) -> None:
    conclusions = concluded(write_study(*BOTH))
    run = conclusions.study.runs[0]
    run.notes.extend(f"note {i} {'x' * length}" for i in range(many))
    run.config.recipe["verl"].update({f"key{i}": "y" * length for i in range(many)})
    comment = render_pr_comment(conclusions, PICTURES)
    assert len(comment) <= PR_LIMIT
    assert "note 0" in comment


def test_a_report_leaves_the_machine_without_its_paths() -> None:
    assert shortened("FileNotFoundError: /home/someone/secret/project/model/config.json is gone") == (
        "FileNotFoundError: …/model/config.json is gone"
    )
    assert shortened("see https://example.org/a/b/c/d and critic/rewards/mean") == (
        "see https://example.org/a/b/c/d and critic/rewards/mean"
    )


@pytest.mark.slow
def test_twice_gives_the_same_bytes_and_old_pictures_go(write_study: WriteStudy) -> None:
    folder = write_study(*BOTH, {"arm": "baseline_repeat"})
    analyze(folder)
    (folder / "figures" / "old.png").write_bytes(b"of an older analysis")
    first = {path.name: path.read_bytes() for path in folder.rglob("*.*") if path.name != "old.png"}
    subprocess.run([sys.executable, "-m", "pipeline.analyze", str(folder)], check=True, capture_output=True)
    second = {path.name: path.read_bytes() for path in folder.rglob("*.*")}
    assert first == second
    pictures = re.findall(r"\]\((figures/[^)]+)\)", (folder / "report.md").read_text())
    assert sorted(pictures) == sorted(f"figures/{path.name}" for path in (folder / "figures").iterdir())
    assert len(pictures) == 9


@pytest.mark.slow
def test_pr_prints_the_comment_and_nothing_else(write_study: WriteStudy, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_study(*BOTH)
    assert main([str(folder), "--pr", "--image-prefix", "https://example.org/"]) == 0
    printed = capsys.readouterr().out
    assert printed == (folder / "pr_comment.md").read_text()
    assert "https://example.org/figures/ledger.png" in printed


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "is not a folder"),
        (lambda path: path.mkdir(), "is not a study's folder"),
        (lambda path: [path.mkdir(), (path / "summary.json").touch()], "kept in git only the report is there"),
        (lambda path: (path / "runs").mkdir(parents=True), "holds no run that can be read: it is empty"),
        (lambda path: (path / "runs" / "a").mkdir(parents=True), "a left out: config.yaml cannot be read"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    tmp_path: Path, make: Callable[[Path], Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "study")
    assert main([str(tmp_path / "study")]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.startswith("error: ")
    assert not printed.out


COUNTER = count()
FILES = ("steps.jsonl", "updates.jsonl", "ledger.json", "env.json", "status.json", "config.yaml", "overrides.yaml")
damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("remove"), st.just(0.0)),
    st.tuples(st.just("empty"), st.just(0.0)),
    st.tuples(st.sampled_from([b"null", b'"NaN"', b"-1", b"1e999", b"{}", b"\xff", b'"x"', b"true"]), st.floats(0, 1)),
)


def apply(path: Path, how: Any, where: float) -> None:
    content = path.read_bytes()
    at = int(where * len(content))
    if how == "remove":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[:at])
    else:  # put a value in place of the next number
        number = re.search(rb"\d[\d.e-]*", content[at:])
        if number:
            path.write_bytes(content[: at + number.start()] + how + content[at + number.end() :])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), what=damage)
def test_damaged_files_never_crash_the_analysis_and_what_is_missing_is_told(
    write_study: WriteStudy, file: str, what: tuple[Any, float]
) -> None:
    small = {"steps": 3, "updates_per_step": 2}
    folder = write_study(*({**run, **small} for run in BOTH), name=f"damaged_{next(COUNTER)}")
    path = next((folder / "runs").glob("*-pao-*")) / file
    apply(path, *what)
    conclusions = concluded(folder)
    summary = summarise(conclusions)
    report = render_report(conclusions, [])
    assert render_pr_comment(conclusions, []).startswith("### Test")
    assert render_dashboard(conclusions).endswith("</html>")
    orjson.loads(json_lines.dumps(summary))
    if what[0] in ("remove", "empty") and file != "config.yaml":
        assert file in report
    if what[0] in ("remove", "empty") and file not in ("overrides.yaml", "config.yaml"):
        assert not summary["pairs"][0]["valid"]


def test_each_setting_of_an_arm_has_its_own_diagnosis(write_study: WriteStudy) -> None:
    def still(row: dict[str, Any]) -> None:
        row.update(liveness=0.0, elements_changed=0, tensors_still=row["tensors"])

    study = write_study(
        {"arm": "pao", "swept": {"control": "dead"}, "edit_update": still},
        {"arm": "pao", "swept": {"control": "none"}},
    )
    analysed = analyze(study)
    assert analysed.summary["arms"]["pao"]["diagnosis_by_setting"] == {
        "control=dead": "dead optimizer",
        "control=none": "healthy",
    }
    assert "updates: DEAD OPTIMIZER (control=dead), healthy (control=none)" in analysed.one_line
    report = analysed.report.read_text()
    assert "| pao (control=none) | **healthy** |" in report
    assert "pao (control=dead): grad_norm, gradient clipping" in report

"""The optimizer probe from its command to the analysis, on host memory with the tiny shape."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.analysis.conclusions import Conclusions, conclude
from pipeline.analysis.pairs import load_study
from pipeline.analysis.provenance import reproduce_command
from pipeline.analysis.report import render_report
from pipeline.study import json_lines
from pipeline.train import optimizer_probe
from pipeline.train.probe_shapes import SHAPES
from pipeline.train.probe_worker import step_bytes_per_parameter

pytestmark = pytest.mark.slow

ARMS = ("baseline", "pao", "pao_bf16_moments", "pao_bf16_all", "dead_optimizer")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.train.optimizer_probe", "--study", "probe", "--shape", "tiny",
         "--device", "cpu", "--lr", "1e-4", "--steps", "2", "--overhead-micro-batches", "2", "--arms", ",".join(ARMS),
         "--results-dir", str(results)],
        cwd=optimizer_probe.PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return results / "probe"


@pytest.fixture(scope="module")
def conclusions(study: Path) -> Conclusions:
    return conclude(load_study(study))


def test_the_diagnosis_tells_the_dead_from_the_living(conclusions: Conclusions) -> None:
    outcomes = {name: arm.diagnosis.outcome for name, arm in conclusions.arms.items()}
    assert outcomes == {name: "dead optimizer" if name == "dead_optimizer" else "healthy" for name in ARMS}


@pytest.mark.parametrize(
    ("arm", "expected"), [("baseline", 18), ("pao", 16), ("pao_bf16_moments", 12), ("pao_bf16_all", 10)]
)
def test_bytes_per_parameter(conclusions: Conclusions, arm: str, expected: int) -> None:
    ledger = conclusions.arms[arm].ledger
    assert ledger is not None
    assert ledger.predicted == expected
    assert ledger.found == pytest.approx(expected, rel=0.01)


def test_a_dead_optimizer_saves_more_than_it_can(conclusions: Conclusions) -> None:
    verdict = conclusions.verdicts["dead_optimizer"]
    assert verdict.savings.outcome == "alarm"
    assert verdict.savings.found == pytest.approx(4, abs=0.05)


def test_every_arm_gets_the_same_first_gradient(conclusions: Conclusions) -> None:
    norms = {run.arm: float(run.updates.column("grad_norm")[0]) for run in conclusions.study.runs}
    # Megatron takes the norm of bf16 main gradients in bf16.
    assert norms.pop("pao_bf16_all") == pytest.approx(norms["baseline"], rel=2**-8)
    assert len(set(norms.values())) == 1, norms


def test_the_report_names_the_only_stand_in(conclusions: Conclusions) -> None:
    report = render_report(conclusions, [])
    stood = (
        "In place of the GPU stack stood: optimizer kernel: a PyTorch reference of TransformerEngine's FusedAdam. Mem"
    )
    assert stood in report
    assert "SGLang" not in report


def test_drift_is_zero_in_the_first_mini_batch_and_not_later(conclusions: Conclusions) -> None:
    for run in conclusions.study.runs:
        first = run.updates.column("mini_batch") == 0
        drift = run.updates.column("ppo_kl")
        assert not drift[first].any(), run.id
        assert drift[~first].any() == (run.arm != "dead_optimizer"), run.id


def test_times_and_bytes_are_written(study: Path) -> None:
    for run in (study / "runs").iterdir():
        speed = json_lines.loads((run / "bandwidth.json").read_bytes())
        assert speed["parameters"] == SHAPES["tiny"].parameters
        assert speed["optimizer_step_s"]["n"] == 2 * 4 - 1
        assert speed["ratio"] == pytest.approx(speed["optimizer_step_s"]["median"] / speed["floor_s"])
        overhead = json_lines.loads((run / "probe_overhead.json").read_bytes())
        assert len(overhead["with_observer_s"]) == len(overhead["without_s"]) == overhead["pairs"]
        assert overhead["tokens_per_update"] == 2 * 256
    assert len((study / "optimizer_steps.md").read_text().splitlines()) == 4 + len(ARMS) + 5


def test_the_report_tells_its_own_command(conclusions: Conclusions) -> None:
    expected = (
        "python -m pipeline.train.optimizer_probe --study probe --shape tiny"
        f" --arms {','.join(ARMS)} --steps 2 --overhead-micro-batches 2 --lr 0.0001 --device cpu"
    )
    assert reproduce_command(conclusions.study) == expected


def test_what_observing_took_is_in_every_row(conclusions: Conclusions) -> None:
    for run in conclusions.study.runs:
        assert (run.updates.column("time_observer_s") > 0).all(), run.id
        assert not run.notes, run.id


def test_bytes_to_move(conclusions: Conclusions) -> None:
    totals = {}
    for run in conclusions.study.runs:
        assert run.ledger is not None
        kinds = step_bytes_per_parameter(run.ledger.ranks[0].entries)
        totals[run.arm] = {name: sum(sizes.values()) for name, sizes in kinds.items()}
    assert totals["baseline"] == {"read": 8 + 4 + 8, "written": 2 + 4 + 8}
    assert totals["pao"] == {"read": 8 + 4 + 8, "written": 4 + 8}
    assert totals["pao_bf16_moments"] == {"read": 8 + 4 + 4, "written": 4 + 4}
    assert totals["pao_bf16_all"] == {"read": 4 + 4 + 4, "written": 4 + 4}


def test_a_second_call_keeps_what_succeeded(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--study", study.name, "--shape", "tiny", "--device", "cpu", "--results-dir", str(study.parent)]
    arguments += ["--arms", "baseline", "--lr", "1e-4", "--overhead-micro-batches", "2"]
    assert optimizer_probe.main([*arguments, "--steps", "2"]) == 0
    assert "succeeded before, kept" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        optimizer_probe.main([*arguments, "--steps", "5"])
    assert ended.value.code == 2
    assert "recipe.steps: 2 then, 5 now" in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--study", "late", "--shape", "tiny", "--device", "cpu", "--results-dir", str(tmp_path)]
    assert optimizer_probe.main([*arguments, "--arms", "pao", "--timeout-s", "1"]) == 1
    assert "did not end within 1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--study", "x", "--shape", "177m", "--device", "cpu"], "--shape 177m needs a GPU"),
        (["--study", "x", "--shape", "tiny", "--arms", "pao,nonsense"], "--arms nonsense: known arms are baseline"),
        (["--study", "../x", "--shape", "tiny"], "cannot name a folder"),
        (["--study", "x", "--shape", "tiny", "--steps", "0"], "0: a whole number from 1 on is needed"),
        (["--study", "x", "--shape", "tiny", "--seed", "-1"], "-1: a whole number from 0 on is needed"),
        (["--study", "x", "--shape", "tiny", "--lr", "nan"], "nan: a number from 0 on is needed"),
        (["--study", "x", "--shape", "tiny", "--device", "cpu", "--arms", "pao,pao"], "an arm is named twice"),
        (
            ["--study", "x", "--shape", "tiny", "--device", "cpu", "--results-dir", "/proc/x"],
            "/proc/x/x: cannot write there",
        ),
    ],
)
def test_bad_input(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        optimizer_probe.main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_qwen2_7b_has_its_parameters() -> None:
    assert SHAPES["qwen2_7b"].parameters == 7_615_616_512

"""The probes where they matter: TransformerEngine's FusedAdam, torch's allocator, NVML."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.analysis.conclusions import Conclusions, conclude
from pipeline.analysis.pairs import load_study
from pipeline.study import json_lines
from pipeline.study.paths import PROJECT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def conclusions(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    results = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.train.optimizer_probe", "--study", "probe", "--shape", "177m", "--steps", "1",
         "--results-dir", str(results)],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return conclude(load_study(results / "probe"))


def test_nothing_is_substituted(conclusions: Conclusions) -> None:
    for run in conclusions.study.runs:
        assert run.ledger is not None
        assert run.ledger.optimizer.inner_class.startswith("transformer_engine."), run.id
        assert run.environment is not None
        assert run.environment.platform == "cuda"
        assert not run.environment.stand_ins


@pytest.mark.parametrize(
    ("arm", "expected"), [("baseline", 18), ("pao", 16), ("pao_bf16_moments", 12), ("pao_bf16_all", 10)]
)
def test_bytes_per_parameter(conclusions: Conclusions, arm: str, expected: int) -> None:
    ledger = conclusions.arms[arm].ledger
    assert ledger is not None
    assert ledger.found == pytest.approx(expected, rel=0.01)
    assert conclusions.arms[arm].diagnosis.outcome == "healthy"


def test_the_allocator_agrees_with_the_ledger(conclusions: Conclusions) -> None:
    """Held after the first optimizer step: the counted tensors, and little else."""
    for run in conclusions.study.runs:
        assert run.ledger is not None
        (rank,) = run.ledger.ranks
        counted = sum(entry.bytes for entry in rank.entries) / 2**30
        assert counted <= rank.memory.after_first_update_gib <= counted + 0.25, run.id


def test_the_observer_is_small(conclusions: Conclusions) -> None:
    for run in conclusions.study.runs:
        overhead = json_lines.loads((Path(run.folder.path) / "probe_overhead.json").read_bytes())
        assert overhead["memory_kept_mib"] <= overhead["memory_at_most_mib"] <= 64, run.id


def test_the_checksums_see_one_bit_in_the_last_element() -> None:
    import torch

    from pipeline.callbacks.liveness import ChecksumsAndSample, bits

    parameters = [torch.randn(3 * 2**22 + 5, device="cuda").bfloat16(), torch.randn(7, device="cuda").bfloat16()]
    probe = ChecksumsAndSample(parameters)
    assert probe.after_step().tensors_still == 2
    bits(parameters[0])[-1] ^= 1
    found = probe.after_step()
    assert found.tensors_still == 1
    assert found.tensors == 2


def test_verl_takes_the_observed_engine(tmp_path: Path) -> None:
    code = (
        "import os; os.environ['PIPELINE_RUN_FOLDER'] = os.getcwd(); open('config.yaml', 'w').write(CONFIG)\n"
        "import verl, verl.workers.engine\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "print('found', EngineRegistry.get_engine_cls('language_model', 'megatron').__name__)\n"
    )
    config = "".join(f"{key}: {{}}\n" for key in ("arm", "recipe", "cluster", "tracking", "gates"))
    config += "study_name: s\nrun_id: r\npair: p\nseed: 1\ngates_hash: x\n"
    done = subprocess.run(
        [sys.executable, "-c", f"CONFIG = {config!r}\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "pipeline.train.plugin"},
    )  # fmt: skip
    assert "found ObservedEngine" in done.stdout, done.stderr

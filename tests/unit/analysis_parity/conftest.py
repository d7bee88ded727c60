"""Made-up studies in memory, and the simulation script as a module."""

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.analysis.columns import NonFinite, Table
from pipeline.analysis.gates import Gates, read_gates
from pipeline.analysis.load import Pair, Run, Study
from pipeline.study.gates_hash import gates_hash
from pipeline.study.records import RunConfig, Status
from pipeline.study.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]

Values = Mapping[str, Sequence[float]]
MakeRun = Callable[..., Run]
MakeStudy = Callable[..., Study]


@pytest.fixture(scope="session")
def default_gates() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf/gates/default.yaml").read_text())


@pytest.fixture
def raw_gates(default_gates: dict[str, Any]) -> dict[str, Any]:
    """conf/gates/default.yaml, to be changed at will."""
    return copy.deepcopy(default_gates)


@pytest.fixture
def gates(raw_gates: dict[str, Any]) -> Gates:
    return read_gates(raw_gates)


@pytest.fixture
def make_run(raw_gates: dict[str, Any]) -> MakeRun:
    """A run from its metrics' values at steps 1, 2, ..."""

    def make(
        arm: str,
        seed: int,
        values: Values,
        *,
        swept: dict[str, Any] | None = None,
        run_gates: dict[str, Any] | None = None,
        stored_hash: str | None = None,
        state: str = "succeeded",
    ) -> Run:
        used = raw_gates if run_gates is None else run_gates
        suffix = "".join(f"-{value}" for value in (swept or {}).values())
        config = RunConfig(
            study_name="made-up",
            run_id=f"{arm}-s{seed}{suffix}",
            pair=f"s{seed}{suffix}",
            seed=seed,
            swept=swept or {},
            arm={"name": arm, "verl": {}},
            recipe={"name": "made-up", "verl": {}},
            cluster={},
            tracking={},
            gates=used,
            gates_hash=stored_hash or gates_hash(used),
        )
        columns = {name: np.array(column, dtype=np.float64) for name, column in values.items()}
        length = len(next(iter(columns.values())))
        non_finite = [
            NonFinite(name, int(np.flatnonzero(~np.isfinite(column))[0]) + 1, int((~np.isfinite(column)).sum()))
            for name, column in columns.items()
            if name.startswith("actor/") and not np.isfinite(column).all()
        ]
        steps = Table({"step": np.arange(1.0, length + 1), **columns}, non_finite=non_finite)
        status = Status(state=state, steps_done=length, started_at=0, ended_at=1)  # type: ignore[arg-type]
        return Run(RunFolder(Path(config.run_id)), config, None, status, None, [], steps, Table({"step": np.empty(0)}))

    return make


@pytest.fixture
def make_study() -> MakeStudy:
    """A study from its runs, paired by seed and swept values."""

    def make(runs: Sequence[Run], reasons: Mapping[str, list[str]] | None = None) -> Study:
        baselines = {run.config.pair: run for run in runs if run.arm == "baseline"}
        pairs = [
            Pair(run.config.pair, baselines[run.config.pair], run, list((reasons or {}).get(run.id, [])))
            for run in runs
            if run.arm != "baseline"
        ]
        return Study(Path("made-up"), list(runs), pairs, [])

    return make


@pytest.fixture(scope="session")
def simulation() -> ModuleType:
    """scripts/simulate_parity.py (scripts/ is no package)."""
    spec = importlib.util.spec_from_file_location("simulate_parity", ROOT / "scripts/simulate_parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

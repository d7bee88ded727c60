"""Made-up studies, written by the same generator that scripts/generate_large_study.py offers."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.analysis.load import Study
from pipeline.analysis.pairs import load_study

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "generate_large_study.py"


def load_generator() -> ModuleType:
    """The script as a module (a package named `scripts` may stand elsewhere on the path)."""
    name = "generate_large_study"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    return load_generator()


@pytest.fixture
def write_study(tmp_path: Path, generator: ModuleType) -> Callable[..., Path]:
    """Write a study of the given MadeUpRun arguments; returns its folder."""

    def write(*runs: dict[str, object], name: str = "made_up") -> Path:
        for run in runs:
            generator.write_run(tmp_path / name, generator.MadeUpRun(**run))
        return tmp_path / name

    return write


@pytest.fixture
def made_up(write_study: Callable[..., Path]) -> Callable[..., Study]:
    """A study of the given MadeUpRun arguments, written and read."""
    return lambda *runs: load_study(write_study(*runs))

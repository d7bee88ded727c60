"""Which parts may be imported without the heavy packages, and which way dependencies point."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: this one may have imported anything. argv: packages to refuse, modules to import with all
# that lies below them.
IMPORTER = """
import importlib, pkgutil, sys

refused = sys.argv[1].split(",")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError(f"{name} is not for this part")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
        print(found.name)
"""


def import_without(refused: str, *modules: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTER, refused, *modules], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("package", ["pipeline.study", "pipeline.analysis"])
def test_study_and_analysis_need_no_training_packages(package: str) -> None:
    imported = import_without("torch,ray,wandb,verl,megatron,transformers", package)
    assert imported, f"{package} has no modules"


def test_without_w_and_b_training_and_tracking_import_as_well() -> None:
    """With tracking=disabled nothing touches wandb: whoever needs it imports it in a function.

    But for workspace and written_report, made of wandb-workspaces' parts, which `create` imports in a function.
    """
    modules = [f"pipeline.tracking.{name}" for name in ("mirror", "mirror_process", "sync", "create", "api_key")]
    import_without("torch,ray,wandb,verl", *modules, "pipeline.dashboard")
    with pytest.raises(AssertionError, match="wandb is not for this part"):
        import_without("wandb", "pipeline.tracking.workspace")
    import_without("wandb", "pipeline.callbacks.wandb_monitor")


def test_launching_needs_neither_torch_nor_verl() -> None:
    imported = import_without("torch,verl,megatron,transformers", "pipeline.launch", "pipeline.sweep")
    assert "pipeline.launch.jobs" in imported


def test_the_importer_refuses() -> None:
    with pytest.raises(AssertionError, match="json is not for this part"):
        import_without("json", "json.decoder")


# Part: the other parts that it may import.
MAY_IMPORT = {
    "study": set[str](),
    "tracking": {"study"},
    "callbacks": {"study", "tracking"},
    "embedded": {"study", "callbacks"},
    "train": {"study", "callbacks", "tracking"},
    "launch": {"study"},
    "analysis": {"study"},
}
EXCEPTIONS = {
    # Only the verl plugin, and only when the platform is cpu, brings in the stand-ins.
    ("pipeline/train/plugin.py", "embedded"),
    # `pipeline.dashboard create`, which no training process imports, shows what dashboard.html shows.
    ("pipeline/tracking/study_in_wandb.py", "analysis"),
    ("pipeline/tracking/workspace.py", "analysis"),
}


def parts_imported(file: Path) -> set[str]:
    parts: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "pipeline":
            names = [f"pipeline.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("pipeline.")}
    return parts


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_dependencies_point_one_way(part: str) -> None:
    files = sorted((ROOT / "pipeline" / part).rglob("*.py"))
    assert files
    wrong = {
        (file.relative_to(ROOT).as_posix(), imported)
        for file in files
        for imported in parts_imported(file) - {part} - MAY_IMPORT[part]
    }
    assert wrong <= EXCEPTIONS

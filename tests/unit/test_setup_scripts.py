"""The set-up scripts, run for real on a small project whose packages are made here: no network is touched."""

import ensurepip
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"

PYPROJECT = """
[build-system]
requires = []
build-backend = "build_it"
backend-path = ["."]
"""

# A build backend in a few lines, in place of setuptools, which would have to be downloaded.
BUILD_IT = """
import pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(pathlib.Path(folder, "paired_grpo-0.1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("paired_grpo.pth", str(pathlib.Path.cwd()))
        info = "paired_grpo-0.1.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: paired-grpo\\nVersion: 0.1\\n"
            "Requires-Dist: counter\\n"
            "Provides-Extra: embedded\\nRequires-Dist: pretend-torch; extra == 'embedded'\\n"
            "Provides-Extra: test\\nRequires-Dist: pretend-pytest; extra == 'test'\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "paired_grpo-0.1-py3-none-any.whl"
"""


def add_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """A package with one module, `<name>.version`."""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = '{version}'\n")
        requirement = f"Requires-Dist: {requires}\n" if requires else ""
        info = f"{name}-{version}.dist-info/"
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirement}")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


class Project:
    """A folder with the real scripts and a small project around them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.pins = root / "constraints" / f"python{MINOR}.txt"
        self.state = root / ".venv" / "setup.json"
        self.log = root / ".cache" / "setup" / "install.log"
        for folder in (self.wheels, self.pins.parent, root / "scripts", root / "pipeline"):
            folder.mkdir(parents=True)
        for name in ("setup_env.py", "sweep.sh"):
            shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "build_it.py").write_text(BUILD_IT)
        (root / "pipeline" / "sweep.py").write_text("import sys, pretend_torch; print(sys.argv[1:])")
        (root / "requirements-no-deps.txt").write_text("pretend_verl==1\n")
        self.pin("counter==1", "pretend_torch==1", "pretend_pytest==1")
        add_wheel(self.wheels, "counter", "1")
        add_wheel(self.wheels, "counter", "2")
        add_wheel(self.wheels, "pretend_torch", "1")
        add_wheel(self.wheels, "pretend_torch", "2")
        add_wheel(self.wheels, "pretend_pytest", "1")
        add_wheel(self.wheels, "pretend_verl", "1", requires="does_not_exist")

    def pin(self, *pins: str) -> None:
        self.pins.write_text("\n".join([f"pip=={ensurepip.version()}", *pins]))

    def start(self, *command: str, **environment: str) -> "subprocess.Popen[str]":
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
        clean |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=clean | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        process = self.start(*command, **environment)
        said, _ = process.communicate(timeout=900)
        return process.returncode, said

    def set_up(self, *parts: str) -> tuple[int, str]:
        return self.run(sys.executable, "scripts/setup_env.py", *parts)

    def parts(self) -> list[str]:
        return json.loads(self.state.read_text())["parts"]

    def installed_version(self, module: str) -> str:
        status, said = self.run(".venv/bin/python", "-c", f"import {module}; print({module}.version)")
        return said.strip() if status == 0 else "absent"

    def venv_id(self) -> int:
        return (self.root / ".venv" / "pyvenv.cfg").stat().st_ino


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project in which `embedded` is installed; tests that take it leave it so."""
    project = Project(tmp_path_factory.mktemp("embedded") / "project")
    status, said = project.set_up("embedded")
    assert status == 0, said
    yield project
    assert project.parts() == ["embedded"]


def test_an_unknown_part_is_refused(project: Project) -> None:
    status, said = project.set_up("embeded")
    assert status == 2
    assert "unknown part embeded; there are analysis, embedded, test" in said
    assert not (project.root / ".venv").exists()


def test_a_python_that_does_not_suit_is_refused(project: Project) -> None:
    script = project.root / "scripts" / "setup_env.py"
    script.write_text(script.read_text().replace('SUPPORTED = ("3.11", "3.12", "3.10")', 'SUPPORTED = ("2.7",)'))
    status, said = project.run(sys.executable, "scripts/setup_env.py", PYTHON=sys.executable)
    assert status == 2
    assert "does not suit" in said
    assert "PYTHON=python3.11" in said


def key_of(project: Project) -> str:
    spec = importlib.util.spec_from_file_location("setup_env", project.root / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.key_of(f"{MINOR}.0")


@pytest.mark.parametrize(
    ("file", "added", "matters"),
    [
        ("pyproject.toml", "\n[project.optional-dependencies]\nmore = ['counter']\n", True),
        ("pyproject.toml", "\n[tool.setuptools]\npackage-dir = { '' = 'src' }\n", True),
        ("pyproject.toml", "\n[tool.ruff]\nline-length = 100\n", False),
        (f"constraints/python{MINOR}.txt", "\nsix==1.17.0", True),
        ("constraints/python3.0.txt", "six==1.17.0", False),
        ("requirements-no-deps.txt", "six==1.17.0", True),
    ],
)
def test_what_makes_an_installation_outdated(project: Project, file: str, added: str, matters: bool) -> None:
    before = key_of(project)
    with (project.root / file).open("a") as text:
        text.write(added)
    assert (key_of(project) != before) == matters


@pytest.mark.slow
def test_sweep_sh_starts_the_program_at_once_when_all_is_there(embedded: Project) -> None:
    log = embedded.log.read_text()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, said = embedded.run("scripts/sweep.sh", "arm=pao", "a key=1", PYTHON=sys.executable)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status == 0
    assert said.strip() == "['arm=pao', 'a key=1']"
    # Seconds of CPU, not of the clock: other programs may keep the machine busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert embedded.log.read_text() == log, "something was installed again"


@pytest.mark.slow
def test_analysis_needs_nothing_more_where_embedded_is_installed(embedded: Project) -> None:
    assert embedded.set_up() == (0, "")


@pytest.mark.slow
def test_listed_packages_are_installed_without_their_dependencies(embedded: Project) -> None:
    assert embedded.installed_version("pretend_verl") == "1"


@pytest.mark.slow
def test_analysis_alone_brings_no_training_packages(project: Project) -> None:
    status, said = project.set_up()
    assert status == 0, said
    assert project.installed_version("counter") == "1"
    assert project.installed_version("pretend_torch") == "absent"


@pytest.mark.slow
def test_changed_pins_reach_a_venv_that_is_there(project: Project) -> None:
    project.set_up("embedded")
    venv = project.venv_id()
    project.pin("counter==2", "pretend_torch==2", "pretend_pytest==1")
    status, said = project.set_up("embedded")
    assert status == 0, said
    assert project.installed_version("counter") == "2"
    assert project.installed_version("pretend_torch") == "2"
    assert project.venv_id() == venv


@pytest.mark.slow
def test_a_failed_part_is_told_and_repeated_alone(project: Project) -> None:
    (project.wheels / "pretend_pytest-1-py3-none-any.whl").rename(project.root / "elsewhere.whl")
    status, said = project.set_up("embedded", "test")
    assert status == 1
    assert "FAILED while installing the packages of 'test'" in said
    assert "depends on pretend-pytest" in said, "what pip said is not shown"
    assert ".cache/setup/install.log" in said
    assert "give the same command again" in said
    assert project.parts() == ["embedded"]

    venv = project.venv_id()
    (project.root / "elsewhere.whl").rename(project.wheels / "pretend_pytest-1-py3-none-any.whl")
    status, said = project.set_up("embedded", "test")
    assert status == 0
    assert "installing test for" in said
    assert project.parts() == ["embedded", "test"]
    assert project.venv_id() == venv


@pytest.mark.slow
def test_a_failed_first_installation_is_not_trusted(project: Project) -> None:
    project.pin("counter==3")
    status, _ = project.set_up()
    assert status == 1
    assert not project.state.exists()

    project.pin("counter==1")
    status, said = project.set_up()
    assert status == 0
    assert ".venv is made anew: it is incomplete" in said
    assert project.parts() == ["analysis"]


# Installing it takes as long as the test wants: its build waits until it is killed.
SLOW_BUILD = """
import pathlib, time

def build_wheel(*_, **__):
    pathlib.Path(r"{started}").touch()
    time.sleep(900)
"""


@pytest.mark.slow
def test_a_killed_installation_is_made_anew(project: Project, tmp_path: Path) -> None:
    started = tmp_path / "started"
    (project.wheels / "counter-1-py3-none-any.whl").rename(project.root / "elsewhere.whl")
    with zipfile.ZipFile(project.wheels / "counter-1.zip", "w") as source:
        source.writestr("counter-1/pyproject.toml", PYPROJECT)
        source.writestr("counter-1/build_it.py", SLOW_BUILD.format(started=started))
    process = project.start(sys.executable, "scripts/setup_env.py")
    deadline = time.monotonic() + 900
    while not started.exists():
        assert time.monotonic() < deadline, "the build never started"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not project.state.exists()

    (project.wheels / "counter-1.zip").unlink()
    (project.root / "elsewhere.whl").rename(project.wheels / "counter-1-py3-none-any.whl")
    status, said = project.set_up()
    assert status == 0, said
    assert "made anew" in said
    assert project.installed_version("counter") == "1"


@pytest.mark.slow
def test_two_at_once_install_once(project: Project) -> None:
    both = [project.start(sys.executable, "scripts/setup_env.py", "embedded") for _ in range(2)]
    said = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("waiting until it is done" in text for text in said) == [False, True]
    assert sum("installing embedded" in text for text in said) == 1


@pytest.mark.slow
def test_a_venv_from_elsewhere_is_made_anew(project: Project, tmp_path: Path) -> None:
    project.set_up()
    copy = Project(tmp_path / "copy")
    shutil.copytree(project.root / ".venv", copy.root / ".venv", symlinks=True)
    status, said = copy.set_up()
    assert status == 0
    assert f"it was made for {project.root}" in said
    assert json.loads(copy.state.read_text())["root"] == str(copy.root)

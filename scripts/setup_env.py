#!/usr/bin/env python3
"""Make .venv and install the pinned packages for the named parts; when all is there, do nothing (and fast).

    python3 scripts/setup_env.py [analysis] [embedded] [test]

analysis: reads run folders and writes reports; no torch (the default). embedded: trains, without a GPU. test: the tools
that scripts/test.sh calls. Needs Python 3.10, 3.11 or 3.12 with its venv module, and nothing else. The interpreter that
runs this file is the one that .venv gets. The environment variable PYTHON says that it was chosen on purpose: then a
.venv of another version of Python is made anew.

Exit status: 0 all is installed; 1 an installation failed; 2 no suitable Python or an unknown part; 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
# What is installed. It is absent while anything is being changed, so a .venv without it is not to be trusted.
STATE = VENV / "setup.json"
WORK = ROOT / ".cache" / "setup"
LOG = WORK / "install.log"
NO_DEPS = ROOT / "requirements-no-deps.txt"

PARTS = ("analysis", "embedded", "test")
SUPPORTED = ("3.11", "3.12", "3.10")  # the one that is tested most comes first


class SetupError(Exception):
    """Message for the user: what failed, where, what to do. `status` is the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def say(text: str) -> None:
    print(f"Set-up: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parts: list[str] = parser.parse_args().parts or ["analysis"]
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    try:
        WORK.mkdir(parents=True, exist_ok=True)
        with (WORK / "lock").open("w") as lock:
            wait_for(lock.fileno())
            set_up(parts)
    except SetupError as error:
        say(str(error))
        return error.status
    except OSError as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted. The same command starts again where it has to.")
        return 130
    return 0


def wait_for(lock: int) -> None:
    """Take the lock; pip inherits it, so that a pip whose parent was killed is waited for as well."""
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another one is at work in this folder; waiting until it is done.")
        fcntl.flock(lock, fcntl.LOCK_EX)


def set_up(parts: list[str]) -> None:
    """Bring .venv to the state in which all of `parts` are installed."""
    state = read_state()
    if state is None:
        python, version = choose_python()
        state = {"python": version, "root": str(ROOT), "key": key_of(version), "parts": []}
    else:
        python = None  # .venv stays
        key = key_of(state["python"])
        if state["key"] != key:  # pins changed: pip brings every package to its new version
            state = {**state, "key": key, "parts": []}

    missing = [part for part in parts if part not in state["parts"] and not (part == "analysis" and state["parts"])]
    if not missing:
        return
    started = time.monotonic()
    where = LOG.relative_to(ROOT)
    say(f"installing {', '.join(missing)} for Python {state['python']} into .venv (log: {where}).")
    if "embedded" in missing:
        say("torch, ray and verl among them: some minutes and at least 2 GB.")
    LOG.write_text("")
    if python is not None:
        make_venv(python, state["python"])
    for part in missing:
        install(part, state)
    say(f"done in {time.monotonic() - started:.0f} s.")


def read_state() -> dict | None:
    """What is installed; None where .venv has to be made (anew), said aloud when there is something to replace."""
    if not VENV.exists():
        return None
    state = json.loads(STATE.read_text()) if STATE.exists() else None
    if state is None:
        why = "it is incomplete, or not made by this script"
    elif state["root"] != str(ROOT):
        why = f"it was made for {state['root']}"
    elif not VENV_PYTHON.exists():
        why = "its Python is gone"
    elif "PYTHON" in os.environ and minor(state["python"]) != minor(own_version()):
        why = f"it has Python {state['python']}, and PYTHON asks for {own_version()}"
    else:
        return state
    say(f".venv is made anew: {why}.")
    return None


def key_of(version: str) -> str:
    """Hash of all that decides what is installed, for a full Python version such as 3.11.7."""
    digest = hashlib.sha256(version.encode())
    digest.update(packaging_sections((ROOT / "pyproject.toml").read_text()).encode())
    for path in (pins_for(version), NO_DEPS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def packaging_sections(pyproject: str) -> str:
    """What pip reads of a pyproject.toml; without the settings of ruff, pyright and pytest, which change nothing here.

    Found by the sections' headers: Python 3.10 has no TOML reader.
    """
    kept: list[str] = []
    keep = False
    for line in pyproject.splitlines():
        if line.startswith("["):
            keep = line.startswith(("[build-system]", "[project", "[tool.setuptools"))
        if keep and line.strip():
            kept.append(line)
    return "\n".join(kept)


def pins_for(version: str) -> Path:
    return ROOT / "constraints" / f"python{minor(version)}.txt"


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def own_version() -> str:
    return ".".join(str(number) for number in sys.version_info[:3])


def choose_python() -> tuple[str, str]:
    """Path and full version of the interpreter for .venv: this one, or (unless PYTHON chose it) another that suits."""
    if minor(own_version()) in SUPPORTED:
        return sys.executable, own_version()
    if "PYTHON" not in os.environ:
        for name in SUPPORTED:
            found = shutil.which(f"python{name}")
            if found is None:
                continue
            # A version manager's stand-in exists for versions that are not switched on: only running it tells.
            asked = subprocess.run(
                [found, "-c", "import platform; print(platform.python_version())"],
                check=False,
                capture_output=True,
                text=True,
            )
            if asked.returncode == 0:
                return found, asked.stdout.strip()
    raise SetupError(
        f"Python {own_version()} does not suit ({sys.executable}): the pinned packages are for Python "
        f"{', '.join(sorted(SUPPORTED))}. Install one of them and name it, for example PYTHON=python3.11.",
        status=2,
    )


def make_venv(python: str, version: str) -> None:
    if VENV.exists():
        shutil.rmtree(VENV)
    run([python, "-m", "venv", str(VENV)], f"making .venv with Python {version}")
    pip(["pip"], version, "installing the pinned pip")


def install(part: str, state: dict) -> None:
    """Install one part and note it in the state; where it fails, what was known before is kept if it is still true."""
    known = STATE.read_text() if STATE.exists() else None
    STATE.unlink(missing_ok=True)
    log_before = LOG.stat().st_size
    what = f"installing the packages of '{part}'"
    extra = "" if part == "analysis" else f"[{part}]"
    try:
        pip(["--editable", f"{ROOT}{extra}"], state["python"], what)
        if part == "embedded":
            pip(["--no-deps", "--requirement", str(NO_DEPS)], state["python"], what)
    except SetupError:
        # Resolving and downloading leave .venv as it was; once pip began to write, nobody knows.
        if known is not None and "Installing collected packages" not in LOG.read_text()[log_before:]:
            STATE.write_text(known)
        raise
    state["parts"].append(part)
    STATE.write_text(json.dumps(state, indent=2))


def pip(arguments: list[str], version: str, what: str) -> None:
    pins = pins_for(version)
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # Packages that come as source are built with pinned tools too; an old pip does not know the option and takes no
    # notice of its variable.
    run(
        [*command, "--constraint", str(pins), *arguments],
        what,
        environment={**os.environ, "PIP_BUILD_CONSTRAINT": str(pins)},
    )


def run(command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
    """Run, its output going to the log; raise SetupError with the gist of it when it fails."""
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        start = log.tell()
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,  # the child holds the lock as well
        )
    if done.returncode == 0:
        return
    said = [line for line in LOG.read_text()[start:].splitlines() if line.strip()]
    # Pip explains itself below its first ERROR; other programs at their end.
    error = next((number for number, line in enumerate(said) if line.startswith("ERROR:")), len(said) - 8)
    shown = "\n".join(f"    {line}" for line in said[max(error, 0) :][:8])
    raise SetupError(
        f"FAILED while {what} (exit status {done.returncode}):\n{shown}\n"
        f"  Everything that was said: {LOG.relative_to(ROOT)}\n"
        "  What to do: mend what it names (network? disk space? pins?), then give the same command again; "
        "it repeats this part.",
        status=1,
    )


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# Set up what is missing, then check all: scripts/test.sh [pytest arguments].
# Runs every test but those that need a GPU, fast ones first; your own -m (and paths, -k, ...) replace that choice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${PYTHON:-python3}" scripts/setup_env.py embedded test
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # no look-up of newer versions
set -x
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
exec .venv/bin/python -m pytest -m "not gpu" "$@"

#!/usr/bin/env bash
# Set up what is missing, then run the study: scripts/sweep.sh [overrides] is python -m pipeline.sweep [overrides].
# PYTHON names the interpreter (3.10, 3.11 or 3.12). Relative paths are relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${PYTHON:-python3}" scripts/setup_env.py embedded
exec .venv/bin/python -m pipeline.sweep "$@"

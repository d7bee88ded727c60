#!/usr/bin/env bash
# Pin every package, transitive ones included, for one version of Python: writes constraints/python3.N.txt.
#
#   PYTHON=python3.12 scripts/renew_constraints.sh          the newest versions that fit pyproject.toml
#   PYTHON=python3.12 scripts/renew_constraints.sh --keep   what is pinned stays, only what is missing is added
#
# Only pip itself is installed, in a throw-away venv; of the rest, metadata alone is fetched. Pip's own
# configuration says where packages come from. Where it offers a CPU build of torch, PIP_CONFIG_FILE=/dev/null takes
# PyPI's build instead, so that its CUDA libraries are pinned too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1-}" in
"" | --keep) ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [[ $1 == --help ]] && exit 0 || exit 2
    ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet --upgrade pip

pins=constraints/python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
keep=()
if [[ ${1-} == --keep ]]; then
    keep=(--constraint "$pins")
fi
"$python" -m pip install --dry-run --use-feature=fast-deps --ignore-installed --report "$work/report.json" "${keep[@]}" \
    pip setuptools '.[embedded,gpu,test]'

"$python" - "$work/report.json" >"$work/pins.txt" <<'PY'
import json
import re
import sys

with open(sys.argv[1]) as file:
    packages = [item["metadata"] for item in json.load(file)["install"]]
print(f"# Written by scripts/renew_constraints.sh with Python {sys.version.split()[0]}; do not edit by hand.")
for name, version in sorted((re.sub(r"[-_.]+", "-", p["name"]).lower(), p["version"]) for p in packages):
    if name != "paired-grpo":
        # A local version (torch's "+cpu") names one build; the pin allows any build of that version.
        print(f"{name}=={version.partition('+')[0]}")
PY
mv "$work/pins.txt" "$pins"
printf '%s: %s packages\n' "$pins" "$(grep -vc '^#' "$pins")"

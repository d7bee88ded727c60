#!/usr/bin/env bash
# Unpack the GPU stack on a host without a network.
#   unpack.sh BUNDLE STACK      BUNDLE: the folder with chunk.NN; STACK: where to
# Afterwards STACK/site belongs on PYTHONPATH; STACK/mcore_0_13_1 in front of it gives the megatron-core with the bug.
set -euo pipefail
[[ $# == 2 ]] || { sed -n '2,4p' "$0" | cut -c3- >&2; exit 2; }
bundle=$1 stack=$2
ls "$bundle"/chunk.?? >/dev/null
if [[ -f $stack/unpacked ]]; then
    echo "$stack is unpacked already"
    exit 0
fi
mkdir -p "$stack"
cat "$bundle"/chunk.?? | gzip -dc | tar xf - -C "$stack"
PYTHONPATH=$stack/site python3 - <<'PYTHON'
from importlib.metadata import version
import torch

print("torch", torch.__version__, "CUDA", torch.version.cuda, "GPU", torch.cuda.is_available())
for name in ("verl", "megatron-core", "mbridge", "transformer-engine", "sglang", "ray", "transformers", "numpy", "tenacity"):
    print(name, version(name))
PYTHON
touch "$stack/unpacked"

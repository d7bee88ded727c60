#!/usr/bin/env bash
# Build the GPU stack for a host without a network: verl, Megatron, TransformerEngine and SGLang for the torch
# 2.11.0+cu130 and Python 3.12 that the host has.
#   build_bundle.sh OUT TE_TORCH_WHEEL [PYTHON]
# OUT/chunk.NN (CHUNK each, default 58M) is what travels; unpack.sh unpacks it. TE_TORCH_WHEEL: transformer_engine_torch
# 2.12.0 for Python 3.12, which the registry has as source only; docs/gpu.md tells how it is built. PYTHON: default
# python3.12.
# Needs 12 GB of disk and 10 minutes.
set -euo pipefail
[[ $# == 2 || $# == 3 ]] || { sed -n '2,8p' "$0" | cut -c3- >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
te_torch=$(realpath "$2")
python=${3:-python3.12}
work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --no-deps --requirement "$here/requirements-no-deps.txt" "$te_torch"
# What pip finds wrong with the packages above is known (see that file): its complaint is not an error.
pip install --constraint "$here/constraints.txt" --requirement "$here/requirements.txt"
pip uninstall --yes kernels || true

# The release with the dead optimizer, beside the stack: its Python is all that is needed, so nothing is built.
release=megatron_core-0.13.1
pip download --no-deps --dest "$work" megatron-core==0.13.1
tar xzf "$work/$release.tar.gz" -C "$work"
mkdir -p "$work/bundle/mcore_0_13_1/megatron" "$work/bundle/mcore_0_13_1/$release.dist-info"
mv "$work/$release/megatron/core" "$work/bundle/mcore_0_13_1/megatron/"
mv "$work/$release/PKG-INFO" "$work/bundle/mcore_0_13_1/$release.dist-info/METADATA"

site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mv "$site" "$work/bundle/site"

# The host has these (a second torch or numpy would shadow its own), or the chip does not need them.
set -o noglob  # the patterns are tar's, not this folder's files
left_behind=(
    torch torch-* torchgen functorch torchvision* triton triton-* nvidia nvidia_* cuda cuda_* lib
    numpy* scipy* pandas* pyarrow* sympy* mpmath* networkx* PIL pillow* h5py* lxml* grpc grpcio* tensorboard* onnx onnx-*
    setuptools* _distutils_hack pip* virtualenv* cmake* ninja* jedi* hf_xet* _mscclpp* deep_ep* ray/jars
    sgl_kernel/flash_ops* sgl_kernel/sm100 sgl_kernel/flashmla* transformer_engine/jax
)
excludes=(--no-anchored --exclude=__pycache__ --anchored)
for name in "${left_behind[@]}"; do excludes+=("--exclude=site/$name"); done
set +o noglob
rm -f "$out"/chunk.??
tar cf - -C "$work/bundle" "${excludes[@]}" site mcore_0_13_1 | gzip -5 | split -b "${CHUNK:-58M}" -d -a 2 - "$out/chunk."
ls -l "$out"/chunk.??

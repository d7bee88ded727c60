#!/usr/bin/env bash
# One arm of the recipe by hand: bare verl, nothing observed. Further arguments are verl's overrides, as in verl's own
# examples/grpo_trainer/run_qwen2-7b_sgl_megatron.sh.
#   scripts/run_qwen2-7b_sgl_megatron.sh                                    # the baseline, 8 GPUs
#   ARM=pao scripts/run_qwen2-7b_sgl_megatron.sh trainer.total_epochs=1
#   RECIPE=tiny_cpu CLUSTER=embedded scripts/run_qwen2-7b_sgl_megatron.sh   # the rehearsal without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
exec "$python" -m pipeline.train.by_hand --recipe "${RECIPE:-qwen2_7b_sgl_megatron}" \
  --cluster "${CLUSTER:-node_8gpu}" --arm "${ARM:-baseline}" --seed "${SEED:-1}" "$@"

#!/usr/bin/env bash
# Everything that needs a GPU, unattended, most valuable first. Parts that are done are skipped, so it can be started
# again; each result is written as soon as it is there, and packed after each part.
#
#   run_all.sh run [PART...]      in the foreground
#   run_all.sh start [PART...]    in the background, in a session of its own; then:
#   run_all.sh follow SECONDS     wait for it at most so long, show its log's end, pack
#   run_all.sh stop               end what `start` began
#   run_all.sh pack               put what there is into $OUT
#
# Parts, in this order when none is named:
#   vectors     golden vectors of TransformerEngine's FusedAdam
#   dead        h200-dead-optimizer: megatron-core 0.16.1 and 0.13.1, 177 million parameters
#   memory      h200-qwen2-7b-memory: Qwen2-7B's shape, each arm that fits
#   grpo1       h200-sgl-megatron: the GRPO run of each arm, seed 1
#   tests       tests/gpu
#   grpo2       seed 2 of baseline and pao
#   memory24    h200-qwen2-7b-24-layers-memory: where bf16 moments fit
#   grpo2b      seed 2 of the arms with bf16 moments
# and, only when they are named, on hosts with several GPUs:
#   two         h200x2-qwen2_tiny: TP 2, and DP 2, which shards the optimizer's state
#   eight       h200x8-qwen2_7b_sgl_megatron: the 7B recipe with random weights, baseline, pao, baseline again. An
#               eighth of the recipe's batch (BATCH, default 128 prompts), in four optimizer steps like the recipe's
#
# Environment: STACK (what unpack.sh made), RESULTS, OUT (packed results; default RESULTS/packed), PIPELINE_COMMIT (the
# project's commit, for the reports: git knows nothing of a copy). The host's python3 must be the one that has torch.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
STACK=${STACK:-/tmp/gpu/stack}
RESULTS=${RESULTS:-/tmp/gpu/results}
OUT=${OUT:-$RESULTS/packed}
DONE=$RESULTS/.done
LOGS=$RESULTS/logs
PARTS=(vectors dead memory grpo1 tests grpo2 memory24 grpo2b)
GRPO_STUDY=h200-sgl-megatron

mkdir -p "$RESULTS" "$DONE" "$LOGS" "$OUT"
cd "$project" || exit 1
export PYTHONPATH=$STACK/site:$project PYTHONUNBUFFERED=1 NVTE_DEBUG=0

say() { echo "$(date +%H:%M:%S) $*"; }

# limited SECONDS NAME COMMAND...: run with a limit, output to the log NAME; a long job gets a moment to end in order
limited() {
    local limit=$1 name=$2 status=0 began=$SECONDS
    shift 2
    timeout --signal=TERM --kill-after=45 "$limit" "$@" >>"$LOGS/$name.log" 2>&1 || status=$?
    say "$name: exit status $status after $((SECONDS - began)) s"
    ((status == 0)) || tail -n 15 "$LOGS/$name.log" | cut -c1-300
    return "$status"
}

# once WORST NAME COMMAND...: skip what is done; it is done when its exit status is WORST at most. Returns the status.
once() {
    local worst=$1 name=$2 status=0
    shift 2
    if [[ -e $DONE/$name ]]; then
        say "$name: done before"
        return
    fi
    "$@" || status=$?
    ((status > worst)) || touch "$DONE/$name"
    pack
    return "$status"
}

probe() {
    local limit=$1 name=$2
    shift 2
    # 1: an arm failed, which is a result (it does not fit in memory).
    once 1 "$name" limited "$limit" "$name" python3 -m pipeline.train.optimizer_probe --results-dir "$RESULTS" "$@"
}

part_vectors() {
    once 0 vectors limited 180 vectors python3 scripts/record_fused_adam_vectors.py \
        --out "$RESULTS/vectors/fused_adam_te_2_12.npz"
    tail -n 20 "$LOGS/vectors.log"
}

part_dead() {
    probe 300 dead_0_16_1 --study h200-dead-optimizer --shape 177m --arms baseline,pao --compare-megatron-core
    PYTHONPATH=$STACK/mcore_0_13_1:$PYTHONPATH probe 300 dead_0_13_1 \
        --study h200-dead-optimizer --shape 177m --arms baseline,pao --compare-megatron-core
    cat "$RESULTS/h200-dead-optimizer/optimizer_steps.md"
}

part_memory() {
    probe 720 memory --study h200-qwen2-7b-memory --shape qwen2_7b --timeout-s 180
    cat "$RESULTS/h200-qwen2-7b-memory/optimizer_steps.md"
}

part_memory24() {
    probe 600 memory24 --study h200-qwen2-7b-24-layers-memory --shape qwen2_7b_24l --timeout-s 180
    cat "$RESULTS/h200-qwen2-7b-24-layers-memory/optimizer_steps.md"
}

part_tests() { once 0 tests limited 300 tests python3 -m pytest -q -m gpu tests/gpu; }

# A sweep that is stopped or runs into its limit keeps the runs that had ended, and goes on with the others next time.
grpo() {
    local limit=$1 name=$2 arms=$3 seed=$4
    wait_for_preparation
    once 0 "$name" limited "$limit" "$name" python3 -m pipeline.sweep recipe=qwen2_tiny_1gpu cluster=one_gpu \
        study_name="$GRPO_STUDY" results_dir="$RESULTS" arm="$arms" seed="$seed"
}

# Seed 2 in reverse order, so that slow drift of the machine falls on all arms alike.
part_grpo1() { grpo 1500 grpo1 baseline,pao,pao_bf16_moments,pao_bf16_all 1; }
part_grpo2() { grpo 900 grpo2 pao,baseline 2; }
part_grpo2b() { grpo 900 grpo2b pao_bf16_all,pao_bf16_moments 2; }

part_two() {
    once 0 two limited 1500 two python3 -m pipeline.sweep recipe=qwen2_tiny_1gpu cluster=node_8gpu \
        recipe.n_workers=2 recipe.tp=2,1 study_name=h200x2-qwen2_tiny results_dir="$RESULTS" arm=baseline,pao seed=1
}

part_eight() {
    local batch=${BATCH:-128}
    once 0 eight limited 1700 eight python3 -m pipeline.sweep recipe=qwen2_7b_random cluster=node_8gpu \
        recipe.train_batch_size="$batch" recipe.mini_batch_size=$((batch / 4)) \
        study_name=h200x8-qwen2_7b_sgl_megatron results_dir="$RESULTS" arm=baseline,pao,baseline_repeat seed=1
}

# While the GPU is busy with the first parts: compile the stack's Python, make the tiny model and its task.
prepare() {
    nice -n 19 python3 -m compileall -q -j 8 "$STACK/site" >"$LOGS/compileall.log" 2>&1
    CUDA_VISIBLE_DEVICES='' nice -n 19 python3 >"$LOGS/assets.log" 2>&1 <<'PYTHON'
from pathlib import Path

from pipeline.train.by_hand import compose_sweep
from pipeline.train.plugin import make_assets

recipe = compose_sweep(["recipe=qwen2_tiny_1gpu", "cluster=one_gpu"])["recipe"]
make_assets(Path(recipe["assets_dir"]), recipe["assets_size"])
PYTHON
    say "preparation: exit status $?"
}

wait_for_preparation() { [[ -z ${preparation:-} ]] || wait "$preparation"; }

# At most 8 files of at most 16 MiB may leave the host: one archive per study, without W&B's files and Ray's logs.
pack() {
    local study
    for study in "$RESULTS"/h200-*/; do
        [[ -d $study ]] || continue
        tar czf "$OUT/$(basename "$study").tar.gz" -C "$RESULTS" --exclude=wandb --exclude=ray_logs --exclude=__pycache__ \
            "$(basename "$study")"
    done
    [[ ! -d $RESULTS/vectors ]] || tar czf "$OUT/vectors.tar.gz" -C "$RESULTS" vectors
    find "$RESULTS" -path '*/ray_logs/*' -type f -size -200k \( -name '*.err' -o -name 'gcs*' -o -name 'raylet*' \
        -o -name 'job-driver*' -o -name 'worker*.out' \) -print0 | tar czf "$OUT/ray_logs.tar.gz" --null -T - 2>/dev/null
    tar czf "$OUT/logs.tar.gz" -C "$RESULTS" logs
    find "$OUT" -type f -size +16M -exec echo "too large to leave the host:" {} \;
}

run() {
    local part parts=("$@")
    ((${#parts[@]})) || parts=("${PARTS[@]}")
    for part in "${parts[@]}"; do
        declare -F "part_$part" >/dev/null || { echo "unknown part $part; there are ${PARTS[*]}" >&2; exit 2; }
    done
    prepare &
    preparation=$!
    for part in "${parts[@]}"; do
        say "== $part"
        "part_$part"
    done
    wait_for_preparation
    say "all parts have ended"
}

start() {
    if [[ -e $RESULTS/pid ]] && kill -0 "$(cat "$RESULTS/pid")" 2>/dev/null; then
        echo "already running" >&2
        exit 1
    fi
    # OUT of the present call is emptied before the next one: the background writes to its own folder.
    OUT=$RESULTS/packed setsid nohup bash "${BASH_SOURCE[0]}" run "$@" >>"$LOGS/run_all.log" 2>&1 </dev/null &
    echo $! >"$RESULTS/pid"
}

stop() { pkill -TERM --session "$(cat "$RESULTS/pid")"; }

follow() {
    local until=$((SECONDS + $1))
    while ((SECONDS < until)) && kill -0 "$(cat "$RESULTS/pid")" 2>/dev/null; do sleep 1; done
    tail -n 70 "$LOGS/run_all.log"
    nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader || true
    tail -n 5 "$(find "$LOGS" "$RESULTS"/h200-*/runs -name '*.log' -print0 2>/dev/null | xargs -0 ls -t | head -n 1)" | cut -c1-300
    pack
    ls -la "$OUT"
    kill -0 "$(cat "$RESULTS/pid")" 2>/dev/null && echo STILL RUNNING || echo ENDED
}

case ${1:-} in
run | start | follow | stop) "$@" ;;
pack) pack ;;
*) sed -n '2,23p' "${BASH_SOURCE[0]}" | cut -c3- >&2; exit 2 ;;
esac

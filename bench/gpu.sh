#!/usr/bin/env bash
# Measures this trainer on one CUDA GPU: the seconds of each stage of a step, and the least they could be.
#
#     bash bench/gpu.sh         writes bench/results/gpu-<device>.md; 20 minutes on an H200 (an estimate)
#     bash bench/gpu.sh tiny    a test of this script with a tiny model, also without a GPU: the figures
#                               mean nothing, and nothing is written into the repository
#
# Each row is a run of 4 steps with 128 prompts x 8 completions (mean 700 tokens, at most 3,000). The weights
# are random, in the shape of Qwen2.5-1.5B: nothing is downloaded.
#
#     whole        all of the memory, no reference model
#     whole-kl     all of the memory, with a reference and recomputed activations
#     compile      as whole, with --compile on
#     40, 24       as on a card of that many GiB
#     24-lora      24 GiB, adapters of rank 32
#     trl          the same step with TRL, if it is installed (bench/vs_trl.py)
#
# A row that fails is reported with its reason, and the next one runs. Nothing else may use the GPU. WORK
# needs 30 GB: the model and the last checkpoint of one run.
#
# Environment: PYTHON is the interpreter; WORK the folder of model and runs, which is kept if you set it;
# ONLY="24 trl" selects rows.
set -uo pipefail
trap 'echo; echo "interrupted"; exit 130' INT TERM
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
[ -n "${WORK:-}" ] || { WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT; }
mkdir -p "$WORK" && WORK=$(cd "$WORK" && pwd) && rm -f "$WORK/vs_trl.md" || exit 1
SHAPE=${1:-qwen2.5-1.5b}
DEVICE=$($PYTHON -c 'import re, torch
print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower() if torch.cuda.is_available() else "")') ||
    { echo "bench/gpu.sh: $PYTHON has no PyTorch: run make setup, or set PYTHON"; exit 1; }
if [ "$SHAPE" = tiny ]; then
    MEAN=16 SIZE="--prompts 4 --samples 4 --max_tokens 64 --max_prompt 256"
    ROWS="whole compile 4 trl" OUT=$WORK/gpu-tiny
else
    [ -n "$DEVICE" ] || { echo "bench/gpu.sh: no CUDA GPU; without one: bash bench/gpu.sh tiny"; exit 1; }
    MEAN=700 SIZE="--prompts 128 --samples 8 --max_tokens 3000 --max_prompt 256"
    ROWS="whole whole-kl compile 40 24 24-lora trl" OUT=$PWD/bench/results/gpu-$DEVICE
fi
MODEL=$WORK/$SHAPE
FAILED=() RUNS=()

row() {  # name, command ...: runs it; a failure is noted with the last line that explains it
    local name=$1 log=$WORK/$1.log; shift
    echo "== $name: $*"
    "$@" 2>&1 | tee "$log" && return
    local reason
    reason=$(grep -a "^nano_rlvr: \|Error: " "$log" | tail -1) || reason=$(tail -1 "$log")
    FAILED+=("$name: ${reason:0:300}")
    echo "== $name FAILED, the next row follows: $reason"
    return 1
}

run() {  # name, flags ...: 4 steps of nano_rlvr.py, the first of which is a warm-up
    local name=$1; shift
    rm -rf "$WORK/runs/$name"
    row "$name" $PYTHON nano_rlvr.py --model "$MODEL" --data "$MODEL/questions.jsonl" --template none \
        --task gsm8k $SIZE --steps 4 --lr 1e-6 --eval_every 1000 --eval_size 8 --save_every 0 \
        --keep_rollouts 1000000 --out "$WORK/runs" --name "$name" "$@"
    [ ! -s "$WORK/runs/$name/metrics.jsonl" ] || RUNS+=("$WORK/runs/$name")  # also of a run that failed late
    rm -rf "$WORK/runs/$name"/step-* "$WORK/runs/$name"/final  # 20 GB per run
}

[ -d "$MODEL" ] || $PYTHON bench/random_model.py "$MODEL" "$SHAPE" --mean $MEAN ||
    { echo "bench/gpu.sh: the model cannot be written to $MODEL"; exit 1; }
for name in ${ONLY:-$ROWS}; do
    case $name in
        whole) run whole --kl_coef 0 ;;
        whole-kl) run whole-kl --kl_coef 0.001 --checkpointing on ;;
        compile) run compile --kl_coef 0 --compile on ;;
        24-lora) run 24-lora --kl_coef 0.001 --memory_gb 24 --lora_rank 32 ;;
        trl) row trl $PYTHON bench/vs_trl.py --random_model "$SHAPE" $MEAN $SIZE --micro 16 8 --steps 3 \
                 --out "$WORK/vs_trl" || true ;;
        *) run "$name" --kl_coef 0.001 --memory_gb "$name" ;;
    esac
done

rm -f "$OUT.md"
if [ ${#RUNS[@]} -gt 0 ]; then
    row report $PYTHON bench/step.py --runs "${RUNS[@]}" --out "$OUT"
fi
{
    [ ! -f "$WORK/vs_trl.md" ] || { printf '\n## Beside TRL\n\n'; cat "$WORK/vs_trl.md"; }
    [ ${#FAILED[@]} -eq 0 ] || { printf '\n## Failed\n\n'; printf -- '- %s\n' "${FAILED[@]}"; }
    printf '\nRows: %s; commit %s' "${ONLY:-$ROWS}" "$(git describe --always --dirty 2>/dev/null)"
    command -v nvidia-smi >/dev/null && printf '; %s' "$(
        nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader)"
    printf '\n'
} >> "$OUT.md"
echo
echo "=============== paste everything below into a new issue of this repository ==============="
cat "$OUT.md"
echo "==========================================================================================="
[ "$SHAPE" = tiny ] || echo "The same text is in $OUT.md."
echo "Failed rows: ${#FAILED[@]}"
[ ${#FAILED[@]} -eq 0 ]

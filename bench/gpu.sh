#!/usr/bin/env bash
# Measures this trainer on one CUDA GPU: the seconds of each stage of a step, and their bounds.
#
#     bash bench/gpu.sh         writes bench/results/gpu-<device>.md; 20 minutes (estimated)
#     bash bench/gpu.sh tiny    a test of this script, also without a GPU; writes to $WORK
#
# Each row is a run of 4 steps with 128 prompts x 8 completions (mean 700 tokens, at most 3,000) of
# random weights in the shape of Qwen2.5-1.5B: nothing is downloaded.
#
#     whole        all of the memory, no reference model
#     whole-kl     all of the memory, with a reference and recomputed activations
#     compile      as whole, with compiled layers (examples/compiled.py)
#     40, 24       planned for a card of that many GiB (peak: memory/* of the .json file)
#     24-lora      24 GiB, adapters of rank 32
#     trl-16, -8   the same step with TRL, if it is installed (bench/vs_trl.py), by micro-batch
#
# A row that fails is listed with its reason, and the next one runs. Nothing else may use the GPU.
# Environment: PYTHON is the interpreter; WORK the folder of model and runs (30 GB), which is kept
# if you set it; ONLY="24 trl-8" selects rows.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
[ -n "${WORK:-}" ] || { WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT; }
mkdir -p "$WORK" && WORK=$(cd "$WORK" && pwd) || exit 1
SHAPE=${1:-qwen2.5-1.5b} MODEL=$WORK/model FAILED=0 RUNS=()
DEVICE=$($PYTHON -c 'import re, torch
if torch.cuda.is_available():
    print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower())') ||
    { echo "bench/gpu.sh: $PYTHON has no PyTorch: set PYTHON"; exit 1; }
if [ "$SHAPE" = tiny ]; then
    MEAN=16 SIZE="--prompts 4 --samples 4 --max_tokens 64 --max_prompt 256"
    ROWS="whole compile 4 trl-8" OUT=$WORK/gpu-tiny
else
    [ -n "$DEVICE" ] || { echo "bench/gpu.sh: no GPU; try: bash bench/gpu.sh tiny"; exit 1; }
    MEAN=700 SIZE="--prompts 128 --samples 8 --max_tokens 3000 --max_prompt 256"
    ROWS="whole whole-kl compile 40 24 24-lora trl-16 trl-8" OUT=$PWD/bench/results/gpu-$DEVICE
fi
REPORT=$OUT.md NOTES=$WORK/notes.md
: > "$NOTES"

row() {  # name, command ...: a failure is noted with the last line that explains it
    local name=$1 log=$WORK/$1.log; shift
    echo "== $name: $*"
    "$@" 2>&1 | tee "$log" && return
    FAILED=$((FAILED + 1))
    local reason=$( (grep -a "^nano_rlvr: \|Error: " "$log" || cat "$log") | tail -1)
    printf -- '- %s failed: %s\n' "$name" "${reason:0:300}" >> "$NOTES"
}

run() {  # name, flags ...: 4 steps of SCRIPT, the first of which is a warm-up
    local folder=$WORK/runs/$1
    rm -rf "$folder"
    row "$1" $PYTHON ${SCRIPT:-nano_rlvr.py} --model "$MODEL" --data "$MODEL/questions.jsonl" \
        --template none --task gsm8k $SIZE --steps 4 --lr 1e-6 --eval_every 1000 --eval_size 8 \
        --save_every 0 --keep_rollouts 1000000 --out "$WORK/runs" --name "$@"
    [ ! -s "$folder/metrics.jsonl" ] || RUNS+=("$folder")  # also of a run that failed late
    rm -rf "$folder"/step-* "$folder"/final  # 20 GB per run
}

$PYTHON -m bench.random_model "$MODEL" "$SHAPE" --mean $MEAN || exit 1
for name in ${ONLY:-$ROWS}; do
    case $name in
        whole) run whole --kl_coef 0 ;;
        whole-kl) run whole-kl --kl_coef 0.001 --gradient_checkpointing on ;;
        compile) SCRIPT='-m examples.compiled' run compile --kl_coef 0 ;;
        24-lora) run 24-lora --kl_coef 0.001 --memory_gb 24 --lora_rank 32 ;;
        trl-*) row "$name" $PYTHON -m bench.vs_trl --random_model "$SHAPE" $MEAN $SIZE \
                   --micro "${name#trl-}" --steps 3 --out "$WORK/$name"
               [ ! -f "$WORK/$name.md" ] || cat "$WORK/$name.md" >> "$NOTES" ;;
        *) run "$name" --kl_coef 0.001 --memory_gb "$name" ;;
    esac
done
rm -f "$REPORT"
[ ${#RUNS[@]} -eq 0 ] || row report $PYTHON -m bench.step "${RUNS[@]}" --out "$OUT"
command -v nvidia-smi >/dev/null && nvidia-smi --format=csv,noheader \
    --query-gpu=name,driver_version,memory.total,power.limit >> "$NOTES"
cat "$NOTES" >> "$REPORT" && cat "$REPORT"
echo "The results are in $REPORT: paste them into a new issue. Failed rows: $FAILED"
[ $FAILED -eq 0 ]

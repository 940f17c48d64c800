#!/usr/bin/env bash
# The first run on a CUDA GPU: what only a GPU can tell, the most valuable first.
#
#     bash bench/gpu.sh         writes bench/results/gpu-<device>.md; 75 minutes (estimated)
#     bash bench/gpu.sh tiny    a test of this script, also without a GPU; writes to $WORK
#
# Each stage is a process of its own with a limit of time. One that fails or hangs is noted with its
# reason, and the next one starts. A line with its result follows each. The first five stages should
# need ten minutes on an H100: does it run, the seconds of each stage of a step beside their bound,
# the peak of memory beside the plan. Rows of runs have 3 steps of 64 prompts x 8 completions (mean
# 700 tokens, at most 3,000) of random weights in the shape of Qwen2.5-1.5B: nothing is downloaded.
#
#     tiny         the bundled model learns for 6 steps, not compiled
#     model        makes the random weights
#     rates        products, memory, link, vLLM's Python per token (bench/roofline.py)
#     whole        all of the memory, with a reference
#     check        the report of what there is so far
#     eager        as whole, with --compile off
#     no-kl        as whole, without a reference
#     engine       vLLM's Python per token, with and without LeanEngine
#     24, 40       planned for a card of that many GiB (peak: memory/* of the .json file)
#     24-lora      24 GiB, adapters of rank 32
#     trl-16, -8   the same step with TRL, if it is installed (bench/vs_trl.py), by micro-batch
#     segments     as whole, without PyTorch's expandable segments
#     resume, offload, zero3, fp32, dapo    paths of the bundled model that only a GPU has
#
# Nothing else may use the GPU. Environment: PYTHON is the interpreter; WORK the folder of model and
# runs (30 GB), which is kept if you set it; ONLY="24 trl-8" selects stages.
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
FIRST="tiny model rates whole check"
if [ "$SHAPE" = tiny ]; then
    MEAN=16 SIZE="--prompts 4 --samples 4 --max_tokens 64 --max_prompt 256"
    STAGES="$FIRST eager 4 trl-8 resume" OUT=$WORK/gpu-tiny SMALL="--prompts 4 --samples 4"
else
    [ -n "$DEVICE" ] || { echo "bench/gpu.sh: no GPU; try: bash bench/gpu.sh tiny"; exit 1; }
    MEAN=700 SIZE="--max_tokens 3000 --max_prompt 256" SMALL=
    STAGES="$FIRST eager no-kl engine 24 40 24-lora trl-16 trl-8 segments resume offload zero3"
    STAGES="$STAGES fp32 dapo" OUT=$PWD/bench/results/gpu-$DEVICE
fi
REPORT=$OUT.md NOTES=$WORK/notes.md
: > "$NOTES"

stage() {  # name, limit in seconds, command ...
    local name=$1 limit=$2 log=$WORK/$1.log start=$SECONDS code reason=; shift 2
    echo "== $name: $*"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log"
    code=$?
    if [ $code -ne 0 ]; then
        FAILED=$((FAILED + 1))
        reason=$( (grep -a "^nano_rlvr: \|Error: " "$log" || cat "$log") | tail -1)
        [ $code -ne 124 ] || reason="it took longer than $limit s"
        printf -- '- %s failed: %s\n' "$name" "${reason:0:300}" >> "$NOTES"
    fi
    echo "== $name: ended with $code after $((SECONDS - start)) s ${reason:0:300}"
    return $code
}

run() {  # name, limit, flags ...: 3 steps, the first of which is a warm-up
    local name=$1 limit=$2 folder=$WORK/runs/$1; shift 2
    rm -rf "$folder"
    stage "$name" "$limit" $PYTHON nano_rlvr.py --model "$MODEL" \
        --data "$MODEL/questions.jsonl" --template none --task gsm8k $SIZE --steps 3 --lr 1e-6 \
        --eval_every 1000 --eval_size 8 --save_every 0 --keep_rollouts 1000000 \
        --out "$WORK/runs" --name "$name" "$@"
    [ ! -s "$folder/metrics.jsonl" ] || RUNS+=("$folder")  # also of a run that failed late
    rm -rf "$folder"/step-* "$folder"/final  # 20 GB per run
}

path() {  # name, flags ...: 2 steps of the bundled model
    local name=$1; shift
    stage "$name" 180 $PYTHON nano_rlvr.py $SMALL --steps 2 --eval_every 2 --eval_size 64 \
        --out "$WORK/runs" --name "$name" "$@"
}

report() {  # limit: the table of all runs so far
    [ ${#RUNS[@]} -eq 0 ] || stage report "$1" $PYTHON -m bench.step "${RUNS[@]}" --out "$OUT" \
        $([ ! -s "$WORK/rates.json" ] || echo --device "$WORK/rates.json")
}

for name in ${ONLY:-$STAGES}; do
    case $name in
        tiny) stage tiny 180 $PYTHON nano_rlvr.py $SMALL --compile off --steps 6 --eval_every 6 \
                  --eval_size 64 --save_every 0 --out "$WORK/runs" --name tiny ;;
        model) stage model 50 $PYTHON -m bench.random_model "$MODEL" "$SHAPE" --mean $MEAN ;;
        rates) stage rates 120 $PYTHON -m bench.roofline --measure &&
                   tail -1 "$WORK/rates.log" > "$WORK/rates.json" ;;
        whole) run whole 400 ;;
        check) report 30 ;;
        eager) run eager 320 --compile off ;;
        no-kl) run no-kl 320 --kl_coef 0 ;;
        engine) stage engine 120 $PYTHON -m bench.roofline --engine
                tail -4 "$WORK/engine.log" >> "$NOTES" ;;
        24-lora) run 24-lora 400 --memory_gb 24 --lora_rank 32 ;;
        trl-*) stage "$name" 900 $PYTHON -m bench.vs_trl --random_model "$SHAPE" $MEAN $SIZE \
                   --micro "${name#trl-}" --steps 3 --out "$WORK/$name"
               [ ! -f "$WORK/$name.md" ] || cat "$WORK/$name.md" >> "$NOTES" ;;
        segments) PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False run segments 320 ;;
        resume) path resume --save_every 1 --lr_end 1 &&
                    path resume --save_every 1 --lr_end 1 --resume --steps 3 ;;
        offload) path offload --lora_rank 8 --offload optimizer --compile off ;;
        zero3) path zero3 --zero_stage 3 --epochs 2 --minibatches 2 ;;
        fp32) path fp32 --dtype float32 ;;
        dapo) path dapo --algo dapo --top_p 0.9 --correction none ;;
        *) run "$name" 500 --memory_gb "$name" ;;
    esac
done
rm -f "$REPORT"
report 120
command -v nvidia-smi >/dev/null && nvidia-smi --format=csv,noheader \
    --query-gpu=name,driver_version,memory.total,power.limit >> "$NOTES"
cat "$NOTES" >> "$REPORT" && cat "$REPORT"
echo "The results are in $REPORT: paste them into a new issue. Failed stages: $FAILED"
[ $FAILED -eq 0 ]

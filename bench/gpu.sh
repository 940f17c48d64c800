#!/usr/bin/env bash
# The first run on a CUDA GPU: what only a GPU can tell, the most valuable first.
#
#     bash bench/gpu.sh         all stages; 75 minutes (estimated)
#     bash bench/gpu.sh tiny    a test of this script, also without a GPU
#
# If the GPU is lent for some minutes at a time, give the seconds of each call and a folder that
# stays. The next call goes on with the first stage that is not done:
#
#     WORK=/tmp/first SECONDS_LEFT=560 bash bench/gpu.sh
#
# Each stage is a process of its own. It begins if the seconds that it should need are left, and it
# is stopped when the call's time ends. A stage that fails or hangs is noted with its reason, and the
# next stage starts. The report is written anew after each stage. Rows of runs have 2 steps, the
# first of which is a warm-up, of 64 prompts x 8 completions (mean 700 tokens, at most 3,000) of
# random weights in the shape of Qwen2.5-1.5B: nothing is downloaded.
#
#     model        makes the random weights
#     whole        all of the memory, with a reference: does it run, the seconds of each stage
#     engine       vLLM's Python per token, with vLLM's own code and with LeanEngine
#     shapes       products by shape, attention kernels: bench/shapes.py
#     token-step   milliseconds of a token step at 1, 8, 64, 256, 512 sequences
#     profile      PyTorch's profiler around rollout and update
#     rates        large products, memory, link: the bound of a step follows from them
#     tiny         the bundled model learns for 6 steps, not compiled
#     real         accuracy before and after 8 steps, if models/smollm2 exists
#     trl-8, -16   the same step with TRL, if it is installed (bench/vs_trl.py), by micro-batch
#     24, 40       planned for a card of that many GiB (peak: memory/* of the .json file)
#     24-lora      24 GiB, adapters of rank 32
#     eager        as whole, with --compile off
#     no-kl        as whole, without a reference
#     segments     as whole, without PyTorch's expandable segments
#     resume, offload, zero3, fp32, dapo    paths of the bundled model that only a GPU has
#
# Nothing else may use the GPU. Environment: PYTHON is the interpreter; WORK the folder of model,
# runs and finished stages (10 GB), which is kept if you set it; OUT the folder of the report
# (bench/results); ONLY="24 trl-8" selects stages, finished ones too.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SECONDS_LEFT=${SECONDS_LEFT:-7200}
[ -n "${WORK:-}" ] || { WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT; }
mkdir -p "$WORK/done" "$WORK/notes" && WORK=$(cd "$WORK" && pwd) || exit 1
SHAPE=${1:-qwen2.5-1.5b} MODEL=$WORK/model FAILED=0
DEVICE=$($PYTHON -c 'import re, torch
if torch.cuda.is_available():
    print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower())') ||
    { echo "bench/gpu.sh: $PYTHON has no PyTorch: set PYTHON"; exit 1; }
if [ "$SHAPE" = tiny ]; then
    MEAN=16 SIZE="--prompts 4 --samples 4 --max_tokens 64 --max_prompt 256"
    SMALL="--prompts 4 --samples 4" REPORT=${OUT:-$WORK}/gpu-tiny
    STAGES="model whole engine shapes token-step profile rates tiny eager trl-8 4 resume"
else
    [ -n "$DEVICE" ] || { echo "bench/gpu.sh: no GPU; try: bash bench/gpu.sh tiny"; exit 1; }
    MEAN=700 SIZE="--max_tokens 3000 --max_prompt 256"
    SMALL="" REPORT=${OUT:-$PWD/bench/results}/gpu-$DEVICE
    STAGES="model whole engine shapes token-step profile rates tiny real trl-8 24 40 24-lora"
    STAGES="$STAGES eager no-kl trl-16 segments resume offload zero3 fp32 dapo"
fi
RANDOM_RUN="--model $MODEL --data $MODEL/questions.jsonl --template none --task gsm8k $SIZE
    --steps 2 --lr 1e-6 --eval_every 1000 --eval_size 8 --save_every -1 --keep_rollouts 1000000"

quiet() {  # without progress bars, whose lines end in carriage returns
    tr '\r' '\n' | grep --line-buffered -av 'it/s\]\|s/it\]\|Capturing\|Loading safetensors'
}

stage() {  # name, seconds that it should need, command ...
    local name=$1 needs=$2 log=$WORK/$1.log start=$SECONDS left code reason=; shift 2
    left=$((SECONDS_LEFT - SECONDS))
    if [ "$left" -lt "$needs" ]; then
        echo "== $name: about $needs s are needed and $left are left: next call"
        return 1
    fi
    echo "== $name: $*"
    timeout --kill-after=10 "$left" "$@" 2>&1 | quiet | tee "$log"
    code=${PIPESTATUS[0]}
    rm -f "$WORK/notes/$name.failed"
    if [ "$code" -ne 0 ]; then
        FAILED=$((FAILED + 1))
        reason=$( (grep -a "^nano_rlvr: \|Error: " "$log" || cat "$log") | tail -1)
        [ "$code" -ne 124 ] || reason="the call's time ended after $((SECONDS - start)) s"
        printf -- '- %s failed: %s\n' "$name" "${reason:0:300}" > "$WORK/notes/$name.failed"
    fi
    # a stage that the call's end has stopped runs again in the next call
    [ "$code" -eq 124 ] || touch "$WORK/done/$name"
    echo "== $name: ended with $code after $((SECONDS - start)) s ${reason:0:300}"
    return "$code"
}

run() {  # name, seconds that it should need, flags ...: 2 steps of the random weights
    local name=$1 needs=$2; shift 2
    rm -rf "$WORK/runs/$name"
    stage "$name" "$needs" "$PYTHON" nano_rlvr.py $RANDOM_RUN --out "$WORK/runs" --name "$name" "$@"
}

path() {  # name, flags ...: 2 steps of the bundled model
    local name=$1; shift
    stage "$name" 60 "$PYTHON" nano_rlvr.py $SMALL --steps 2 --eval_every 2 --eval_size 64 \
        --out "$WORK/runs" --name "$name" "$@"
}

keep_lines() {  # name, number of lines: the end of a stage's output goes into the report
    tail -n "$2" "$WORK/$1.log" > "$WORK/notes/$1"
}

report() {  # writes what there is so far
    local runs=() name
    for name in whole eager no-kl 4 24 40 24-lora segments; do
        [ ! -s "$WORK/runs/$name/metrics.jsonl" ] || runs+=("$WORK/runs/$name")
    done
    mkdir -p "$(dirname "$REPORT")"
    rm -f "$REPORT.md"
    if [ ${#runs[@]} -gt 0 ] && [ -s "$WORK/rates.json" ]; then
        "$PYTHON" -m bench.step "${runs[@]}" --out "$REPORT" --device "$WORK/rates.json" \
            > "$WORK/report.log" 2>&1 || tail -1 "$WORK/report.log"
    fi
    # before the rates are measured there is no bound: the metrics as the run wrote them
    for name in "${runs[@]}"; do
        cp "$name/metrics.jsonl" "$REPORT-$(basename "$name").jsonl"
    done
    ! command -v nvidia-smi > /dev/null || nvidia-smi --format=csv,noheader \
        --query-gpu=name,driver_version,memory.total,power.limit > "$WORK/notes/card"
    for name in "$WORK"/notes/*; do
        [ ! -s "$name" ] || printf '\n**%s**\n\n%s\n' "$(basename "$name")" "$(cat "$name")"
    done >> "$REPORT.md"
}

begin() {  # name of a stage
    case $1 in
        model) stage model 50 "$PYTHON" -m bench.random_model "$MODEL" "$SHAPE" --mean $MEAN ;;
        whole) run whole 250 ;;
        engine) stage engine 90 "$PYTHON" -m bench.roofline --engine && keep_lines engine 4 ;;
        shapes) stage shapes 60 "$PYTHON" -m bench.shapes $SHAPE && keep_lines shapes 40 ;;
        token-step) stage token-step 90 "$PYTHON" -m bench.shapes $SHAPE --decode "$MODEL" &&
                        keep_lines token-step 8 ;;
        profile) stage profile 150 "$PYTHON" -m examples.profiled $RANDOM_RUN \
                     --out "$WORK/runs" --name profile && keep_lines profile 45 ;;
        rates) stage rates 90 "$PYTHON" -m bench.roofline --measure &&
                   tail -1 "$WORK/rates.log" > "$WORK/rates.json" ;;
        tiny) stage tiny 60 "$PYTHON" nano_rlvr.py $SMALL --compile off --steps 6 --eval_every 6 \
                  --eval_size 64 --save_every -1 --out "$WORK/runs" --name tiny ;;
        real) [ ! -d models/smollm2 ] || stage real 120 "$PYTHON" nano_rlvr.py \
                  --model models/smollm2 --save_every -1 --out "$WORK/runs" --name real ;;
        trl-*) stage "$1" 300 "$PYTHON" -m bench.vs_trl --random_model "$SHAPE" $MEAN $SIZE \
                   --micro "${1#trl-}" --steps 3 --out "$WORK/$1" &&
                   cp "$WORK/$1.md" "$WORK/notes/$1" ;;
        eager) run eager 200 --compile off ;;
        no-kl) run no-kl 200 --kl_coef 0 ;;
        24-lora) run 24-lora 250 --memory_gb 24 --lora_rank 32 ;;
        segments) PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False run segments 200 ;;
        resume) path resume --save_every 1 --lr_end 1 &&
                    path resume --save_every 1 --lr_end 1 --resume --steps 3 ;;
        offload) path offload --lora_rank 8 --offload optimizer --compile off ;;
        zero3) path zero3 --zero_stage 3 --epochs 2 --minibatches 2 ;;
        fp32) path fp32 --dtype float32 ;;
        dapo) path dapo --algo dapo --top_p 0.9 --correction none ;;
        *) run "$1" 300 --memory_gb "$1" ;;
    esac
}

for name in ${ONLY:-$STAGES}; do
    [ -z "${ONLY:-}" ] && [ -e "$WORK/done/$name" ] && continue
    begin "$name"
    report
done
for name in $STAGES; do
    [ -e "$WORK/done/$name" ] || echo "not done: $name"
done
cat "$REPORT.md"
echo "The results are in $REPORT.md. Failed stages: $FAILED"
[ $FAILED -eq 0 ]

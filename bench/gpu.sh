#!/usr/bin/env bash
# The cost of one step on one CUDA GPU: 128 x 8 completions (mean 700 tokens, at most 3,000), random weights
# in the shape of Qwen2.5-1.5B, with all of the memory and with 40 and 24 GiB; and the same with TRL.
#
#     bash bench/gpu.sh           20 minutes on an H200; writes bench/results/gpu.md
#     bash bench/gpu.sh tiny      a test of this script on a CPU with a tiny model; the figures mean nothing
#
# Environment: PYTHON is the interpreter, WORK the folder of model and runs, ONLY="24 trl" selects rows.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
WORK=${WORK:-$(mktemp -d)}
SHAPE=${1:-qwen2.5-1.5b}
if [ "$SHAPE" = tiny ]; then
    MEAN=16 SIZE="--prompts 4 --samples 4 --max_tokens 64 --max_prompt 256" CAPS="whole 4"
else
    MEAN=700 SIZE="--prompts 128 --samples 8 --max_tokens 3000 --max_prompt 256"
    CAPS="whole whole-kl 40 24 24-lora"
fi
ONLY=${ONLY:-$CAPS trl}
MODEL=$WORK/$SHAPE
[ -d "$MODEL" ] || $PYTHON bench/random_model.py "$MODEL" "$SHAPE" --mean $MEAN

run() {  # name, flags ...: 4 steps, the first of which is a warm-up
    echo "== $*"
    $PYTHON nano_rlvr.py --model "$MODEL" --data "$MODEL/questions.jsonl" --template none --task gsm8k $SIZE \
        --steps 4 --lr 1e-6 --eval_every 1000 --eval_size 8 --keep_rollouts 8 \
        --out "$WORK/runs" --name "$@" || echo "== $1 FAILED"
}

for row in $CAPS; do
    case " $ONLY " in *" $row "*) ;; *) continue ;; esac
    case $row in  # "whole" has no reference model: its bound in gpu_table.py was computed without one
        whole) run whole --kl_coef 0 ;;
        whole-kl) run whole-kl --kl_coef 0.001 --checkpointing on ;;
        24-lora) run 24-lora --kl_coef 0.001 --memory_gb 24 --lora_rank 32 ;;
        *) run "$row" --kl_coef 0.001 --memory_gb "$row" ;;
    esac
done
[ ! -d "$WORK/runs" ] || $PYTHON bench/gpu_table.py "$WORK/runs" "$SHAPE"
case " $ONLY " in *" trl "*)
    $PYTHON bench/vs_trl.py --random_model "$SHAPE" $MEAN $SIZE --micro 16 8 --steps 3 \
        --out "vs_trl_$SHAPE" ;;
esac

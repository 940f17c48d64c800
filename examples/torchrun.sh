#!/usr/bin/env bash
# One machine, one process per GPU. The same command starts a run and, later, continues it:
#   examples/torchrun.sh --name first --model Qwen2.5-Math-1.5B
exec torchrun --standalone --nproc_per_node "${RANKS:-gpu}" "$(dirname "$0")/../nano_rlvr.py" --resume "$@"

#!/usr/bin/env bash
# Two machines with equal numbers of GPUs. On both, with the address of the first one:
#   examples/two_nodes.sh 0 10.0.0.1 --name first --model Qwen2.5-7B    on the first
#   examples/two_nodes.sh 1 10.0.0.1 --name first --model Qwen2.5-7B    on the second
# --out (runs/) must be the same folder on both. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network.
node=$1 first=$2
shift 2
exec torchrun --nnodes 2 --node_rank "$node" --master_addr "$first" --master_port "${PORT:-29500}" \
    --nproc_per_node "${RANKS:-gpu}" "$(dirname "$0")/../nano_rlvr.py" --resume "$@"

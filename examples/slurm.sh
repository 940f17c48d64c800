#!/usr/bin/env bash
# In the repository, on a disk that all nodes share:  sbatch examples/slurm.sh --name a --model Qwen2.5-7B
# Ten minutes before the time is over SLURM sends SIGUSR1: the run saves a checkpoint and ends with 138.
# The job is queued again, and continues there.
#SBATCH --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 --exclusive
#SBATCH --time=24:00:00 --signal=USR1@600 --requeue --open-mode=append
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python nano_rlvr.py --resume "$@"' - "$@"
[ $? = 138 ] && scontrol requeue "$SLURM_JOB_ID"

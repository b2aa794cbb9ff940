#!/usr/bin/env bash
#SBATCH --job-name=drmas_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
# One process per node with all its GPUs. Has NOT been run: written from
# Slurm's and jax's documentation.
#
#   sbatch --nodes=4 launch/slurm.sh --config configs/math_smollm2.py \
#     --workdir /on/a/shared/disk/runs/1
#
# Slurm sends SIGTERM two minutes before the end: the run saves and exits with
# 143, and the same command continues it.
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR="$head:$((20000 + SLURM_JOB_ID % 20000))"
srun --kill-on-bad-exit=1 bash -c '
  exec python -m drmas_jax.main --coordinator_address="$COORDINATOR" \
    --num_processes="$SLURM_NTASKS" --process_id="$SLURM_PROCID" "$@"' _ "$@"

#!/bin/bash
# One process a node, all GPUs or chips of a node in it: sbatch launch/slurm.sh
# Edit the lines of #SBATCH; a folder that all nodes see holds the repository and runs/.
#SBATCH --job-name=parallax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/%x-%j.log
# Two minutes before the time is up, and before a preemption: the run saves the step that it is in, and ends with 0.
#SBATCH --signal=TERM@120

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?start me with sbatch}"

# JAX would give each process one device; the processes here have all of their node's.
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PARALLAX_COORDINATOR="$coordinator:$((20000 + SLURM_JOB_ID % 20000))"
export PARALLAX_NUM_PROCESSES="$SLURM_NTASKS"
export PARALLAX_JOB_TOKEN="$SLURM_JOB_ID"

# The same --run_name after a requeue: the run goes on from its last checkpoint.
srun --kill-on-bad-exit=1 --wait=60 bash -c 'PARALLAX_PROCESS_ID=$SLURM_PROCID exec "$@"' process \
  .venv/bin/python -u train.py --config="${CONFIG:-configs/llama_1b_16.py}" \
  --run_name="${RUN_NAME:-$SLURM_JOB_NAME-$SLURM_JOB_ID}" --max-runtime="${MAX_RUNTIME:-7h45m}" "$@"
status=$?

# 75: a process was lost; the command is right, start it again. Any other status says what is wrong in the log.
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

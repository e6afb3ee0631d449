#!/bin/bash
# One process a node, all of a node's GPUs in it; what follows the script is train.py's:
#   RUN_NAME=first sbatch launch/slurm.sh --config.data.path=FILES --config.data.tokenizer=FILE.json
# As it is, Llama-2-7B on a node with eight GPUs of 80 GB; with sbatch --nodes=4 on four of them. For other GPUs name
# another config: CONFIG=configs/gpu_24gb.py (docs/hardware.md).
# Edit the lines of #SBATCH; a folder that all nodes see holds the repository and runs/.
#SBATCH --job-name=parallax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Two minutes before the time is up, and before a preemption: the run saves the step that it is in.
#SBATCH --signal=TERM@120

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?start me with sbatch}" || exit
: "${RUN_NAME:?name the run, as in RUN_NAME=first sbatch launch/slurm.sh; the same name goes on with it}"

# JAX would give each process one device; the processes here have all of their node's.
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PARALLAX_COORDINATOR="$coordinator:$((20000 + SLURM_JOB_ID % 20000))"
export PARALLAX_NUM_PROCESSES="$SLURM_NTASKS"
PARALLAX_JOB_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export PARALLAX_JOB_TOKEN

# A collective that hangs is ended by the run itself, with 75: after distributed.wait_secs (15 minutes), or in the first
# step distributed.compile_secs (2 hours), since processes may compile for different times. If it cannot, XLA ends the
# process later than both, with 134; with a longer limit of the run, raise this one. What NCCL warns of is in the log.
export XLA_FLAGS="--xla_gpu_nccl_termination_timeout_seconds=7500 ${XLA_FLAGS:-}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# The config's 16 microbatches of 256 windows are for one node. Over a network each of them waits for its weights: so a
# GPU takes four windows at once, for which it needs 50 to 56 GiB (docs/hardware.md). For another batch say how many.
microbatches=
if [ -z "${CONFIG:-}" ] && [ "$SLURM_NTASKS" -gt 1 ]; then
  gpus=$((SLURM_NTASKS * ${SLURM_GPUS_ON_NODE:-8}))
  microbatches=--config.pipeline.microbatches=$((gpus < 64 ? 64 / gpus : 1))
fi

# When one task has ended, the others have a minute for their last words.
# A task has its cores by srun's own flag: from SLURM 22.05 on sbatch's is not taken over.
# shellcheck disable=SC2016  # the shell of each task has its own SLURM_PROCID
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60 bash -c 'PARALLAX_PROCESS_ID=$SLURM_PROCID exec "$@"' process \
  .venv/bin/python -u train.py --config="${CONFIG:-configs/gpu_80gb_x8.py}" ${microbatches:+"$microbatches"} \
  --run-name="$RUN_NAME" --max-runtime="${MAX_RUNTIME:-7h45m}" --stopped-status=75 "$@"
status=$?

# 75: a process was lost, or the run was stopped and saved before its end. 134 to 139: one was killed, for want of memory
# perhaps, or crashed; srun has the highest status of all. Both go on from the last checkpoint. Any other status says what
# is wrong in the log. A job that was cancelled is not RUNNING.
case "$status" in
  75 | 13[4-9])
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-100}" ] &&
      [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$status"

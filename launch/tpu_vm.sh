#!/bin/bash
# All hosts of a TPU VM pod at once, each finding the others by itself: bash launch/tpu_vm.sh NAME ZONE
# The repository and its .venv are on every host already (see docs/platforms/tpu-vm.md); --workdir is a folder that all hosts share,
# or one in a bucket.
set -euo pipefail
name=${1:?the name of the TPU VM} zone=${2:?its zone}

gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd parallax && .venv/bin/python -u train.py --config=${CONFIG:-configs/llama_1b_16.py} --workdir=${WORKDIR:-/shared/runs/first} ${ARGS:-}"

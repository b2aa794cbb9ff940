#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU slice. Has NOT been run: written from
# gcloud's and jax's documentation.
#
#   NAME=my-tpu ZONE=europe-west4-b launch/tpu_pod.sh \
#     --config configs/math_smollm2.py --workdir gs://my-bucket/runs/1
#
# Copies this folder to every host, installs it with the TPU extra, and starts
# one process per host. The workdir must be one that all hosts see.
set -euo pipefail
: "${NAME:?the name of the TPU}" "${ZONE:?its zone}"
cd "$(dirname "$0")/.."

gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" \
  . "$NAME:~/drmas_jax"
gcloud compute tpus tpu-vm ssh "$NAME" --worker=all --zone="$ZONE" --command="
  cd ~/drmas_jax && pip install -q -e '.[tpu]' &&
  python3 -m drmas_jax.main --coordinator_address=auto $(printf '%q ' "$@")"

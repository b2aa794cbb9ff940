#!/usr/bin/env bash
# A dry run of a job on several hosts: one machine, N processes, gloo on
# loopback, DEVICES (default 4) fake CPU devices each. Has been run, on 2 cores
# with the command below.
#
#   launch/local.sh 2 --config configs/math_tiny.py --workdir runs/dry \
#     --config.placement.strategy=columns --config.steps=4
#
# Every line of output starts with its process. A process that fails is missed
# by the others, which name it and end too; the exit code is that of the first
# process, by number, that did not end with 0. Ctrl-C goes to all of them.
set -euo pipefail
num_processes=${1:?"usage: launch/local.sh NUM_PROCESSES --config .. --workdir .."}
shift

python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-4}"

pids=()
trap 'kill -INT "${pids[@]}" 2>/dev/null || true' INT
for ((i = 0; i < num_processes; i++)); do
  "$python" -m drmas_jax.main "$@" --coordinator_address="127.0.0.1:$port" \
    --num_processes="$num_processes" --process_id="$i" \
    > >(sed -u "s/^/[$i] /") 2>&1 &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do  # Ctrl-C ends a wait, not the process
    wait "$pid" || true
  done
  wait "$pid" || status=$((status ? status : $?))
done
exit "$status"

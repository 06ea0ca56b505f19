#!/usr/bin/env bash
# Open MPI, one process per GPU:  RUN=/shared/run bash examples/multi_node/mpirun.sh node1:8,node2:8 --epochs 100
set -uo pipefail
hosts=${1:?must be hosts with their numbers of GPUs, as node1:8,node2:8}
shift
export MASTER_ADDR=${hosts%%[:,]*} MASTER_PORT=${MASTER_PORT:-29500}
if [[ $MASTER_ADDR = localhost && $hosts = *,* ]]; then
    echo "error: $hosts: localhost is another machine on each; name this one as the others know it" >&2
    exit 2
fi

# At a signal, mpirun sends SIGTERM to all processes, which save a checkpoint, and ends those that are left after 10 s.
trap 'stopped=1; kill -TERM "$job"' TERM INT HUP
for try in 1 2 3 4 5; do
    # In a session of its own, because a second signal, which Ctrl-C would send it, lets it wait for nothing.
    setsid mpirun --host "$hosts" --bind-to none --mca odls_base_sigkill_timeout 10 \
        -x PATH -x RUN ${DEVICES:+-x DEVICES} -x MASTER_ADDR -x MASTER_PORT \
        bash examples/multi_node/train.sh "$@" &
    job=$!
    while wait "$job"; code=$?; kill -0 "$job" 2>/dev/null; do :; done  # a signal ends `wait` early
    if [ -n "${stopped:-}" ]; then exit 143; fi
    if [ "$code" = 0 ] || [ "$code" = 2 ]; then break; fi
done
exit "$code"

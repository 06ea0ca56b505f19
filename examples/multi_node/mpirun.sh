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

# At a signal, all processes save a checkpoint and stop: mpirun hands SIGUSR1 on to them. At SIGTERM it would no longer
# read what they print, and kill them.
trap 'stopped=1; kill -USR1 "$job"' TERM INT HUP
for try in 1 2 3 4 5; do
    # In a session of its own, where Ctrl-C does not reach it.
    setsid mpirun --host "$hosts" --bind-to none \
        -x PATH -x RUN ${DEVICES:+-x DEVICES} -x MASTER_ADDR -x MASTER_PORT \
        bash examples/multi_node/train.sh "$@" &
    job=$!
    while wait "$job"; code=$?; kill -0 "$job" 2>/dev/null; do :; done  # a signal ends `wait` early
    if [ -n "${stopped:-}" ]; then exit 143; fi
    if [ "$code" = 0 ] || [ "$code" = 2 ]; then break; fi
done
exit "$code"

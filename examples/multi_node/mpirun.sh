#!/usr/bin/env bash
# Open MPI, one process per GPU:  RUN=/shared/run bash examples/multi_node/mpirun.sh node1:8,node2:8 --epochs 100
set -uo pipefail
hosts=${1:?must be hosts with their numbers of GPUs, as node1:8,node2:8}
shift
export MASTER_ADDR=${hosts%%[:,]*} MASTER_PORT=${MASTER_PORT:-29500}

for try in 1 2 3 4 5; do
    mpirun --host "$hosts" --bind-to none -x RUN -x DEVICES -x MASTER_ADDR -x MASTER_PORT \
        bash examples/multi_node/train.sh "$@"
    code=$?
    if [ "$code" = 0 ] || [ "$code" = 2 ]; then break; fi
done
exit "$code"

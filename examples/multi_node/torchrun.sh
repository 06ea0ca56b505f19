#!/usr/bin/env bash
# torchrun, the same line on every node:  RUN=/shared/run bash examples/multi_node/torchrun.sh node1 2 8 --epochs 100
set -euo pipefail
host=${1:?must be the first node} nodes=${2:?must be the number of nodes} gpus=${3:?must be the GPUs of a node}
shift 3
export RUN

exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" --max-restarts 5 \
    --rdzv-backend c10d --rdzv-endpoint "$host:29400" --rdzv-id "$(basename "$RUN")" \
    --no-python bash examples/multi_node/train.sh "$@"

"""Ray Train: a worker per GPU, each of which runs one process of the run; Ray starts all anew when one fails.

RUN=/shared/run python examples/multi_node/ray_train.py 16 --epochs 100
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

PORT = 29500


def train(config: dict) -> None:
    """Run one process of the run in this worker."""
    context = get_context()
    host = broadcast_from_rank_zero(socket.gethostbyname(socket.gethostname()))
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"{host}:{PORT}",
        "JAX_NUM_PROCESSES": f"{context.get_world_size()}",
        "JAX_PROCESS_ID": f"{context.get_world_rank()}",
        "RUN": config["run"],
    }
    command = ["bash", "examples/multi_node/train.sh", *config["arguments"]]
    subprocess.run(command, env=os.environ | variables, cwd=config["folder"], check=True)


def main(workers: int, arguments: list[str]) -> None:
    """Start the workers, and wait for the end of the run."""
    config = {"run": os.environ["RUN"], "arguments": arguments, "folder": str(Path.cwd())}
    use_gpu = os.environ.get("USE_GPU", "1") == "1"
    DataParallelTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=20)),
    ).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

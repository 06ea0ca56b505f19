"""Job in JAX: one process drives all devices of the machine."""

import jax
import numpy as np

from examples.multi_gpu.job import Options, world_sizes
from jaxddp import DistributedDataParallel, Replicas, models, optim, prepare
from jaxddp.data.micro_batches import MicroBatches


def speeds(options: Options) -> dict[int, float]:
    """Measure examples per second, by world size.

    Raises:
        InputError: there are fewer devices than --devices.
    """
    devices = prepare(options.devices, options.platform)
    with jax.default_matmul_precision("highest"):  # torch's default; on GPUs jax would use TF32
        return {size: speed(options, Replicas(devices[:size])) for size in world_sizes(len(devices))}


def speed(options: Options, replicas: Replicas) -> float:
    """Measure examples per second of all replicas together; a round is one dispatch."""
    config, dataset = options.config(replicas.world_size), options.batch()
    ddp = DistributedDataParallel(models.build(config, dataset), optim.from_config(config, 1), replicas=replicas)
    shape = replicas.world_size, options.steps
    examples = {name: np.broadcast_to(array, (*shape, *array.shape)) for name, array in dataset.train.items()}
    placed, state = replicas.shard(MicroBatches(None, examples, None)), ddp.init()

    def round_of_steps() -> None:
        nonlocal state
        state, _ = ddp.steps(state, placed)
        jax.block_until_ready(state.params)

    measured = options.examples_per_second(replicas.world_size, round_of_steps)
    ddp.verify(state)
    return measured

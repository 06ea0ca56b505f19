"""Job in PyTorch: a process per device, started here or by torchrun."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from examples.multi_gpu.job import Options, world_sizes
from torch_ref import models, optim
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import bare, wrap
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.step import train_step
from torch_ref.verify import verify_replicas


def speeds(options: Options) -> dict[int, float]:
    """Measure examples per second, by world size; every rank of torchrun returns the same.

    Raises:
        InputError: there are fewer devices than --devices.
    """
    config = options.config(options.devices)
    check_devices(replace(config, global_batch_size=options.batch_per_replica * num_replicas(config)))
    return launch(partial(on_rank, options), config)[0]


def on_rank(options: Options, world: World, config: TorchConfig) -> dict[int, float]:
    """Measure every world size in turn; ranks beyond it wait."""
    measured = {}
    for size in world_sizes(world.world_size):
        group = dist.new_group(list(range(size)))  # a collective call: all ranks must take part
        speed_of_size = torch.zeros((), dtype=torch.float64, device=world.device)
        if world.rank < size:
            speed_of_size += speed(options, World(world.rank, size, world.device, group))
        measured[size] = world.broadcast(speed_of_size).item()
    return measured


def speed(options: Options, world: World) -> float:
    """Measure examples per second of all ranks together, by this rank's clock."""
    config, dataset = options.config(world.world_size), options.batch()
    model = wrap(models.build(config, dataset).to(world.device), world)
    optimizer, scheduler = optim.from_config(model.parameters(), config, 1)
    batch = {name: torch.from_numpy(array).to(world.device) for name, array in dataset.train.items()}
    batch["y"] = batch["y"].long()

    def round_of_steps() -> None:
        for _ in range(options.steps):
            train_step(model, optimizer, scheduler, [batch], world)
        world.barrier()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    measured = options.examples_per_second(world.world_size, round_of_steps)
    verify_replicas(bare(model), world, step=(1 + options.rounds) * options.steps)
    return measured

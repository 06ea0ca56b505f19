"""Batches of a program in a check: those of each trainer's own loader. Imports each framework where it is used."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jaxddp.config import TrainerConfig
from jaxddp.data.order import epoch_order
from jaxddp.data.run_data import RunData, load_data
from jaxddp.data.sampler import samples_per_replica
from jaxddp.data.sources import Source
from jaxddp.program import Program


class RunBatches:
    """Batches of a program's training set by step and rank, as each trainer's loader yields them.

    Args:
        program: a program with `train_data`, bound to its options.
        config: batch size, order and seed.
        world_size: number of replicas.

    Raises:
        InputError: the batch cannot be divided.
    """

    def __init__(self, program: Program, config: TrainerConfig, world_size: int):
        config.per_replica_batch_size(world_size)
        self._program, self._world_size = program, world_size
        # A port cuts its batches into micro-batches of equal size.
        rest = config.accumulation_steps > 1 or config.drop_last_batch
        rest = rest and config.steps_per_epoch is None  # all batches of a stream are full
        self._config = dataclasses.replace(config, accumulation_steps=1, drop_last_batch=rest, join=False)

    @cached_property
    def _data(self) -> RunData:
        return load_data(self._program, self._config)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch of either loader."""
        c, sampler = self._config, self._program.get("sampler")
        order = epoch_order(len(self._data.train), c.shuffle, c.seed, 0, sampler)
        examples = samples_per_replica(len(order), self._world_size, c.drop_last)
        full, rest = divmod(examples, c.per_replica_batch_size(self._world_size))
        return full + (rest > 0 and not c.drop_last_batch)

    def test_data(self) -> Mapping[str, Source]:
        """Return the test sets, by the beginning of their metrics' names."""
        return self._data.tests

    @cached_property
    def _jax_loader(self) -> Any:
        from jaxddp.distributed.replicas import VirtualReplicas
        from jaxddp.loader import Loader

        c = self._config
        return Loader(
            self._data.train,
            VirtualReplicas(self._world_size),
            global_batch_size=c.global_batch_size,
            steps_per_dispatch=1,
            shuffle=c.shuffle,
            seed=c.seed,
            drop_last=c.drop_last,
            drop_last_batch=c.drop_last_batch,
            sampler=self._program.get("sampler"),
        )

    def jax_batch(self, step: int, rank: int) -> dict[str, Any]:
        """Return a replica's examples of a step from jaxddp's loader."""
        epoch, place = divmod(step, self.steps_per_epoch)
        batch = next(self._jax_loader.host_batches(epoch, start_step=place))
        return {name: array[rank, 0] for name, array in batch.last.items()}

    def torch_batch(self, step: int, rank: int) -> dict[str, Any]:
        """Return a rank's examples of a step from torch's DataLoader and DistributedSampler."""
        from torch_ref.loader import Loader

        sampler = self._program.get("sampler")
        loader = Loader(self._data.train, self._config, self._world_size, [rank], sampler=sampler)
        epoch, place = divmod(step, self.steps_per_epoch)
        return dict(next(loader.epoch(epoch, start_step=place))[0])

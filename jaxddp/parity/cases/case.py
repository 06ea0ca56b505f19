"""Check of one of jaxddp's own models against its twin in torch_ref."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import jax
import numpy as np

from jaxddp import models
from jaxddp.config import TrainConfig
from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.data.datasets import Dataset
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.loader import Loader
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch
from jaxddp.parity.jax_side.side import JaxSide, side_of_config
from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.side import BuiltIn


@dataclass(frozen=True)
class Case:
    """One of jaxddp's own models and its training, as a `jaxddp.parity.case_interface.AnyCase`.

    Attributes:
        config: model, optimizer, schedule, batch size, normalisation, dtype, seed.
        world_size: number of replicas.
        steps: number of optimizer steps.
        ignored_labels: share of labels that do not count; replicas then hold unequal numbers of valid ones.
    """

    config: TrainConfig
    world_size: int
    steps: int = 20
    ignored_labels: float = 0.0

    @property
    def name(self) -> str:
        """Model, optimizer, world size and dtype, a word each."""
        config = self.config
        return f"{config.model} {config.optimizer} x{self.world_size} {config.dtype}"

    @property
    def dtype(self) -> str:
        """Dtype of parameters, buffers and inputs."""
        return self.config.dtype

    @property
    def torch_source(self) -> BuiltIn:
        """Model and optimizer of torch_ref."""
        return BuiltIn(self.config, self.dataset())

    def jax_side(self) -> JaxSide:
        """Build the jax side: model and optimizer of jaxddp."""
        return side_of_config(self.config, self.dataset(), self.steps)

    def initial_weights(self) -> Tensors:
        """Return the weights that both frameworks draw from the config's seed, under torch's names."""
        with jax.enable_x64(self.dtype == "float64"):
            functional = Functional(models.build(self.config, self.dataset()))
            tensors = to_torch(jax.device_get({**functional.params, **functional.buffers}))
            return {n: x.astype(self.dtype) if x.dtype.kind == "f" else x for n, x in tensors.items()}

    def with_dtype(self, dtype: str) -> "Case":
        """Return the same case in another dtype."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, dtype=cast(Any, dtype)))

    def dataset(self) -> Dataset:
        """Draw a small dataset of the model's kind that breaks symmetries.

        Inputs have a mean far from 0, images are not square, replicas differ, and the last batch of an epoch is
        smaller than the others.
        """
        config = self.config
        rng = np.random.default_rng(config.seed)
        # Each replica has 2 3/4 steps per epoch. The dataset is one example short of all replicas' share, so the
        # sampler has to pad.
        per_replica = config.per_replica_batch_size(self.world_size) * 11 // 4
        size = self.world_size * per_replica - (self.world_size - 1)
        if config.model == "char_mlp":
            shape: tuple[int, ...] = (config.context_length,)
            num_classes = 7
            x = rng.integers(0, num_classes, (size, *shape)).astype(np.int32)
        else:
            shape, num_classes = ((6, 4), 5) if config.model == "convnet" else ((12,), 5)
            x = (rng.standard_normal((size, *shape)) + 1.5).astype(np.float32)
        y = rng.integers(0, num_classes, size).astype(np.int32)
        y[rng.random(size) < self.ignored_labels] = IGNORE_INDEX
        arrays = {"x": x.astype(config.dtype) if x.dtype.kind == "f" else x, "y": y}
        return Dataset("probe", arrays, arrays, num_classes, shape)

    def batches(self) -> Iterator[MicroBatches]:
        """Yield every step's micro-batches, leaves (world_size, ...)."""
        config = self.config
        loader = Loader(
            self.dataset().train,
            VirtualReplicas(self.world_size),
            global_batch_size=config.global_batch_size,
            accumulation_steps=config.accumulation_steps,
            steps_per_dispatch=1,
            seed=config.seed,
            drop_last=config.drop_last,
            drop_last_batch=config.drop_last_batch,
            join=config.join,
        )
        epochs = -(-self.steps // loader.steps_per_epoch)
        batches = (batch for epoch in range(epochs) for batch in loader.host_batches(epoch))
        return (_without_dispatch_axis(batch) for batch in islice(batches, self.steps))


def _without_dispatch_axis(batch: MicroBatches) -> MicroBatches:
    """Turn a batch of one step per dispatch, leaves (W, 1, ...), into leaves (W, ...)."""
    return jax.tree.map(lambda array: array[:, 0], batch)

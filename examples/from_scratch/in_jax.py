"""SimpleDDP in JAX: one process holds all replicas, each with a copy of the parameters."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self

import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

from examples.from_scratch.course import Measured, Side, measure
from examples.from_scratch.loops import milliseconds
from examples.from_scratch.problem import CONFIG, TIMED, TIMED_STEPS, Batch, batches
from examples.from_scratch.skeleton import Place, Skeleton
from jaxddp import DistributedDataParallel, DistributedSampler, Replicas, models, optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.distributed.collectives import all_reduce_mean, broadcast, rank, world_size
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import cross_entropy
from jaxddp.nn.torch_weights import to_torch, torch_name
from jaxddp.state import Params


class Programs:
    """Compiled programs of a replica, shared by all SimpleDDPs with the same model and optimizer.

    Slice r of each array (world_size, ...), on device r, holds what process r holds in torch.

    Args:
        model: the model; its values are not used.
        optimizer: an optax transformation.
        replicas: the devices.
    """

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, replicas: Replicas):
        functional = Functional(model)
        self._loss, self._buffers = functional.local_loss(cross_entropy, train=True), functional.buffers
        self._optimizer = optimizer
        self.replicas = replicas
        self.distances = replicas.map(_distances, (0,), 0)
        self.start = replicas.map(self._start, (0,), 0)
        self.add_gradients = replicas.map(self._add_gradients, (0, 0, 0, None), 0, donate=(1,))
        self.average = replicas.map(all_reduce_mean, (0,), 0, donate=(0,))
        self.update = replicas.map(self._update, (0, 0, 0), 0, donate=(0, 1, 2))

    def _start(self, params: Params) -> tuple[Any, Params]:
        return self._optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def _add_gradients(self, params: Params, accumulated: Params, batch: Batch, scale: jax.Array) -> Params:
        gradients = jax.grad(self._mean_loss)(params, batch)
        return jax.tree.map(lambda before, gradient: before + scale * gradient, accumulated, gradients)

    def _mean_loss(self, params: Params, batch: Batch) -> jax.Array:
        sums, _ = self._loss(params, self._buffers, batch)
        return sums["loss"] / sums["count"]

    def _update(self, params: Params, opt_state: Any, gradients: Params) -> tuple[Params, Any, Params]:
        updates, opt_state = self._optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.tree.map(jnp.zeros_like, gradients)


def _distances(params: Params) -> Params:
    return jax.tree.map(lambda mine, first: jnp.abs(mine - first).max(), params, broadcast(params))


class SimpleDDP(Skeleton):
    """Data parallelism in three programs: gradients, their mean, the update.

    Args:
        copies: each replica's model, in rank order; all must be equal.
        programs: programs for this model on as many replicas.
        dtype: dtype of the parameters.

    Raises:
        TrainingError: the copies differ.
    """

    def __init__(self, copies: Sequence[nnx.Module], programs: Programs, dtype: str):
        of_copies = [cast(Functional(copy).params, dtype) for copy in copies]
        stacked = {name: np.stack([params[name] for params in of_copies]) for name in of_copies[0]}
        self._programs, self._params = programs, programs.replicas.shard(stacked)
        self.check_replicas()
        self._opt_state, self._gradients = programs.start(self._params)

    def gaps(self) -> dict[str, list[float]]:
        """See `Skeleton`."""
        return {torch_name(name): gaps.tolist() for name, gaps in self._programs.distances(self._params).items()}

    def backward(self, batch: Any, scale: float = 1.0) -> None:
        """See `Skeleton`; the batch has leaves (world_size, B, ...), placed by `Replicas.shard`."""
        self._gradients = self._programs.add_gradients(self._params, self._gradients, batch, scale)

    def average_gradients(self) -> None:
        """See `Skeleton`."""
        self._gradients = self._programs.average(self._gradients)

    def step(self) -> None:
        """See `Skeleton`."""
        state = self._params, self._opt_state, self._gradients
        self._params, self._opt_state, self._gradients = self._programs.update(*state)

    def parameters(self) -> dict[str, np.ndarray]:
        """See `Skeleton`."""
        return to_torch({name: np.asarray(value)[0] for name, value in self._params.items()})

    def wait(self) -> Self:
        """See `Skeleton`."""
        jax.block_until_ready(self._params)
        return self


def places(replicas: Replicas) -> list[Place]:
    """Ask each replica for its rank and world size; the local rank is its position in this process."""
    program = replicas.map(lambda zero: (zero + rank(), zero + world_size()), (0,), 0)
    ranks, sizes = program(replicas.shard(np.zeros(replicas.world_size, np.int32)))
    local_ranks = range(len(replicas.local_ranks))
    return [Place(*numbers) for numbers in zip(ranks.tolist(), local_ranks, sizes.tolist(), strict=True)]


def simple(replicas: Replicas, seeds: Sequence[int], lr: float, config: TrainConfig = CONFIG) -> SimpleDDP:
    """Build a SimpleDDP whose replica r has the initial weights of seeds[r]."""
    copies = [models.build(replace(config, seed=seed), datasets.load(config)) for seed in seeds]
    return SimpleDDP(copies, _programs(replicas, replace(config, lr=lr)), config.dtype)


@cache
def _programs(replicas: Replicas, config: TrainConfig) -> Programs:
    return Programs(models.build(config, datasets.load(config)), optim.from_config(config, 1), replicas)


def real(replicas: Replicas, placed: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the parameters after a step of `jaxddp.DistributedDataParallel` on each batch."""
    model = models.build(CONFIG, datasets.load(CONFIG))
    ddp = DistributedDataParallel(model, optim.from_config(CONFIG, 1), replicas=replicas, dtype=CONFIG.dtype)
    state = ddp.init()
    for batch in placed:
        state, _ = ddp.step(state, batch)
    return to_torch(ddp.values(state)[0])


def run(replicas: Replicas) -> Measured:
    """Run all steps of the course on two replicas."""
    with jax.enable_x64(True):
        return measure(Side(partial(simple, replicas), partial(real, replicas), replicas.shard))


def times(replicas: Replicas) -> dict[str, float]:
    """Time a step in milliseconds: of one replica, of two without synchronisation, of two with it."""
    one = Replicas(replicas.devices[:1])
    on_host = batches(TIMED, TIMED_STEPS)
    alone = [one.shard({name: array[:1] for name, array in batch.items()}) for batch in on_host]
    placed = [replicas.shard(batch) for batch in on_host]
    apart = simple(replicas, (0, 0), TIMED.base_lr, TIMED)
    with apart.no_sync():
        without = milliseconds(apart, placed)
    return {
        "one": milliseconds(simple(one, (0,), TIMED.base_lr, TIMED), alone),
        "apart": without,
        "together": milliseconds(simple(replicas, (0, 0), TIMED.base_lr, TIMED), placed),
    }


def sampler_steps(num_examples: int, world_size: int, batch_size: int) -> list[int]:
    """Count the full batches of each rank under `DistributedSampler`."""
    return [len(DistributedSampler(num_examples, world_size, rank)) // batch_size for rank in range(world_size)]

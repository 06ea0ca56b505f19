"""Three ways to train in JAX: one replica; several that sum their gradients; several that average them like DDP."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from examples.same_updates.settings import DDP, MANY, Case, Epoch, Record
from jaxddp import DistributedDataParallel, Loader, Losses, Replicas, cross_entropy, optim
from jaxddp.config.choices import IGNORE_INDEX
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.sampler import epoch_indices
from jaxddp.data.torch_rng import Generator, linear_init
from jaxddp.distributed.collectives import all_reduce
from jaxddp.nn.losses import Batch, summed
from jaxddp.state import TrainState
from jaxddp.step.replica_step import ReplicaStep

OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optim.sgd,
    "adam": optim.adamw,
    "adagrad": optim.adagrad,
    "rmsprop": optim.rmsprop,
}
WEIGHT = "kernel"  # (dim, num_labels): torch's weight, transposed


def reduced_cross_entropy(model: Callable[[jax.Array], jax.Array], batch: Batch, reduction: str) -> Losses:
    """Reduce a replica's batch to one element, its sum or mean, so that the step divides by 1."""
    losses = cross_entropy(model, batch)
    sums, sums_once = summed(losses), summed(losses, valid=batch["once"])
    loss = sums["loss"] / sums["count"] if reduction == "mean" else sums["loss"]
    return Losses(loss[None], metrics={"right": sums["accuracy"][None], "right_once": sums_once["accuracy"][None]})


def epochs(case: Case, examples: np.ndarray, labels: np.ndarray, generator: Generator) -> Iterator[dict[str, Any]]:
    """Yield each epoch's examples in the order in which the replicas receive them.

    Args:
        case: the run.
        examples, labels: the data set.
        generator: generator of the initial weights and the data set; it also draws the orders.

    Yields:
        "x"; "y"; and "once", 0 for a repeated example.
    """
    settings = case.settings
    size, shuffle = settings.num_examples, not settings.no_shuffle
    for _ in range(settings.epochs):
        if case.way == DDP:  # the order of epoch 0 every time: the program does not call set_epoch
            shards = epoch_indices(
                size, case.devices, shuffle=shuffle, seed=settings.seed, drop_last=settings.drop_last
            )
            order = shards.T.ravel()
        else:
            order = torch_random_order(generator, size) if shuffle else np.arange(size)
        # Pad the last step so that every replica has an example; no loss counts the padding.
        padding = -len(order) % case.devices
        x = np.pad(examples[order], ((0, padding), (0, 0)))
        y = np.pad(labels[order], (0, padding), constant_values=IGNORE_INDEX)
        yield {"x": x, "y": y, "once": (np.arange(len(y)) < size).astype(x.dtype)}


def torch_random_order(generator: Generator, size: int) -> np.ndarray:
    """Draw the order of torch's `DataLoader(shuffle=True)`, which first draws a seed for its workers."""
    _, seed = generator.random((2,)).tolist()
    return Generator(seed).randperm(size)


def observed_steps(
    step: ReplicaStep, state: TrainState, batches: MicroBatches
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take K steps on a replica; return each step's loss, gradient and new weights too."""

    def body(state: TrainState, batch: MicroBatches) -> tuple[TrainState, dict[str, jax.Array]]:
        next_state, sums, stages = step(state, batch)
        observed = {"local_loss": stages["local_loss"], "gradient": stages["gradients"][WEIGHT][0, 0]}
        return next_state, {**sums, **observed, "weight": next_state.params[WEIGHT].T}

    return lax.scan(body, state, batches)


def train(case: Case, devices: Sequence[jax.Device]) -> Record:
    """Train.

    Args:
        case: the run.
        devices: at least `case.devices` devices.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        return _train(case, Replicas(devices[: case.devices]))


def _train(case: Case, replicas: Replicas) -> Record:
    settings, generator = case.settings, Generator(case.settings.seed)
    weight = linear_init(generator, settings.dim, settings.num_labels, bias=False)[0].astype(case.dtype)
    examples = generator.normal((settings.num_examples, settings.dim), dtype=np.dtype(case.dtype))
    labels = generator.randint(0, settings.num_labels, (settings.num_examples,)).astype(np.int32)

    model = nnx.Linear(settings.dim, settings.num_labels, use_bias=False, rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"comm_hook": all_reduce} if case.way == MANY else {}  # a sum; by default, the mean
    loss_fn = partial(reduced_cross_entropy, reduction=case.reduction)
    optimizer = OPTIMIZERS[settings.opt](**settings.optimizer_options)
    ddp = DistributedDataParallel(model, optimizer, loss_fn, replicas=replicas, **options)
    steps = replicas.map(partial(observed_steps, ddp.replica_step), (None, 0), (None, 0))

    state = ddp.init({WEIGHT: jnp.asarray(weight.T)})
    all_observed: list[dict[str, np.ndarray]] = []
    results: list[Epoch] = []
    for arrays in epochs(case, examples, labels, generator):
        global_batch_size = settings.batch_size * (replicas.world_size if case.way == DDP else 1)
        loader = Loader(arrays, replicas, global_batch_size=global_batch_size, shuffle=False)
        of_epoch = []
        for batches in loader.epoch(0):
            state, observed = steps(state, batches)
            of_epoch.append(jax.tree.map(lambda x: np.asarray(x[0]), observed))  # replica 0's, (K, ...)
        all_observed += of_epoch
        results.append(_epoch(of_epoch, settings.num_examples, int(arrays["once"].sum())))

    first = {name: float(values[0]) for name, values in all_observed[0].items() if name != "weight"}
    weights = np.concatenate([weight[None], *(part["weight"] for part in all_observed)])
    first_loss = first["local_loss" if case.way == DDP else "loss"]
    return Record(first_loss, first["loss"], first["gradient"], weights, results)


def _epoch(parts: list[dict[str, np.ndarray]], num_examples: int, seen_once: int) -> Epoch:
    """Summarise an epoch from its dispatches' sums (K,)."""
    total = {name: float(sum(part[name].sum() for part in parts)) for name in ("loss", "right", "right_once")}
    steps = sum(len(part["loss"]) for part in parts)
    accuracy, accuracy_once = 100 * total["right"] / num_examples, 100 * total["right_once"] / seen_once
    return Epoch(steps, total["loss"] / steps, accuracy, accuracy_once)

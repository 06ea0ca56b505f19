"""Gradients of the model in JAX: by hand, by autodiff, and averaged over replicas."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from examples.gradient_averaging import steps
from examples.gradient_averaging.problem import CONTEXT, EMBEDDING, HIDDEN, SEED, Arrays
from jaxddp import DistributedDataParallel, Replicas, optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.models import CharMLP
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import Batch
from jaxddp.nn.torch_weights import from_torch, to_torch
from jaxddp.state import Params, TrainState


def by_hand(parameters: Arrays, examples: Arrays, dtype: str) -> Arrays:
    """Compute the gradient of every intermediate and parameter by the hand-written backward pass."""
    return _run(_by_hand, parameters, examples, dtype)


def by_autodiff(parameters: Arrays, examples: Arrays, dtype: str) -> Arrays:
    """Compute the gradient of every intermediate and parameter by `jax.grad`."""
    return _run(_by_autodiff, parameters, examples, dtype)


def _run(function: Callable[..., Params], parameters: Arrays, examples: Arrays, dtype: str) -> Arrays:
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):  # not TF32 on GPUs
        p = {name: jnp.asarray(value, dtype) for name, value in parameters.items()}
        return jax.device_get(function(p, examples["x"], examples["y"]))


@jax.jit
def _by_hand(p: Params, x: jax.Array, y: jax.Array) -> Params:
    return steps.backward(jnp, p, x, y)


@jax.jit
def _by_autodiff(p: Params, x: jax.Array, y: jax.Array) -> Params:
    """Differentiate with respect to zeros added to the intermediates: jax.grad needs them as arguments."""
    _, values = steps.remembered(jnp, p, x, y)

    def loss(p: Params, zeros: Params) -> jax.Array:
        return steps.forward(jnp, p, x, y, lambda name, value: value + zeros[name])

    of_parameters, of_intermediates = jax.grad(loss, argnums=(0, 1))(p, jax.tree.map(jnp.zeros_like, values))
    return {**of_parameters, **of_intermediates}


def gradient_of_replicas(norm: str, weights: Arrays, examples: Arrays, replicas: Replicas) -> Arrays:
    """Compute the gradients that the optimizer receives when replicas share a batch.

    Args:
        norm: the model's BatchNorm: "none", "local" or "synchronised".
        weights: arrays by torch's names.
        examples: x (n, 3) and y (n,), split evenly among the replicas.
        replicas: the replicas.

    Returns:
        Arrays by torch's names, float64.
    """
    with jax.enable_x64(True):
        model = _model(norm, len(weights["fc2.bias"]))
        ddp = DistributedDataParallel(model, optim.sgd(1.0), replicas=replicas, dtype="float64")

        def gradients(state: TrainState, share: Batch) -> Any:
            _, _, stages = ddp.replica_step(state, MicroBatches(None, share))
            return stages["gradients"]

        functional = Functional(model)
        tensors = {**to_torch(functional.buffers), **weights}
        state = ddp.init(*from_torch(tensors, functional.params, functional.buffers))
        shares = {name: np.stack(np.split(array, replicas.world_size)) for name, array in examples.items()}
        averaged = replicas.map(gradients, in_axes=(None, 0), out_axes=None)(state, replicas.shard(shares))
        return to_torch(jax.device_get(averaged))


def _model(norm: str, vocab_size: int) -> CharMLP:
    sync = norm == "synchronised"
    model = CharMLP(vocab_size, CONTEXT, EMBEDDING, HIDDEN, sync_batch_norm=sync, generator=Generator(SEED))
    if norm == "none":
        model.bn = nnx.Sequential()  # type: ignore[assignment]
    return model

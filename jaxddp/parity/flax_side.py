"""The flax half of what is compared: parameters, the product's replica step, and the way to torch's names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from jax import numpy as jnp

from jaxddp import models, optim, weights
from jaxddp.config import TrainConfig
from jaxddp.datasets import Dataset
from jaxddp.errors import InputError
from jaxddp.functional import Functional, LocalLoss, cast
from jaxddp.losses import Batch, cross_entropy
from jaxddp.parity.convert import Converter
from jaxddp.parity.linen import LinenFunctional
from jaxddp.parity.port import Port
from jaxddp.state import Buffers, Params
from jaxddp.step import ReplicaStep

Tensors = dict[str, np.ndarray]  # torch's names, torch's layout


@dataclass(frozen=True)
class FlaxSide:
    """What a run in jax needs.

    Attributes:
        replica_step: the step; its optimizer makes the optimizer state.
        to_torch: flax arrays, or gradients of them, under torch's names and in torch's layout.
        from_torch: torch's tensors as parameters and buffers.
    """

    replica_step: ReplicaStep
    to_torch: Callable[[Mapping[str, Any]], Tensors]
    from_torch: Callable[[Tensors], tuple[Params, Buffers]]


def side_of_config(config: TrainConfig, dataset: Dataset, steps: int) -> FlaxSide:
    """What `jaxddp.train` would train."""
    functional = Functional(models.build(config, dataset))
    step = ReplicaStep(
        functional.local_loss(cross_entropy, train=True),
        optim.from_config(config, steps),
        config.loss_normalization,
        config.clip_grad_norm,
    )

    like = cast(functional.params, config.dtype), cast(functional.buffers, config.dtype)
    return FlaxSide(step, weights.to_torch, lambda tensors: weights.from_torch(tensors, *like))


def side_of_port(port: Port, steps: int, dtype: str) -> FlaxSide:
    """A port's flax half.

    Args:
        steps: optimizer steps of the whole run; schedules need their number.
        dtype: of parameters and buffers.

    Raises:
        InputError: the flax model is none, or its arrays do not map to torch's.
    """
    params, buffers, local_loss = _pure(port)
    shapes = {name: value.shape for name, value in (params | buffers).items()}
    converter = Converter(port.torch_model(), shapes, port.names, port.transpose_kernel)

    def from_torch(tensors: Tensors) -> tuple[Params, Buffers]:
        arrays = {name: jnp.asarray(value) for name, value in converter.to_flax(tensors).items()}
        return cast({name: arrays[name] for name in params}, dtype), cast({n: arrays[n] for n in buffers}, dtype)

    config = port.optimizer_config
    optimizer = port.flax_optimizer if config is None else optim.from_config(config, steps)
    assert optimizer is not None, "Port saw to it"
    step = ReplicaStep(local_loss, optimizer, clip_grad_norm=port.clip_grad_norm)
    return FlaxSide(step, converter.to_torch, from_torch)


def _pure(port: Port) -> tuple[Params, Buffers, LocalLoss]:
    """The model's parameters and buffers, and its loss as a function of them."""
    model, loss_fn = port.flax_model(), _per_element(port)
    if isinstance(model, nnx.Module):
        functional = Functional(model)
        return functional.params, functional.buffers, functional.local_loss(loss_fn, train=True)
    if isinstance(model, linen.Module):
        of_linen = LinenFunctional(model, loss_fn, port.micro_batches(0, 0)[0])
        return of_linen.params, of_linen.buffers, of_linen.local_loss(loss_fn)
    raise InputError(f"flax_model: must make a flax.nnx or flax.linen module, and makes {type(model).__name__}")


def _per_element(port: Port) -> Callable[[Any, Batch], jax.Array]:
    """The port's loss with an axis to take the mean over, where it took that itself."""
    return lambda model, batch: jnp.atleast_1d(port.flax_loss(model, batch))

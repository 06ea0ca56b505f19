"""What a replica does on its own: loss and gradients of its micro-batches, added up. Nothing is sent here.

micro-batch -> forward pass -> loss -> backward pass -> sum over micro-batches
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.nn.dropout_rng import Place
from jaxddp.nn.functional import LocalLoss, RandomLoss
from jaxddp.nn.losses import Batch, Sums, num_examples
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.trainable import noted, of_reached, trained


class LocalResult(NamedTuple):
    """What a replica finds on its own: loss = loss / denominator, gradients = gradients / denominator.

    `valid` is from how many examples; None where there is no padding, and so every replica has some.
    With a loss scaler the gradients, and they alone, are scaled.
    """

    loss: jax.Array
    gradients: Params
    denominator: jax.Array
    sums: Sums
    valid: jax.Array | None = None


class Unsynchronized(NamedTuple):
    """What a replica has gathered since the last synchronised step; each has its own.

    Attributes:
        result: sums over its micro-batches.
        buffers: as its own forward passes have left them.
        examples: int32 scalar, how many they were; None where no random numbers depend on it.
    """

    result: LocalResult
    buffers: Buffers
    examples: jax.Array | None = None


@dataclass(frozen=True)
class LocalGradients:
    """The first half of a replica step, of which `jaxddp.step.replica_step` is the second.

    Attributes:
        loss: (params, buffers, batch) -> (sums, new buffers); sums holds "loss" and "count".
        loss_normalization, frozen, find_unused_parameters, scaler: see `jaxddp.step.options.StepOptions`.
    """

    loss: LocalLoss
    loss_normalization: str = "ddp"
    frozen: tuple[str, ...] = ()
    find_unused_parameters: bool | None = False
    scaler: GradScaler | None = None

    def accumulate(self, state: TrainState, batch: MicroBatches) -> Unsynchronized:
        """Sum a replica's micro-batches, each seeing the buffers that the one before it left."""
        if batch.head is None:
            return self.differentiate(state, state.buffers, batch.last)
        pieces = 1 + len(jax.tree.leaves(batch.head)[0])

        def body(before: Unsynchronized, micro_batch: Batch) -> tuple[Unsynchronized, None]:
            return self.add(state, before, micro_batch, pieces), None

        first = jax.tree.map(lambda x: x[0], batch.head)
        shapes = jax.eval_shape(self.differentiate, state, state.buffers, first)
        nothing = jax.tree.map(jnp.zeros_like, shapes)._replace(buffers=state.buffers)
        gathered, _ = lax.scan(body, nothing, batch.head)
        return self.add(state, gathered, batch.last, pieces)

    def add(self, state: TrainState, before: Unsynchronized, micro_batch: Batch, pieces: int = 1) -> Unsynchronized:
        """A micro-batch more."""
        result, buffers, examples = self.differentiate(state, before.buffers, micro_batch, before.examples, pieces)
        return Unsynchronized(jax.tree.map(jnp.add, before.result, result), buffers, examples)

    def differentiate(
        self, state: TrainState, buffers: Buffers, batch: Batch, before: jax.Array | None = None, pieces: int = 1
    ) -> Unsynchronized:
        """Loss and gradients of one micro-batch, as numerators and a denominator.

        Args:
            state: its parameters are what the loss is differentiated at.
            buffers: as the micro-batch before has left them.
            before: how many examples this replica has had before in this step; None: none.
            pieces: micro-batches of the step, as far as that is known.

        Raises:
            InputError: the loss does not depend on a parameter, and `find_unused_parameters` is False.
        """
        loss_of, examples = self.loss, None
        if isinstance(self.loss, RandomLoss):
            first = jnp.int32(0) if before is None else before
            loss_of, examples = self.loss.at(Place(state.step, first)), first + num_examples(batch)
        scaler = self.scaler
        reached: set[str] = set()
        valid = jnp.sum(batch["valid"]) if "valid" in batch else None

        def share(denominator: jax.Array) -> jax.Array:
            # What torch divides by before its backward pass. 16 bits overflow at the same scale only if we do too.
            return jnp.maximum(denominator, 1) * pieces

        def numerator(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Sums, Buffers]]:
            sums, new_buffers = loss_of({**state.params, **noted(params, reached)}, buffers, batch)
            loss, denominator = self.fraction(sums, valid)
            scaled = loss if scaler is None else scaler.scale(state.scaler, loss / share(denominator))
            return scaled, (loss, denominator, sums, new_buffers)

        found, gradients = jax.value_and_grad(numerator, has_aux=True)(trained(state.params, self.frozen))
        loss, denominator, sums, new_buffers = found[1]
        gradients = of_reached(gradients, reached, self.find_unused_parameters)
        if scaler is not None:
            gradients = jax.tree.map(lambda g: g * share(denominator).astype(g.dtype), gradients)
        result = LocalResult(loss, gradients, denominator, sums, valid)
        return Unsynchronized(result, new_buffers, examples)

    def fraction(self, sums: Sums, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """A micro-batch's numerator and denominator.

        Args:
            valid: from how many examples the sums are; None: there is no padding.
        """
        if self.loss_normalization == "global":
            return sums["loss"], sums["count"]
        if valid is None:
            return sums["loss"] / sums["count"], jnp.ones_like(sums["count"])
        some = valid > 0  # without any there is nothing; without a label that counts, no number, as in torch
        loss = jnp.where(some, sums["loss"] / jnp.where(some, sums["count"], 1), 0)
        return loss, some.astype(sums["count"].dtype)

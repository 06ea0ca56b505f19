"""First half of a replica step: loss and gradients of a replica's micro-batches, accumulated; nothing is sent.

micro-batch -> forward pass -> loss -> backward pass -> sum over micro-batches
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.nn.dropout_rng import Place
from jaxddp.nn.functional import LocalLoss, RandomLoss
from jaxddp.nn.losses import Batch, Sums, num_examples
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.grad_scaler import GradScaler
from jaxddp.step.loops import scan_or_unroll
from jaxddp.step.trainable import noted, of_used, trained
from jaxddp.tracking.gradient_metrics import EXAMPLE, EXAMPLES


class LocalResult(NamedTuple):
    """Numerators and denominator of one replica's loss and gradients, summed over its micro-batches.

    Attributes:
        loss: numerator of the loss, a scalar.
        gradients: numerators of the gradients; with a loss scaler, the only scaled field.
        denominator: scalar; "ddp": the number of micro-batches, "global": the sum of the elements' weights.
        sums: sums that the loss function returns, "loss" and "count" among them.
        valid: number of examples without the padding; None: without padding, where every replica has examples.
    """

    loss: jax.Array
    gradients: Params
    denominator: jax.Array
    sums: Sums
    valid: jax.Array | None = None


class Unsynchronized(NamedTuple):
    """Results that one replica has accumulated since the last optimizer step; they differ between replicas.

    Attributes:
        result: sums over its micro-batches.
        buffers: buffers after this replica's forward passes.
        examples: int32 scalar, the number of examples; None where neither random numbers nor anomalies depend on it.
    """

    result: LocalResult
    buffers: Buffers
    examples: jax.Array | None = None


@dataclass(frozen=True)
class LocalGradients:
    """Computation and accumulation of one replica's gradients.

    Attributes:
        loss: (params, buffers, batch) -> (sums, new buffers); sums holds "loss" and "count".
        loss_normalization, frozen, find_unused_parameters, scaler, remat, detect_anomaly: see `StepOptions`.
    """

    loss: LocalLoss
    loss_normalization: str = "ddp"
    frozen: tuple[str, ...] = ()
    find_unused_parameters: bool | None = False
    scaler: GradScaler | None = None
    remat: bool = False
    detect_anomaly: bool = False

    def accumulate(self, state: TrainState, batch: MicroBatches) -> Unsynchronized:
        """Sum over a replica's micro-batches, each starting from the buffers that the previous one left."""
        if batch.head is None:
            return self.differentiate(state, state.buffers, batch.last)
        pieces = 1 + len(jax.tree.leaves(batch.head)[0])

        def body(before: Unsynchronized, micro_batch: Batch) -> tuple[Unsynchronized, None]:
            return self.add(state, before, micro_batch, pieces), None

        first = jax.tree.map(lambda x: x[0], batch.head)
        shapes = jax.eval_shape(self.differentiate, state, state.buffers, first)
        zeros = jax.tree.map(jnp.zeros_like, shapes)._replace(buffers=state.buffers)
        accumulated, _ = scan_or_unroll(body, zeros, batch.head)
        # Outside of the loop, so that the all-reduce can overlap with the last micro-batch's backward pass.
        return self.add(state, accumulated, batch.last, pieces)

    def add(self, state: TrainState, before: Unsynchronized, micro_batch: Batch, pieces: int = 1) -> Unsynchronized:
        """Add one micro-batch."""
        result, buffers, examples = self.differentiate(state, before.buffers, micro_batch, before.examples, pieces)
        if EXAMPLE in result.sums:  # only the first counts
            result.sums[EXAMPLE] *= before.result.sums[EXAMPLES] == 0
        return Unsynchronized(jax.tree.map(jnp.add, before.result, result), buffers, examples)

    def differentiate(
        self, state: TrainState, buffers: Buffers, batch: Batch, before: jax.Array | None = None, pieces: int = 1
    ) -> Unsynchronized:
        """Compute loss and gradients of one micro-batch, as numerators and a denominator.

        Args:
            state: the loss is differentiated at its parameters.
            buffers: buffers after the previous micro-batch.
            before: number of examples that this replica has had in this step; None: none.
            pieces: number of micro-batches in the step; 1 if unknown.

        Raises:
            InputError: the loss does not depend on a parameter, and `find_unused_parameters` is False.
        """
        loss_of, first = self.loss, jnp.int32(0) if before is None else before
        if isinstance(self.loss, RandomLoss):
            loss_of = self.loss.at(Place(state.step, first))
        examples = first + num_examples(batch) if loss_of is not self.loss or self.detect_anomaly else None
        scaler = self.scaler
        reached: set[str] = set()
        valid = jnp.sum(batch["valid"]) if "valid" in batch else None

        def share(denominator: jax.Array) -> jax.Array:
            # torch divides by this before its backward pass; doing the same makes 16 bits overflow at the same scale.
            # At least 1, for a replica with only padding; the gradients are multiplied by it afterwards.
            return jnp.maximum(denominator, 1) * pieces

        def sums_of(params: Params, *arguments: Any) -> tuple[Sums, Buffers]:
            # Frozen parameters come from the state, which is not differentiated, so they get no gradient.
            return loss_of({**state.params, **noted(params, reached)}, *arguments)

        loss_and_buffers = jax.checkpoint(sums_of, policy=_is_product) if self.remat else sums_of

        def numerator(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Sums, Buffers]]:
            sums, new_buffers = loss_and_buffers(params, buffers, batch)
            loss, denominator = self.fraction(sums, valid)
            scaled = loss if scaler is None else scaler.scale(state.scaler, loss / share(denominator))
            return scaled, (loss, denominator, sums, new_buffers)

        (_, aux), gradients = jax.value_and_grad(numerator, has_aux=True)(trained(state.params, self.frozen))
        loss, denominator, sums, new_buffers = aux
        gradients = of_used(gradients, reached, self.find_unused_parameters)
        if not self.detect_anomaly:
            sums = {name: x for name, x in sums.items() if name not in (EXAMPLE, EXAMPLES)}
        elif EXAMPLE in sums:
            sums[EXAMPLE] += first * (sums[EXAMPLE] > 0)
        if scaler is not None:
            gradients = jax.tree.map(lambda g: g * share(denominator).astype(g.dtype), gradients)
        result = LocalResult(loss, gradients, denominator, sums, valid)
        return Unsynchronized(result, new_buffers, examples)

    def fraction(self, sums: Sums, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return numerator and denominator of a micro-batch's loss.

        Args:
            valid: number of examples without the padding; None: without padding.
        """
        if self.loss_normalization == "global":
            return sums["loss"], sums["count"]
        if valid is None:
            return sums["loss"] / sums["count"], jnp.ones_like(sums["count"])
        # Without examples, loss and denominator are 0. With examples but no valid label, the loss is NaN, as in torch.
        some = valid > 0
        # The inner `where` avoids 0 / 0, which would make the gradient NaN even where the outer one picks 0.
        loss = jnp.where(some, sums["loss"] / jnp.where(some, sums["count"], 1), 0)
        return loss, some.astype(sums["count"].dtype)


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether `jax.checkpoint` keeps the results of a primitive: those that take long to compute again."""
    return primitive.name in ("dot_general", "conv_general_dilated")


def mean_over_micro_batches(local: LocalResult, count_empty: bool) -> LocalResult:
    """Average over a replica's own number of micro-batches, where padding makes it differ between replicas.

    The new denominator is this replica's weight in the mean over replicas: 1, or 0 for a replica without examples
    unless `count_empty`.
    """
    micro_batches = jnp.maximum(local.denominator, 1)
    weight = jnp.ones_like(micro_batches) if count_empty else jnp.minimum(local.denominator, 1)
    gradients = divide(local.gradients, micro_batches)
    return local._replace(loss=local.loss / micro_batches, gradients=gradients, denominator=weight)


def divide(tree: Any, denominator: jax.Array) -> Any:
    """Divide every leaf by a scalar, in the leaf's dtype."""
    return jax.tree.map(lambda x: x / denominator.astype(x.dtype), tree)

"""A port's `flax_step`, in place of jaxddp's replica step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.nn.losses import Batch, Sums
from jaxddp.state import Buffers, Params, TrainState, state_axes
from jaxddp.step.replica_step import ReplicaStep

SHOWN = ("local_loss", "local_gradients", "gradients", "clipped_gradients")
Own = Callable[[Any, Any, TrainState, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class OwnStep:
    """A port's `flax_step` with the interface of `ReplicaStep`.

    The stages "pure_local_loss" and "pure_local_gradients" are those of jaxddp's step with the port's loss. They show
    whether model and loss are right, whatever the port's step does.

    Attributes:
        step: jaxddp's step, with the port's loss and optimizer.
        own: the port's function, (loss, optimizer, state, batch) -> state, or (state, stages).
    """

    step: ReplicaStep
    own: Own

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer of the port."""
        return self.step.optimizer

    @property
    def axes(self) -> TrainState:
        """Axes of the state, which is the same on every replica."""
        return state_axes(())

    def init(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state before the first step."""
        return TrainState(jnp.int32(0), params, buffers, self.optimizer.init(params))

    def start(self, params: Params, buffers: Buffers, replicas: Replicas) -> TrainState:
        """Place the state before the first step on all replicas."""
        return replicas.start(self.init(params, buffers), self.axes)

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Compute the next state and the stages that the port shows.

        Raises:
            InputError: the port's step returns anything but a state, or a state and known stages.
        """
        returned = self.own(self._loss, self.optimizer, state, _joined(batch))
        next_state, stages = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(next_state, TrainState):
            kind = type(next_state).__name__
            raise InputError(f"flax_step: must return a TrainState, or one and its stages, and returns {kind}")
        if unknown := set(stages) - set(SHOWN):
            raise InputError(f"flax_step: shows {', '.join(sorted(unknown))}; known are {', '.join(SHOWN)}")
        local = self.step.local.accumulate(state, batch).result
        denominator = self.step.denominator(local)
        by_itself = self.step.local_stages(state, local, denominator, self.step.shares(local, denominator))
        after = {"params": next_state.params, "buffers": next_state.buffers}
        return next_state, {}, {**{f"pure_{name}": x for name, x in by_itself.items()}, **stages, **after}

    def _loss(self, params: Params, buffers: Buffers, batch: Batch) -> tuple[jax.Array, Buffers]:
        sums, new_buffers = self.step.loss(params, buffers, batch)
        return sums["loss"] / sums["count"], new_buffers


def _joined(batch: MicroBatches) -> Batch:
    """Return the whole batch, leaves (B, ...), or (A, B / A, ...) with micro-batches."""
    if batch.head is None:
        return batch.last
    return {name: jnp.concatenate([head, batch.last[name][None]]) for name, head in batch.head.items()}

"""A port's `jax_step`, which replaces jaxddp's replica step and works on the model's trees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.nn.model_tree import TreeMap
from jaxddp.state import Buffers, Params, TrainState, state_axes
from jaxddp.step.replica_step import ReplicaStep

SHOWN = ("local_loss", "local_gradients", "gradients", "clipped_gradients")
CustomFunction = Callable[[Any, Any, TrainState, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class ModelTrees:
    """Map between a state of flat dictionaries and one of the model's trees.

    Attributes:
        params, buffers: the maps of its parameters and buffers.
    """

    params: TreeMap
    buffers: TreeMap

    def nest(self, state: TrainState) -> TrainState:
        """Return the state that a port's function takes."""
        params, opt_state = self.params.nest(state.params), self.params.nest_within(state.opt_state)
        return replace(state, params=params, buffers=self.buffers.nest(state.buffers), opt_state=opt_state)

    def flat(self, state: TrainState) -> TrainState:
        """Flatten the state that a port's function returns; the inverse of `nest`."""
        params, opt_state = self.params.flat(state.params), self.params.flat_within(state.opt_state)
        return replace(state, params=params, buffers=self.buffers.flat(state.buffers), opt_state=opt_state)


@dataclass(frozen=True)
class CustomStep:
    """A port's `jax_step` with the interface of `ReplicaStep`.

    The stages "pure_local_loss" and "pure_local_gradients" are those of jaxddp's step with the port's loss. They show
    whether model and loss are right, whatever the port's step does.

    Attributes:
        step: jaxddp's step, with the port's loss and optimizer.
        function: the port's function, (loss, optimizer, state, batch) -> state, or (state, stages).
        given_optimizer: the optimizer as the port made it.
        trees: maps of the model's trees.
    """

    step: ReplicaStep
    function: CustomFunction
    given_optimizer: optax.GradientTransformation
    trees: ModelTrees

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer of flat dictionaries."""
        return self.step.optimizer

    @property
    def loss(self) -> LocalLoss:
        """Return the port's loss."""
        return self.step.loss

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
        returned = self.function(self._loss, self.given_optimizer, self.trees.nest(state), _joined(batch))
        next_state, stages = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(next_state, TrainState):
            kind = type(next_state).__name__
            raise InputError(f"jax_step: must return a TrainState, or one and its stages, and returns {kind}")
        if unknown := set(stages) - set(SHOWN):
            raise InputError(f"jax_step: shows {', '.join(sorted(unknown))}; known are {', '.join(SHOWN)}")
        next_state = self.trees.flat(next_state)
        for kind in ("params", "buffers"):
            if problems := differences(getattr(next_state, kind), getattr(state, kind)):
                raise InputError(f"jax_step: must return all {kind} of the state: {listed(problems)}")
        shown = {name: x if name == "local_loss" else self.trees.params.flat(x) for name, x in stages.items()}
        local = self.step.local.accumulate(state, batch).result
        denominator = self.step.denominator(local)
        by_itself = self.step.local_stages(state, local, denominator, self.step.shares(local, denominator))
        after = {"params": next_state.params, "buffers": next_state.buffers}
        return next_state, {}, {**{f"pure_{name}": x for name, x in by_itself.items()}, **shown, **after}

    def _loss(self, params: Any, buffers: Any, batch: Batch) -> tuple[jax.Array, Any]:
        sums, new_buffers = self.loss(self.trees.params.flat(params), self.trees.buffers.flat(buffers), batch)
        return sums["loss"] / sums["count"], self.trees.buffers.nest(new_buffers)


def _joined(batch: MicroBatches) -> Batch:
    """Return the batch with its micro-batches joined, leaves (B, ...), or (A, B / A, ...) with micro-batches."""
    if batch.head is None:
        return batch.last
    return jax.tree.map(lambda head, last: jnp.concatenate([head, last[None]]), batch.head, batch.last)

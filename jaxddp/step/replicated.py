"""What becomes of the replicas' gradients: here, all replicas make the same update, each the whole of it.

    gradients of all -> mean -> clipping -> optimizer -> parameters

`jaxddp.step.zero.Sharded`, where each makes a slice of it, and `jaxddp.step.post_local_sgd.PostLocalSGD`, where
each makes its own, are the other ways. `jaxddp.step.replica_step` asks the same of all three.
"""

from typing import Any

import jax
import optax

from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.optim import clip_by_global_norm
from jaxddp.state import Params, TrainState
from jaxddp.step import trainable
from jaxddp.step.grad_scaler import all_finite


class Replicated:
    """Every replica has all gradients, all of the optimizer's state and all parameters, as with torch's DDP.

    Attributes:
        own: fields of `TrainState` of which each replica has its own.
        sliced: fields of which each replica has a slice.
    """

    own: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()

    def mean(self, gradients: Params, step: jax.Array) -> Any:
        """What a replica's optimizer is given.

        Args:
            gradients: this replica's.
            step: int32 scalar, optimizer steps so far.
        """
        return all_reduce_mean(gradients)

    def part(self, gradients: Params) -> Any:
        """The same, of a mean that all replicas have."""
        return gradients

    def whole(self, gradients: Any) -> Params:
        """All of the gradients that `mean` and `part` return."""
        return gradients

    def all_finite(self, gradients: Any) -> jax.Array:
        """Whether all of them are finite: the same on all replicas."""
        return all_finite(gradients)

    def clip(self, gradients: Any, max_norm: float) -> tuple[Any, jax.Array]:
        """They, scaled down to a global norm of `max_norm`; and their norm before, for the metrics."""
        return clip_by_global_norm(gradients, max_norm)

    def update(self, optimizer: optax.GradientTransformation, gradients: Any, state: TrainState) -> tuple[Params, Any]:
        """The next parameters, and the next state of the optimizer."""
        return trainable.update(optimizer, gradients, state.opt_state, state.params)

    def split(self, optimizer: optax.GradientTransformation, opt_state: Any, params: Params, world_size: int) -> Any:
        """The optimizer's state of whole parameters, as the replicas have it: leaves (world_size, ...) if sliced."""
        return opt_state

    def join(self, opt_state: Any) -> Any:
        """What `split` was given."""
        return opt_state

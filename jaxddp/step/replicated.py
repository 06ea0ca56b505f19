"""Strategy of torch's DDP: every replica makes the same update of all parameters.

local gradients -> all_reduce -> clipping -> update of all parameters
"""

import jax
import optax

from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.distributed.gpu_options import kept_apart
from jaxddp.optim import clip_by_global_norm
from jaxddp.state import Params, TrainState
from jaxddp.step import trainable
from jaxddp.step.strategy import Strategy


class Replicated(Strategy):
    """Every replica holds all gradients, all of the optimizer's state and all parameters."""

    def mean(self, gradients: Params, step: jax.Array) -> Params:
        """Average the gradients over the replicas."""
        return all_reduce_mean(gradients)

    def clip(self, gradients: Params, max_norm: float) -> tuple[Params, jax.Array]:
        """Clip by the global norm, which is the same on all replicas."""
        return clip_by_global_norm(gradients, max_norm)

    def update(
        self, optimizer: optax.GradientTransformation, gradients: Params, state: TrainState
    ) -> tuple[Params, optax.OptState]:
        """Update all parameters that have a gradient."""
        return trainable.update(optimizer, gradients, state.opt_state, kept_apart(state.params))

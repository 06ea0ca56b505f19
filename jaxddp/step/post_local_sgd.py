"""Post-local SGD: replicas start as DDP, then make their own updates and average the parameters every few steps.

    step t < start     g = 1/N sum_r g_r, as in DDP; all replicas make the same update
    step t >= start    each replica updates its own parameters with its own g_r and its own optimizer state
    ... and (t - start) a multiple of period    then p = 1/N sum_r p_r; optimizer states are not averaged

Source: Lin et al., https://arxiv.org/abs/1808.07217; torch's post_localSGD_hook (without the all-reduce in subgroups)
and PeriodicModelAverager.
"""

from dataclasses import dataclass

import jax
import optax
from jax import lax

from jaxddp.config import TrainerConfig
from jaxddp.config.ranges import check_range
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.optim import clip_by_global_norm
from jaxddp.state import Params, TrainState
from jaxddp.step import trainable
from jaxddp.step.strategy import Strategy


@dataclass(frozen=True)
class PostLocalSGD(Strategy):
    """Replicas with their own parameters and optimizer states, and the schedule by which they average.

    Attributes:
        start_iter: number of optimizer steps at the start that average gradients.
        period: after these, optimizer steps from one averaging of the parameters to the next, beginning with the
            first step.

    Raises:
        InputError: `start_iter` is below 0, or `period` below 1.

    >>> [t for t in range(10) if PostLocalSGD(start_iter=3, period=2).averages(t)]
    [3, 5, 7, 9]
    """

    start_iter: int
    period: int

    per_replica = ("params", "opt_state")

    def __post_init__(self) -> None:
        check_range("start_local_sgd_iter", self.start_iter, f"start_iter {self.start_iter}")
        check_range("local_sgd_period", self.period, f"period {self.period}")

    def averages(self, step: jax.Array) -> jax.Array:
        """Return whether the parameters are averaged at the end of a step, counted from 0."""
        return (step >= self.start_iter) & ((step - self.start_iter) % self.period == 0)

    def mean(self, gradients: Params, step: jax.Array) -> Params:
        """Average the gradients over the replicas before the start; return the local gradients after it."""
        return lax.cond(step < self.start_iter, all_reduce_mean, lambda local: local, gradients)

    def clip(self, gradients: Params, max_norm: float) -> tuple[Params, jax.Array]:
        """Clip each replica's gradients by their own norm; return the mean of the norms, for the metrics."""
        clipped, norm = clip_by_global_norm(gradients, max_norm)
        return clipped, all_reduce_mean(norm)

    def norm(self, gradients: Params) -> jax.Array:
        """Return the mean of the replicas' norms."""
        return all_reduce_mean(super().norm(gradients))

    def update(
        self, optimizer: optax.GradientTransformation, gradients: Params, state: TrainState
    ) -> tuple[Params, optax.OptState]:
        """Update this replica's parameters and, in the steps that do so, average them over the replicas."""
        params, opt_state = trainable.update(optimizer, gradients, state.opt_state, state.params)
        updated = {name: params[name] for name in gradients}
        return params | lax.cond(self.averages(state.step), all_reduce_mean, lambda local: local, updated), opt_state


def from_config(config: TrainerConfig) -> PostLocalSGD | None:
    """Return the strategy that `config` asks for; None: gradients are averaged in every step."""
    if config.start_local_sgd_iter is None:
        return None
    return PostLocalSGD(config.start_local_sgd_iter, config.averaging_period)

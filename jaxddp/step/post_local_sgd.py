"""Post-local SGD: after a while as DDP, replicas step on their own and meet every few steps.

    step t < start    g = 1/N sum_r g_r, as DDP; all replicas make the same step
    step t >= start   each makes its own step with its own g_r, and its optimizer's own state
    (t - start) a multiple of period, t >= start    then p = 1/N sum_r p_r; optimizers keep their own state

Source: Lin et al., https://arxiv.org/abs/1808.07217; torch's post_localSGD_hook (without an all-reduce in subgroups)
and PeriodicModelAverager.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import lax

from jaxddp.config import TrainConfig
from jaxddp.config.ranges import check_range
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.state import Params, TrainState
from jaxddp.step.replicated import Replicated


@dataclass(frozen=True)
class PostLocalSGD(Replicated):
    """When replicas average; each has parameters and optimizer state of its own.

    Attributes:
        start_iter: optimizer steps that average gradients, from the first.
        period: then, optimizer steps from one averaging of the parameters to the next, beginning with the first.

    Raises:
        InputError: `start_iter` is below 0, or `period` below 1.

    >>> [t for t in range(10) if PostLocalSGD(start_iter=3, period=2).averages(t)]
    [3, 5, 7, 9]
    """

    start_iter: int
    period: int

    own = ("params", "opt_state")

    def __post_init__(self) -> None:
        check_range("start_local_sgd_iter", self.start_iter, f"start_iter {self.start_iter}")
        check_range("local_sgd_period", self.period, f"period {self.period}")

    def averages(self, step: jax.Array) -> jax.Array:
        """Whether the parameters are averaged at the end of a step, counted from 0."""
        return (step >= self.start_iter) & ((step - self.start_iter) % self.period == 0)

    def mean(self, gradients: Params, step: jax.Array) -> Params:
        """The mean of all gradients or, after the start, this replica's own."""
        return lax.cond(step < self.start_iter, all_reduce_mean, lambda own: own, gradients)

    def clip(self, gradients: Params, max_norm: float) -> tuple[Params, jax.Array]:
        """Each replica clips its own; the metrics show the mean of the norms."""
        clipped, norm = super().clip(gradients, max_norm)
        return clipped, all_reduce_mean(norm)

    def update(
        self, optimizer: optax.GradientTransformation, gradients: Params, state: TrainState
    ) -> tuple[Params, Any]:
        """Each replica makes its own step, and goes on with the mean of the parameters or with its own."""
        params, opt_state = super().update(optimizer, gradients, state)
        learning = {name: params[name] for name in gradients}
        return params | lax.cond(self.averages(state.step), all_reduce_mean, lambda own: own, learning), opt_state


def from_config(config: TrainConfig) -> PostLocalSGD | None:
    """What `config` says; None: gradients are averaged in every step."""
    if config.start_local_sgd_iter is None:
        return None
    return PostLocalSGD(config.start_local_sgd_iter, config.averaging_period)

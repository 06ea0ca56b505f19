"""Changes of a state between two epochs: of a rate by a metric, and of an equal average by the parameters."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.optim import observed, plateaus
from jaxddp.optim.plateau import with_plateaus
from jaxddp.state import TrainState
from jaxddp.step.moving_average import EqualAverage, equal_average


class BetweenEpochs:
    """Changes as programs of all replicas: `DistributedDataParallel.observed` and `update_average`.

    Args:
        replicas: the replicas.
        axes: axes of the state, see `jaxddp.state`.
    """

    def __init__(self, replicas: Replicas, axes: TrainState):
        self._replicas, self._axes = replicas, axes

    def observed(self, state: TrainState, metric: float) -> TrainState:
        """Tell the optimizer's plateaus the metric of an epoch."""
        if not (before := plateaus(state.opt_state)):
            raise InputError("observed: the optimizer has no plateau; make it by optim.reduce_on_plateau")
        after = self._observe(before, metric, self._ranks)
        return replace(state, opt_state=with_plateaus(state.opt_state, after))

    def rates(self, state: TrainState) -> tuple[float, ...]:
        """Return the rates of the optimizer's plateaus, from this process's first replica."""
        rates = [rate for plateau in plateaus(state.opt_state) for rate in plateau.rates]
        return tuple(float(np.ravel(rate.addressable_data(0))[0]) for rate in rates)

    def averaged(self, state: TrainState) -> TrainState:
        """Add the parameters to the equal average."""
        if not isinstance(state.averaged, EqualAverage):
            raise InputError("update_average: no equal average is kept; set DistributedDataParallel's swa")
        return replace(state, averaged=self._average(state.averaged, state.params, self._ranks))

    @cached_property
    def _ranks(self) -> Any:
        """Argument that differs between replicas, as a mapped function needs one."""
        return self._replicas.shard(np.array(self._replicas.local_ranks))

    @cached_property
    def _observe(self) -> Callable[..., Any]:
        axis = self._axes.opt_state
        return self._replicas.map(lambda before, metric, _: observed(before, metric), (axis, None, 0), axis)

    @cached_property
    def _average(self) -> Callable[..., EqualAverage]:
        axes = (None, None, 0)
        return self._replicas.map(lambda old, params, _: equal_average(old, params), axes, None, donate=(0,))

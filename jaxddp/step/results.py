"""Results of a training state: evaluations, verification, averages, and the trained model."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import jax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.sources import as_source
from jaxddp.distributed.replicas import Replicas
from jaxddp.distributed.verify import Verifier
from jaxddp.errors import InputError
from jaxddp.nn.any_model import AnyFunctional
from jaxddp.nn.functional import Functional
from jaxddp.nn.linen import LinenFunctional
from jaxddp.nn.losses import Batch, Sums
from jaxddp.state import Buffers, Params, TrainState, shared
from jaxddp.step.batch_statistics import BatchStatistics
from jaxddp.step.between_epochs import BetweenEpochs
from jaxddp.step.evaluate import Evaluation, EvaluationSet
from jaxddp.step.metrics import means


class Results:
    """The part of `jaxddp.DistributedDataParallel` that reads a state, and changes it between epochs.

    Attributes:
        functional: the pure side of the model.
        replicas: the devices.
        replica_step: step whose state it is.
    """

    functional: AnyFunctional
    replicas: Replicas
    replica_step: Any
    _axes: TrainState
    _shortest_axes: Any
    _training_forward: Callable[..., Any]
    _evaluation: Evaluation
    _between_epochs: BetweenEpochs
    _verifier: Verifier

    def check_evaluation(self, data: Any) -> bool:
        """Trace the loss of an evaluation on an example; return whether it is a mean over its batch."""
        return self._evaluation.is_mean(as_source(data, "evaluation data", checked=False))

    def evaluate(self, state: TrainState, data: Any, batch_size: int = 256) -> dict[str, float]:
        """Compute means over `data` in evaluation mode; every example counts exactly once."""
        return means(jax.device_get(self.evaluate_placed(state, self.place(data, batch_size))))

    def place(self, data: Any, batch_size: int = 256) -> EvaluationSet:
        """Place an evaluation set on the devices, to be evaluated by `evaluate_placed` any number of times.

        Args:
            data: arrays by name, or an object with a length and items, see `jaxddp.data.sources.as_source`.
            batch_size: largest number of examples per replica and forward pass.

        Raises:
            InputError: there are no examples, or arrays differ in length.
        """
        return self._evaluation.place(data, batch_size)

    def evaluate_placed(self, state: TrainState, placed: Iterable[Batch]) -> Sums:
        """Compute sums over a placed evaluation set; the result stays on the devices."""
        check_not_used_up(state)
        return self._evaluation.sums(state, placed)

    def verify(self, state: TrainState) -> None:
        """Raise `DriftError` unless the shared fields of the state are equal on all replicas, bit for bit."""
        check_not_used_up(state)
        self._verifier.check(shared(state, self._axes), int(state.step))

    def repaired(self, state: TrainState, rank: int) -> TrainState:
        """Return the state with the shared fields of replica `rank` on all replicas."""
        return dataclasses.replace(state, **self.replicas.copied_from(rank, shared(state, self._axes)))

    def observed(self, state: TrainState, metric: float) -> TrainState:
        """Tell `optim.reduce_on_plateau` a metric, such as the test loss, at the end of an epoch.

        Raises:
            InputError: the optimizer has no plateau.
        """
        return self._between_epochs.observed(state, metric)

    def rates(self, state: TrainState) -> tuple[float, ...]:
        """Return the learning rates that `optim.reduce_on_plateau` has reached, one per group; () without a plateau."""
        return self._between_epochs.rates(state)

    def module(self, state: TrainState) -> Any:
        """Return the model with the trained values, for use outside of jaxddp; a linen module's variables."""
        values = jax.tree.map(jnp.asarray, self.values(state))
        if isinstance(self.functional, Functional):
            return self.functional.module(*values)
        if isinstance(self.functional, LinenFunctional):
            return self.functional.variables(*values)
        model = self.functional.arguments(*values)
        return model[0] if len(model) == 1 else model

    def averaged(self, state: TrainState) -> TrainState:
        """Replace the parameters by their average, to evaluate or save it.

        Raises:
            InputError: no average is kept, or nothing is in it yet.
        """
        if self.replica_step.swa:
            if not int(state.averaged.n_averaged):
                raise InputError("averaged: nothing is averaged yet; call update_average first")
            return dataclasses.replace(state, params=state.averaged.params)
        if self.replica_step.ema_decay is None:
            raise InputError("averaged: no moving average is kept; set DistributedDataParallel's ema_decay")
        return dataclasses.replace(state, params=state.averaged)

    def update_average(self, state: TrainState) -> TrainState:
        """Add the parameters to the equal average of stochastic weight averaging, as at the end of a late epoch.

        Raises:
            InputError: no equal average is kept.

        Source: torch.optim.swa_utils.AveragedModel.update_parameters
        """
        return self._between_epochs.averaged(state)

    def update_bn(self, state: TrainState, batches: Iterable[MicroBatches]) -> TrainState:
        """Replace BatchNorm's running statistics by their means over batches of the training set, for `averaged`.

        Every micro-batch of every replica counts the same, like a batch in torch's update_bn; padding does not.

            state = ddp.update_bn(ddp.averaged(state), loader.epoch(0))

        Args:
            batches: from `Loader.epoch`; at least one.

        Raises:
            InputError: the model has no BatchNorm, or there are no batches.

        Source: torch.optim.swa_utils.update_bn
        """
        return self._update_bn(state, batches)

    @cached_property
    def _update_bn(self) -> BatchStatistics:
        if not isinstance(self.functional, Functional):
            raise InputError("update_bn: only for a flax.nnx module")
        model = self.functional.module(self.functional.params, self.functional.buffers)
        return BatchStatistics(model, self._training_forward, self.replicas, self._axes, self._shortest_axes)

    def values(self, state: TrainState) -> tuple[Params, Buffers]:
        """Return NumPy arrays: parameters (their mean if replicas differ) and buffers (those of replica 0)."""
        unsharded = self.replicas.unsharded(state, self._axes)
        params, buffers = jax.device_get((unsharded.params, unsharded.buffers))
        if self._axes.params == 0:
            params = {name: x.mean(axis=0, dtype=x.dtype) for name, x in params.items()}
        return params, {name: x[0] for name, x in buffers.items()} if self._axes.buffers == 0 else buffers


def check_not_used_up(state: TrainState) -> None:
    if isinstance(state.step, jax.Array) and state.step.is_deleted():  # jax 0.10 would crash the process
        raise ValueError("this state was used up by an earlier `steps`; use the state that it returned")

"""Replica step: one optimizer step as each replica computes it, from its batch to the next state.

    local loss and gradients -> accumulation                                        jaxddp.step.local_gradients
    comm hook -> mean over replicas -> clipping -> optimizer update -> buffers      ReplicaStep.synchronize

Nothing is sent before the comm hook. `ReplicaStep` is a pure function of (state, batch), which `Replicas.map` runs
on N devices or, unchanged, on one.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.comm_hooks import CommHook, stateless
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce, all_reduce_mean
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.state import Buffers, Params, TrainState, state_axes
from jaxddp.step.buffers import synchronized
from jaxddp.step.gradient_hooks import apply_hooks, check_patterns
from jaxddp.step.gradient_stats import anomalies, learning_rates, norms_and_histograms, of_replicas
from jaxddp.step.local_gradients import LocalGradients, LocalResult, Unsynchronized, divide, mean_over_micro_batches
from jaxddp.step.loops import scan_alike
from jaxddp.step.metrics import StepSums
from jaxddp.step.moving_average import EqualAverage, moving_average
from jaxddp.step.options import StepOptions
from jaxddp.step.replicated import Replicated
from jaxddp.step.strategy import Strategy
from jaxddp.step.trainable import trained, with_zeros
from jaxddp.step.zero import Sharded
from jaxddp.tracking.gradient_metrics import TOTAL_NORM


@dataclass(frozen=True)
class ReplicaStep(StepOptions):
    """One optimizer step, as each replica computes it.

    With replicas r of W, micro-batches a of A, per-element losses l and weights w, the loss whose gradient is
    applied is

        ddp:     (1/W) sum_r (1/A) sum_a (sum w l / sum w)     mean of means, as in torch's DDP
        global:  sum_r sum_a sum w l / sum_r sum_a sum w       every element weighs the same

    Both are mean_r(numerator_r) / mean_r(denominator_r) with different numerators and denominators, so one all-reduce
    carries gradients, denominators and metrics in either case.

    Padded examples, whose entry "valid" of the batch is 0, count in none of these sums. A replica with only padding
    adds nothing; A then differs between replicas, and W may be the number of replicas that have examples (see
    `divide_by_initial_world_size`).

    Attributes:
        loss: (params, buffers, batch) -> (sums, new buffers); sums holds "loss" and "count".
        optimizer: an optax transformation.

    The other attributes are those of `jaxddp.step.options.StepOptions`.
    """

    loss: LocalLoss
    optimizer: optax.GradientTransformation

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Compute the next state.

        Returns:
            The next state; the metrics, sums over all replicas and elements; and every stage of the step by name,
            for `jaxddp.parity` (XLA removes what a caller does not use).
        """
        return self.synchronize(state, self.local.accumulate(state, batch), batch.buffers_of)

    def no_sync(self, state: TrainState, micro_batch: Batch, before: Unsynchronized | None = None) -> Unsynchronized:
        """Add the gradients of a micro-batch to those that this replica has accumulated; send nothing.

        Calls for every micro-batch, then `synchronize`, equal one call with all micro-batches.
        """
        if before is None:
            return self.local.differentiate(state, state.buffers, micro_batch)
        return self.local.add(state, before, micro_batch)

    def synchronize(
        self, state: TrainState, accumulated: Unsynchronized, buffers_of: jax.Array | None = None
    ) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Make an optimizer step with the gradients that all replicas have accumulated.

        Args:
            buffers_of: see `MicroBatches`.

        Returns:
            The next state, the metrics and the stages; see `__call__`.
        """
        strategy, scaler = self.strategy, self.scaler
        step_metrics: Sums = {}

        # Local gradients, scaled so that their mean over the replicas is the gradient of the loss.
        local = accumulated.result
        if local.valid is not None and self.loss_normalization == "ddp":
            local = mean_over_micro_batches(local, self.divide_by_initial_world_size)
        denominator = self.denominator(local)
        shares = self.shares(local, denominator)

        # Comm hook and mean over replicas. A loss scaler's scale stays in the gradients until here, as in torch, where
        # DDP reduces in the backward pass and the scaler unscales afterwards.
        reduced, comm_state = self.reduce(state, local, denominator, shares)
        gradients = self._unscale(state, reduced)
        hooked = apply_hooks(gradients, self.gradient_hooks, "mean")

        # Clipping.
        clipped = hooked
        if self.clip_grad_norm is not None:
            clipped, step_metrics[TOTAL_NORM] = strategy.clip(hooked, self.clip_grad_norm)
        elif (bound := self.clip_grad_value) is not None:  # element by element, so of slices too
            clipped = jax.tree.map(lambda g: jnp.clip(g, -bound, bound), hooked)

        # Optimizer update.
        params, opt_state = strategy.update(self.optimizer, clipped, state)
        if self.is_logged is not None:
            if self.clip_grad_norm is None:
                step_metrics[TOTAL_NORM] = self._norm(state, hooked, local.loss.dtype)
            step_metrics |= learning_rates(state.opt_state, opt_state, self.lr)
        averaged = state.averaged
        if self.ema_decay is not None:
            # The average starts at the first update, and steps that the scaler skips make none.
            is_first = state.step == (0 if scaler is None else state.scaler.skipped)
            averaged = moving_average(averaged, params, self.ema_decay, is_first)

        # Buffers.
        buffers = synchronized(accumulated.buffers, self.keep_buffers, buffers_of)

        next_state = TrainState(state.step + 1, params, buffers, opt_state, comm_state, averaged)
        sums = self._summed(state, local.sums, shares)
        if scaler is not None:  # gradients that overflow undo the update
            next_state, scaler_metrics = scaler.step(state, next_state, strategy.all_finite(reduced))
            step_metrics |= scaler_metrics
        if self.skip_nonfinite:
            # Both conditions are equal on all replicas, so all undo the step or none. The step counts in either case,
            # since the position in the data follows from it.
            finite = strategy.all_finite(reduced) & jnp.isfinite(sums["loss"])
            undone = jax.tree.map(partial(jnp.where, finite), next_state, state)
            next_state = dataclasses.replace(undone, step=next_state.step)
            step_metrics["skipped"] = 1 - finite.astype(sums["loss"].dtype)
        if self.log_gradients:
            step_metrics |= norms_and_histograms(strategy.unsharded(hooked), self.log_gradients)
        stages = self.local_stages(state, local, denominator, shares) | {
            "gradients": strategy.unsharded(gradients),
            "clipped_gradients": strategy.unsharded(clipped),
            **self._stages_of_state(next_state),
        }
        return next_state, sums | step_metrics, stages

    @property
    def local(self) -> LocalGradients:
        """First half of the step, before anything is sent."""
        options = self.frozen, self.find_unused_parameters, self.scaler, self.remat, self.detect_anomaly
        return LocalGradients(self.loss, self.loss_normalization, *options)

    @property
    def strategy(self) -> Strategy:
        """Strategy by which replicas share gradients, optimizer state and updates."""
        if self.local_sgd is not None:
            return self.local_sgd
        return Sharded(self.group_of) if self.shard_optimizer else Replicated()

    @property
    def hook(self) -> CommHook | None:
        """Communication hook, made of a plain function if need be; None: the strategy's mean is used."""
        if self.comm_hook is None or isinstance(self.comm_hook, CommHook):
            return self.comm_hook
        return stateless(self.comm_hook)

    def denominator(self, local: LocalResult) -> jax.Array:
        """Return the divisor of the sums over a replica's elements, the same on all replicas."""
        # With padding, "ddp" may leave out replicas without examples: their denominator is 0, and that of others 1.
        if self.loss_normalization == "global" or not (local.valid is None or self.divide_by_initial_world_size):
            return all_reduce_mean(local.denominator)
        return local.denominator  # equal on all replicas: the number of micro-batches, or with padding 1

    def shares(self, local: LocalResult, denominator: jax.Array) -> Params:
        """Return this replica's scaled gradients, after hooks on local gradients; their mean is the gradient."""
        return apply_hooks(divide(local.gradients, denominator), self.gradient_hooks, "local")

    def local_stages(
        self, state: TrainState, local: LocalResult, denominator: jax.Array, shares: Params
    ) -> dict[str, Any]:
        """Return the local loss and gradients; their means over the replicas are the loss and its gradient."""
        return {"local_loss": local.loss / denominator, "local_gradients": self._unscale(state, shares)}

    def reduce(self, state: TrainState, local: LocalResult, denominator: jax.Array, shares: Params) -> tuple[Any, Any]:
        """Reduce the local gradients by the communication hook or, without one, to their mean.

        Args:
            shares: see `shares`.

        Returns:
            The gradients (a sharding strategy keeps this replica's slice); the hook's next state.
        """
        if self.hook is not None:
            # As in torch, a hook sees all parameters that learn, with zeros where the loss does not depend on one.
            every = with_zeros(shares, trained(state.params, self.frozen))
            reduced, comm_state = self.hook.reduce(every, state.comm_state)
            # Parameters without a gradient are left out again, because the optimizer must not touch them.
            return self.strategy.part({name: reduced[name] for name in shares}), comm_state
        if any(hook.when == "local" for hook in self.gradient_hooks):
            return self.strategy.mean(shares, state.step), state.comm_state
        # Division after the mean lets the all-reduce of the gradients carry the denominator too.
        return divide(self.strategy.mean(local.gradients, state.step), denominator), state.comm_state

    @property
    def axes(self) -> TrainState:
        """Axes of the state: 0 for each field that differs between replicas, None for the others."""
        return state_axes({*self._per_replica, *self.strategy.sliced})

    def init(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state of one replica before the first step, with the optimizer's state unsharded."""
        learning = trained(params, self.frozen)
        check_patterns(self.gradient_hooks, learning)
        opt_state = jax.jit(self.optimizer.init)(learning)  # one program; by itself one per shape
        comm_state = () if self.hook is None else self.hook.init(learning)
        averaged: Any = () if self.ema_decay is None else params
        if self.swa:
            averaged = EqualAverage(jnp.zeros((), jnp.int32), params)
        scaler = () if self.scaler is None else self.scaler.init()
        return TrainState(jnp.zeros((), jnp.int32), params, buffers, opt_state, comm_state, averaged, scaler)

    def start(self, params: Params, buffers: Buffers, replicas: Replicas) -> TrainState:
        """Return the state before the first step, on the devices of all replicas."""
        return self.place(replicas.repeat(self.init(params, buffers), self._per_replica), replicas)

    def place(self, state: TrainState, replicas: Replicas) -> TrainState:
        """Place a state on the devices: a copy of every shared field on each, and each replica's part of the others.

        A sharded optimizer's state is given unsharded, and is split for the number of replicas.
        """
        learning = trained(state.params, self.frozen)
        opt_state = self.strategy.split(self.optimizer, state.opt_state, learning, replicas.world_size)
        return replicas.place(dataclasses.replace(state, opt_state=opt_state), self.axes)

    def unsharded(self, state: TrainState) -> TrainState:
        """Compute the inverse of `place`."""
        return dataclasses.replace(state, opt_state=self.strategy.join(state.opt_state))

    @property
    def _per_replica(self) -> set[str]:
        """Fields of the state that differ between replicas, slices aside."""
        return {"comm_state", *self.strategy.per_replica, *(["buffers"] if self.keep_buffers == "local" else [])}

    def _unscale(self, state: TrainState, gradients: Any) -> Any:
        return gradients if self.scaler is None else self.scaler.unscale(state.scaler, gradients)

    def _norm(self, state: TrainState, gradients: Any, dtype: Any) -> jax.Array:
        """Compute the norm of the gradients if the step is logged; NaN otherwise."""
        assert self.is_logged is not None, "checked before"
        norm = lambda gradients: self.strategy.norm(gradients).astype(dtype)  # noqa: E731
        unknown = lambda gradients: jnp.asarray(jnp.nan, dtype)  # noqa: E731
        return lax.cond(self.is_logged(state.step + 1), norm, unknown, gradients)

    def _summed(self, state: TrainState, sums: Sums, shares: Params) -> Sums:
        """Sum over all replicas; stacked, since every operand of an all-reduce costs microseconds."""
        if self.detect_anomaly:
            sums = of_replicas(sums) | anomalies(shares, trained(state.params, self.frozen))
        return dict(zip(sums, all_reduce(jnp.stack(list(sums.values()))), strict=True))

    def _stages_of_state(self, state: TrainState) -> dict[str, Any]:
        stages: dict[str, Any] = {"params": state.params, "buffers": state.buffers}
        if self.ema_decay is not None:
            stages["averaged"] = state.averaged
        if self.scaler is not None:
            stages["scaler"] = state.scaler.shown()
        return stages


def run_steps(
    step: Callable[[TrainState, MicroBatches], tuple[TrainState, Sums, Any]], state: TrainState, batches: MicroBatches
) -> tuple[TrainState, StepSums]:
    """Run K steps in one program.

    Args:
        batches: leaves (K, ...).

    Returns:
        The state after K steps; the metrics of each step, (K,) per name.
    """

    def body(state: TrainState, batch: MicroBatches) -> tuple[TrainState, StepSums]:
        next_state, metrics, _ = step(state, batch)
        return next_state, StepSums.of(metrics)

    return scan_alike(body, state, batches, state.step < 0)

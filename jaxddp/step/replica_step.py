"""The replica step: what every replica computes, from its batch to the next state.

    what it does alone (`jaxddp.step.local_gradients`): loss and gradients, summed over micro-batches
    what all do together: comm_hook (mean over replicas) -> clipping -> optimizer -> moving average; buffers

`ReplicaStep` is a pure function of (state, batch). `Replicas.map` runs it on N devices or,
unchanged, on one.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import lax
from jax import numpy as jnp

from jaxddp.comm_hooks import CommHook, stateless
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce, all_reduce_mean, broadcast
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.nn.functional import LocalLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.state import Buffers, Params, TrainState, state_axes
from jaxddp.step.gradient_hooks import check_patterns, hooked
from jaxddp.step.gradient_stats import anomalies, logged
from jaxddp.step.local_gradients import LocalGradients, LocalResult, Unsynchronized
from jaxddp.step.metrics import StepSums
from jaxddp.step.options import StepOptions
from jaxddp.step.replicated import Replicated
from jaxddp.step.trainable import trained, with_zeros
from jaxddp.step.zero import Sharded


@dataclass(frozen=True)
class ReplicaStep(StepOptions):
    """One optimizer step, as every replica computes it.

    With replicas r, micro-batches a, per-element losses l and weights w, the loss whose
    gradient is applied is

        ddp:     (1/W) sum_r (1/A) sum_a (sum w l / sum w)     the mean of means, as torch DDP
        global:  sum_r sum_a sum w l / sum_r sum_a sum w       every element weighs the same

    Both are mean_r(numerator_r) / mean_r(denominator_r); only the pieces differ, so one
    all-reduce carries gradients, denominators and metrics in either case.

    Padded examples, 0 in the batch's entry "valid", are in none of this. A replica that has no others adds
    nothing; A is then each replica's own, and W may be the number of those that have some.

    Attributes:
        loss: (params, buffers, batch) -> (sums, new buffers); sums holds "loss" and "count".
        optimizer: an optax transformation.

    The others are the options that `jaxddp.step.options.StepOptions` explains.
    """

    loss: LocalLoss
    optimizer: optax.GradientTransformation

    def __call__(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Compute the next state.

        Returns:
            The next state; the metrics, sums over all replicas and elements; and every stage on
            the way, for `jaxddp.parity` (a caller that drops it pays nothing).
        """
        return self.synchronize(state, self.local.accumulate(state, batch), batch.buffers_of)

    def no_sync(self, state: TrainState, micro_batch: Batch, before: Unsynchronized | None = None) -> Unsynchronized:
        """Add a micro-batch's gradients to what this replica has gathered, and send nothing.

        With `synchronize` after the last, the same as a call with all micro-batches at once.
        """
        if before is None:
            return self.local.differentiate(state, state.buffers, micro_batch)
        return self.local.add(state, before, micro_batch)

    def synchronize(
        self, state: TrainState, gathered: Unsynchronized, buffers_of: jax.Array | None = None
    ) -> tuple[TrainState, Sums, dict[str, Any]]:
        """Make an optimizer step of what all replicas have gathered; returns what a call does.

        Args:
            buffers_of: see `MicroBatches`.
        """
        local = self.among_uneven(gathered.result)
        denominator = self.denominator(local)
        shares = self.shares(local, denominator)
        scaled, comm_state = self.reduce(state, local, denominator, shares)
        gradients = self.unscale(state, scaled)
        changed = hooked(gradients, self.gradient_hooks, "mean")
        clipped, more_metrics = self.clip(changed)
        params, opt_state = self.updates.update(self.optimizer, clipped, state)
        next_state = TrainState(
            step=state.step + 1,
            params=params,
            buffers=self.kept(gathered.buffers, buffers_of),
            opt_state=opt_state,
            comm_state=comm_state,
            averaged=self.average(state, params),
        )
        if self.scaler is not None:
            next_state, of_scaler = self.scaler.step(state, next_state, self.updates.all_finite(scaled))
            more_metrics |= of_scaler
        if self.log_gradients:
            more_metrics |= logged(self.updates.whole(changed), self.log_gradients)
        metrics = _sum_over_replicas(local.sums | self.anomalies(state, shares)) | more_metrics
        stages = self.local_stages(state, local, denominator, shares) | {
            "gradients": self.updates.whole(gradients),
            "clipped_gradients": self.updates.whole(clipped),
            "params": next_state.params,
            "buffers": next_state.buffers,
        }
        if self.ema_decay is not None:
            stages["averaged"] = next_state.averaged
        if self.scaler is not None:
            stages["scaler"] = next_state.scaler.shown()
        return next_state, metrics, stages

    @property
    def local(self) -> LocalGradients:
        """What a replica does on its own."""
        of_gradients = self.frozen, self.find_unused_parameters, self.scaler
        return LocalGradients(self.loss, self.loss_normalization, *of_gradients)

    @property
    def hook(self) -> CommHook:
        """The communication hook."""
        return self.comm_hook if isinstance(self.comm_hook, CommHook) else stateless(self.comm_hook)

    @property
    def updates(self) -> Replicated:
        """What becomes of the gradients."""
        if self.local_sgd is not None:
            return self.local_sgd
        return Sharded() if self.shard_optimizer else Replicated()

    @property
    def own(self) -> set[str]:
        """The fields of the state of which each replica has its own."""
        return {"comm_state", *self.updates.own, *(["buffers"] if self.keep_buffers == "local" else [])}

    @property
    def axes(self) -> TrainState:
        """Which parts of the state are each replica's own, see `state_axes`."""
        return state_axes(self.own.union(self.updates.sliced))

    def init(self, params: Params, buffers: Buffers) -> TrainState:
        """The state of one replica before the first step."""
        learning = trained(params, self.frozen)
        check_patterns(self.gradient_hooks, learning)
        opt_state, comm_state = self.optimizer.init(learning), self.hook.init(learning)
        averaged = () if self.ema_decay is None else params
        scaler = () if self.scaler is None else self.scaler.init()
        return TrainState(jnp.zeros((), jnp.int32), params, buffers, opt_state, comm_state, averaged, scaler)

    def start(self, params: Params, buffers: Buffers, replicas: Replicas) -> TrainState:
        """The state before the first step, on all replicas."""
        return self.place(replicas.repeat(self.init(params, buffers), self.own), replicas)

    def place(self, state: TrainState, replicas: Replicas) -> TrainState:
        """Put a state on the devices: what all replicas share on each, of the rest each its own.

        An optimizer's state that is to be in slices is given whole, for any number of replicas.
        """
        learning = trained(state.params, self.frozen)
        opt_state = self.updates.split(self.optimizer, state.opt_state, learning, replicas.world_size)
        return replicas.place(dataclasses.replace(state, opt_state=opt_state), self.axes)

    def whole(self, state: TrainState) -> TrainState:
        """What `place` was given."""
        return dataclasses.replace(state, opt_state=self.updates.join(state.opt_state))

    def reduce(self, state: TrainState, local: LocalResult, denominator: jax.Array, shares: Params) -> tuple[Any, Any]:
        """The gradients of all replicas as one, or this replica's slice of them, and what the hook remembers.

        Args:
            shares: see `shares`.
        """
        if self.comm_hook is all_reduce_mean:
            if any(hook.when == "local" for hook in self.gradient_hooks):
                return self.updates.mean(shares, state.step), state.comm_state
            # Divided afterwards, so that one all-reduce carries the denominator too.
            return _divide(self.updates.mean(local.gradients, state.step), denominator), state.comm_state
        # A hook meets the parameters that its `init` has met: as in torch, zeros where the loss depends on none.
        whole = with_zeros(shares, trained(state.params, self.frozen))
        reduced, comm_state = self.hook.reduce(whole, state.comm_state)
        gradients = {name: reduced[name] for name in shares}
        return self.updates.part(gradients), comm_state

    def unscale(self, state: TrainState, gradients: Any) -> Any:
        """Gradients of the loss as it was before it was scaled."""
        return gradients if self.scaler is None else self.scaler.unscale(state.scaler, gradients)

    def anomalies(self, state: TrainState, shares: Params) -> Sums:
        """Which local gradients are not finite, if anyone asks."""
        return anomalies(shares, trained(state.params, self.frozen)) if self.detect_anomaly else {}

    def clip(self, gradients: Any) -> tuple[Any, Sums]:
        """What the optimizer is given, and the norm before."""
        if self.clip_grad_norm is None:
            return gradients, {}
        clipped, norm = self.updates.clip(gradients, self.clip_grad_norm)
        return clipped, {"grad_norm": norm}

    def kept(self, buffers: Buffers, buffers_of: jax.Array | None = None) -> Buffers:
        """The buffers that go on."""
        if self.keep_buffers == "local":
            return buffers
        if self.keep_buffers == "mean":
            if buffers_of is not None:
                raise InputError("keep_buffers mean: not of replicas without examples; must be rank0 or local")
            return jax.tree.map(lambda mean, own: mean.astype(own.dtype), all_reduce_mean(buffers), buffers)
        return broadcast(buffers, src=0 if buffers_of is None else buffers_of)

    def average(self, state: TrainState, params: Params) -> Any:
        """a <- a + (1 - decay) (p - a), and p itself at first."""
        if self.ema_decay is None:
            return state.averaged
        first = state.step == (0 if self.scaler is None else state.scaler.skipped)
        share = jnp.where(first, 1.0, 1.0 - self.ema_decay)
        return jax.tree.map(lambda a, p: a + share.astype(p.dtype) * (p - a), state.averaged, params)

    def among_uneven(self, local: LocalResult) -> LocalResult:
        """The same where all replicas have equally many micro-batches; else, for "ddp", its share of the mean.

        Its share are the means over its own micro-batches, by 1; of a replica that has none, 0 by 0, or by
        1 if it counts all the same.
        """
        if local.valid is None or self.loss_normalization == "global":
            return local
        own = jnp.maximum(local.denominator, 1)
        active = jnp.ones_like(own) if self.divide_by_initial_world_size else jnp.minimum(local.denominator, 1)
        return local._replace(loss=local.loss / own, gradients=_divide(local.gradients, own), denominator=active)

    def denominator(self, local: LocalResult) -> jax.Array:
        """What sums over a replica's elements are divided by: the same on all replicas."""
        if self.loss_normalization == "global" or not (local.valid is None or self.divide_by_initial_world_size):
            return all_reduce_mean(local.denominator)
        return local.denominator  # the number of micro-batches

    def shares(self, local: LocalResult, denominator: jax.Array) -> Params:
        """The local gradients, scaled, as hooks have left them."""
        return hooked(_divide(local.gradients, denominator), self.gradient_hooks, "local")

    def local_stages(
        self, state: TrainState, local: LocalResult, denominator: jax.Array, shares: Params
    ) -> dict[str, Any]:
        """A replica's share of loss and gradients, whose mean over the replicas they are."""
        return {"local_loss": local.loss / denominator, "local_gradients": self.unscale(state, shares)}


def run_steps(step: ReplicaStep, state: TrainState, batches: MicroBatches) -> tuple[TrainState, StepSums]:
    """K steps in one program: `batches` leaves, and the metrics returned, have a leading axis K."""

    def body(state: TrainState, batch: MicroBatches) -> tuple[TrainState, StepSums]:
        next_state, metrics, _ = step(state, batch)
        return next_state, StepSums.of(metrics)

    return lax.scan(body, state, batches)


def _sum_over_replicas(sums: Sums) -> Sums:
    """Each sum over all replicas; stacked, since every operand of an all-reduce costs microseconds."""
    return dict(zip(sums, all_reduce(jnp.stack(list(sums.values()))), strict=True))


def _divide(tree: Any, denominator: jax.Array) -> Any:
    return jax.tree.map(lambda x: x / denominator.astype(x.dtype), tree)

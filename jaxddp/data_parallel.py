"""The whole of it as one object: a model, trained by as many replicas as there are devices."""

import dataclasses
from collections import deque
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.config.choices import AMP
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce_mean, broadcast
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.distributed.verify import Verifier
from jaxddp.errors import InputError, check_name
from jaxddp.loader import Arrays
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import Batch, LossFunction, Sums, cross_entropy
from jaxddp.state import Buffers, Params, TrainState, shared, shortest
from jaxddp.step.evaluate import evaluate_replica, padded_batches
from jaxddp.step.local_gradients import Unsynchronized
from jaxddp.step.metrics import RUN_AHEAD, StepSums, means
from jaxddp.step.replica_step import ReplicaStep, run_steps
from jaxddp.step.trainable import trained


class DataParallel:
    """Trains an nnx module with one replica per device, as torch's DistributedDataParallel does.

    The object holds no weights: `steps` takes a state and returns the next one. It runs at most
    `RUN_AHEAD` dispatches ahead of the devices, since with too many in flight XLA's CPU devices
    wait for each other for ever.

    Args:
        model: the module; its values are the start, and it stays as it is.
        optimizer: an optax transformation; `jaxddp.optim` has torch's.
        loss_fn: (model, batch) -> one loss per example, (B, ...) or `losses.Losses`.
        replicas: the devices; if None, those of `jaxddp.distributed.devices.prepare()`.
        dtype: of the floating-point parameters and buffers; None: as the model has them.
        dropout_masks: what a model that draws random numbers draws in training: "replica": each replica its own;
            "shared": all the same; "example": each example its own, whatever the number of replicas, for which
            it takes `jaxddp.nn.layers.Dropout`.
        amp: "bf16" or "fp16": compute in 16 bits, see `jaxddp.nn.autocast`; fp16 wants a scaler, as in torch.
        options: of `jaxddp.step.options.StepOptions`: loss_normalization, clip_grad_norm, scaler, ...

    Raises:
        InputError: an option that makes no sense; the message says what would.

    >>> import numpy as np
    >>> from jaxddp import optim
    >>> from jaxddp.distributed.devices import prepare
    >>> from jaxddp.loader import Loader
    >>> replicas = Replicas(prepare(2, "cpu"))
    >>> def loss_fn(model, batch):
    ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
    >>> ddp = DataParallel(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optim.sgd(0.1), loss_fn, replicas=replicas)
    >>> data = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[:, None]}
    >>> data["y"] = 3 * data["x"][:, 0] + 1
    >>> loader = Loader(data, replicas, global_batch_size=16)
    >>> state = ddp.init()
    >>> for epoch in range(50):
    ...     for batches in loader.epoch(epoch):
    ...         state, sums = ddp.steps(state, batches)
    >>> ddp.verify(state)
    >>> print(f"{ddp.module(state).kernel[0, 0]:.2f} x + {ddp.module(state).bias[0]:.2f}")
    3.00 x + 1.00
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        loss_fn: LossFunction = cross_entropy,
        *,
        replicas: Replicas | None = None,
        dtype: Any = None,
        dropout_masks: str = "replica",
        amp: str = "none",
        **options: Any,
    ):
        check_name("amp", amp, AMP)
        self.replicas = replicas or Replicas(prepare())
        self.functional = Functional(model)
        self.optimizer = optimizer
        training_loss = self.functional.local_loss(loss_fn, train=True, masks=dropout_masks, amp=amp)
        self.replica_step = ReplicaStep(training_loss, optimizer, **options)
        if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise InputError(f"dtype {dtype}: needs jax's 64-bit mode; set jax_enable_x64")
        self._dtype = dtype
        self._dispatched: deque[jax.Array] = deque()  # a result of each
        self._evaluation_loss = self.functional.local_loss(loss_fn, train=False, amp=amp)
        self._axes = self.replica_step.axes
        shapes = jax.eval_shape(self.replica_step.init, self.functional.params, self.functional.buffers)
        axes = shortest(self._axes, shapes)
        self._steps = self.replicas.map(partial(run_steps, self.replica_step), (axes, 0), (axes, None), donate=(0,))
        self._no_sync = self.replicas.map(self._gather, (axes, 0, 0), 0, donate=(2,))
        self._step = self.replicas.map(self._synchronized, (axes, 0, 0), (axes, None), donate=(0,))
        self._evaluate = self.replicas.map(self._evaluated, (axes, 0), None)
        self._verifier = Verifier(self.replicas)

    @property
    def world_size(self) -> int:
        """The number of replicas."""
        return self.replicas.world_size

    @property
    def frozen_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that do not learn."""
        params = self.functional.params
        return tuple(name for name in params if name not in trained(params, self.replica_step.frozen))

    def unused_parameters(self, state: TrainState, micro_batch: Batch) -> tuple[str, ...]:
        """The names of those that would learn, but the loss does not depend on them; nothing runs.

        Args:
            micro_batch: leaves (world_size, B, ...).

        Raises:
            InputError: there are some, and `find_unused_parameters` is False; the message names them too.
        """
        gradients = jax.eval_shape(self._no_sync, state, micro_batch, None)[0].result.gradients
        return tuple(name for name in trained(state.params, self.replica_step.frozen) if name not in gradients)

    def init(self, params: Params | None = None, buffers: Buffers | None = None) -> TrainState:
        """The state before the first step, on all devices.

        Args:
            params, buffers: start from these instead of the model's own values.
        """
        params = cast(self.functional.params if params is None else params, self._dtype)
        buffers = cast(self.functional.buffers if buffers is None else buffers, self._dtype)
        return self.replica_step.start(params, buffers, self.replicas)

    def place_state(self, state: TrainState) -> TrainState:
        """Put a state on the devices: what all replicas share on each, of the rest each its own; see `whole`."""
        return self.replica_step.place(state, self.replicas)

    def whole(self, state: TrainState) -> TrainState:
        """The state as `place_state` takes it, with as many replicas or, where none has anything of its own, others.

        With `shard_optimizer`, the optimizer's state is that of whole parameters in it, as without.
        """
        return self.replica_step.whole(state)

    def steps(self, state: TrainState, batches: MicroBatches) -> tuple[TrainState, StepSums]:
        """Make the optimizer steps of one dispatch.

        Args:
            state: is used up: its buffers become the result's.
            batches: from `Loader.epoch`, leaves (world_size, K, ...).

        Returns:
            The state after K steps; sums over all replicas and elements, by name and each (K,):
            "loss", "count" and the loss function's metrics.

        Raises:
            ValueError: the batches are not for as many replicas as there are, or the state is used up.
        """
        self._check(state, batches)
        state, sums = self._steps(state, batches)
        self._bound_run_ahead(sums.table)
        return state, sums

    def no_sync(self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None = None) -> Unsynchronized:
        """Gradients of a micro-batch that stay apart, each replica's own; nothing is sent.

        As a backward pass in DDP's `no_sync()`. `steps` accumulates inside of one program, which is
        faster; this is for loops that decide as they go which micro-batch is the last.

        Args:
            state: is not used up.
            micro_batch: leaves (world_size, B, ...), dealt by `Replicas.shard`.
            gathered: what the call before has returned, to be added to; it is used up.

        Returns:
            Leaves (world_size, ...), for the next call, or for `step`.

        Raises:
            ValueError: the batch is not for as many replicas as there are, or the state is used up.
        """
        self._check(state, micro_batch, gathered)
        gathered, loss = self._no_sync(state, micro_batch, gathered)
        self._bound_run_ahead(loss)
        return gathered

    def step(
        self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None = None
    ) -> tuple[TrainState, Sums]:
        """One optimizer step, with the gradients of this micro-batch and of those before it.

        Args:
            state: is used up.
            micro_batch: leaves (world_size, B, ...), dealt by `Replicas.shard`.
            gathered: from `no_sync`; None: this micro-batch is the only one.

        Returns:
            The next state; sums over all replicas and elements, each a scalar.

        Raises:
            ValueError: the batch is not for as many replicas as there are, or the state is used up.
        """
        self._check(state, micro_batch, gathered)
        state, sums = self._step(state, micro_batch, gathered)
        self._bound_run_ahead(sums["loss"])
        return state, sums

    def _gather(
        self, state: TrainState, micro_batch: Batch, before: Unsynchronized | None
    ) -> tuple[Unsynchronized, jax.Array]:
        gathered = self.replica_step.no_sync(state, micro_batch, before)
        return gathered, gathered.result.loss  # one to go on with, and one to wait for

    def _synchronized(
        self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None
    ) -> tuple[TrainState, Sums]:
        replica_step = self.replica_step
        next_state, sums, _ = replica_step.synchronize(state, replica_step.no_sync(state, micro_batch, gathered))
        return next_state, sums

    def check(self, state: TrainState, batches: MicroBatches) -> None:
        """Trace the program that `steps` would run, so that what cannot work fails here; nothing runs."""
        jax.eval_shape(self._steps, state, batches)

    def compiled_text(self, state: TrainState, batches: MicroBatches) -> str:
        """The program that `steps` would run, as XLA compiled it (HLO text); nothing runs."""
        self.replicas.check_dealt(batches)
        return self._steps.lower(state, batches).compile().as_text()

    def evaluate(self, state: TrainState, arrays: Arrays, batch_size: int = 256) -> dict[str, float]:
        """Means over `arrays`, each example counted exactly once, in the model's evaluation mode."""
        return means(jax.device_get(self.evaluate_placed(state, self.place(arrays, batch_size))))

    def place(self, arrays: Arrays, batch_size: int = 256) -> Batch:
        """Put an evaluation set on the devices once, for `evaluate_placed` after every epoch."""
        size = max(map(len, arrays.values()), default=0)
        per_replica = min(batch_size, -(-size // self.world_size))
        return self.replicas.shard(padded_batches(arrays, self.world_size, max(1, per_replica)))

    def evaluate_placed(self, state: TrainState, placed: Batch) -> Sums:
        """Sums over a placed evaluation set, still on the devices."""
        _check_not_used_up(state)
        sums = self._evaluate(state, placed)
        self._bound_run_ahead(sums["loss"])
        return sums

    def verify(self, state: TrainState) -> None:
        """Raise `TrainingError` unless all replicas hold the same shared state, bit for bit."""
        _check_not_used_up(state)
        self._verifier.check(shared(state, self._axes), int(state.step))

    def module(self, state: TrainState) -> nnx.Module:
        """The model with the trained values, for use outside of jaxddp."""
        return self.functional.module(*jax.tree.map(jnp.asarray, self.values(state)))

    def averaged(self, state: TrainState) -> TrainState:
        """The same state with the moving average of the parameters in their place, to be evaluated or kept.

        Raises:
            InputError: none is kept.
        """
        if self.replica_step.ema_decay is None:
            raise InputError("averaged: no moving average is kept; DataParallel needs an ema_decay")
        return dataclasses.replace(state, params=state.averaged)

    def values(self, state: TrainState) -> tuple[Params, Buffers]:
        """Parameters and buffers as NumPy arrays; of parameters that differ, their mean, of buffers, replica 0's."""
        params, buffers = jax.device_get((state.params, state.buffers))
        if self._axes.params == 0:
            params = {name: x.mean(axis=0, dtype=x.dtype) for name, x in params.items()}
        return params, {name: x[0] for name, x in buffers.items()} if self._axes.buffers == 0 else buffers

    def _evaluated(self, state: TrainState, placed: Batch) -> Sums:
        """Every replica evaluates the same model, see `values`."""
        params = all_reduce_mean(state.params) if self._axes.params == 0 else state.params
        buffers = broadcast(state.buffers) if self._axes.buffers == 0 else state.buffers
        state = dataclasses.replace(state, params=params, buffers=buffers)
        return evaluate_replica(self._evaluation_loss, state, placed)

    def _check(self, state: TrainState, batch: Batch | MicroBatches, gathered: Unsynchronized | None = None) -> None:
        self.replicas.check_dealt(batch)
        _check_not_used_up(state)
        if gathered is not None and gathered.result.loss.is_deleted():
            raise ValueError("these gradients were used up by an earlier `no_sync`; go on from those that it returned")

    def _bound_run_ahead(self, result: jax.Array) -> None:
        """Note what was dispatched, and wait for what was `RUN_AHEAD` dispatches ago."""
        self._dispatched.append(result)
        if len(self._dispatched) > RUN_AHEAD:
            self._dispatched.popleft().block_until_ready()


def _check_not_used_up(state: TrainState) -> None:
    if isinstance(state.step, jax.Array) and state.step.is_deleted():  # jax 0.10 would crash the process
        raise ValueError("this state was used up by an earlier `steps`; go on from the state that it returned")

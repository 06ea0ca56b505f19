"""`DataParallel`: the data-parallel trainer of one model, with one replica per device."""

import dataclasses
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
from jaxddp.distributed.gpu_options import options_for
from jaxddp.distributed.replicas import Replicas
from jaxddp.distributed.verify import Verifier
from jaxddp.errors import InputError, check_name
from jaxddp.loader import Arrays
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import Batch, LossFunction, Sums, cross_entropy
from jaxddp.nn.model_tree import seeing
from jaxddp.state import Buffers, Params, TrainState, shared, shortest
from jaxddp.step.dispatch import Dispatch, RunAhead
from jaxddp.step.evaluate import evaluate_replica, padded_batches
from jaxddp.step.local_gradients import Unsynchronized
from jaxddp.step.metrics import StepSums, means
from jaxddp.step.replica_step import ReplicaStep, run_steps
from jaxddp.step.trainable import trained


class DataParallel:
    """Trainer of an nnx module with one replica per device, like torch's DistributedDataParallel.

    The object holds no weights: `steps` takes a state and returns the next one. A few dispatches run ahead of the
    devices (see `jaxddp.step.dispatch`).

    Args:
        model: the module, whose values are the initial ones; it is not changed.
        optimizer: an optax transformation; `jaxddp.optim` has torch's optimizers. It sees the parameters as an
            `nnx.State`, as from `nnx.Optimizer`, so that masks and labels may go by path.
        loss_fn: (model, batch) -> one loss per example, (B, ...) or `losses.Losses`.
        replicas: the devices; None: those of `jaxddp.distributed.devices.prepare()`.
        dtype: dtype of the floating-point parameters and buffers; None: that of the model.
        dropout_masks: random numbers drawn in training. "replica": each replica draws its own; "shared": all draw
            the same; "example": each example has its own, whatever the number of replicas, which needs
            `jaxddp.nn.layers.Dropout`.
        amp: "bf16" or "fp16" to compute in 16 bits, see `jaxddp.nn.autocast`; fp16 needs a scaler, as in torch.
        options: `jaxddp.step.options.StepOptions` by name: loss_normalization, clip_grad_norm, scaler, ...

    Raises:
        InputError: an option is invalid; the message names a valid value.

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
        self.replica_step = ReplicaStep(training_loss, seeing(self.functional.param_tree, optimizer), **options)
        if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise InputError(f"dtype {dtype}: needs jax's 64-bit mode; set jax_enable_x64")
        self._dtype = dtype
        self._run_ahead = RunAhead()
        self._evaluation_loss = self.functional.local_loss(loss_fn, train=False, amp=amp)
        self._axes = self.replica_step.axes
        shapes = jax.eval_shape(self.replica_step.init, self.functional.params, self.functional.buffers)
        axes = shortest(self._axes, shapes)
        learning = trained(self.functional.params, self.replica_step.frozen)
        training: dict[str, Any] = {"donate": (0,), "compiler_options": options_for(self.replicas.devices, learning)}
        self._steps = Dispatch(self.replicas, partial(run_steps, self.replica_step), axes, (axes, None), **training)
        self._no_sync = self.replicas.map(self._gather, (axes, 0, 0), 0, donate=(2,))
        self._step = self.replicas.map(self._synchronized, (axes, 0, 0), (axes, None), **training)
        self._evaluate = Dispatch(self.replicas, self._evaluated, axes, None)
        self._verifier = Verifier(self.replicas)

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.replicas.world_size

    @property
    def frozen_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that do not learn."""
        params = self.functional.params
        return tuple(name for name in params if name not in trained(params, self.replica_step.frozen))

    def unused_parameters(self, state: TrainState, micro_batch: Batch) -> tuple[str, ...]:
        """Return the names of the parameters that learn but that the loss does not depend on; nothing runs.

        Args:
            micro_batch: leaves (world_size, B, ...).

        Raises:
            InputError: there are such parameters, and `find_unused_parameters` is False.
        """
        gradients = jax.eval_shape(self._no_sync, state, micro_batch, None)[0].result.gradients
        return tuple(name for name in trained(state.params, self.replica_step.frozen) if name not in gradients)

    def init(self, params: Params | None = None, buffers: Buffers | None = None) -> TrainState:
        """Return the state before the first step, on all devices.

        Args:
            params, buffers: initial values; None: the values of the model.
        """
        params = cast(self.functional.params if params is None else params, self._dtype)
        buffers = cast(self.functional.buffers if buffers is None else buffers, self._dtype)
        return self.replica_step.start(params, buffers, self.replicas)

    def place_state(self, state: TrainState) -> TrainState:
        """Place a state, such as a restored checkpoint, on the devices; the inverse of `unsharded`."""
        return self.replica_step.place(state, self.replicas)

    def unsharded(self, state: TrainState) -> TrainState:
        """Return the state as `place_state` takes it: the slices of a sharded optimizer's state are joined.

        Unless a field differs between replicas, the result can be placed on another number of replicas.
        """
        return self.replica_step.unsharded(self.replicas.unsharded(state, self._axes))

    def steps(self, state: TrainState, batches: MicroBatches) -> tuple[TrainState, StepSums]:
        """Make K optimizer steps in one dispatch, or in K on CPU if the model has convolutions (see `Dispatch`).

        Args:
            state: donated: its memory is reused for the result, and it cannot be used again.
            batches: from `Loader.epoch`, leaves (world_size, K, ...).

        Returns:
            The state after K steps; sums over all replicas and elements, (K,) each: "loss", "count" and the
            metrics of the loss function.

        Raises:
            ValueError: the batches are for another number of replicas, or the state was donated before.
        """
        self._check(state, batches)
        parts = []
        for call in self._steps.calls(state, batches):
            state, sums = call(state)
            self._run_ahead.add(sums.table)
            parts.append(sums)
        return state, StepSums.joined(parts)

    def no_sync(self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None = None) -> Unsynchronized:
        """Accumulate the gradients of a micro-batch on each replica, and send nothing, as in DDP's `no_sync()`.

        `steps` accumulates inside one program, which is faster; use `no_sync` and `step` in loops that decide as they
        run which micro-batch is the last.

        Args:
            state: not donated.
            micro_batch: leaves (world_size, B, ...), placed by `Replicas.shard`.
            gathered: result of the previous call, to add to; donated.

        Returns:
            Accumulated gradients, leaves (world_size, ...), for the next call or for `step`.

        Raises:
            ValueError: the batch is for another number of replicas, or the state was donated before.
        """
        self._check(state, micro_batch, gathered)
        gathered, loss = self._no_sync(state, micro_batch, gathered)
        self._run_ahead.add(loss)
        return gathered

    def step(
        self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None = None
    ) -> tuple[TrainState, Sums]:
        """Make one optimizer step with the gradients of this micro-batch and of those accumulated before.

        Args:
            state: donated.
            micro_batch: leaves (world_size, B, ...), placed by `Replicas.shard`.
            gathered: from `no_sync`; None: this micro-batch is the only one.

        Returns:
            The next state; sums over all replicas and elements, scalars.

        Raises:
            ValueError: the batch is for another number of replicas, or the state was donated before.
        """
        self._check(state, micro_batch, gathered)
        state, sums = self._step(state, micro_batch, gathered)
        self._run_ahead.add(sums["loss"])
        return state, sums

    def _gather(
        self, state: TrainState, micro_batch: Batch, before: Unsynchronized | None
    ) -> tuple[Unsynchronized, jax.Array]:
        gathered = self.replica_step.no_sync(state, micro_batch, before)
        return gathered, gathered.result.loss  # the second may be waited for after the first is donated

    def _synchronized(
        self, state: TrainState, micro_batch: Batch, gathered: Unsynchronized | None
    ) -> tuple[TrainState, Sums]:
        replica_step = self.replica_step
        next_state, sums, _ = replica_step.synchronize(state, replica_step.no_sync(state, micro_batch, gathered))
        return next_state, sums

    def check(self, state: TrainState, batches: MicroBatches) -> None:
        """Trace the program of `steps`, so that errors are raised before training; nothing runs."""
        jax.eval_shape(self._steps.program, state, batches)

    def compiled_text(self, state: TrainState, batches: MicroBatches) -> str:
        """Return the program of `steps` as compiled by XLA, as HLO text; nothing runs.

        On CPU the program of a model with convolutions is that of one of the K steps.
        """
        self.replicas.check_dealt(batches)
        return self._steps.compiled_text(state, batches)

    def evaluate(self, state: TrainState, arrays: Arrays, batch_size: int = 256) -> dict[str, float]:
        """Compute means over `arrays` in evaluation mode; every example counts exactly once."""
        return means(jax.device_get(self.evaluate_placed(state, self.place(arrays, batch_size))))

    def place(self, arrays: Arrays, batch_size: int = 256) -> Batch:
        """Place an evaluation set on the devices, to be evaluated by `evaluate_placed` any number of times."""
        size = max(map(len, arrays.values()), default=0)
        per_replica = min(batch_size, -(-size // self.world_size))
        batches = padded_batches(arrays, self.world_size, max(1, per_replica))
        return self.replicas.shard(self.replicas.local(batches))

    def evaluate_placed(self, state: TrainState, placed: Batch) -> Sums:
        """Compute sums over a placed evaluation set; the result stays on the devices."""
        _check_not_used_up(state)
        parts = []
        for call in self._evaluate.calls(state, placed):
            parts.append(call(state))
            self._run_ahead.add(parts[-1]["loss"])
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *sums: sum(sums), *parts)

    def verify(self, state: TrainState) -> None:
        """Raise `DriftError` unless the shared fields of the state are equal on all replicas, bit for bit."""
        _check_not_used_up(state)
        self._verifier.check(shared(state, self._axes), int(state.step))

    def repaired(self, state: TrainState, rank: int) -> TrainState:
        """Return the state with the shared fields of replica `rank` on all replicas."""
        return dataclasses.replace(state, **self.replicas.copied_from(rank, shared(state, self._axes)))

    def module(self, state: TrainState) -> nnx.Module:
        """Return the model with the trained values, for use outside of jaxddp."""
        return self.functional.module(*jax.tree.map(jnp.asarray, self.values(state)))

    def averaged(self, state: TrainState) -> TrainState:
        """Replace the parameters by their moving average, to evaluate or save it.

        Raises:
            InputError: no moving average is kept.
        """
        if self.replica_step.ema_decay is None:
            raise InputError("averaged: no moving average is kept; set DataParallel's ema_decay")
        return dataclasses.replace(state, params=state.averaged)

    def values(self, state: TrainState) -> tuple[Params, Buffers]:
        """Return NumPy arrays: parameters (their mean if replicas differ) and buffers (those of replica 0)."""
        unsharded = self.replicas.unsharded(state, self._axes)
        params, buffers = jax.device_get((unsharded.params, unsharded.buffers))
        if self._axes.params == 0:
            params = {name: x.mean(axis=0, dtype=x.dtype) for name, x in params.items()}
        return params, {name: x[0] for name, x in buffers.items()} if self._axes.buffers == 0 else buffers

    def _evaluated(self, state: TrainState, placed: Batch) -> Sums:
        """Evaluate the same model, see `values`, on every replica."""
        params = all_reduce_mean(state.params) if self._axes.params == 0 else state.params
        buffers = broadcast(state.buffers) if self._axes.buffers == 0 else state.buffers
        state = dataclasses.replace(state, params=params, buffers=buffers)
        return evaluate_replica(self._evaluation_loss, state, placed)

    def _check(self, state: TrainState, batch: Batch | MicroBatches, gathered: Unsynchronized | None = None) -> None:
        self.replicas.check_dealt(batch)
        _check_not_used_up(state)
        if gathered is not None and gathered.result.loss.is_deleted():
            raise ValueError("these gradients were used up by an earlier `no_sync`; use the gradients that it returned")


def _check_not_used_up(state: TrainState) -> None:
    if isinstance(state.step, jax.Array) and state.step.is_deleted():  # jax 0.10 would crash the process
        raise ValueError("this state was used up by an earlier `steps`; use the state that it returned")

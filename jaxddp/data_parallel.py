"""`DistributedDataParallel`: the data-parallel trainer of a model, with one replica per device."""

import math
from functools import partial
from operator import methodcaller
from typing import Any, Unpack

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.choices import AMP
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.gpu_options import options_for
from jaxddp.distributed.replicas import Replicas
from jaxddp.distributed.verify import Verifier
from jaxddp.errors import InputError, check_name
from jaxddp.nn.any_model import AnyFunctional, functional_of
from jaxddp.nn.functional import Functional, cast
from jaxddp.nn.losses import Batch, LossFunction, Metrics, Sums, cross_entropy, no_metrics
from jaxddp.nn.model_tree import seeing
from jaxddp.optim.groups import Grouped
from jaxddp.state import Buffers, Params, TrainState, shortest
from jaxddp.step.between_epochs import BetweenEpochs
from jaxddp.step.dispatch import Dispatch, RunAhead
from jaxddp.step.evaluate import Evaluation
from jaxddp.step.local_gradients import Unsynchronized
from jaxddp.step.loops import product_flops
from jaxddp.step.metrics import StepSums
from jaxddp.step.options import StepKeywords
from jaxddp.step.program_step import ProgramStep
from jaxddp.step.replica_step import ReplicaStep, run_steps
from jaxddp.step.results import Results, check_not_used_up
from jaxddp.step.trainable import trained


class DistributedDataParallel(Results):
    """Trainer of a model with one replica per device, like torch's DistributedDataParallel.

    The object holds no weights: `steps` takes a state and returns the next one. A few dispatches run ahead of the
    devices (see `jaxddp.step.dispatch`).

    Args:
        model: a flax.nnx module, whose values are the initial ones (it is not changed); a linen module; or any tree of
            arrays, as of Equinox or Haiku, see `jaxddp.nn.plain`; or the pure side of one of them.
        optimizer: an optax transformation; `jaxddp.optim` has torch's optimizers. It sees the parameters as an
            `nnx.State`, as from `nnx.Optimizer`, so that masks and labels may go by path.
        loss_fn: (model, batch) -> one loss per example, (B, ...) or `losses.Losses`; or their mean, in a run
            without padding.
        replicas: the devices; None: those of `jaxddp.distributed.devices.prepare()`.
        dtype: dtype of the floating-point parameters and buffers; None: that of the model.
        dropout_masks: random numbers drawn in training. "replica": each replica draws its own; "shared": all draw
            the same; "example": each example has its own, whatever the number of replicas, which needs
            `jaxddp.nn.layers.Dropout`.
        amp: "bf16" or "fp16" to compute in 16 bits, see `jaxddp.nn.autocast`; fp16 needs a scaler, as in torch.
        metrics: (model, batch) -> further metrics by name, computed in evaluation: one value per example, or means.
        example: any batch, on which a linen module is initialized; other models need none.
        seed: seed of the keys that the loss of a linen module or of a tree may take, see `jaxddp.nn.placed`.
        replica_step: a step of the user's, which has its optimizers and, in training, replaces loss, optimizer and
            options; see `jaxddp.step.program_step`.
        options: `jaxddp.step.options.StepOptions` by name: loss_normalization, clip_grad_norm, scaler, ...

    Raises:
        InputError: an option is invalid; the message names a valid value.

    >>> import numpy as np
    >>> from flax import nnx
    >>> from jaxddp import optim
    >>> from jaxddp.distributed.devices import prepare
    >>> from jaxddp.loader import Loader
    >>> replicas = Replicas(prepare(2, "cpu"))
    >>> def loss_fn(model, batch):
    ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
    >>> ddp = DistributedDataParallel(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optim.sgd(0.1), loss_fn, replicas=replicas)
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
        model: Any,
        optimizer: optax.GradientTransformation | None,
        loss_fn: LossFunction = cross_entropy,
        *,
        replicas: Replicas | None = None,
        dtype: Any = None,
        dropout_masks: str = "replica",
        amp: str = "none",
        metrics: Metrics = no_metrics,
        example: Batch | None = None,
        seed: int = 0,
        replica_step: ProgramStep | None = None,
        **options: Unpack[StepKeywords],
    ):
        check_name("amp", amp, AMP)
        self.replicas = replicas or Replicas(prepare())
        known = isinstance(model, AnyFunctional)
        self.functional: AnyFunctional = model if known else functional_of(model, loss_fn, lambda: _given(example))
        self.optimizer = optimizer
        seeded: dict[str, Any] = {} if isinstance(self.functional, Functional) else {"seed": seed}
        self._training_forward = methodcaller("local_loss", loss_fn, True, dropout_masks, amp, **seeded)
        self.replica_step: Any = replica_step
        if replica_step is None:
            assert optimizer is not None, "only a replica_step has its own"
            given: dict[str, Any] = {**options}
            if isinstance(optimizer, Grouped):
                optimizer, of_groups = optimizer.for_step(self.functional.params, options.get("frozen", ()))
                given |= of_groups
            seen = seeing(self.functional.param_tree, optimizer)
            self.replica_step = ReplicaStep(self._training_forward(self.functional), seen, **given)
        if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise InputError(f"dtype {dtype}: needs jax's 64-bit mode; set jax_enable_x64")
        self._dtype = dtype
        self._run_ahead = RunAhead()
        evaluated = self.functional.local_loss(loss_fn, train=False, amp=amp, metrics=metrics, **seeded)
        self._axes = self.replica_step.axes
        shapes = jax.eval_shape(self.replica_step.init, self.functional.params, self.functional.buffers)
        self._shortest_axes = axes = shortest(self._axes, shapes)
        learning = trained(self.functional.params, self.replica_step.frozen)
        training: dict[str, Any] = {"donate": (0,), "compiler_options": options_for(self.replicas.devices, learning)}
        self._steps = Dispatch(self.replicas, partial(run_steps, self.replica_step), axes, (axes, None), **training)
        self._no_sync = self.replicas.map(self._gather, (axes, 0, 0), 0, donate=(2,))
        self._step = self.replicas.map(self._synchronized, (axes, 0, 0), (axes, None), **training)
        self._evaluation = Evaluation(evaluated, self.functional, self.replicas, axes, self._run_ahead)
        self._between_epochs = BetweenEpochs(self.replicas, self._axes)
        self._verifier = Verifier(self.replicas)

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.replicas.world_size

    @property
    def programs(self) -> tuple[int, int]:
        """Numbers of programs that `steps` and evaluations have compiled, one for each shape of batch."""
        return len(self._steps.shapes), len(self._evaluation.dispatch.shapes)

    @property
    def one_by_one(self) -> bool:
        """Whether `steps` is known to dispatch each of its steps by itself, so that several at once save nothing."""
        return bool(self._steps.slow)

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

    def product_flops(self, state: TrainState, batches: MicroBatches) -> float:
        """Count the operations of `steps`' matrix products and convolutions, per example and replica's share of it."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # the state may be used up
        program = jax.make_jaxpr(self._steps.program)(shapes, batches).jaxpr
        _, count, *axes = jax.tree.leaves(batches.last)[0].shape
        examples = count * (axes[0] + sum(math.prod(x.shape[2:4]) for x in jax.tree.leaves(batches.head)[:1]))
        return product_flops(program) / examples / self.world_size

    def compiled_text(self, state: TrainState, batches: MicroBatches) -> str:
        """Return the program of `steps` as compiled by XLA, as HLO text; nothing runs.

        On CPU the program of a model with convolutions is that of one of the K steps.
        """
        self.replicas.check_dealt(batches)
        return self._steps.compiled_text(state, batches)

    def _check(self, state: TrainState, batch: Batch | MicroBatches, gathered: Unsynchronized | None = None) -> None:
        self.replicas.check_dealt(batch)
        check_not_used_up(state)
        if gathered is not None and gathered.result.loss.is_deleted():
            raise ValueError("these gradients were used up by an earlier `no_sync`; use the gradients that it returned")


def _given(example: Batch | None) -> Batch:
    if example is None:
        raise InputError("example: must be given for a linen module, which is initialized on it")
    return example

"""BatchNorm statistics of given parameters over a training set, as torch's update_bn computes them.

Averaged parameters are those of no step, so the running statistics of the steps do not fit them.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional, LocalLoss
from jaxddp.nn.layers import BatchNorm
from jaxddp.nn.losses import Batch
from jaxddp.state import Buffers, TrainState
from jaxddp.step.dispatch import Dispatch
from jaxddp.step.loops import scan

COUNT = "num_batches_tracked"
LAYERS = BatchNorm | nnx.BatchNorm


class BatchStatistics:
    """Function from a state and batches to the state with their BatchNorm statistics.

    Args:
        model: the model, whose BatchNorm layers are changed.
        loss_of: returns the training's loss function, whose forward pass is run, of a `Functional`.
        replicas: the replicas.
        axes, shortest_axes: axes of the state, see `jaxddp.state`.

    Raises:
        InputError: the model has no BatchNorm.
    """

    def __init__(
        self,
        model: nnx.Module,
        loss_of: Callable[[Functional], LocalLoss],
        replicas: Replicas,
        axes: Any,
        shortest_axes: Any,
    ):
        layers = [(path, layer) for path, layer in nnx.iter_modules(model) if isinstance(layer, LAYERS)]
        if not layers:
            raise InputError("update_bn: the model has no BatchNorm of jaxddp.layers or flax.nnx")
        for _, layer in layers:  # the running statistics after a forward pass are then those of its batch
            layer.momentum = 1.0 if isinstance(layer, BatchNorm) else 0.0
        self._of_all = {_prefix(path): _synchronized(layer) for path, layer in layers}
        self._loss = loss_of(Functional(model))
        self._replicas, self._axes = replicas, axes
        self._dispatch = Dispatch(replicas, self._sums, shortest_axes, None)

    def __call__(self, state: TrainState, batches: Iterable[MicroBatches]) -> TrainState:
        """Replace the running statistics by their means over the batches.

        Raises:
            InputError: there are no batches.
        """
        parts = []
        for of_steps in batches:
            self._replicas.check_dealt(of_steps)
            parts += [jax.device_get(call(state)) for call in self._dispatch.calls(state, of_steps)]
        if not parts:
            raise InputError("update_bn: needs at least one batch")
        new = self._means(jax.tree.map(lambda *sums: sum(sums), *parts))
        arrays = {name: np.asarray(new[name], x.dtype) for name, x in state.buffers.items() if name in new}
        if self._axes.buffers == 0:
            arrays = {name: np.broadcast_to(x, (self._replicas.world_size, *x.shape)) for name, x in arrays.items()}
            placed = self._replicas.shard(self._replicas.local(arrays))
        else:
            placed = self._replicas.replicate(arrays)
        return replace(state, buffers={**state.buffers, **placed})

    def _sums(self, state: TrainState, batches: MicroBatches) -> Buffers:
        """Sum the statistics of each micro-batch of all replicas, and count by layer the batches with examples.

        Args:
            batches: of this replica, leaves (K, ...).
        """

        def body(total: Buffers, batch: Batch) -> tuple[Buffers, None]:
            return jax.tree.map(jnp.add, total, self._of_batch(state, batch)), None

        def of_step(total: Buffers, batch: MicroBatches) -> tuple[Buffers, None]:
            if batch.head is not None:
                total, _ = scan(body, total, batch.head)
            return body(total, batch.last)

        first = jax.tree.map(lambda x: x[0], batches.last)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self._of_batch, state, first))
        total, _ = scan(of_step, zeros, batches)
        return all_reduce(total)

    def _means(self, sums: Buffers) -> dict[str, np.ndarray]:
        new: dict[str, Any] = {}
        for path, synchronized in self._of_all.items():
            count = sums[path + COUNT]
            new |= {path + name: sums[path + name] / count for name in ("mean", "var")}
            new[path + COUNT] = count // (self._replicas.world_size if synchronized else 1)
        return new

    def _of_batch(self, state: TrainState, batch: Batch) -> Buffers:
        statistics = [path + name for path in self._of_all for name in ("mean", "var", COUNT)]
        cleared = {name: jnp.zeros_like(x) if name in statistics else x for name, x in state.buffers.items()}
        _, after = self._loss(state.params, cleared, batch)
        # A batch of only padding leaves all of them 0.
        counts = {path + COUNT: after.get(path + COUNT, jnp.int32(1)) for path in self._of_all}
        return {name: after[name] for name in statistics if name in after} | counts


def _prefix(path: tuple[Any, ...]) -> str:
    return "".join(f"{part}." for part in path)


def _synchronized(layer: Any) -> bool:
    return bool(layer.sync) if isinstance(layer, BatchNorm) else layer.axis_name is not None

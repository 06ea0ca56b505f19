"""Training written by hand in plain JAX, for any nnx module: the reference for jaxddp's speed.

There is no option and no check. State and batches are placed before the step needs them, the state's buffers are
donated, it is a flat tuple of arrays, and losses are read late.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks import models_jax
from benchmarks.race import Turn
from benchmarks.workloads import Arrays, Workload
from jaxddp.data.sampler import epoch_indices

Way = Literal["pmap", "shard_map", "jit"]
Leaves = tuple[jax.Array, ...]  # parameters, optimizer state, and the module's other state
Metrics = tuple[jax.Array, jax.Array]  # loss and accuracy
Step = Callable[[Leaves, Arrays], tuple[Leaves, Metrics]]

AXIS = "replica"
RUN_AHEAD = 8  # dispatches in flight; XLA's CPU devices deadlock with more than about 30


def make_step(model: nnx.Module, lr: float, replicated: bool) -> tuple[Step, Leaves]:
    """Return an optimizer step of a module with Adam, and the state before the first step."""
    graphdef, params, keys, others = nnx.split(model, nnx.Param, nnx.RngKey, ...)  # type: ignore[misc]
    optimizer = optax.adam(lr)
    others, others_def = jax.tree.flatten(others)
    start, treedef = jax.tree.flatten((params, optimizer.init(params), others))

    def loss_fn(params: nnx.State, others: list[jax.Array], batch: Arrays) -> Any:
        rank = lax.axis_index(AXIS) if replicated else 0
        here = jax.tree.map(lambda key: jax.random.fold_in(key, rank), keys)  # other dropout masks on each replica
        # Built here, because nnx refuses to change variables of an outer trace.
        module = nnx.merge(graphdef, params, here, jax.tree.unflatten(others_def, others))
        logits = models_jax.logits_of(module, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        accuracy = (logits.argmax(-1) == batch["y"]).mean()
        others_after: Any = nnx.split(module, nnx.Param, nnx.RngKey, ...)[3]  # type: ignore[misc]
        return losses.mean(), (accuracy, jax.tree.leaves(others_after))

    def step(leaves: Leaves, batch: Arrays) -> tuple[Leaves, Metrics]:
        params, opt_state, others = jax.tree.unflatten(treedef, leaves)
        (loss, (accuracy, others)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, others, batch)
        if replicated:
            grads, loss, accuracy, others = _mean((grads, loss, accuracy, others))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return tuple(jax.tree.leaves((optax.apply_updates(params, updates), opt_state, others))), (loss, accuracy)

    return step, tuple(jax.device_get(start))


def _mean(tree: Any) -> Any:
    """Average over the replicas; counters are equal on all."""
    leaves, treedef = jax.tree.flatten(tree)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    means = iter(lax.pmean([leaf for leaf, averaged in zip(leaves, floating, strict=True) if averaged], AXIS))
    averages = [next(means) if averaged else leaf for leaf, averaged in zip(leaves, floating, strict=True)]
    return jax.tree.unflatten(treedef, averages)


class ByHand:
    """Compiled step and the loop around it.

    Args:
        workload: what to train.
        devices: one device per replica; with "jit", the one for the full batch.
        way: how the step is mapped over the devices.
        steps_per_dispatch: K; above 1, `lax.scan` runs the steps, unrolled where XLA is slow in a loop.
    """

    def __init__(self, workload: Workload, devices: Sequence[jax.Device], way: Way, steps_per_dispatch: int = 1):
        self._arrays, self._way = workload.arrays(), way
        self._replicas, self._several = len(devices), steps_per_dispatch
        self._size = workload.batch_size // len(devices)
        model = models_jax.build(workload)
        model.train()
        step, self._start = make_step(model, workload.lr, replicated=way != "jit")
        if steps_per_dispatch > 1:
            unrolled = workload.has_convolutions and devices[0].platform == "cpu"
            step = _scanned(step, unrolled)
        mesh = Mesh(np.array(devices), (AXIS,))
        self._state_sharding: Any = NamedSharding(mesh, PartitionSpec())
        self._batch_sharding: Any = NamedSharding(mesh, PartitionSpec(AXIS))
        if way == "pmap":
            self._step = jax.pmap(step, AXIS, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0)
        elif way == "shard_map":
            spec, split = PartitionSpec(), PartitionSpec(AXIS)
            # With check_vma, gradients of replicated values would be summed over the devices before the mean.
            mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, split), out_specs=(spec, spec), check_vma=False)
            self._step = jax.jit(mapped, donate_argnums=0)
        else:
            self._step = jax.jit(step, donate_argnums=0)
            self._state_sharding = self._batch_sharding = SingleDeviceSharding(devices[0])

    def train(self, steps: int) -> Turn:
        """Train from the initial state; see `benchmarks.race.Contender`."""
        owned = [np.array(leaf) for leaf in self._start]  # device_put may share the memory, which the step donates
        state = jax.block_until_ready(jax.device_put(tuple(owned), self._state_sharding))
        dispatches, waiting = chain.from_iterable(map(self._indices, count())), deque[jax.Array]()
        losses: list[float] = []
        dispatched, indices = 0, next(dispatches)
        started = time.perf_counter()
        while True:
            batch = {name: array[indices] for name, array in self._arrays.items()}
            state, (loss, _) = self._step(state, jax.device_put(batch, self._batch_sharding))
            waiting.append(loss)
            dispatched += loss.size
            if len(waiting) > RUN_AHEAD:
                losses += _numbers(waiting.popleft())
            if dispatched >= steps:
                break
            indices = next(dispatches)
        for loss in waiting:
            losses += _numbers(loss)
        return Turn(time.perf_counter() - started, losses)

    def compiled(self) -> jax.stages.Compiled:
        """Return the compiled program of one dispatch; nothing runs."""
        indices = next(self._indices(0))
        return self._step.lower(self._start, {name: array[indices] for name, array in self._arrays.items()}).compile()

    def _indices(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield each dispatch's examples in the axes of the program: (W, K, b), (W, b), (W b,), (K, b) or (b,)."""
        shards = epoch_indices(len(self._arrays["y"]), self._replicas, epoch=epoch)
        full = shards.shape[1] // self._size
        for first in range(0, full, self._several):
            last = min(first + self._several, full)
            chunk = shards[:, first * self._size : last * self._size]
            yield self._arranged(chunk.reshape(self._replicas, -1, self._size))
        if rest := shards.shape[1] % self._size:
            yield self._arranged(shards[:, None, -rest:])

    def _arranged(self, indices: np.ndarray) -> np.ndarray:
        steps = indices if self._several > 1 else indices[:, 0]
        if self._way == "jit":
            return steps[0]
        return steps if self._way == "pmap" else steps.reshape(-1)


def _scanned(step: Step, unrolled: bool) -> Step:
    return lambda state, batches: lax.scan(step, state, batches, unroll=unrolled)


def _numbers(losses: jax.Array) -> list[float]:
    return [float(loss) for loss in np.atleast_1d(losses.addressable_data(0))]

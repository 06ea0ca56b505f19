"""What a good JAX user writes without jaxddp: the same training, by hand, for this one model.

No module system, no options, no checks: the mark that jaxddp's speed is measured against. State
and batches are put on the devices before the step needs them, the state's buffers are reused, and
nothing waits for a loss before an epoch ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Params = list[tuple[jax.Array, jax.Array]]  # kernel (in, out) and bias (out,) of each layer
State = tuple[Params, Any]  # and the optimizer's state
Arrays = Mapping[str, np.ndarray]


def forward(params: Params, x: jax.Array) -> jax.Array:
    """A multilayer perceptron: logits (B, C) for x (B, ...)."""
    x = x.reshape(len(x), -1)
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias[None])
    return x @ params[-1][0] + params[-1][1][None]


def make_step(optimizer: optax.GradientTransformation, average: Callable[[Any], Any]) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics), where `average` takes the mean over the replicas."""

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = forward(params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), (logits.argmax(-1) == batch["y"]).mean()

    def step(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, tuple[jax.Array, jax.Array]]:
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        grads, loss, accuracy = average((grads, loss, accuracy))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, accuracy)

    return step


class HandWritten:
    """The step compiled, and the loop around it.

    Args:
        optimizer: an optax transformation.
        data: "x" (N, ...) and "y" (N,).
        devices: one per replica, for pmap; or one, for plain `jax.jit` on the whole batch.
        plain: plain `jax.jit`.
        batch_size: examples of a step, over all replicas.
        steps_per_dispatch: K; above 1 by `lax.scan`.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        data: Arrays,
        devices: Sequence[jax.Device],
        *,
        plain: bool = False,
        batch_size: int = 32,
        steps_per_dispatch: int = 1,
        seed: int = 0,
    ):
        self._data, self._seed, self._plain = data, seed, plain
        self._replicas, self._batch_size, self._scanned = len(devices), batch_size // len(devices), steps_per_dispatch
        average = (lambda tree: tree) if plain else (lambda tree: lax.pmean(tree, "replica"))
        step = make_step(optimizer, average)
        several = step if steps_per_dispatch == 1 else lambda state, batches: lax.scan(step, state, batches)
        if plain:
            self._step = jax.jit(several, donate_argnums=0)
            self._state_sharding = self._batch_sharding = SingleDeviceSharding(devices[0])
        else:
            self._step = jax.pmap(
                several, "replica", in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0
            )
            mesh = Mesh(np.array(devices), ("replica",))
            self._state_sharding = NamedSharding(mesh, PartitionSpec())
            self._batch_sharding = NamedSharding(mesh, PartitionSpec("replica"))

    def place(self, state: State) -> State:
        """A copy of the state on every device."""
        return jax.device_put(jax.tree.map(np.array, state), self._state_sharding)

    def train(self, state: State, epochs: range) -> tuple[State, list[float]]:
        """Train; returns the losses of all steps."""
        losses: list[float] = []
        for epoch in epochs:
            metrics = []
            for indices in self._indices(epoch):
                batch = {name: array[indices] for name, array in self._data.items()}
                state, metric = self._step(state, jax.device_put(batch, self._batch_sharding))
                metrics.append(metric)
            losses += [float(x) for loss, _ in jax.device_get(metrics) for x in np.atleast_1d(loss)]
        return state, losses

    def _indices(self, epoch: int) -> Iterator[np.ndarray]:
        size, K = self._batch_size, self._scanned
        order = np.random.default_rng(self._seed + epoch).permutation(len(self._data["y"]))
        per_replica = -(-len(order) // self._replicas)
        dealt = np.resize(order, (per_replica, self._replicas)).T
        full = per_replica // size
        for first in range(0, full, K):
            last = min(first + K, full)
            yield self._shape(dealt[:, first * size : last * size].reshape(self._replicas, last - first, size))
        if per_replica % size:
            yield self._shape(dealt[:, None, full * size :])

    def _shape(self, indices):
        if self._scanned == 1:
            indices = indices[:, 0]
        return indices[0] if self._plain else indices

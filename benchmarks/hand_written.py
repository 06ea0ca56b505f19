"""Training written by hand in plain JAX, for one model: the reference for jaxddp's speed.

There is no module system, no option and no check. State and batches are placed on the devices before the step needs
them, the state's buffers are donated, and nothing waits for a loss before the epoch ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Params = list[tuple[jax.Array, jax.Array]]  # kernel (in, out) and bias (out,) of each layer
State = tuple[Params, Any]  # parameters and the optimizer's state
Metrics = tuple[jax.Array, jax.Array]  # loss and accuracy
Step = Callable[[State, Any], tuple[State, Metrics]]


def make_step(optimizer: optax.GradientTransformation, average: Callable[[Any], Any]) -> Step:
    """Build an optimizer step of a multilayer perceptron; `average` takes the mean over the replicas."""

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> Metrics:
        x = batch["x"].reshape(len(batch["x"]), -1)
        for kernel, bias in params[:-1]:
            x = jax.nn.relu(x @ kernel + bias[None])
        logits = x @ params[-1][0] + params[-1][1][None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), (logits.argmax(-1) == batch["y"]).mean()

    def step(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics]:
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        grads, loss, accuracy = average((grads, loss, accuracy))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, accuracy)

    return step


class HandWritten:
    """Compiled step and the loop around it.

    Args:
        optimizer: an optax transformation.
        devices: one device per replica, for `jax.pmap`; with `plain`, the one for `jax.jit`.
        plain: use plain `jax.jit`, with the whole batch on one device.
        steps_per_dispatch: K; above 1, `lax.scan` runs the steps.
        batch_size: examples per step, over all replicas.
        seed: seed of the sample order.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        devices: Sequence[jax.Device],
        *,
        plain: bool = False,
        steps_per_dispatch: int = 1,
        batch_size: int = 32,
        seed: int = 0,
    ):
        self._plain, self._seed, self._steps_per_dispatch = plain, seed, steps_per_dispatch
        self._replicas, self._size = len(devices), batch_size // len(devices)
        step = make_step(optimizer, (lambda tree: tree) if plain else (lambda tree: lax.pmean(tree, "replica")))
        several: Step = step if steps_per_dispatch == 1 else lambda state, batches: lax.scan(step, state, batches)
        self.state_sharding: Sharding
        self.batch_sharding: Sharding
        if plain:
            self.step = jax.jit(several, donate_argnums=0)
            self.state_sharding = self.batch_sharding = SingleDeviceSharding(devices[0])
        else:
            self.step = jax.pmap(
                several, "replica", in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0
            )
            mesh = Mesh(np.array(devices), ("replica",))
            self.state_sharding = NamedSharding(mesh, PartitionSpec())
            self.batch_sharding = NamedSharding(mesh, PartitionSpec("replica"))

    def place(self, state: Any) -> State:
        """Place a copy of the state on every device."""
        return jax.device_put(jax.tree.map(np.array, state), self.state_sharding)

    def train(self, state: State, data: Mapping[str, np.ndarray], epochs: range) -> tuple[State, list[float]]:
        """Train for some epochs; return the state and the loss of every step."""
        losses: list[float] = []
        for epoch in epochs:
            metrics = []
            for indices in self._indices(epoch, len(data["y"])):
                batch = jax.device_put({name: array[indices] for name, array in data.items()}, self.batch_sharding)
                state, metric = self.step(state, batch)
                metrics.append(metric)
            losses += [float(x) for loss, _ in jax.device_get(metrics) for x in np.atleast_1d(loss)]
        return state, losses

    def _indices(self, epoch: int, dataset_size: int) -> Iterator[np.ndarray]:
        """Yield each dispatch's examples, (replicas, K, examples), without the axes that the program lacks."""
        order = np.random.default_rng((self._seed, epoch)).permutation(dataset_size)
        per_replica = -(-dataset_size // self._replicas)
        shards = np.resize(order, (per_replica, self._replicas)).T  # repeats the first examples as padding
        full_steps = per_replica // self._size
        full, rest = np.split(shards, [full_steps * self._size], axis=1)
        by_step = full.reshape(self._replicas, full_steps, self._size)
        dispatches = [
            by_step[:, i : i + self._steps_per_dispatch] for i in range(0, full_steps, self._steps_per_dispatch)
        ]
        for indices in [*dispatches, rest[:, None]] if rest.size else dispatches:
            steps = indices if self._steps_per_dispatch > 1 else indices[:, 0]
            yield steps[0] if self._plain else steps

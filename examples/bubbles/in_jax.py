"""Step in JAX, compiled with timestamps between its phases.

A mark passes the sum of an array to a callback, which returns zero, and adds that zero to the array. The callback
cannot run before the array is computed, and nothing that needs the array can run before the callback has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.experimental import io_callback

from examples.bubbles.cases import EPSILON, REPLICAS, Case, Plan
from examples.bubbles.trace import ALL_REDUCE, BACKWARD, FORWARD, START, Marks
from jaxddp import optim
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.collectives import all_reduce, rank, world_size
from jaxddp.distributed.replicas import Replicas
from jaxddp.plan.messages import all_reduces

Tree = TypeVar("Tree")
Inputs = dict[str, jax.Array]


@dataclass(eq=False)  # no two are equal, so jax's cache does not confuse their programs
class Clocks:
    """A record of the phases that each replica has finished, and when."""

    marks: list[list[tuple[str, int]]] = field(default_factory=lambda: [[] for _ in range(REPLICAS)])

    def note(self, tree: Tree, phase: str, pause: jax.Array | float = 0.0) -> Tree:
        """Return the tree after a callback has recorded the end of `phase` and slept for `pause` seconds."""
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))
        zero = io_callback(
            partial(self._record, phase), jax.ShapeDtypeStruct((), jnp.float32), rank(), total, jnp.asarray(pause)
        )
        return jax.tree.map(lambda leaf: leaf + zero, tree)

    def _record(self, phase: str, replica: np.ndarray, total: np.ndarray, pause: np.ndarray) -> np.float32:
        self.marks[int(replica)].append((phase, time.monotonic_ns()))
        time.sleep(float(pause))
        return np.float32(0)

    def between(self, forward: str, backward: str) -> Callable[[jax.Array], jax.Array]:
        """Return an identity that records the end of `forward` when x is ready, of `backward` when its gradient is."""

        @jax.custom_vjp
        def mark(x: jax.Array) -> jax.Array:
            return self.note(x, forward)

        mark.defvjp(lambda x: (self.note(x, forward), None), lambda _, gradient: (self.note(gradient, backward),))
        return mark

    def total(self, x: jax.Array) -> jax.Array:
        """Differentiable sum over all replicas, with the time recorded before and after it."""
        before, after = self.between(FORWARD, ALL_REDUCE), self.between(ALL_REDUCE, BACKWARD)
        return after(all_reduce(before(x)))

    def taken(self) -> list[Marks]:
        """Return each replica's marks since the last call."""
        marks, self.marks = self.marks, [[] for _ in range(REPLICAS)]
        return list(marks)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def block(x: jax.Array, kernel: jax.Array, passes: jax.Array, most_passes: int) -> jax.Array:
    """Apply h = tanh(h W) `passes` times; JAX has no gradient of a loop whose length is traced."""
    return lax.fori_loop(0, passes, lambda _, h: jnp.tanh(h @ kernel), x)


def _block_forward(x: jax.Array, kernel: jax.Array, passes: jax.Array, most_passes: int) -> tuple[jax.Array, Any]:
    kept = jnp.zeros((most_passes + 1, *x.shape), x.dtype).at[0].set(x)
    kept = lax.fori_loop(0, passes, lambda i, kept: kept.at[i + 1].set(jnp.tanh(kept[i] @ kernel)), kept)
    return kept[passes], (kept, kernel, passes)


def _block_backward(most_passes: int, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    kept, kernel, passes = residuals

    def back(i: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_h, of_kernel = gradients
        of_product = of_h * (1 - jnp.square(kept[passes - i]))
        return of_product @ kernel.T, of_kernel + kept[passes - i - 1].T @ of_product

    of_x, of_kernel = lax.fori_loop(0, passes, back, (gradient, jnp.zeros_like(kernel)))
    return of_x, of_kernel, None


block.defvjp(_block_forward, _block_backward)


@dataclass(frozen=True)
class Step:
    """A replica's gradient computation in one step.

    Attributes:
        most_passes: largest number of passes of any replica through a block.
        sync_batch_norm, sync_loss: see `cases.Case`.
        clocks: record of the time.
    """

    most_passes: int
    sync_batch_norm: bool
    sync_loss: bool
    clocks: Clocks

    def __call__(self, kernels: jax.Array, inputs: Inputs) -> jax.Array:
        """Compute the gradient of the mean loss over all examples of all replicas."""
        inputs = inputs | {"x": self.clocks.note(inputs["x"], START, inputs["pause"])}
        gradient = jax.grad(self.loss)(kernels, inputs)
        if self.sync_loss:
            return self.clocks.note(all_reduce(self.clocks.note(gradient, BACKWARD)), ALL_REDUCE)
        both = self.clocks.note((gradient, inputs["weights"].sum()), BACKWARD)
        total, count = self.clocks.note(all_reduce(both), ALL_REDUCE)
        return total / count

    def loss(self, kernels: jax.Array, inputs: Inputs) -> jax.Array:
        """Sum the loss over the replica's examples that count; with `sync_loss`, divide by all replicas' count."""
        h, count = self.forward_ended(self.forward(kernels, inputs), inputs["weights"].sum())
        loss = jnp.sum(inputs["weights"] * jnp.square(h - inputs["y"]).mean(1))
        return loss / count if self.sync_loss else loss

    def forward(self, kernels: jax.Array, inputs: Inputs) -> jax.Array:
        """Apply the blocks that `examples.bubbles.cases` describes."""
        frozen = lax.stop_gradient(kernels[0])
        x = lax.fori_loop(0, inputs["frozen"], lambda _, x: jnp.tanh(x @ frozen), inputs["x"])
        for kernel, passes in zip(kernels, inputs["passes"], strict=True):
            x = self.normalised(block(x, kernel, passes, self.most_passes))
        return x

    def normalised(self, x: jax.Array) -> jax.Array:
        """Normalise each feature to mean 0 and variance 1, over this replica's examples or all replicas'."""
        sums, count = jnp.stack([x.sum(0), jnp.square(x).sum(0)]), len(x)
        if self.sync_batch_norm:
            sums, count = self.clocks.total(sums), count * world_size()
        mean, square = sums / count
        return (x - mean[None]) * lax.rsqrt(square - jnp.square(mean) + EPSILON)[None]

    def forward_ended(self, h: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Record the end of the forward pass; with `sync_loss`, all-reduce the count as well."""

        @jax.custom_vjp
        def ended(h: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
            h, count = self.clocks.note((h, count), FORWARD)
            return self.clocks.note((h, all_reduce(count)), ALL_REDUCE) if self.sync_loss else (h, count)

        ended.defvjp(lambda h, count: (ended(h, count), None), lambda _, gradients: gradients)
        return ended(h, count)


def measure(plan: Plan, replicas: Replicas) -> dict[str, dict[str, Any]]:
    """Run the cases in turn; return all replicas' marks of each step of each case, and the case's gradient."""
    clocks = Clocks()
    kinds = {(case.sync_batch_norm, case.sync_loss) for case in plan.cases.values()}
    programs = {kind: replicas.map(Step(plan.most_passes, *kind, clocks), (None, 0), None) for kind in kinds}
    kernels, examples = replicas.replicate(plan.kernels()), plan.inputs()
    inputs = {name: replicas.shard(examples | _work(case)) for name, case in plan.cases.items()}
    measured: dict[str, dict[str, Any]] = {name: {"steps": []} for name in plan.cases}
    for _ in range(1 + plan.steps):
        for name, case in plan.cases.items():
            gradient = programs[case.sync_batch_norm, case.sync_loss](kernels, inputs[name])
            measured[name]["gradient"] = np.asarray(gradient)
            jax.effects_barrier()
            measured[name]["steps"].append(clocks.taken())
    return {name: {**of, "steps": of["steps"][1:]} for name, of in measured.items()}


def _work(case: Case) -> dict[str, np.ndarray]:
    pause = np.array(case.pause, np.float32)
    return {"passes": np.array(case.passes), "frozen": np.array(case.frozen), "pause": pause}


def cost_of_a_mark(plan: Plan, replicas: Replicas) -> float:
    """Return the median seconds from one mark to the next with nothing between them."""
    clocks = Clocks()
    program = replicas.map(lambda x: clocks.note(clocks.note(x, START), FORWARD), (0,), 0)
    placed = replicas.shard(plan.inputs()["x"])
    for _ in range(1 + plan.steps):
        jax.block_until_ready(program(placed))
        jax.effects_barrier()
    times = np.array([[now for _, now in of_replica] for of_replica in clocks.taken()]).reshape(REPLICAS, -1, 2)
    return float(np.median(np.diff(times[:, 1:]))) / 1e9


def all_reduces_of_jaxddp(replicas: Replicas, loss_normalization: str) -> int:
    """Count the all-reduces in a compiled step of `jaxddp.DistributedDataParallel`."""
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    ddp = DistributedDataParallel(model, optim.sgd(0.1), replicas=replicas, loss_normalization=loss_normalization)
    batch = {"x": np.zeros((REPLICAS, 1, 2, 4), np.float32), "y": np.zeros((REPLICAS, 1, 2), np.int32)}
    return all_reduces(ddp.compiled_text(ddp.init(), replicas.shard(MicroBatches(None, batch)))).count

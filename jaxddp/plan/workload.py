"""Describe what a run computes: a replica step and the shapes of its state and batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.nn.losses import Batch
from jaxddp.state import Buffers, Params, TrainState, shortest
from jaxddp.step.program_step import ProgramStep
from jaxddp.step.replica_step import ReplicaStep, run_steps
from jaxddp.step.trainable import trained

Shapes = Mapping[str, jax.ShapeDtypeStruct]
AnyStep = ReplicaStep | ProgramStep


@dataclass(frozen=True)
class Workload:
    """A training step, and the shapes for which it is compiled; it never runs.

    Attributes:
        name: name in the report.
        replica_step: step of `jaxddp train`, or of `jaxddp.DistributedDataParallel`; a program's.
        params, buffers: arrays of the model; only their shapes count.
        example: shapes of one example's arrays, by name.
        batch_size: examples per replica and step, in `accumulation_steps` micro-batches.
        accumulation_steps: micro-batches per step.
        matmul_precision: jax's `default_matmul_precision` of the run; None: jax's default.
        float64: whether jax's 64-bit mode is on.
    """

    name: str
    replica_step: AnyStep
    params: Params
    buffers: Buffers
    example: Shapes
    batch_size: int
    accumulation_steps: int = 1
    matmul_precision: str | None = None
    float64: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.accumulation_steps:
            raise InputError(
                f"--batch-size {self.batch_size}: must be a multiple of --accumulation-steps {self.accumulation_steps}"
            )

    @property
    def gradients(self) -> Params:
        """Parameters that learn; their gradients have the same shapes."""
        return trained(self.params, self.replica_step.frozen)

    def state(self, world_size: int) -> TrainState:
        """Return the shapes of the state, with an axis of replicas where these differ."""
        if self.replica_step.shard_optimizer:
            raise InputError("--shard-optimizer: cannot be planned yet; leave it out")
        state = jax.eval_shape(self.replica_step.init, self.params, self.buffers)
        axes = self.replica_step.axes

        def of_all(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((world_size, *leaf.shape), leaf.dtype)

        fields = {name: getattr(state, name) for name in vars(axes)}
        return TrainState(
            **{name: jax.tree.map(of_all, part) if getattr(axes, name) == 0 else part for name, part in fields.items()}
        )

    def lower(self, replicas: Replicas, batch_size: int, compiler_options: Mapping[str, Any] | None = None) -> Any:
        """Lower one optimizer step for these replicas, the program of `DistributedDataParallel.steps`."""
        with jax.enable_x64(self.float64), jax.default_matmul_precision(self.matmul_precision):
            state = self.state(replicas.world_size)
            axes = shortest(self.replica_step.axes, state)
            step = partial(run_steps, self.replica_step)
            mapped = replicas.map(step, (axes, 0), (axes, None), donate=(0,), compiler_options=compiler_options)
            return mapped.lower(state, self._batch(replicas.world_size, batch_size))

    def _batch(self, world_size: int, batch_size: int) -> MicroBatches:
        pieces, size = self.accumulation_steps, batch_size // self.accumulation_steps

        def shapes(*axes: int) -> Batch:
            return {
                name: jax.ShapeDtypeStruct((world_size, 1, *axes, size, *array.shape), array.dtype)
                for name, array in self.example.items()
            }

        return MicroBatches(shapes(pieces - 1) if pieces > 1 else None, shapes())


def nbytes(tree: Any) -> int:
    """Sum the bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""The job that watches the operations of a port's jax loss which may return an operand, over the batches of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.case_interface import AnyCase, Trajectory, micro_batches_of
from jaxddp.parity.idle_operations import (
    Called,
    Watched,
    merged,
    merged_sides,
)
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.idle_members import kept_by, members_of_optimizer, with_members
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.recorded_runs import forced_state
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.jax_side.watched_program import WatchedProgram, dropouts_shown, watched_program
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.user_code.uncalled import calls_noted
from jaxddp.step.replica_step import ReplicaStep


@dataclass(frozen=True)
class WatchJax:
    """A job that tells which operands the operations of a case's jax loss have always returned.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        reference: folder of the reference's records, from whose weights each step is taken.
        twins: watch also operations that are only of interest as twins of torch's.
        known: numbers that torch's loss is given, which are not changed.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    twins: bool = True
    known: tuple[float, ...] = ()

    def run(self, tell: Tell) -> Watched:
        """Compute the loss of all micro-batches, and return the operations at the user's lines."""
        tell("operations without effect")
        with calls_noted(self.case.name) as called:
            watched = self._watched()
        return watched._replace(functions=frozenset(called))

    def _watched(self) -> Watched:
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            side = side_of(self.case)
            with side.lifting(), dropouts_shown():
                if not isinstance(side.replica_step, ReplicaStep):
                    return merged_sides(self._of_steps(side, reference))
                of_loss = merged_sides(self._of_batches(side, reference))
            return of_loss._replace(members=merged(members_of_optimizer(side, reference)))

    def _of_batches(self, side: JaxSide, reference: Trajectory) -> Iterator[Watched]:
        """Yield the operations of the loss of each micro-batch of each replica."""
        step: Any = side.replica_step
        loss, programs = step.loss, dict[str, WatchedProgram]()
        alone = jax.vmap(lambda _, given: loss(*given)[0]["loss"], (0, None), axis_name=AXIS_NAME)
        for number, batch in self._batches(reference):
            weights = side.from_torch(reference.before(number))
            for rank in range(self.case.world_size):
                for micro_batch in micro_batches_of(batch, rank):
                    arguments = jnp.zeros(1), (*weights, jax.tree.map(jnp.asarray, micro_batch))
                    shapes = str(jax.tree.map(jnp.shape, micro_batch))
                    if shapes not in programs:
                        programs[shapes] = watched_program(alone, arguments, known=self.known)
                    calls, numbers = programs[shapes].watch(arguments, self.twins)
                    yield Watched(calls, {}, numbers)

    def _of_steps(self, side: JaxSide, reference: Trajectory) -> Iterator[Watched]:
        """Yield the operations of each whole step of a port's `jax_step`, of all replicas together."""
        step: Any = side.replica_step
        members: list[Called] = []
        of_replica = with_members(lambda state, batch: step(state, batch), members)
        of_all = jax.vmap(of_replica, (None, 0), axis_name=AXIS_NAME)
        state, program = step.init(*side.from_torch(reference.start)), None
        for number, batch in self._batches(reference):
            params, buffers = side.from_torch(reference.before(number))
            state = replace(state, params=params, buffers=buffers)
            if isinstance(step, MultiLossStep):
                state = forced_state(step, state, reference, number, side)
            arguments = state, jax.tree.map(jnp.asarray, batch)
            program = program or watched_program(of_all, arguments, replicas=self.case.world_size)
            calls, ((after, *_), flags) = program(arguments)
            state = jax.tree.map(lambda x: x[0], after)
            yield Watched(calls, kept_by(members, flags), {})

    def _batches(self, reference: Trajectory) -> Iterator[tuple[int, MicroBatches]]:
        for number, (_, batch) in enumerate(zip(reference.records, self.case.batches(), strict=False)):
            yield number, batch

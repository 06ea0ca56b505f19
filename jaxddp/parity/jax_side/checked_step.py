"""A case's step as a compiled program, and the records of its outputs."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import optax

from jaxddp.comm_hooks import CommHook
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.parity.case_interface import LOCAL_STAGES, AnyCase, micro_batches_of
from jaxddp.parity.excerpts import excerpts, is_large, norms_of_large
from jaxddp.parity.fingerprints import fingerprints
from jaxddp.parity.jax_side.custom_step import CustomStep
from jaxddp.parity.jax_side.side import JaxSide, optimizer_tensors
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.port.draws import examples_of
from jaxddp.parity.projections import projections_of
from jaxddp.parity.records import Tensors, stacked
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.replica_step import ReplicaStep

OF_LARGE = ("norms", "projections", "local_norms", "local_projections")  # parts of a record on large tensors
Hook = CommHook | Callable[[Params], Params]
Stages = dict[str, Any]
Update = Callable[[Params, Any, Params], tuple[dict[str, Tensors], Any]]
# (stage, rank, arrays of this replica) -> excerpts of tensors, norms and projections of large ones
Excerpts = Callable[[str, int, dict[str, np.ndarray]], tuple[Tensors, Tensors, Tensors]]


@dataclass(frozen=True)
class CheckedStep:
    """A case's compiled step.

    Attributes:
        side: the jax side.
        replicas: the replicas that it runs on.
        run: (state, batch) -> (replica 0's next state, stages of all replicas).
    """

    side: JaxSide
    replicas: Replicas
    run: Any

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer of flat dictionaries; a `MultiLossStep` does not have one."""
        step = self.side.replica_step
        assert isinstance(step, ReplicaStep | CustomStep), "a MultiLossStep is forced by itself"
        return step.optimizer

    def start(self, params: Params, buffers: Buffers) -> TrainState:
        """Return the state before the first step, on the devices."""
        return self.side.replica_step.start(params, buffers, self.replicas)

    def placed(self, state: TrainState) -> TrainState:
        """Copy a replica's state to the devices."""
        return self.replicas.place(state, self.side.replica_step.axes)

    def placed_again(self, state: TrainState) -> TrainState:
        """Place the state that a step has returned; the old arrays are freed first."""
        return self.placed(_taken_back(state))

    def step(self, state: TrainState, batch: MicroBatches) -> tuple[TrainState, Stages]:
        """Take a step from a state on the devices, which is donated; return the stages of all processes' replicas."""
        state, stages = self.run(state, self.replicas.shard(self.replicas.local(batch)))
        return state, stages if self.replicas.in_one_process else self.replicas.gather(stages)

    def record(self, stages: Stages, batch: MicroBatches) -> dict[str, Tensors]:
        """Return the record of the stages; each is dropped once it is recorded, to free its memory."""
        return record_of(stages, self.side, batch, self._excerpts)

    def given(self, stages: Stages, of_torch: Arrays, start: Arrays) -> Params:
        """Return the reference's gradients, and jax's where torch has none.

        Torch has none for frozen parameters, whose gradients jax's optimizer has to mask.
        """
        stage: Params = stages[self.side.given if self.side.given in stages else "gradients"]
        of_jax = self.side.to_torch(slices_of(stage, 0)) if len(of_torch) < len(stage) else {}
        return self.side.from_torch(Joined(of_torch, of_jax, start), adds=False)[0]

    def of_custom_step(self, after: TrainState, params: Params) -> dict[str, Tensors]:
        """Return the updates and the optimizer's state after a custom step, under torch's names."""
        return stages_of_optimizer(self.side, updates_between(params, after.params), after.opt_state, params)

    def updating(self) -> Update:
        """Return (gradients, optimizer's state, params) -> (stages of the optimizer, its next state)."""
        update = jax.jit(self.optimizer.update)

        def updated(gradients: Params, opt_state: Any, params: Params) -> tuple[dict[str, Tensors], Any]:
            updates, opt_state = update(gradients, opt_state, params)
            return stages_of_optimizer(self.side, updates, opt_state, params), opt_state

        return updated

    def _excerpts(self, stage: str, rank: int, arrays: dict[str, np.ndarray]) -> tuple[Tensors, Tensors, Tensors]:
        """Return the excerpts of a stage's tensors, buffers in full, and norms and projections of large gradients."""
        tensors = self.side.to_torch(arrays)
        if stage == "buffers":
            return tensors, {}, {}
        gradients = tensors if stage.endswith("gradients") else {}
        return excerpts(tensors), norms_of_large(gradients), projections_of(gradients, is_large)


def forget_programs() -> None:
    """Drop the compiled programs and the sides of all cases, because a port's file may have changed since."""
    program_of.cache_clear()
    side_of.cache_clear()


@lru_cache(maxsize=1)
def side_of(case: AnyCase) -> JaxSide:
    """Build the jax side of a case; cached, because a case runs freely and then forced."""
    return case.jax_side()


def replicas_of(case: AnyCase) -> Replicas:
    """Return the case's replicas, divided evenly among the processes.

    Raises:
        InputError: they cannot be divided among the processes.
    """
    each, rest = divmod(case.world_size, jax.process_count())
    if rest:
        raise InputError(f"--num-processes {jax.process_count()}: must divide the world size {case.world_size}")
    of_process = [[d for d in jax.devices() if d.process_index == p] for p in range(jax.process_count())]
    return Replicas([device for devices in of_process for device in devices[:each]])


@lru_cache(maxsize=1)
def program_of(case: AnyCase, replicas: Replicas | None, comm_hook: Hook | None) -> CheckedStep:
    """Build the program of a case; cached, because compiling takes longest."""
    side = side_of(case)
    replicas = replicas or replicas_of(case)
    step = side.replica_step
    if isinstance(step, ReplicaStep) and comm_hook is not None:
        step = dataclasses.replace(step, comm_hook=comm_hook)
        side = dataclasses.replace(side, replica_step=step)

    def without_metrics(state: TrainState, batch: MicroBatches) -> tuple[TrainState, Stages]:
        next_state, _, stages = step(state, batch)
        if clips_not(step):
            del stages["clipped_gradients"]  # the same as "gradients"
        return next_state, stages

    # Stages come back from every replica (axis 0), or one that drifts apart would go unseen.
    return CheckedStep(side, replicas, replicas.map(without_metrics, (step.axes, 0), (step.axes, 0), donate=(0,)))


def updates_between(before: Params, after: Params) -> dict[str, np.ndarray]:
    """Return the differences of the parameters."""
    return {name: np.asarray(x) - np.asarray(before[name]) for name, x in after.items()}


def stages_of_optimizer(
    side: JaxSide, updates: Mapping[str, Any], opt_state: Any, params: Params, library: Any = np
) -> dict[str, dict[str, Any]]:
    """Return excerpts of the updates and of the optimizer's state, and projections, under torch's names."""
    state = optimizer_tensors(opt_state, params, partial(side.to_torch, library=library))
    projected: dict[str, Any] = {}
    whole = {"update": side.to_torch(updates, library), "optimizer_state": state}
    for stage, tensors in whole.items():
        projected |= {f"{stage}:{name}": x for name, x in projections_of(tensors, is_large, library).items()}
    return {stage: excerpts(tensors) for stage, tensors in whole.items()} | {"optimizer_projections": projected}


def _taken_back(state: TrainState) -> TrainState:
    """Copy the state to NumPy and free its arrays on the devices, so that no device holds a large state twice."""
    taken = jax.tree.map(np.array, state)
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()
    return taken


def record_of(stages: Stages, side: JaxSide, batch: MicroBatches, excerpts_of: Excerpts) -> dict[str, Tensors]:
    """Return the stages under torch's names: local stages of all replicas, shared stages of replica 0.

    Large tensors are excerpts; the parts `OF_LARGE` hold norms and projections of gradients, as "stage:tensor".
    If replicas differ in a tensor of a shared stage, "spread" also holds it for all replicas, as "stage:tensor".
    Each stage is dropped from `stages` once it is recorded, to free its memory.

    Args:
        stages: stage -> losses, (world_size,), or arrays, (world_size, ...).
        side: the jax side.
        batch: the step's batch.
        excerpts_of: see `Excerpts`.
    """
    world_size = len(jax.tree.leaves([x for stage, x in stages.items() if stage.endswith("local_loss")])[0])
    record: dict[str, Tensors] = {"samples": _samples(batch, world_size), "spread": {}, **{key: {} for key in OF_LARGE}}
    for stage in list(stages):
        value = stages.pop(stage)
        if stage.endswith("local_loss"):
            losses = value if isinstance(value, Mapping) else {"loss": value}
            record[stage] = {name: np.asarray(x) for name, x in losses.items()}
            continue
        local = stage.endswith(LOCAL_STAGES)
        differing = {name for name, x in value.items() if not local and _differs(x, world_size)}
        ranks = range(world_size if local or differing else 1)
        of_ranks, *of_large = zip(*(excerpts_of(stage, rank, slices_of(value, rank)) for rank in ranks), strict=True)
        of_all = stacked(of_ranks)
        record[stage] = of_all if local else of_ranks[0]
        for key, of_each in zip(OF_LARGE[2:] if local else OF_LARGE[:2], of_large, strict=True):
            of_stage = stacked(of_each) if local else of_each[0]
            record[key] |= {f"{stage}:{name}": x for name, x in of_stage.items()}
        for tensors in (stacked(of_large[1]), of_all) if differing else ():  # what excerpts show goes before
            record["spread"] |= {f"{stage}:{name}": x for name, x in tensors.items() if _differs(x, len(x))}
    if clips_not(side.replica_step) and "gradients" in record:
        record["clipped_gradients"] = record["gradients"]
        for key in OF_LARGE[:2]:
            record[key] |= {x.replace("gradients:", "clipped_gradients:", 1): value for x, value in record[key].items()}
    return record


def clips_not(step: Any) -> bool:
    return isinstance(step, ReplicaStep) and step.clip_grad_norm is None and step.clip_grad_value is None


def _samples(batch: MicroBatches, world_size: int) -> Tensors:
    of_ranks = [list(map(examples_of, micro_batches_of(batch, rank))) for rank in range(world_size)]
    return stacked([fingerprints(micro_batches) for micro_batches in of_ranks])


def slices_of(arrays: Mapping[str, Any], rank: int) -> dict[str, np.ndarray]:
    """Return a replica's slices of arrays (world_size, ...), without a copy where they are on the CPU."""
    return {name: _slice(value, rank) for name, value in arrays.items()}


def _slice(value: Any, rank: int) -> np.ndarray:
    if isinstance(value, jax.Array) and len(value.addressable_shards) == len(value):
        of_replica = next(shard for shard in value.addressable_shards if (shard.index[0].start or 0) == rank)
        return np.asarray(of_replica.data)[0]
    return np.asarray(value)[rank]


def _differs(value: Any, world_size: int) -> bool:
    """Return whether the replicas' slices differ; NaN equals NaN here."""
    first, *others = (_slice(value, rank) for rank in range(world_size))
    return any(not np.array_equal(first, other, equal_nan=first.dtype.kind == "f") for other in others)

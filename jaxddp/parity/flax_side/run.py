"""Runs of a case in jax, recorded stage by stage under torch's names."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from jaxddp.comm_hooks import CommHook
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.parity.excerpts import excerpts, norms_of_large
from jaxddp.parity.fingerprints import fingerprints
from jaxddp.parity.flax_side.own_step import OwnStep
from jaxddp.parity.flax_side.side import FlaxSide, hyperparameters, optimizer_tensors
from jaxddp.parity.flax_side.whole_step import WholeStep
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.port.draws import examples_of
from jaxddp.parity.question import LOCAL_STAGES, Question, Trajectory, micro_batches_of
from jaxddp.parity.records import Record, Tensors, is_large_model, whole
from jaxddp.state import Params, TrainState
from jaxddp.step.replica_step import ReplicaStep

Hook = CommHook | Callable[[Params], Params]


def free_records(
    case: Question,
    weights: Arrays,
    *,
    replicas: Replicas | None = None,
    batches: Iterable[MicroBatches] | None = None,
    comm_hook: Hook | None = None,
) -> Iterator[Record]:
    """Take the case's steps, each from the state that the one before has left, and yield their records.

    Args:
        case: model or port, world size, dtype and batches.
        weights: initial weights under torch's names.
        replicas: replicas to run on; None: the first `world_size` devices.
        batches: batches that replace the case's, one per step.
        comm_hook: communication hook that replaces the case's.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side, replicas, step = _program(case, replicas, comm_hook)
        params, buffers = side.from_torch(weights)
        axes = side.replica_step.axes
        state = side.replica_step.start(params, buffers, replicas)
        del params, buffers
        for number, batch in enumerate(case.batches() if batches is None else batches):
            state = replicas.place(_taken_back(_restored(side, state, number)), axes)
            state, stages = step(state, replicas.shard(batch))
            if isinstance(side.replica_step, WholeStep):
                side.replica_step.shown(state.opt_state)
            yield _record(stages, side, batch)


def forced_records(
    case: Question,
    reference: Trajectory,
    *,
    replicas: Replicas | None = None,
    comm_hook: Hook | None = None,
) -> Iterator[Record]:
    """Take every step from the reference's state before it and yield the records; no step inherits a difference.

    Only the optimizer state carries over from step to step: the optimizer is given the reference's gradients in every
    step, and "update" is its output. A port's own step contains its optimizer, and gives it the step's own gradients.

    Args:
        case: model or port, world size, dtype and batches.
        reference: torch's run of the case.
        replicas, comm_hook: see `free_records`.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        alone = is_large_model(reference.start)  # then the step has no optimizer, whose state fills each device
        side, replicas, step = _program(case, replicas, comm_hook, alone)
        if isinstance(side.replica_step, WholeStep):
            yield from _forced_whole(case, reference, side, replicas, step)
            return
        own = isinstance(side.replica_step, OwnStep)
        optimizer = side.replica_step.optimizer
        update = jax.jit(optimizer.update)
        params, buffers = side.from_torch(reference.start)
        axes, start = side.replica_step.axes, side.replica_step.init(params, buffers)
        opt_state, scaler = start.opt_state, start.scaler
        without = dataclasses.replace(start, params={}, buffers={}, opt_state=())
        comm_state = replicas.start(without, axes).comm_state
        del start, without
        for number, (batch, theirs) in enumerate(zip(case.batches(), reference.records, strict=False)):
            state = TrainState(jnp.int32(number), params, buffers, opt_state, comm_state, scaler=scaler)
            state = _restored(side, state, number)
            given_state = state if own or not alone else dataclasses.replace(state, opt_state=optax.EmptyState())
            after, stages = step(replicas.place(given_state, axes), replicas.shard(batch))
            comm_state, scaler = after.comm_state, after.scaler
            if own:
                opt_state = after.opt_state
                updates = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after.params, params)
            given = {} if own else _given(side, stages, whole(theirs, side.given), reference.start)
            carried = {name: after.buffers[name] for name in side.alone}
            del after
            record = dict(_record(stages, side, batch))
            if not own:
                updates, opt_state = update(side.from_torch(given)[0], state.opt_state, params)
            record["update"] = excerpts(side.to_torch(updates))
            record["optimizer_state"] = excerpts(optimizer_tensors(opt_state, params, side.to_torch))
            shown = hyperparameters(opt_state)
            record["hyperparameters"] = {name: np.asarray(value) for name, value in shown.items()}
            yield record
            params, buffers = side.from_torch(reference.before(number + 1))
            buffers |= jax.device_get(carried)


def _forced_whole(
    case: Question, reference: Trajectory, side: FlaxSide, replicas: Replicas, step: Any
) -> Iterator[Record]:
    """Take every step of a `WholeStep` from the reference's state, with the reference's gradients."""
    whole_step = side.replica_step
    assert isinstance(whole_step, WholeStep), "checked by forced_records"
    params, buffers = side.from_torch(reference.start)
    opt_state = whole_step.init(params, buffers).opt_state
    for number, (batch, theirs) in enumerate(zip(case.batches(), reference.records, strict=False)):
        given = whole(theirs, side.given)
        zeros = {name: np.zeros_like(x) for name, x in reference.start.items() if name not in given}
        forced = whole_step.forced(opt_state, side.from_torch(Joined(given, zeros))[0])
        state = TrainState(jnp.int32(number), params, buffers, forced)
        after, stages = step(replicas.place(state, whole_step.axes), replicas.shard(batch))
        opt_state = jax.device_get(after.opt_state)
        updates = {name: np.asarray(x) - np.asarray(params[name]) for name, x in after.params.items()}
        shown, carried = whole_step.shown(opt_state), {name: after.buffers[name] for name in side.alone}
        record = dict(_record(stages, side, batch))
        if record["local_loss"].keys() != theirs["local_loss"].keys():
            ours, of_torch = (", ".join(sorted(x["local_loss"])) for x in (record, theirs))
            raise InputError(f"flax_step: returns the losses {ours}; must be torch_step's, {of_torch}")
        record["update"] = excerpts(side.to_torch(updates))
        record["optimizer_state"] = excerpts(optimizer_tensors(shown, params, side.to_torch))
        record["hyperparameters"] = {name: np.asarray(x) for name, x in hyperparameters(shown).items()}
        yield record
        params, buffers = side.from_torch(reference.before(number + 1))
        buffers |= jax.device_get(carried)


def _given(side: FlaxSide, stages: Mapping[str, Any], theirs: Arrays, start: Arrays) -> Arrays:
    """Return the reference's gradients.

    Where torch has none, as for frozen parameters, they are jax's: its optimizer has to mask them.
    """
    stage = stages.get(side.given, stages["gradients"])
    ours = side.to_torch(_of_replica(stage, 0)) if len(theirs) < len(stage) else {}
    return Joined(theirs, ours, start)


def starting_weights(case: Question, weights: Arrays) -> list[Arrays]:
    """Return the parameters that each replica starts from, made by the port's `flax_start` if it has one.

    Args:
        case: model or port.
        weights: initial weights under torch's names.

    Raises:
        InputError: `flax_start` returns anything but the model's parameters.
    """
    with jax.enable_x64(case.dtype == "float64"):
        side = case.flax_side()
        if side.start is None:
            return [weights] * case.world_size
        params, _ = side.from_torch(weights)
        of_ranks = [side.start(params, rank) for rank in range(case.world_size)]
        for rank, started in enumerate(of_ranks):
            if problems := differences(started, params):
                raise InputError(f"flax_start(params, {rank}): must return the parameters: {listed(problems)}")
        return [side.to_torch(jax.device_get(started)) for started in of_ranks]


def forget_programs() -> None:
    """Drop the compiled programs of all cases, because a port's file may have changed since."""
    _program.cache_clear()


def _taken_back(state: TrainState) -> TrainState:
    """Return the state in NumPy; its copies on the devices are freed, so that a large one is placed again."""
    taken = jax.tree.map(np.array, state)
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()
    return taken


def _restored(side: FlaxSide, state: TrainState, steps: int) -> TrainState:
    """Save and load the state by the port's `flax_restore` after `restore_at` steps; else return it unchanged."""
    return side.restore(state) if side.restore is not None and steps == side.restore_at else state


@lru_cache(maxsize=2)
def _program(
    case: Question, replicas: Replicas | None, comm_hook: Hook | None, without_optimizer: bool = False
) -> tuple[FlaxSide, Replicas, Any]:
    """Build the flax side, its replicas, and (state, batch) -> (replica 0's next state, stages of all replicas).

    The result is cached because a case is run freely and then forced, and compiling takes most of the time.
    """
    side = case.flax_side()
    replicas = replicas or Replicas(jax.devices()[: case.world_size])
    step = side.replica_step
    if isinstance(step, ReplicaStep) and comm_hook is not None:
        step = dataclasses.replace(step, comm_hook=comm_hook)
        side = dataclasses.replace(side, replica_step=step)
    if isinstance(step, ReplicaStep) and without_optimizer:
        step = dataclasses.replace(step, optimizer=optax.set_to_zero())

    def without_metrics(state: TrainState, batch: MicroBatches) -> tuple[TrainState, dict[str, Any]]:
        next_state, _, stages = step(state, batch)
        if _clips_not(step):
            del stages["clipped_gradients"]  # the same as "gradients"
        return next_state, stages

    return side, replicas, replicas.map(without_metrics, (step.axes, 0), (step.axes, 0), donate=(0,))


def _record(stages: dict[str, Any], side: FlaxSide, batch: MicroBatches) -> Record:
    """Return the stages under torch's names: local stages of all replicas, shared stages of replica 0.

    Large tensors are excerpts; "norms" and "local_norms" hold the norms of gradients, as "stage:tensor".
    A tensor of a shared stage that differs between replicas is also in "spread", as "stage:tensor", of all replicas.
    The stages are emptied on the way.
    """
    world_size = len(jax.tree.leaves([x for stage, x in stages.items() if stage.endswith("local_loss")])[0])
    record: dict[str, Tensors] = {"samples": _samples(batch, world_size), "spread": {}, "norms": {}, "local_norms": {}}
    for stage in list(stages):
        value = stages.pop(stage)
        if stage.endswith("local_loss"):
            losses = value if isinstance(value, Mapping) else {"loss": value}
            record[stage] = {name: np.asarray(x) for name, x in losses.items()}
            continue
        local = stage.endswith(LOCAL_STAGES)
        differing = {name for name, x in value.items() if not local and _differs(x, world_size)}
        ranks = range(world_size if local or differing else 1)
        of_ranks, norms = zip(
            *(_excerpts(side.to_torch(_of_replica(value, rank)), stage) for rank in ranks), strict=True
        )
        of_all = _stacked(of_ranks)
        record[stage] = of_all if local else of_ranks[0]
        record["local_norms" if local else "norms"] |= _stacked(norms) if local else norms[0]
        record["spread"] |= {f"{stage}:{name}": x for name, x in of_all.items() if differing and _differs(x, len(x))}
    if _clips_not(side.replica_step):
        record["clipped_gradients"] = record["gradients"]
        of_all = {name.replace("gradients:", "clipped_gradients:", 1): norm for name, norm in record["norms"].items()}
        record["norms"] |= of_all
    return record


def _clips_not(step: ReplicaStep | OwnStep | WholeStep) -> bool:
    return isinstance(step, ReplicaStep) and step.clip_grad_norm is None


def _excerpts(tensors: Tensors, stage: str) -> tuple[Tensors, Tensors]:
    """Return the excerpts of a stage's tensors, but buffers whole, and the norms of large gradients."""
    if stage == "buffers":
        return tensors, {}
    norms = norms_of_large(tensors) if stage.endswith("gradients") else {}
    return excerpts(tensors), {f"{stage}:{name}": norm for name, norm in norms.items()}


def _samples(batch: MicroBatches, world_size: int) -> Tensors:
    of_ranks = [list(map(examples_of, micro_batches_of(batch, rank))) for rank in range(world_size)]
    return _stacked([fingerprints(micro_batches) for micro_batches in of_ranks])


def _of_replica(arrays: Mapping[str, Any], rank: int) -> dict[str, np.ndarray]:
    """Return a replica's slices of arrays (world_size, ...), without a copy where they are on the CPU."""
    return {name: _slice(value, rank) for name, value in arrays.items()}


def _slice(value: Any, rank: int) -> np.ndarray:
    if isinstance(value, jax.Array) and len(value.addressable_shards) == len(value):
        of_replica = next(shard for shard in value.addressable_shards if (shard.index[0].start or 0) == rank)
        return np.asarray(of_replica.data)[0]
    return np.asarray(value)[rank]


def _stacked(of_each: Sequence[Tensors]) -> Tensors:
    return {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}


def _differs(value: Any, world_size: int) -> bool:
    """Return whether the replicas' slices differ; NaN equals NaN here."""
    first, *others = (_slice(value, rank) for rank in range(world_size))
    return any(not np.array_equal(first, other, equal_nan=first.dtype.kind == "f") for other in others)

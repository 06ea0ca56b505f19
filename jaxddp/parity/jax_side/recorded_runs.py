"""Runs of a case in jax, recorded stage by stage under torch's names."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.parity.case_interface import AnyCase, Trajectory
from jaxddp.parity.jax_side.checked_step import (
    CheckedStep,
    Hook,
    Update,
    program_of,
    stages_of_optimizer,
    updates_between,
)
from jaxddp.parity.jax_side.custom_step import CustomStep
from jaxddp.parity.jax_side.excerpt_program import MANY, excerpt_program
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.side import JaxSide, hyperparameters
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.records import Record, Tensors, full, is_large_model
from jaxddp.state import Params, TrainState

FIRST_MOMENTS = ("mu", "trace", "buffer")  # fields of the states of Optax's optimizers and of jaxddp's


def free_records(
    case: AnyCase,
    weights: Arrays,
    *,
    replicas: Replicas | None = None,
    batches: Iterable[MicroBatches] | None = None,
    comm_hook: Hook | None = None,
) -> Iterator[Record]:
    """Take the case's steps freely, each from the state after the one before, and yield their records.

    Args:
        case: model or port, world size, dtype and batches.
        weights: initial weights under torch's names.
        replicas: replicas to run on; None: the first `world_size` devices.
        batches: batches that replace the case's, one per step.
        comm_hook: communication hook that replaces the case's.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        program = _program(case, weights, replicas, comm_hook)
        state = program.start(*program.side.from_torch(weights))
        for number, batch in enumerate(case.batches() if batches is None else batches):
            state = program.placed_again(_restored(program.side, state, number))
            state, stages = program.step(state, batch)
            if isinstance(program.side.replica_step, MultiLossStep):
                program.side.replica_step.shown(state.opt_state)
            yield program.record(stages, batch)


def forced_records(
    case: AnyCase,
    reference: Trajectory,
    *,
    replicas: Replicas | None = None,
    comm_hook: Hook | None = None,
    moments: Sequence[float] | None = None,
) -> Iterator[Record]:
    """Take every step from the reference's state before it, so that no step inherits a difference; yield the records.

    Only the optimizer state carries over from step to step: the optimizer is given the reference's gradients in every
    step, and "update" is its output. A port's `jax_step` contains its optimizer, which gets the step's gradients.

    Args:
        case: model or port, world size, dtype and batches.
        reference: torch's run of the case.
        replicas, comm_hook: see `free_records`.
        moments: factors of the optimizer's first moments, one per step of a run that restores nothing; None: all are 1.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        program = _program(case, reference.start, replicas, comm_hook, reference)
        side = program.side
        take = _steps_of(program)
        params, buffers = side.from_torch(reference.start)
        start = side.replica_step.init(params, buffers)
        without = dataclasses.replace(start, params={}, buffers={}, opt_state=())
        comm_state = program.replicas.start(without, side.replica_step.axes).comm_state
        after, carried = dataclasses.replace(start, comm_state=comm_state, averaged=()), dict[str, Any]()
        del start
        # `zip` reads the records first: after the last one it makes no further batch, which may be the one that hangs.
        for number, (_, batch) in enumerate(zip(reference.records, case.batches(), strict=False)):
            if number:
                params, buffers = side.from_torch(reference.before(number))
            state = dataclasses.replace(after, step=jnp.int32(number), params=params, buffers=buffers | carried)
            del after, params  # so that a large model's state is held once
            if moments is None:
                restored = _restored(side, state, number)
            else:
                restored = state = dataclasses.replace(state, opt_state=_scaled(state.opt_state, moments[number]))
            changed = {} if restored is state else {"restored": changes(state, restored)}
            record, after = take(restored, batch, reference, number)
            record = {**record, **changed}
            del state, restored
            carried = jax.device_get({name: after.buffers[name] for name in side.alone})
            yield record
            del record


def _steps_of(program: CheckedStep) -> Callable[..., tuple[Record, TrainState]]:
    """Return the function that takes a forced step of the program's kind.

    Its arguments are the state, the batch, the reference and the step's number, from 0; it returns the record, and the
    next state without parameters.
    """
    step = program.side.replica_step
    if isinstance(step, MultiLossStep):
        return partial(_multi_loss_step, program, step)
    if isinstance(step, CustomStep):
        return partial(_custom_step, program)
    return partial(_replica_step, program, program.updating())


def _replica_step(
    program: CheckedStep, update: Update, state: TrainState, batch: MicroBatches, reference: Trajectory, number: int
) -> tuple[Record, TrainState]:
    after, stages = program.step(program.placed(state), batch)
    after = dataclasses.replace(after, params={}, opt_state=())
    gradients = program.given(stages, full(reference.records[number], program.side.given), reference.start)
    of_optimizer, opt_state = update(gradients, state.opt_state, state.params)
    record = program.record(stages, batch) | of_optimizer | _shown(opt_state)
    return record, dataclasses.replace(after, opt_state=opt_state)


def _custom_step(program: CheckedStep, state: TrainState, batch: MicroBatches, *_: Any) -> tuple[Record, TrainState]:
    after, stages = program.step(program.placed(state), batch)
    of_optimizer = program.of_custom_step(after, state.params)
    counted = {"counted": {"step": np.asarray(after.step)}}
    record = program.record(stages, batch) | of_optimizer | _shown(after.opt_state) | counted
    return record, dataclasses.replace(after, params={})


def _multi_loss_step(
    program: CheckedStep,
    step: MultiLossStep,
    state: TrainState,
    batch: MicroBatches,
    reference: Trajectory,
    number: int,
) -> tuple[Record, TrainState]:
    forced = forced_state(step, state, reference, number, program.side)
    after, stages = program.step(program.placed(forced), batch)
    opt_state = jax.device_get(after.opt_state)
    shown, updates = step.shown(opt_state), updates_between(state.params, after.params)
    record = program.record(stages, batch)
    of_jax, of_torch = (sorted(x["local_loss"]) for x in (record, reference.records[number]))
    if of_jax != of_torch:
        raise InputError(
            f"jax_step: returns the losses {', '.join(of_jax)}; must be torch_step's, {', '.join(of_torch)}"
        )
    record |= stages_of_optimizer(program.side, updates, shown, state.params) | _shown(shown)
    return record, dataclasses.replace(after, params={}, opt_state=opt_state)


def _shown(opt_state: Any) -> dict[str, Tensors]:
    """Return the hyperparameters that the optimizer's state shows, as a part of a record."""
    return {"hyperparameters": {name: np.asarray(value) for name, value in hyperparameters(opt_state).items()}}


def given_gradients(reference: Trajectory, step: int, side: JaxSide) -> Params:
    """Return the gradients that the reference gives its optimizers in a step, from 0; zeros where it gives none."""
    given = full(reference.records[step], side.given)
    zeros = {name: np.zeros_like(x) for name, x in reference.start.items() if name not in given}
    return side.from_torch(Joined(given, zeros), adds=False)[0]


def forced_state(
    step: MultiLossStep, state: TrainState, reference: Trajectory, number: int, side: JaxSide
) -> TrainState:
    """Return a state whose optimizers use the reference's gradients, and their own where it has none."""
    names = full(reference.records[number], side.given).keys()
    flags = {name: np.full_like(x, name in names) for name, x in reference.start.items()}
    given = given_gradients(reference, number, side), side.from_torch(flags, adds=False)[0]
    return dataclasses.replace(state, opt_state=step.forced(state.opt_state, *given))


def _program(
    case: AnyCase,
    start: Arrays,
    replicas: Replicas | None,
    comm_hook: Hook | None,
    reference: Trajectory | None = None,
) -> CheckedStep:
    """Return the case's program; for a large port, or one with many parameters, one that returns excerpts."""
    is_port = hasattr(case, "port") and case.port.torch_step is None
    asks_much = len(start) > MANY or is_large_model(start)
    if not (is_port and replicas is None and comm_hook is None and asks_much):
        return program_of(case, replicas, comm_hook)
    records = [] if reference is None else reference.records
    lacking = {name for record in records for name in record["params"].keys() - record["clipped_gradients"].keys()}
    return excerpt_program(case, start, reference is not None, lacking)


def starting_weights(case: AnyCase, weights: Arrays) -> list[Arrays]:
    """Return the parameters that each replica starts from, made by the port's `jax_start` if it has one.

    Args:
        case: model or port.
        weights: initial weights under torch's names.

    Raises:
        InputError: `jax_start` returns anything but the model's parameters.
    """
    with jax.enable_x64(case.dtype == "float64"):
        side = case.jax_side()
        if side.start is None:
            return [weights] * case.world_size
        params, _ = side.from_torch(weights)
        of_ranks = [side.start(params, rank) for rank in range(case.world_size)]
        for rank, started in enumerate(of_ranks):
            if problems := differences(started, params):
                raise InputError(f"jax_start(params, {rank}): must return the parameters: {listed(problems)}")
        return [side.to_torch(jax.device_get(started)) for started in of_ranks]


def _restored(side: JaxSide, state: TrainState, steps: int) -> TrainState:
    """Save and load the state by the port's `jax_restore` after `restore_at` steps; otherwise return it unchanged."""
    return side.restore(state) if side.restore is not None and steps == side.restore_at else state


def _scaled(opt_state: Any, factor: float) -> Any:
    """Multiply the first moments in an optimizer's state by a factor.

    >>> import optax
    >>> _scaled((optax.TraceState({"w": jnp.ones(1)}), optax.EmptyState()), 3.0)
    (TraceState(trace={'w': Array([3.], dtype=float32)}), EmptyState())
    """
    if factor == 1:
        return opt_state

    def scale(path: Any, x: Any) -> Any:
        return x * factor if any(getattr(key, "name", None) in FIRST_MOMENTS for key in path) else x

    return jax.tree_util.tree_map_with_path(scale, opt_state)


def changes(before: TrainState, after: TrainState) -> Tensors:
    """Return what a restore changes: field of the state -> values before and after, norms of arrays.

    >>> state = TrainState(jnp.int32(4), {"w": jnp.ones(4)}, {}, ({"w": jnp.zeros(4)},))
    >>> changes(state, dataclasses.replace(state, step=jnp.int32(3), params={"w": jnp.zeros(4)}))
    {'step': array([4., 3.]), 'params': array([2., 0.])}
    """
    differing: dict[str, list[tuple[Any, Any]]] = {}
    leaves = (jax.tree_util.tree_flatten_with_path(state)[0] for state in (before, after))
    for (path, x), (_, y) in zip(*leaves, strict=False):
        if not np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f"):
            named = max((k for k, key in enumerate(path) if hasattr(key, "name")), default=0)
            differing.setdefault(jax.tree_util.keystr(path[: named + 1]).lstrip("."), []).append((x, y))
    return {name: np.asarray([_size(of) for of in zip(*pairs, strict=True)]) for name, pairs in differing.items()}


def _size(arrays: Sequence[Any]) -> float:
    """Return the number if there is only one, else the norm of all arrays."""
    only = arrays[0] if len(arrays) == 1 and not np.ndim(arrays[0]) else None
    return float(np.linalg.norm([np.linalg.norm(x) for x in arrays]) if only is None else only)

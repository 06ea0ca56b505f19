"""Everything that decides a run's next step, in one tree that can be saved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax

Params = dict[str, jax.Array]
Buffers = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state between two optimizer steps; the same on every replica, but for what is a replica's own.

    The sampler's position and the schedule follow from `step`, so they need no place here.

    Attributes:
        step: int32 scalar, optimizer steps so far, skipped ones among them.
        params: what the optimizer trains, by name ("layers.0.kernel").
        buffers: what a forward pass leaves behind (BatchNorm's running statistics), by name.
        opt_state: the optimizer's own state, as optax keeps it.
        comm_state: what the communication hook remembers, of each replica.
        averaged: the moving average of the parameters, by name; () where none is kept.
        scaler: the loss scaler's state; () where there is none.
    """

    step: jax.Array
    params: Params
    buffers: Buffers
    opt_state: Any
    comm_state: Any = ()
    averaged: Any = ()
    scaler: Any = ()


def state_axes(own: Iterable[str]) -> Any:
    """Per field, what `Replicas.map` and `Replicas.place` ask: 0 for what each replica has its own of, else None."""
    make: Any = TrainState  # of axes in place of arrays
    return make(**{field.name: 0 if field.name in own else None for field in fields(TrainState)})


def shared(state: TrainState, axes: TrainState) -> Mapping[str, Any]:
    """The fields of a state that are the same on every replica, by name."""
    names = (field.name for field in fields(TrainState))
    return {name: getattr(state, name) for name in names if getattr(axes, name) is None}


def shortest(axes: TrainState, state: TrainState) -> TrainState | None:
    """The axes of a state, or None if no replica has anything of its own: then jax dispatches faster."""
    own = [getattr(state, field.name) for field in fields(TrainState) if getattr(axes, field.name) is not None]
    return axes if jax.tree.leaves(own) else None

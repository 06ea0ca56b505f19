"""Training state: one tree of arrays that determines the next step and can be saved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax

Params = dict[str, jax.Array]
Buffers = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Training state between two optimizer steps; equal on all replicas, apart from fields that differ by design.

    The position in the data and the learning rate follow from `step` and are not stored.

    Attributes:
        step: int32 scalar, number of optimizer steps so far, including skipped ones.
        params: name ("layers.0.kernel") -> trained parameter.
        buffers: name -> array that forward passes update (BatchNorm's running statistics).
        opt_state: optax state of the optimizer.
        comm_state: state of the communication hook, separate for each replica.
        averaged: name -> moving average of a parameter, or an `EqualAverage`; () without an average.
        scaler: state of the loss scaler; () without a scaler.
    """

    step: jax.Array
    params: Params
    buffers: Buffers
    opt_state: Any
    comm_state: Any = ()
    averaged: Any = ()
    scaler: Any = ()


def state_axes(per_replica: Iterable[str]) -> Any:
    """Return axes of a state for `Replicas.map` and `Replicas.place`: 0 for the fields `per_replica`, None for others.

    Args:
        per_replica: names of the fields that differ between replicas.
    """
    make: Any = TrainState  # fields hold axes instead of arrays
    return make(**{field.name: 0 if field.name in per_replica else None for field in fields(TrainState)})


def shared(state: TrainState, axes: TrainState) -> Mapping[str, Any]:
    """Return the fields of a state that are equal on all replicas, by name."""
    names = (field.name for field in fields(TrainState))
    return {name: getattr(state, name) for name in names if getattr(axes, name) is None}


def shortest(axes: TrainState, state: TrainState) -> TrainState | None:
    """Return `axes`, or None if no array differs between replicas, which makes jax's dispatch faster."""
    differing = [getattr(state, field.name) for field in fields(TrainState) if getattr(axes, field.name) is not None]
    return axes if jax.tree.leaves(differing) else None

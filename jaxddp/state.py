"""Everything that decides a run's next step, in one tree that can be saved."""

from dataclasses import dataclass
from typing import Any

import jax

Params = dict[str, jax.Array]
Buffers = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state between two optimizer steps; the same on every replica.

    The sampler's position and the schedule follow from `step`, so they need no place here.

    Attributes:
        step: int32 scalar, optimizer steps made so far.
        params: what the optimizer trains, by name ("layers.0.kernel").
        buffers: what a forward pass leaves behind (BatchNorm's running statistics), by name.
        opt_state: the optimizer's own state, as optax keeps it.
    """

    step: jax.Array
    params: Params
    buffers: Buffers
    opt_state: Any

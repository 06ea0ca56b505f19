"""The random numbers of a forward pass: a pure function of the seed and of where in the run it is. Nothing is kept.

With k a stream's key as the module was built, N replicas, and fold = `jax.random.fold_in`:

    replica:  key   = fold(fold(fold(k, step), first), rank)     each replica draws its own
    shared:   key   = fold(fold(k, step), first)                 all replicas draw the same
    example:  key_i = fold(fold(k, step), (first + i) N + rank)  whatever N is, an example draws the same

first counts the replica's examples before these in the step, so that each micro-batch draws anew. The sampler deals
place p of a global batch to replica p mod N, so (first + i) N + rank is the place of example i in it.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.config.choices import DROPOUT_MASKS
from jaxddp.distributed.collectives import rank, world_size
from jaxddp.errors import InputError, check_name

_fold_in = jnp.vectorize(jax.random.fold_in)  # keys and numbers of shapes that broadcast


class Place(NamedTuple):
    """Where in a run a forward pass is, as far as its replica knows.

    Attributes:
        step: int32 scalar, optimizer steps made before.
        first: int32 scalar, examples that this replica has had before in this step.
    """

    step: jax.Array
    first: jax.Array


class ExampleKey(nnx.RngKey):
    """The key of a layer that can draw for each example: scalar, or (B,) with "example" masks."""


def random_state_at(state: nnx.State, place: Place, masks: str, examples: int) -> nnx.State:
    """A module's random state for a forward pass: keys for this place, counts from 0.

    Args:
        state: as the module was built.
        masks: "replica", "shared" or "example".
        examples: how many the batch has, B.
    """

    def at(variable: Any) -> Any:
        value = variable[...]
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros_like(value))
        keys = _fold_in(value, place.step)
        if masks == "example":
            places = (place.first + jnp.arange(examples)) * world_size() + rank()
            return variable.replace(_fold_in(keys[..., None], places))
        keys = _fold_in(keys, place.first)
        return variable.replace(_fold_in(keys, rank()) if masks == "replica" else keys)

    return nnx.from_flat_state([(path, at(variable)) for path, variable in nnx.to_flat_state(state)])


def check_masks(masks: str, state: nnx.State) -> None:
    """Raise `InputError` unless a module with this random state can draw such masks."""
    check_name("dropout_masks", masks, DROPOUT_MASKS)
    keys = [(path, variable) for path, variable in nnx.to_flat_state(state) if isinstance(variable, nnx.RngKey)]
    if not keys and masks != "replica":
        raise InputError(f"dropout_masks {masks}: this model draws no random numbers")
    if masks == "example":
        coarse = [".".join(map(str, path[:-1])) for path, variable in keys if not isinstance(variable, ExampleKey)]
        if coarse:
            raise InputError(
                f"dropout_masks example: {', '.join(coarse)} would draw one mask for the whole batch; "
                "jaxddp.nn.layers.Dropout draws one for each example"
            )

"""Random numbers of a forward pass, a pure function of the seed and of the place in the run; no state is kept.

With k the key of a stream in the module as built, N replicas, and fold = `jax.random.fold_in`:

    replica:  key   = fold(fold(fold(k, step), first), rank)     different masks on each replica
    shared:   key   = fold(fold(k, step), first)                 the same masks on all replicas
    example:  key_i = fold(fold(k, step), (first + i) N + rank)  the same mask for an example, for any N

first is the number of the replica's examples in earlier micro-batches of the step, so that each micro-batch draws new
masks. The sampler assigns position p of a global batch to replica p mod N, so (first + i) N + rank is the position of
example i in the global batch.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.config.choices import DROPOUT_MASKS
from jaxddp.distributed.collectives import rank, world_size
from jaxddp.errors import InputError, check_name

_fold_in = jnp.vectorize(jax.random.fold_in)  # broadcasts keys against numbers


class Place(NamedTuple):
    """Place of a forward pass in a run.

    Attributes:
        step: int32 scalar, number of optimizer steps before.
        first: int32 scalar, number of this replica's examples in earlier micro-batches of the step.
    """

    step: jax.Array
    first: jax.Array


class ExampleKey(nnx.RngKey):
    """Key of a layer that can draw a mask per example: scalar, or (B,) with "example" masks."""


def random_state_at(state: nnx.State, place: Place, masks: str, examples: int) -> nnx.State:
    """Return a module's random state for a forward pass: keys for this place, counts from 0.

    Args:
        state: random state of the module as built.
        place: place of the forward pass.
        masks: "replica", "shared" or "example".
        examples: number of examples in the batch, B.
    """

    def at(variable: Any) -> Any:
        value = variable[...]
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros_like(value))
        keys = _fold_in(value, place.step)
        if masks == "example":
            positions = (place.first + jnp.arange(examples)) * world_size() + rank()
            return variable.replace(_fold_in(keys[..., None], positions))
        keys = _fold_in(keys, place.first)
        return variable.replace(_fold_in(keys, rank()) if masks == "replica" else keys)

    return nnx.from_flat_state([(path, at(variable)) for path, variable in nnx.to_flat_state(state)])


def check_masks(masks: str, state: nnx.State) -> None:
    """Raise `InputError` unless a module with this random state can draw masks of this kind."""
    check_name("dropout_masks", masks, DROPOUT_MASKS)
    keys = [(path, variable) for path, variable in nnx.to_flat_state(state) if isinstance(variable, nnx.RngKey)]
    if not keys and masks != "replica":
        raise InputError(f"dropout_masks {masks}: this model draws no random numbers")
    if masks == "example":
        per_batch = [".".join(map(str, path[:-1])) for path, variable in keys if not isinstance(variable, ExampleKey)]
        if per_batch:
            raise InputError(
                f"dropout_masks example: {', '.join(per_batch)} would draw one mask for all examples of a batch; "
                "use jaxddp.nn.layers.Dropout, which draws one per example"
            )

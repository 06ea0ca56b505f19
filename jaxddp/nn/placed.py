"""Losses of linen modules and of trees of arrays in the trainer: their mode, and the random keys of their place.

A loss function that has a parameter `train` gets whether it computes a batch of training; one that has a parameter
`key` gets a key, which depends only on the seed and on the place in the run, as in `jaxddp.nn.dropout_rng`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxddp.distributed.collectives import rank
from jaxddp.errors import InputError
from jaxddp.nn.dropout_rng import Place
from jaxddp.nn.functional import LocalLoss, RandomLoss
from jaxddp.nn.losses import Batch, Sums
from jaxddp.program import asks_for, bound
from jaxddp.state import Buffers, Params


def placed(
    function: Callable[..., tuple[Sums, Buffers]],
    loss_fn: Callable[..., Any],
    train: bool | None,
    masks: str,
    amp: str,
    seed: int,
) -> LocalLoss:
    """Return the pure loss (params, buffers, batch) -> (sums, new buffers) of a loss function.

    Args:
        function: (loss function, params, buffers, batch) -> (sums, new buffers).
        loss_fn: the loss function; in evaluation its key is always the same.
        train: value of its parameter `train`; None: it gets none.
        masks: "replica": each replica has its own key; "shared": all have the same.
        amp: must be "none": a loss function casts what it computes itself.
        seed: seed of the keys.

    Raises:
        InputError: `masks` or `amp` is another.
    """
    if amp != "none":
        raise InputError(f"amp {amp}: casts the layers of a flax.nnx module; cast in jax_loss instead")
    if masks not in ("replica", "shared"):
        raise InputError(f"dropout_masks {masks}: only for a flax.nnx module; draw from `key` by example in jax_loss")
    if train is not None:
        loss_fn = bound(loss_fn, train=train)

    def at(place: Place | None, params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
        key = jax.random.key(seed)
        if place is not None:
            key = jax.random.fold_in(jax.random.fold_in(key, place.step), place.first)
            key = jax.random.fold_in(key, rank()) if masks == "replica" else key
        return function(bound(loss_fn, key=key), params, buffers, batch)

    if not train or not asks_for(loss_fn, "key"):
        return partial(at, None)
    return RandomLoss(lambda params, buffers, batch, place: at(place, params, buffers, batch))

"""Are the replicas identical? A fingerprint per array and replica, compared bit for bit."""

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxddp.errors import TrainingError
from jaxddp.replicas import Replicas


class Verifier:
    """Checks that a replicated tree holds the same bits on every device.

    Nothing else would tell: jax takes a replicated array's word for it and reads device 0.

    >>> from jaxddp.devices import prepare
    >>> replicas = Replicas(prepare(2, "cpu"))
    >>> Verifier(replicas).check(replicas.replicate({"w": np.ones(3)}), step=0)
    """

    def __init__(self, replicas: Replicas):
        self._ranks = replicas.shard(np.arange(replicas.world_size))
        # The ranks are there because a mapped function needs an argument that differs.
        self._fingerprints = replicas.map(
            lambda tree, _: jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)]),
            in_axes=(None, 0),
            out_axes=0,
        )

    def check(self, tree: Any, step: int) -> None:
        """Compare all replicas with replica 0.

        Args:
            tree: replicated arrays.
            step: optimizer step, for the message.

        Raises:
            TrainingError: names the array that differs most, the replica, the step and the
                largest difference.
        """
        prints = np.asarray(self._fingerprints(tree, self._ranks))  # (world_size, leaves)
        differing = (prints != prints[0]).any(axis=0)
        if not differing.any():
            return
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        found = [_largest_difference(path, leaf) for (path, leaf), bad in zip(leaves, differing, strict=True) if bad]
        difference, rank, name = max(found)
        raise TrainingError(
            f"replicas differ at step {step}: {name} on replica {rank} is up to {difference:.3g} away from "
            f"replica 0 ({differing.sum()} of {len(leaves)} arrays differ)"
        )


def fingerprint(x: jax.Array) -> jax.Array:
    """sum_i bits_i * odd_i mod 2**32 over the 32-bit words of `x`, a uint32 scalar.

    odd_i is a different odd number for each i, so no change of a single word is missed
    (odd numbers can be inverted mod 2**32) and exchanged elements show.

    >>> print(fingerprint(jnp.array([1.0, 2.0])) == fingerprint(jnp.array([2.0, 1.0])))
    False
    """
    words = _words(x)
    odd = jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(2654435762) + jnp.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_ or x.dtype.itemsize < 4:
        narrow = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        unsigned = jnp.uint8 if narrow.dtype.itemsize == 1 else jnp.uint16
        return lax.bitcast_convert_type(narrow, unsigned).astype(jnp.uint32).ravel()
    return lax.bitcast_convert_type(x, jnp.uint32).ravel()


def _largest_difference(path: Any, leaf: jax.Array) -> tuple[float, int, str]:
    copies = [np.asarray(shard.data, dtype=np.float64) for shard in leaf.addressable_shards]
    with np.errstate(invalid="ignore"):
        differences = [float(np.max(np.abs(copy - copies[0]))) for copy in copies]
    # NaN on one replica only is the largest difference of all.
    differences = [math.inf if math.isnan(difference) else difference for difference in differences]
    rank = int(np.argmax(differences))
    return differences[rank], rank, jax.tree_util.keystr(path, simple=True, separator=".")

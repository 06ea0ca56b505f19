"""Verification that replicas are identical, by a fingerprint of the bits of each array on each replica."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from numpy.typing import NDArray

from jaxddp.distributed.collectives import all_gather
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import DriftError


class Verifier:
    """Check that a replicated tree holds the same bits on every device.

    jax does not notice a difference: it reads a replicated array from device 0.

    Args:
        replicas: replicas to compare.

    >>> from jaxddp.distributed.devices import prepare
    >>> replicas = Replicas(prepare(2, "cpu"))
    >>> Verifier(replicas).check(replicas.replicate({"w": np.ones(3)}), step=0)
    """

    def __init__(self, replicas: Replicas):
        self._devices = replicas.devices
        self._ranks = replicas.shard(np.array(replicas.local_ranks))
        # The ranks are passed because a mapped function needs an argument with an axis.
        self._fingerprints = replicas.map(
            lambda tree, _: all_gather(jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)])),
            in_axes=(None, 0),
            out_axes=None,
        )

    def check(self, tree: Any, step: int) -> None:
        """Compare all replicas, array by array, with what the majority of them holds.

        Args:
            tree: replicated arrays.
            step: optimizer step, for the message.

        Raises:
            DriftError: replicas differ; the message names the array that differs most, the replica, the
                step and the largest difference, and all replicas that differ from a majority.
        """
        if len(self._devices) == 1:
            return
        prints = np.asarray(self._fingerprints(tree, self._ranks))  # (world_size, leaves)
        references, decided = majority(prints)
        differing = prints != prints[references, np.arange(len(references))]
        if not differing.any():
            return
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        worst = max(
            (self._difference(leaf, references[number], rank), rank, number)
            for number, (_, leaf) in enumerate(leaves)
            for rank in np.flatnonzero(differing[:, number]).tolist()
        )
        difference, rank, number = worst
        name = jax.tree_util.keystr(leaves[number][0], simple=True, separator=".")
        odd = np.flatnonzero(differing[:, decided].any(axis=1)).tolist()
        healthy = np.flatnonzero(~differing.any(axis=1)).tolist() if decided.all() else []
        how = "differs from" if difference < 0 else f"is up to {difference:.3g} away from"
        raise DriftError(
            f"replicas differ at step {step}: {name} on replica {rank} {how} "
            f"{_against(references[number], decided[number], odd)} "
            f"({differing.any(axis=0).sum()} of {len(leaves)} arrays differ)",
            healthy=healthy[0] if healthy else None,
        )

    def _difference(self, leaf: jax.Array, rank: int, other: int) -> float:
        """Return the largest difference between two replicas; -1 if another process has one of them."""
        copies = {self._devices.index(shard.device): shard.data for shard in leaf.addressable_shards}
        return _largest_difference(copies[rank], copies[other]) if {rank, other} <= copies.keys() else -1.0


def majority(prints: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return, for each array, the first replica of the largest group that agrees, and whether it is a majority.

    Args:
        prints: fingerprints (world_size, arrays).

    >>> majority(np.array([[1, 1], [2, 2], [2, 1], [2, 2]], np.uint32))
    (array([1, 0]), array([ True, False]))
    """
    votes = (prints[:, None] == prints).sum(axis=1)  # of the replicas that agree with each
    return votes.argmax(axis=0), votes.max(axis=0) * 2 > len(prints)


def _against(reference: int, decided: bool, odd: Sequence[int]) -> str:
    """Name the replica with which another was compared, and which of them is wrong."""
    if not decided:
        return f"replica {reference}; no majority tells which is right"
    return f"the majority; replica{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} must be wrong"


def fingerprint(x: jax.Array) -> jax.Array:
    """Compute sum_i mix(word_i + i c) mod 2**32 over the 32-bit words of `x`, a uint32 scalar.

    mix is MurmurHash3's finalizer, which is invertible: any change of a single word changes the sum;
    other changes (swapped elements, flipped signs) go unnoticed with probability 2**-32.

    >>> print(fingerprint(jnp.array([1.0, -1.0])) == fingerprint(jnp.array([-1.0, 1.0])))
    False
    """
    words = _words(x)
    mixed = words + jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of `x` as uint32 words; a narrower element becomes one word."""
    if x.dtype == jnp.bool_ or x.dtype.itemsize < 4:
        narrow = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        unsigned = jnp.uint8 if narrow.dtype.itemsize == 1 else jnp.uint16
        return lax.bitcast_convert_type(narrow, unsigned).astype(jnp.uint32).ravel()
    return lax.bitcast_convert_type(x, jnp.uint32).ravel()


def _largest_difference(a: jax.Array, b: jax.Array) -> float:
    """Return max |a - b|; infinite if only one of the two is NaN somewhere."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.where(same, 0, np.abs(x - y))))
    return math.inf if math.isnan(largest) else largest

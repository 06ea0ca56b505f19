"""What replicas tell each other inside a mapped function, in torch.distributed's words.

These functions have a meaning only where the axis `AXIS_NAME` exists: in a function that
`Replicas.map` runs. N below is the world size.

>>> from jaxddp.devices import prepare
>>> from jaxddp.replicas import Replicas
>>> replicas = Replicas(prepare(2, "cpu"))
>>> def talk(x):
...     return {"sum": all_reduce(x), "mean": all_reduce_mean(x), "first": broadcast(x), "rank": rank() + 0 * x}
>>> said = replicas.map(talk, in_axes=(0,), out_axes=0)(replicas.shard(jnp.array([5, 7])))
>>> {name: values.tolist() for name, values in said.items()}
{'first': [5, 5], 'mean': [6.0, 6.0], 'rank': [0, 1], 'sum': [12, 12]}
"""

from typing import TypeVar

import jax
from jax import lax
from jax import numpy as jnp

AXIS_NAME = "replica"

Tree = TypeVar("Tree")


def rank() -> jax.Array:
    """This replica's number, an int32 scalar in 0 .. N-1."""
    return lax.axis_index(AXIS_NAME)


def world_size() -> int:
    """N, the number of replicas."""
    return lax.axis_size(AXIS_NAME)


def all_reduce(tree: Tree) -> Tree:
    """The sum over the replicas, leaf by leaf: y = x_0 + x_1 + ... + x_{N-1}, on each of them."""
    return lax.psum(tree, AXIS_NAME)


def all_reduce_mean(tree: Tree) -> Tree:
    """The mean over the replicas, leaf by leaf: y = (x_0 + ... + x_{N-1}) / N, on each of them.

    This is what torch DDP's default communication hook does to gradients.
    """
    return lax.pmean(tree, AXIS_NAME)


def broadcast(tree: Tree, src: int = 0) -> Tree:
    """Replica `src`'s value of each leaf, on every replica."""
    is_source = rank() == src
    total = all_reduce(jax.tree.map(lambda x: jnp.where(is_source, x, jnp.zeros_like(x)), tree))
    return jax.tree.map(lambda y, x: y.astype(x.dtype), total, tree)  # a sum of booleans is an integer

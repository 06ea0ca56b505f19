"""What replicas tell each other inside a mapped function, in torch.distributed's words.

These functions have a meaning only where the axis `AXIS_NAME` exists: in a function that
`Replicas.map` runs. Below, N is the world size, x_r what replica r gives, y_r what it gets. Each takes a
tree, and treats its leaves one by one.

    all_reduce      y_r = x_0 + ... + x_{N-1}, or their mean, min, max, product
    reduce          the same, on replica dst alone
    broadcast       y_r = x_src
    all_gather      y_r = [x_0, ..., x_{N-1}]
    gather          the same, on replica dst alone
    scatter         y_r = x_src[r]
    reduce_scatter  y_r = x_0[r] + ... + x_{N-1}[r]
    all_to_all      y_r = [x_0[r], ..., x_{N-1}[r]]
    barrier         y_r = x_r, once all have come

Source: pytorch.org/docs/stable/distributed.html

>>> from jaxddp.distributed.devices import prepare
>>> from jaxddp.distributed.replicas import Replicas
>>> replicas = Replicas(prepare(2, "cpu"))
>>> def talk(x):
...     return {"sum": all_reduce(x), "mean": all_reduce_mean(x), "first": broadcast(x), "rank": rank() + 0 * x}
>>> said = replicas.map(talk, in_axes=(0,), out_axes=0)(replicas.shard(jnp.array([5, 7])))
>>> {name: values.tolist() for name, values in said.items()}
{'first': [5, 5], 'mean': [6.0, 6.0], 'rank': [0, 1], 'sum': [12, 12]}
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_batching import custom_vmap

from jaxddp.errors import InputError, check_name

AXIS_NAME = "replica"

Tree = TypeVar("Tree")


def rank() -> jax.Array:
    """This replica's number, an int32 scalar in 0 .. N-1."""
    return lax.axis_index(AXIS_NAME)


def world_size() -> int:
    """N, the number of replicas."""
    return lax.axis_size(AXIS_NAME)


@custom_vmap
def alike(x: jax.Array) -> jax.Array:
    """A value of which each replica has its own, and all the same; nothing is sent, and nothing checks it.

    Virtual replicas, which `jax.vmap` maps, know from here on that it is one value.
    """
    return x


@alike.def_vmap
def _(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return x[0] if in_batched[0] else x, False


def all_reduce(tree: Tree, op: str = "sum") -> Tree:
    """All replicas' values as one, on each of them: y = x_0 + x_1 + ... + x_{N-1}.

    Args:
        op: sum | mean | min | max | product.

    Raises:
        InputError: another op.
    """
    check_name("all_reduce: op", op, REDUCTIONS)
    return REDUCTIONS[op](tree)


def all_reduce_mean(tree: Tree) -> Tree:
    """The mean over the replicas, leaf by leaf: y = (x_0 + ... + x_{N-1}) / N, on each of them.

    This is what torch DDP's default communication hook does to gradients.
    """
    return lax.pmean(tree, AXIS_NAME)


def reduce(tree: Tree, dst: int = 0, op: str = "sum") -> Tree:
    """What `all_reduce` makes, on replica `dst`; the others keep what they gave."""
    here = _is("reduce: dst", dst)
    return jax.tree.map(lambda y, x: jnp.where(here, y, x.astype(y.dtype)), all_reduce(tree, op), tree)


def broadcast(tree: Tree, src: int | jax.Array = 0) -> Tree:
    """Replica `src`'s value of each leaf, on every replica; all of them must name the same one."""
    is_source = _is("broadcast: src", src)
    total = all_reduce(jax.tree.map(lambda x: _or_zeros(is_source, x), tree))
    return jax.tree.map(lambda y, x: y.astype(x.dtype), total, tree)  # a sum of booleans is an integer


def all_gather(tree: Tree) -> Tree:
    """Every replica's value, leaves (N, ...), on each of them."""
    return lax.all_gather(tree, AXIS_NAME)


def gather(tree: Tree, dst: int = 0) -> Tree:
    """Every replica's value, leaves (N, ...), on replica `dst`; zeros on the others."""
    here = _is("gather: dst", dst)
    return jax.tree.map(lambda y: _or_zeros(here, y), all_gather(tree))


def scatter(tree: Tree, src: int = 0) -> Tree:
    """Slice r of replica `src`'s leaves (N, ...), on replica r.

    Raises:
        InputError: a leaf has not one slice for each replica.
    """
    is_source = _is("scatter: src", src)
    return reduce_scatter(jax.tree.map(lambda x: _or_zeros(is_source, x), tree))


def reduce_scatter(tree: Tree, op: str = "sum") -> Tree:
    """All replicas' slices r of their leaves (N, ...) as one, on replica r: half of an all-reduce.

    Args:
        op: sum | mean.

    Raises:
        InputError: another op, or a leaf has not one slice for each replica.
    """
    check_name("reduce_scatter: op", op, ("sum", "mean"))
    _check_slices("reduce_scatter", tree)
    total = lax.psum_scatter(tree, AXIS_NAME)
    return total if op == "sum" else jax.tree.map(lambda y: y / world_size(), total)


def all_to_all(tree: Tree) -> Tree:
    """Slice r of everybody's leaves (N, ...), on replica r: a transposition of ranks and slices.

    Raises:
        InputError: a leaf has not one slice for each replica.
    """
    _check_slices("all_to_all", tree)
    return jax.tree.map(lambda x: lax.all_to_all(x, AXIS_NAME, split_axis=0, concat_axis=0), tree)


def barrier(tree: Tree) -> Tree:
    """The same tree, of which nobody has anything before all replicas have come here."""
    arrived = lax.psum(jnp.ones((), jnp.int32), AXIS_NAME)
    return lax.optimization_barrier((tree, arrived))[0]


# Of a whole tree at once, which XLA makes one all-reduce of.
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda tree: lax.psum(tree, AXIS_NAME),
    "mean": lambda tree: lax.pmean(tree, AXIS_NAME),
    "min": lambda tree: lax.pmin(tree, AXIS_NAME),
    "max": lambda tree: lax.pmax(tree, AXIS_NAME),
    "product": lambda tree: jax.tree.map(lambda x: jnp.prod(x, axis=0), lax.all_gather(tree, AXIS_NAME)),
}


def _is(name: str, number: int | jax.Array) -> jax.Array:
    """Whether this replica has a number."""
    if isinstance(number, int) and not 0 <= number < world_size():
        raise InputError(f"{name} {number}: must be a rank, 0 to {world_size() - 1}")
    return rank() == number


def _or_zeros(condition: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(condition, x, jnp.zeros_like(x))


def _check_slices(name: str, tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if leaf.shape[:1] != (world_size(),):
            raise InputError(f"{name}: a leaf of shape {leaf.shape}: must have {world_size()} slices, one per replica")

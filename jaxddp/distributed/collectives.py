"""Collectives between replicas, under the names of torch.distributed.

They work only inside a function that `Replicas.map` runs, where the axis `AXIS_NAME` exists. With N the world
size, x_r the argument and y_r the result on replica r, each collective applies to a tree, leaf by leaf:

    all_reduce      y_r = x_0 + ... + x_{N-1}, or their mean, min, max, product
    reduce          the same, only on replica dst
    broadcast       y_r = x_src
    all_gather      y_r = [x_0, ..., x_{N-1}]
    gather          the same, only on replica dst
    scatter         y_r = x_src[r]
    reduce_scatter  y_r = x_0[r] + ... + x_{N-1}[r]
    all_to_all      y_r = [x_0[r], ..., x_{N-1}[r]]
    barrier         y_r = x_r, once all replicas have arrived

Source: pytorch.org/docs/stable/distributed.html

>>> from jaxddp.distributed.devices import prepare
>>> from jaxddp.distributed.replicas import Replicas
>>> replicas = Replicas(prepare(2, "cpu"))
>>> def collect(x):
...     return {"sum": all_reduce(x), "mean": all_reduce_mean(x), "first": broadcast(x), "rank": rank() + 0 * x}
>>> results = replicas.map(collect, in_axes=(0,), out_axes=0)(replicas.shard(jnp.array([5, 7])))
>>> {name: values.tolist() for name, values in results.items()}
{'first': [5, 5], 'mean': [6.0, 6.0], 'rank': [0, 1], 'sum': [12, 12]}
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_batching import custom_vmap

from jaxddp.errors import InputError, check_name

__all__ = [
    "AXIS_NAME",
    "REDUCTIONS",
    "alike",
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "rank",
    "reduce",
    "reduce_scatter",
    "scatter",
    "world_size",
]

AXIS_NAME = "replica"
_SMALL = 64 * 1024  # bytes of the largest array that an all-reduce joins to others; larger ones gain nothing

Tree = TypeVar("Tree")


def rank() -> jax.Array:
    """Return the number of this replica, an int32 scalar in 0 .. N-1."""
    return lax.axis_index(AXIS_NAME)


def world_size() -> int:
    """Return N, the number of replicas."""
    return lax.axis_size(AXIS_NAME)


@custom_vmap
def alike(x: jax.Array) -> jax.Array:
    """Declare that a value is equal on all replicas, without communication or a check.

    Under `jax.vmap`, which maps virtual replicas, it becomes a single unbatched value.
    """
    return x


@alike.def_vmap
def _(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return x[0] if in_batched[0] else x, False


def all_reduce(tree: Tree, op: str = "sum") -> Tree:
    """Reduce the values of all replicas, with the result on every replica: y = x_0 + x_1 + ... + x_{N-1}.

    Args:
        op: sum | mean | min | max | product.

    Raises:
        InputError: another op.
    """
    check_name("all_reduce: op", op, REDUCTIONS)
    return REDUCTIONS[op](tree)


def all_reduce_mean(tree: Tree) -> Tree:
    """Average over the replicas, with the result on every replica: y = (x_0 + ... + x_{N-1}) / N.

    torch DDP's default communication hook does this to gradients.
    """
    # torch's hook divides before the sum; the two differ by rounding only.
    return jax.tree.map(lambda total: total / world_size(), _sum(tree))


def reduce(tree: Tree, dst: int = 0, op: str = "sum") -> Tree:
    """Reduce the values of all replicas, with the result on replica `dst`; the others keep their values."""
    here = _is("reduce: dst", dst)
    return jax.tree.map(lambda y, x: jnp.where(here, y, x.astype(y.dtype)), all_reduce(tree, op), tree)


def broadcast(tree: Tree, src: int | jax.Array = 0) -> Tree:
    """Send the value of replica `src` to every replica; `src` must be equal on all of them.

    If the tree has floating-point leaves, its integers are sent as floats, so that one message carries all leaves.
    """
    is_source = _is("broadcast: src", src)
    if _alone():
        return tree
    floats = [x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    carrier = max(floats, key=lambda dtype: dtype.itemsize, default=None)
    sent = jax.tree.map(lambda x: _or_zeros(is_source, _pieces(x, carrier)), tree)
    return jax.tree.map(lambda y, x: _whole(y, x.dtype, carrier), all_reduce(sent), tree)


def all_gather(tree: Tree) -> Tree:
    """Gather the values of all replicas, leaves (N, ...), on every replica."""
    return lax.all_gather(tree, AXIS_NAME)


def gather(tree: Tree, dst: int = 0) -> Tree:
    """Gather the values of all replicas, leaves (N, ...), on replica `dst`; the others get zeros."""
    here = _is("gather: dst", dst)
    return jax.tree.map(lambda y: _or_zeros(here, y), all_gather(tree))


def scatter(tree: Tree, src: int = 0) -> Tree:
    """Send slice r of replica `src`'s leaves (N, ...) to replica r.

    Raises:
        InputError: a leaf does not have one slice per replica.
    """
    is_source = _is("scatter: src", src)
    return reduce_scatter(jax.tree.map(lambda x: _or_zeros(is_source, x), tree))


def reduce_scatter(tree: Tree, op: str = "sum") -> Tree:
    """Reduce slice r of all replicas' leaves (N, ...) onto replica r: the first half of an all-reduce.

    Args:
        op: sum | mean.

    Raises:
        InputError: another op, or a leaf that does not have one slice per replica.
    """
    check_name("reduce_scatter: op", op, ("sum", "mean"))
    _check_slices("reduce_scatter", tree)
    total = lax.psum_scatter(tree, AXIS_NAME)
    return total if op == "sum" else jax.tree.map(lambda y: y / world_size(), total)


def all_to_all(tree: Tree) -> Tree:
    """Send slice r of every replica's leaves (N, ...) to replica r: a transposition of ranks and slices.

    Raises:
        InputError: a leaf does not have one slice per replica.
    """
    _check_slices("all_to_all", tree)
    return jax.tree.map(lambda x: lax.all_to_all(x, AXIS_NAME, split_axis=0, concat_axis=0), tree)


def barrier(tree: Tree) -> Tree:
    """Return the tree unchanged, once all replicas have arrived."""
    arrived = lax.psum(jnp.ones((), jnp.int32), AXIS_NAME)
    # Without a dependence on the sum, XLA would remove it.
    return lax.optimization_barrier((tree, arrived))[0]


def _on_devices() -> bool:
    """Return whether each replica has a device to itself; virtual ones share one."""
    # pmap is a shard_map, whose axis is manual in the abstract mesh; vmap's axis is not in the mesh.
    return AXIS_NAME in jax.sharding.get_abstract_mesh().manual_axes


def _alone() -> bool:
    """Return whether this replica is the only one, and not a virtual one.

    A single virtual replica needs a collective, from which `vmap` learns that its values are equal on all.
    """
    return world_size() == 1 and _on_devices()


def _sum(tree: Any) -> Any:
    """Sum over the replicas. XLA would keep the all-reduce of a single one, a third of the default job's step."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [x.astype(jnp.int32) if jnp.result_type(x) == jnp.bool else x for x in map(jnp.asarray, leaves)]
    return jax.tree.unflatten(treedef, leaves if _alone() else _summed(leaves))


def _summed(leaves: list[jax.Array]) -> list[jax.Array]:
    """Sum leaf by leaf, the small ones of a dtype joined, as in DDP's buckets.

    On CPU the replicas meet once for each array of an all-reduce: 100 small ones took ten times as long as one.
    """
    buckets: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        buckets.setdefault(leaf.dtype if leaf.nbytes <= _SMALL else place, []).append(place)
    members = [[leaves[place] for place in bucket] for bucket in buckets.values()]
    joined = [_joined(arrays) for arrays in members]
    totals = lax.psum(joined, AXIS_NAME) if _on_devices() else list(map(_sum_of_virtual, joined))
    sums = itertools.chain.from_iterable(map(_parted, totals, members))
    of_place = dict(zip(itertools.chain.from_iterable(buckets.values()), sums, strict=True))
    return [of_place[place] for place in range(len(leaves))]


def _sum_of_virtual(array: jax.Array) -> jax.Array:
    """Sum over virtual replicas in a loop: XLA would compute a written-out sum once for each use.

    On CPU, the library to which XLA gives reductions copies all terms. Measured for two replicas of 124 million
    parameters in float64: 1.5 GiB in addition to the arguments instead of 2.1, and a step of 3 s instead of 6.
    """
    of_all = lax.all_gather(array, AXIS_NAME)

    def add(rank: jax.Array, total: jax.Array) -> jax.Array:
        return total + lax.dynamic_index_in_dim(of_all, rank, keepdims=False)

    return lax.fori_loop(1, len(of_all), add, of_all[0])


def _joined(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else lax.concatenate([array.ravel() for array in arrays], 0)


def _parted(total: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """Return the parts of what `_joined` returned for arrays of these shapes."""
    if len(like) == 1:
        return [total]
    parts = lax.split(total, [array.size for array in like])
    return [part.reshape(array.shape) for part, array in zip(parts, like, strict=True)]


# Each reduces all leaves of a tree at once, which XLA turns into one all-reduce.
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": _sum,
    "mean": all_reduce_mean,
    "min": lambda tree: lax.pmin(tree, AXIS_NAME),
    "max": lambda tree: lax.pmax(tree, AXIS_NAME),
    # lax has no product over a mapped axis.
    "product": lambda tree: jax.tree.map(lambda x: jnp.prod(x, axis=0), lax.all_gather(tree, AXIS_NAME)),
}


def _is(name: str, number: int | jax.Array) -> jax.Array:
    """Return whether this replica has rank `number`."""
    if isinstance(number, int) and not 0 <= number < world_size():
        raise InputError(f"{name} {number}: must be a rank, 0 to {world_size() - 1}")
    return rank() == number


def _pieces(x: jax.Array, carrier: jnp.dtype | None) -> jax.Array:
    """Return an integer's bits as pieces, along a new last axis, each a float that the carrier holds exactly."""
    if carrier is None or not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(x, _piece(x.dtype, carrier)).astype(carrier)


def _whole(y: jax.Array, dtype: jnp.dtype, carrier: jnp.dtype | None) -> jax.Array:
    """Return the value that `_pieces` took apart; a sum of booleans, which is an integer, becomes boolean again."""
    if carrier is None or not jnp.issubdtype(dtype, jnp.integer):
        return y.astype(dtype)
    return lax.bitcast_convert_type(y.astype(_piece(dtype, carrier)), dtype)


def _piece(dtype: jnp.dtype, carrier: jnp.dtype) -> type:
    """Return the unsigned type of a piece: bfloat16 holds integers up to 256, float32 up to 2^24."""
    return jnp.uint16 if min(dtype.itemsize, carrier.itemsize // 2) >= 2 else jnp.uint8


def _or_zeros(condition: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(condition, x, jnp.zeros_like(x))


def _check_slices(name: str, tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if leaf.shape[:1] != (world_size(),):
            raise InputError(f"{name}: a leaf of shape {leaf.shape}: must have {world_size()} slices, one per replica")

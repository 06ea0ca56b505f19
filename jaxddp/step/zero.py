"""ZeRO, stage 1: the optimizer's state in N slices, one per replica.

    local gradients -> reduce_scatter -> clipping -> update of a slice -> all_gather of the parameters

The parameters of each dtype, and of each group of `optim.grouped`, are laid out as one vector, sorted by name and
padded with zeros to a multiple of N; replica r holds slice r of it. The optimizer must treat every element of a group
alike, whatever tensor it belongs to, so that the update of a slice is a slice of the update; all of `jaxddp.optim` do
but Adafactor and Muon. Optimizers that look at a tensor as a unit (LAMB) or at other names (optax.masked) would compute
something else here.

Source: Rajbhandari et al., https://arxiv.org/abs/1910.02054; torch.distributed.optim.ZeroRedundancyOptimizer, which
distributes tensors instead of slices.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax import numpy as jnp

from jaxddp.distributed.collectives import all_gather, all_reduce, rank, reduce_scatter, world_size
from jaxddp.optim import clip_by_global_norm
from jaxddp.state import Params, TrainState
from jaxddp.step.strategy import Strategy


class Slot(NamedTuple):
    """Name, shape and dtype of a parameter, and number of its group."""

    name: str
    like: jax.ShapeDtypeStruct
    group: int


Layout = tuple[Slot, ...]  # sorted by name


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Slices:
    """Arrays shaped like the parameters, as one vector per dtype and group; its path is its first parameter's name.

    Attributes:
        vectors: vector by the name of its first parameter: (N, chunk) for all slices, (chunk,) for one.
        layout: places of the parameters.
    """

    vectors: dict[str, Any]
    layout: Layout

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], Any]:
        """Split into the vectors, each with its key, and the rest."""
        children = [(jax.tree_util.DictKey(name), vector) for name, vector in self.vectors.items()]
        return children, (tuple(self.vectors), self.layout)

    @classmethod
    def tree_unflatten(cls, rest: Any, vectors: Iterable[Any]) -> "Slices":
        """Compute the inverse of `tree_flatten_with_keys`."""
        names, layout = rest
        return cls(dict(zip(names, vectors, strict=True)), layout)


def layout_of(params: Params, group_of: Callable[[str], int]) -> Layout:
    """Return the places of parameters, sorted by name so that insertion order does not matter."""
    return tuple(Slot(k, jax.ShapeDtypeStruct(x.shape, x.dtype), group_of(k)) for k, x in sorted(params.items()))


def sliced(tree: Params, layout: Layout, count: int) -> Slices:
    """Split arrays shaped like the parameters into `count` slices of equal size; groups of masked nodes stay so.

    >>> params = {"w": jnp.ones((2, 2)), "b": jnp.arange(3.0)}
    >>> print(sliced(params, layout_of(params, lambda name: 0), 2).vectors["b"])
    [[0. 1. 2. 1.]
     [1. 1. 1. 0.]]
    """

    def vector(names: list[str]) -> Any:
        if _is_masked(tree[names[0]]):
            return tree[names[0]]
        joint = jnp.concatenate([jnp.ravel(tree[name]) for name in names])
        # Zeros fill the last slice: reduce_scatter takes slices of equal size, and a zero gradient moves nothing.
        return jnp.pad(joint, (0, -joint.size % count)).reshape(count, -1)

    # One vector per dtype, since `concatenate` would promote mixed dtypes to a common one.
    return Slices({names[0]: vector(names) for names in _vectors(layout)}, layout)


def joined(slices: Slices) -> Params:
    """Compute the inverse of `sliced`, from vectors (N, chunk)."""
    tree, shapes = dict[str, Any](), {place.name: place.like for place in slices.layout}
    for names in _vectors(slices.layout):
        vector, start = slices.vectors[names[0]], 0
        for name in names:
            end = start + shapes[name].size
            masked = _is_masked(vector)
            tree[name] = vector if masked else vector.reshape(-1)[start:end].reshape(shapes[name].shape)
            start = end
    return tree


@dataclass(frozen=True)
class Sharded(Strategy):
    """Every replica holds all parameters, and one slice of the gradients and of the optimizer's state.

    Attributes:
        group_of: function from a parameter's name to the number of its group; None: there is one group.
    """

    sliced = ("opt_state",)

    group_of: Callable[[str], int] | None = None

    def layout_of(self, params: Params) -> Layout:
        """Return the places of parameters in their groups."""
        return layout_of(params, self.group_of or (lambda name: 0))

    def mean(self, gradients: Params, step: jax.Array) -> Slices:
        """Return this replica's slice of the mean gradients: the first half of an all-reduce."""
        return reduce_scatter(sliced(gradients, self.layout_of(gradients), world_size()), op="mean")

    def part(self, gradients: Params) -> Slices:
        """Return this replica's slice of gradients that are the same on all replicas."""
        return jax.tree.map(lambda x: x[rank()], sliced(gradients, self.layout_of(gradients), world_size()))

    def unsharded(self, gradients: Slices) -> Params:
        """Join the slices of all replicas, on each of them: the second half of an all-reduce."""
        return joined(all_gather(gradients))

    def all_finite(self, gradients: Slices) -> jax.Array:
        """Check that the slices of all replicas are finite, since all have to skip a step or none."""
        return all_reduce(super().all_finite(gradients).astype(jnp.int32), op="min") == 1

    def clip(self, gradients: Slices, max_norm: float) -> tuple[Slices, jax.Array]:
        """Clip by the norm over the slices of all replicas."""
        return clip_by_global_norm(gradients, max_norm, self.norm)

    def norm(self, gradients: Slices) -> jax.Array:
        """Return the norm over the slices of all replicas, which together hold every element once, besides zeros."""
        return jnp.sqrt(all_reduce(optax.tree.norm(gradients, squared=True)))

    def update(
        self, optimizer: optax.GradientTransformation, gradients: Slices, state: TrainState
    ) -> tuple[Params, optax.OptState]:
        """Update this replica's slice of the parameters that have a gradient, and gather all slices."""
        params = self.part({place.name: state.params[place.name] for place in gradients.layout})
        updates, opt_state = optimizer.update(gradients, state.opt_state, params)
        return {**state.params, **self.unsharded(optax.apply_updates(params, updates))}, opt_state

    def split(self, optimizer: optax.GradientTransformation, opt_state: Any, params: Params, world_size: int) -> Any:
        """Split the optimizer's state into `world_size` slices."""
        layout = self.layout_of(params)
        # Its structure tells which parts of the state are shaped like the parameters; the rest are counters.
        of_slices = jax.eval_shape(lambda: optimizer.init(sliced(params, layout, world_size)))

        def split(like: Any, node: Any) -> Any:
            if _is_slices(like):
                return sliced(node, layout, world_size)
            # The optimizer's state has axis 0 as one field, so its counters need that axis too.
            return jnp.broadcast_to(node, (world_size, *jnp.shape(node)))

        return jax.tree.map(split, of_slices, opt_state, is_leaf=_is_slices)

    def join(self, opt_state: Any) -> Any:
        """Compute the inverse of `split`, in the host's memory: on one device it might not fit."""

        def unsliced(node: Any) -> Any:
            return joined(node) if _is_slices(node) else node[0]  # counters are equal on all replicas

        return jax.tree.map(unsliced, jax.device_get(opt_state), is_leaf=_is_slices)


def _vectors(layout: Layout) -> Iterator[list[str]]:
    """Yield the names of each vector's parameters."""
    for kind in sorted({(str(place.like.dtype), place.group) for place in layout}):
        yield [place.name for place in layout if (str(place.like.dtype), place.group) == kind]


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_slices(node: Any) -> bool:
    return isinstance(node, Slices)

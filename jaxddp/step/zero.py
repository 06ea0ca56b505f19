"""The optimizer's state in N slices, one on each replica: the first stage of ZeRO.

    local gradients -> reduce_scatter -> clipping -> update of a slice -> all_gather of the parameters

A tree of parameters is laid out as one vector per dtype, by name, with zeros at its end up to a multiple of N;
slice r of it is replica r's. An optimizer that treats every element alike, whatever tensor it is of, makes of a
slice what it would make of the whole: all of `jaxddp.optim` do. One that looks at whole tensors (LAMB, Adafactor)
or at their names (optax.masked) does not, and would be another optimizer here.

Source: Rajbhandari et al., https://arxiv.org/abs/1910.02054; torch.distributed.optim.ZeroRedundancyOptimizer, which
deals out whole tensors in place of slices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.distributed.collectives import all_gather, all_reduce, rank, reduce_scatter, world_size
from jaxddp.optim import clip_by_global_norm
from jaxddp.state import Params, TrainState
from jaxddp.step.replicated import Replicated

Layout = tuple[tuple[str, jax.ShapeDtypeStruct], ...]  # of each parameter, by name


@partial(jax.tree_util.register_dataclass, data_fields=["vectors"], meta_fields=["layout"])
@dataclass(frozen=True)
class Slices:
    """Parameters, or something for each of their elements, as one vector per dtype.

    Attributes:
        vectors: by the parameters' dtype: (N, chunk) of all slices, (chunk,) of one.
        layout: of the parameters.
    """

    vectors: dict[str, jax.Array]
    layout: Layout


def layout_of(params: Params) -> Layout:
    """Names, shapes and dtypes."""
    return tuple((name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in sorted(params.items()))


def sliced(tree: Params, layout: Layout, count: int) -> Slices:
    """A tree like the parameters, in so many slices.

    >>> params = {"w": jnp.ones((2, 2)), "b": jnp.arange(3.0)}
    >>> print(sliced(params, layout_of(params), 2).vectors["float32"])
    [[0. 1. 2. 1.]
     [1. 1. 1. 0.]]
    """

    def vector(names: list[str]) -> jax.Array:
        whole = jnp.concatenate([jnp.ravel(tree[name]) for name in names])
        return jnp.pad(whole, (0, -whole.size % count)).reshape(count, -1)

    return Slices({dtype: vector(names) for dtype, names in _by_dtype(layout)}, layout)


def joined(slices: Slices) -> Params:
    """The tree that all slices, (N, chunk), are of."""
    tree, shapes = {}, dict(slices.layout)
    for dtype, names in _by_dtype(slices.layout):
        whole, start = slices.vectors[dtype].reshape(-1), 0
        for name in names:
            tree[name] = whole[start : start + shapes[name].size].reshape(shapes[name].shape)
            start += shapes[name].size
    return tree


class Sharded(Replicated):
    """Every replica has a slice of the gradients and of the optimizer's state, and all parameters."""

    sliced = ("opt_state",)

    def mean(self, gradients: Params, step: jax.Array) -> Slices:
        """This replica's slice of the mean of all replicas' gradients: half of an all-reduce."""
        return reduce_scatter(sliced(gradients, layout_of(gradients), world_size()), op="mean")

    def part(self, gradients: Params) -> Slices:
        """This replica's slice of what all have."""
        return jax.tree.map(lambda x: x[rank()], sliced(gradients, layout_of(gradients), world_size()))

    def whole(self, gradients: Slices) -> Params:
        """What all replicas' slices are of, on each of them: the other half of an all-reduce."""
        return joined(all_gather(gradients))

    def all_finite(self, gradients: Slices) -> jax.Array:
        """Whether all replicas' slices are finite."""
        return all_reduce(super().all_finite(gradients).astype(jnp.int32), op="min") == 1

    def clip(self, gradients: Slices, max_norm: float) -> tuple[Slices, jax.Array]:
        """Scale by the norm of all replicas' slices together."""

        def norm(own: Slices) -> jax.Array:
            return jnp.sqrt(all_reduce(optax.tree.norm(own, squared=True)))

        return clip_by_global_norm(gradients, max_norm, norm)

    def update(
        self, optimizer: optax.GradientTransformation, gradients: Slices, state: TrainState
    ) -> tuple[Params, Any]:
        """Each replica updates its slice of the parameters that have a gradient, and all get all of it."""
        own = self.part({name: state.params[name] for name, _ in gradients.layout})
        updates, opt_state = optimizer.update(gradients, state.opt_state, own)
        return {**state.params, **self.whole(optax.apply_updates(own, updates))}, opt_state

    def split(self, optimizer: optax.GradientTransformation, opt_state: Any, params: Params, world_size: int) -> Any:
        """The optimizer's state of whole parameters as that of so many slices."""
        layout = layout_of(params)
        of_slices = jax.eval_shape(lambda: optimizer.init(sliced(params, layout, world_size)))

        def split(like: Any, node: Any) -> Any:
            if _is_slices(like):
                return sliced(node, layout, world_size)
            return jnp.broadcast_to(node, (world_size, *jnp.shape(node)))

        return jax.tree.map(split, of_slices, opt_state, is_leaf=_is_slices)

    def join(self, opt_state: Any) -> Any:
        """The optimizer's state of whole parameters, in the host's memory."""

        def whole(node: Any) -> Any:
            return joined(node) if _is_slices(node) else node[0]

        return jax.tree.map(whole, jax.device_get(opt_state), is_leaf=_is_slices)


def _by_dtype(layout: Layout) -> Iterator[tuple[str, list[str]]]:
    """The names of each dtype's parameters."""
    for dtype in sorted({str(like.dtype) for _, like in layout}):
        yield dtype, [name for name, like in layout if str(like.dtype) == dtype]


def _is_slices(node: Any) -> bool:
    return isinstance(node, Slices)

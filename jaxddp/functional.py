"""A flax.nnx module seen as pure functions of flat dictionaries of arrays."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.losses import Batch, LossFunction, Sums, summed
from jaxddp.state import Buffers, Params

LocalLoss = Callable[[Params, Buffers, Batch], tuple[Sums, Buffers]]


class Functional:
    """The pure side of an nnx module: its parameters and buffers by name, and its forward pass.

    Args:
        model: any nnx module; it is read, never changed.

    Raises:
        ValueError: the module draws random numbers while running.

    >>> functional = Functional(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> {name: value.shape for name, value in functional.params.items()}
    {'bias': (1,), 'kernel': (2, 1)}
    """

    def __init__(self, model: nnx.Module):
        self._graphdef: nnx.GraphDef
        self._graphdef, params, buffers = _split(model)
        random_state = nnx.to_flat_state(nnx.filter_state(buffers, nnx.RngState))
        if random_state:
            names = ", ".join(sorted({_name(path[:-1]) for path, _ in random_state}))
            raise ValueError(f"{names}: modules that draw random numbers (dropout) are not supported yet")
        self._params, self._buffers = params, buffers
        self.params: Params = _to_dict(params)
        self.buffers: Buffers = _to_dict(buffers)

    def module(self, params: Params, buffers: Buffers) -> nnx.Module:
        """The module with these values in it."""
        return nnx.merge(self._graphdef, _from_dict(params, self._params), _from_dict(buffers, self._buffers))

    def local_loss(self, loss_fn: LossFunction, train: bool) -> LocalLoss:
        """`loss_fn(model, batch)` as (params, buffers, batch) -> (sums, new buffers).

        Args:
            loss_fn: returns one loss per element (see `jaxddp.losses`); a batch entry "valid"
                takes padded examples out.
            train: whether layers such as BatchNorm run in their training mode.
        """

        def function(params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
            # Merged inside the differentiated function: nnx refuses modules from an outer trace.
            model = self.module(params, buffers)
            model.train() if train else model.eval()
            sums = summed(loss_fn(model, batch), batch.get("valid"))
            _, _, left_behind = _split(model)
            return sums, _to_dict(left_behind)

        return function


def cast(arrays: Mapping[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """Arrays of floating-point numbers in another dtype, the others as they are; None: all as they are.

    >>> {name: str(x.dtype) for name, x in cast({"w": jnp.ones(1), "n": jnp.arange(1)}, "bfloat16").items()}
    {'w': 'bfloat16', 'n': 'int32'}
    """

    def convert(x: jax.Array) -> jax.Array:
        return jnp.asarray(x, dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return {name: convert(x) for name, x in arrays.items()}


def gradient_order(model: nnx.Module) -> tuple[str, ...]:
    """The parameters' names in the order in which torch's backward pass has their gradients: the last layer first.

    So DDP lays out its bucket from the second step on, for a model that calls its layers in the order in which it
    defines them. A normalisation's scale comes before its bias, of all others the bias first.

    >>> block = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    >>> gradient_order(block)
    ('layers.1.scale', 'layers.1.bias', 'layers.0.bias', 'layers.0.kernel')
    """
    return tuple(_last_first(model))


def _split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """What the module is, its parameters, and everything else that it holds."""
    graphdef, params, others = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    return graphdef, params, others


def _last_first(module: nnx.Pytree, path: str = "") -> Iterator[str]:
    content = vars(module)
    own = [name for name, value in content.items() if isinstance(value, nnx.Param)]
    for name in own if "scale" in own else reversed(own):
        yield path + name
    for name, value in reversed(content.items()):
        if isinstance(value, nnx.Pytree):
            yield from _last_first(value, f"{path}{name}.")


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _to_dict(state: nnx.State) -> dict[str, jax.Array]:
    return {_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def _from_dict(values: dict[str, jax.Array], like: nnx.State) -> nnx.State:
    variables = nnx.to_flat_state(like)
    return nnx.from_flat_state([(path, variable.replace(values[_name(path)])) for path, variable in variables])

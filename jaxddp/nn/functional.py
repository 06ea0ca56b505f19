"""A flax.nnx module seen as pure functions of flat dictionaries of arrays."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn.autocast import autocast
from jaxddp.nn.dropout_rng import Place, check_masks, random_state_at
from jaxddp.nn.losses import Batch, LossFunction, Sums, num_examples, summed
from jaxddp.state import Buffers, Params

LocalLoss = Callable[[Params, Buffers, Batch], tuple[Sums, Buffers]]


@dataclass(frozen=True)
class RandomLoss:
    """A `LocalLoss` that draws random numbers, and so has to be told where in the run it is.

    Called without that it draws what the module's keys give as they were built.

    Attributes:
        function: (params, buffers, batch, place) -> (sums, new buffers).
    """

    function: Callable[[Params, Buffers, Batch, Place | None], tuple[Sums, Buffers]]

    def __call__(self, params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
        """The loss at no place in particular."""
        return self.function(params, buffers, batch, None)

    def at(self, place: Place) -> LocalLoss:
        """The loss at a place."""
        return lambda params, buffers, batch: self.function(params, buffers, batch, place)


class Functional:
    """The pure side of an nnx module: its parameters and buffers by name, and its forward pass.

    What it draws random numbers from (`nnx.RngState`) is no part of either: see `jaxddp.nn.dropout_rng`.

    Args:
        model: any nnx module; it is read, never changed.

    >>> functional = Functional(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> {name: value.shape for name, value in functional.params.items()}
    {'kernel': (2, 1), 'bias': (1,)}
    """

    def __init__(self, model: nnx.Module):
        self._graphdef: nnx.GraphDef
        self._graphdef, params, self._random_state, buffers = _split(model)
        self._params, self._buffers = params, buffers
        values = _to_dict(params)
        self.params: Params = {name: values[name] for name in _in_model_order(model, values)}
        self.buffers: Buffers = _to_dict(buffers)

    @property
    def random_streams(self) -> list[str]:
        """The names of what the module can draw random numbers from."""
        return sorted({_name(path[:-1]) for path, _ in nnx.to_flat_state(self._random_state)})

    def module(self, params: Params, buffers: Buffers, random_state: nnx.State | None = None) -> nnx.Module:
        """The module with these values in it; its random state as it was built if None."""
        state = self._random_state if random_state is None else random_state
        return nnx.merge(self._graphdef, _from_dict(params, self._params), state, _from_dict(buffers, self._buffers))

    def local_loss(self, loss_fn: LossFunction, train: bool, masks: str = "replica", amp: str = "none") -> LocalLoss:
        """`loss_fn(model, batch)` as (params, buffers, batch) -> (sums, new buffers).

        Args:
            loss_fn: returns one loss per element (see `jaxddp.nn.losses`); a batch entry "valid", (B,),
                takes examples out that are 0 there. Each module that has an attribute `valid` is given
                it meanwhile, so that they are in no statistic either.
            train: whether layers such as BatchNorm and Dropout run in their training mode.
            masks: what replicas draw, if the module draws random numbers in training: "replica", "shared" or
                "example", see `jaxddp.nn.dropout_rng`.
            amp: what matrix products are computed in, see `jaxddp.nn.autocast.autocast`.

        Returns:
            A `RandomLoss` if the module draws random numbers in training. It, or the function, raises
            `InputError` for a module that would take padding into its statistics.

        Raises:
            InputError: the module cannot draw such masks.
        """

        def function(
            params: Params, buffers: Buffers, batch: Batch, place: Place | None = None
        ) -> tuple[Sums, Buffers]:
            drawn = None if place is None else random_state_at(self._random_state, place, masks, num_examples(batch))
            # Merged inside the differentiated function: nnx refuses modules from an outer trace.
            model = self.module(params, buffers, drawn)
            model.train() if train else model.eval()
            autocast(model, amp)
            valid = batch.get("valid")
            if valid is not None:
                if train:
                    _check_statistics(model)
                model.set_attributes(valid=nnx.data(valid), raise_if_not_found=False)
            sums = summed(loss_fn(model, batch), valid)
            if valid is not None:
                model.set_attributes(valid=None, raise_if_not_found=False)
            _, _, _, left_behind = _split(model)
            return sums, _to_dict(left_behind)

        if not train:
            return function
        check_masks(masks, self._random_state)
        return RandomLoss(function) if self.random_streams else function


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


def _check_statistics(model: nnx.Module) -> None:
    """Refuse a module that keeps statistics, and cannot be told which examples count."""
    for path, module in nnx.iter_modules(model):
        statistics = any(isinstance(value, nnx.BatchStat) for value in vars(module).values())
        if statistics and not hasattr(module, "valid"):
            raise InputError(
                f"{_name(path) or 'the model'}: {type(module).__name__} would take padded examples into its "
                "statistics; use jaxddp.nn.layers.BatchNorm, or give it an attribute `valid`"
            )


def _split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
    """What the module is, its parameters, what it draws random numbers from, and everything else that it holds."""
    graphdef, params, random_state, others = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]
    return graphdef, params, random_state, others


def _last_first(module: nnx.Pytree, path: str = "") -> Iterator[str]:
    content = vars(module)
    own = [name for name, value in content.items() if isinstance(value, nnx.Param)]
    for name in own if "scale" in own else reversed(own):
        yield path + name
    for name, value in reversed(content.items()):
        if isinstance(value, nnx.Pytree):
            yield from _last_first(value, f"{path}{name}.")


def _in_model_order(model: nnx.Module, names: Collection[str]) -> list[str]:
    """Names of parameters in the order in which the modules define them; flax itself sorts them."""
    seen: set[int] = set()

    def walk(module: nnx.Module, path: tuple[str, ...]) -> Iterator[str]:
        seen.add(id(module))
        for key, child in vars(module).items():
            if (name := _name((*path, key))) in names:
                yield name
            elif isinstance(child, nnx.Module) and id(child) not in seen:
                yield from walk(child, (*path, key))

    return list(dict.fromkeys([*walk(model, ()), *names]))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _to_dict(state: nnx.State) -> dict[str, jax.Array]:
    return {_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def _from_dict(values: dict[str, jax.Array], like: nnx.State) -> nnx.State:
    variables = nnx.to_flat_state(like)
    return nnx.from_flat_state([(path, variable.replace(values[_name(path)])) for path, variable in variables])

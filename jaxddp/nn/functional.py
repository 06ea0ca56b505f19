"""A flax.nnx module as pure functions of flat dictionaries of arrays."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn.autocast import autocast
from jaxddp.nn.dropout_rng import Place, check_masks, random_state_at
from jaxddp.nn.losses import Batch, LossFunction, Metrics, Sums, as_losses, no_metrics, num_examples, sums_of
from jaxddp.nn.model_tree import ModelTree
from jaxddp.program import bound
from jaxddp.state import Buffers, Params

LocalLoss = Callable[[Params, Buffers, Batch], tuple[Sums, Buffers]]


@dataclass(frozen=True)
class RandomLoss:
    """A `LocalLoss` that draws random numbers, which depend on the place in the run.

    Called directly, it draws from the module's keys as built.

    Attributes:
        function: (params, buffers, batch, place) -> (sums, new buffers).
    """

    function: Callable[[Params, Buffers, Batch, Place | None], tuple[Sums, Buffers]]

    def __call__(self, params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
        """Compute the loss with the module's keys as built."""
        return self.function(params, buffers, batch, None)

    def at(self, place: Place) -> LocalLoss:
        """Return the loss function for a place in the run."""
        return lambda params, buffers, batch: self.function(params, buffers, batch, place)


class Functional:
    """Pure side of an nnx module: its parameters and buffers by name, and its forward pass.

    Random state (`nnx.RngState`) is neither a parameter nor a buffer: see `jaxddp.nn.dropout_rng`. Nor is an array that
    is no `nnx.Variable`, as a table of frequencies: it stays as built.

    Args:
        model: any nnx module; never changed.

    Attributes:
        params, buffers: its values by name.
        param_tree, buffer_tree: maps to the module's trees.

    >>> functional = Functional(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> {name: value.shape for name, value in functional.params.items()}
    {'kernel': (2, 1), 'bias': (1,)}
    """

    def __init__(self, model: nnx.Module):
        self._graphdef: nnx.GraphDef
        self._graphdef, params, self._random_state, self._constants, buffers = _split(model)
        self._params, self._buffers = params, buffers
        values = _to_dict(params)
        self.params: Params = {name: values[name] for name in _in_model_order(model, values)}
        self._gradient_order = gradient_order(model)  # flax sorts the attributes of a module that it builds
        self.buffers: Buffers = _to_dict(buffers)
        self.param_tree, self.buffer_tree = ModelTree.of_state(params), ModelTree.of_state(buffers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its arrays by name."""
        return {name: value.shape for name, value in {**self.params, **self.buffers}.items()}

    def gradient_order(self) -> tuple[str, ...]:
        """Return the parameters' names in the order of torch's backward pass, see `gradient_order`."""
        return self._gradient_order

    def forget_values(self) -> None:
        """Free the parameters' values; keep their names, shapes and dtypes."""
        self.params = abstract(self.params)
        self._params = _from_dict(self.params, self._params)

    @property
    def random_streams(self) -> list[str]:
        """Names of the module's random streams."""
        return sorted({_name(path[:-1]) for path, _ in nnx.to_flat_state(self._random_state)})

    def module(self, params: Params, buffers: Buffers, random_state: nnx.State | None = None) -> nnx.Module:
        """Build the module with these values; `random_state` None: as built."""
        # New variables, because nnx refuses to count draws in variables of an outer trace.
        state = _copied(self._random_state) if random_state is None else random_state
        trees = _from_dict(params, self._params), state, self._constants, _from_dict(buffers, self._buffers)
        return nnx.merge(self._graphdef, *trees)

    def values(self, module: nnx.Module) -> tuple[Params, Buffers]:
        """Return the parameters and buffers of a module that `module` has built.

        Raises:
            InputError: an array that is no `nnx.Variable` has changed.
        """
        _, params, _, constants, buffers = _split(module)
        after = dict(nnx.to_flat_state(constants))
        for path, built in nnx.to_flat_state(self._constants):
            if after.get(path) is not built:
                raise InputError(f"{_name(path)}: an array that changes must be an nnx.Variable of the module")
        return _to_dict(params), _to_dict(buffers)

    def local_loss(
        self,
        loss_fn: LossFunction,
        train: bool | None,
        masks: str = "replica",
        amp: str = "none",
        metrics: Metrics = no_metrics,
    ) -> LocalLoss:
        """Turn `loss_fn(model, batch)` into a pure function (params, buffers, batch) -> (sums, new buffers).

        Args:
            loss_fn: returns one loss per element, see `jaxddp.nn.losses`. A batch entry "valid", (B,), is 0
                for examples to leave out; modules with an attribute `valid` see it during the forward pass,
                so that their statistics leave these examples out too.
            train: whether layers such as BatchNorm and Dropout run in training mode; None: see `set_modes`.
            masks: kind of random masks in training: "replica", "shared" or "example", see
                `jaxddp.nn.dropout_rng`.
            amp: dtype of matrix products: "none", "bf16" or "fp16", see `jaxddp.nn.autocast.autocast`.
            metrics: (model, batch) -> further metrics by name, see `jaxddp.nn.losses.sums_of`.

        Returns:
            The function; a `RandomLoss` if `train` and the module draws random numbers. Calling it with padded
            examples raises `InputError` for a module that would include them in its statistics.

        Raises:
            InputError: the module cannot draw masks of this kind.
        """

        loss_fn = loss_fn if train is None else bound(loss_fn, train=train)

        def function(
            params: Params, buffers: Buffers, batch: Batch, place: Place | None = None
        ) -> tuple[Sums, Buffers]:
            drawn = None if place is None else random_state_at(self._random_state, place, masks, num_examples(batch))
            # Built inside the differentiated function, because nnx refuses modules from an outer trace.
            model = self.module(params, buffers, drawn)
            set_modes(model, train)
            autocast(model, amp)
            valid = batch.get("valid")
            if valid is not None:
                if train is not False:
                    _check_statistics(model)
                model.set_attributes(valid=nnx.data(valid), raise_if_not_found=False)
            losses = as_losses(loss_fn(model, batch))
            sums = sums_of(losses, valid, train, metrics(model, batch), batch)
            if valid is not None:
                model.set_attributes(valid=None, raise_if_not_found=False)
            return sums, self.values(model)[1]

        if train is False:
            return function
        check_masks(masks, self._random_state)
        return RandomLoss(function) if self.random_streams else function


def set_modes(model: nnx.Module, train: bool | None) -> None:
    """Put all layers into training or evaluation mode; None: each keeps the mode it was built in, and trains if none.

    >>> block = nnx.List([nnx.Dropout(0.5, deterministic=mode) for mode in (True, None)])
    >>> set_modes(block, None)
    >>> [dropout.deterministic for dropout in block]
    [True, False]
    """
    if train is not None:
        model.train() if train else model.eval()
        return
    for _, layer in nnx.iter_modules(model):
        for mode in ("deterministic", "use_running_average"):
            if getattr(layer, mode, False) is None:
                setattr(layer, mode, False)


def cast(arrays: Mapping[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """Cast floating-point arrays to `dtype` and leave others unchanged; None: leave all unchanged.

    >>> {name: str(x.dtype) for name, x in cast({"w": jnp.ones(1), "n": jnp.arange(1)}, "bfloat16").items()}
    {'w': 'bfloat16', 'n': 'int32'}
    """

    def convert(x: jax.Array) -> jax.Array:
        return jnp.asarray(x, dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return {name: convert(x) for name, x in arrays.items()}


def abstract(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the arrays' shapes and dtypes.

    >>> abstract({"w": jnp.ones(2)})
    {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def gradient_order(model: nnx.Module) -> tuple[str, ...]:
    """Return parameter names in the order in which torch's backward pass computes gradients, the last layer first.

    DDP lays out its bucket in this order from the second step on, for a model that calls its layers in the order
    of their definition. Normalisation layers have scale before bias, all other layers bias before kernel.

    >>> block = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    >>> gradient_order(block)
    ('layers.1.scale', 'layers.1.bias', 'layers.0.bias', 'layers.0.kernel')
    """
    return tuple(_last_first(model))


def _check_statistics(model: nnx.Module) -> None:
    """Raise `InputError` for a module that keeps statistics and has no attribute `valid`."""
    for path, module in nnx.iter_modules(model):
        statistics = any(isinstance(value, nnx.BatchStat) for value in vars(module).values())
        if statistics and not hasattr(module, "valid"):
            raise InputError(
                f"{_name(path) or 'the model'}: {type(module).__name__} would include padded examples in its "
                "statistics; use jaxddp.nn.layers.BatchNorm, or give it an attribute `valid`"
            )


def _split(model: nnx.Module) -> Any:
    """Split a module into its graph, its parameters, its random state, its bare arrays, and all other state."""
    return nnx.split(model, nnx.Param, nnx.RngState, lambda _, value: not isinstance(value, nnx.Variable), ...)


def _last_first(module: nnx.Pytree, path: str = "", seen: tuple[int, ...] = ()) -> Iterator[str]:
    content = vars(module)
    params = [name for name, value in content.items() if isinstance(value, nnx.Param)]
    for name in params if "scale" in params else reversed(params):
        yield path + name
    for name, value in reversed(content.items()):
        if isinstance(value, nnx.Pytree) and id(value) not in seen:  # a module may refer to one around it
            yield from _last_first(value, f"{path}{name}.", (*seen, id(module)))


def _in_model_order(model: nnx.Module, names: Collection[str]) -> list[str]:
    """Order parameter names as the modules define them; flax sorts them."""
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


def _copied(state: nnx.State) -> nnx.State:
    return nnx.from_flat_state([(path, x.replace(x[...])) for path, x in nnx.to_flat_state(state)])


def _from_dict(values: dict[str, jax.Array], like: nnx.State) -> nnx.State:
    variables = nnx.to_flat_state(like)
    return nnx.from_flat_state([(path, variable.replace(values[_name(path)])) for path, variable in variables])

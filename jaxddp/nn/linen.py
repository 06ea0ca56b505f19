"""A flax.linen module as flat dictionaries of arrays and a pure loss, the counterpart of `jaxddp.nn.functional`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import linen, traverse_util
from flax.errors import InvalidRngError
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn.functional import LocalLoss, abstract
from jaxddp.nn.losses import Batch, LossFunction, Metrics, Sums, as_losses, no_metrics, sums_of
from jaxddp.nn.model_tree import ModelTree
from jaxddp.nn.placed import placed
from jaxddp.program import bound as accept
from jaxddp.state import Buffers, Params

PARAMS = "params"


class Bound:
    """A linen module with its variables, callable like an nnx or torch module.

    Args:
        module: linen module.
        variables: its collections; None: the first call initializes them.

    Attributes:
        variables: collections after the last call.
    """

    def __init__(self, module: linen.Module, variables: Mapping[str, Any] | None = None):
        self._module = module
        self.variables = variables

    def __call__(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Return the module's output; keep its changed variables for the next call.

        A module that needs keys and is given no `rngs` draws from key 0.
        """
        if self.variables is None:
            keys = {**(rngs if isinstance(rngs, Mapping) else {}), PARAMS: jax.random.key(0)}
            output, self.variables = self._module.init_with_output(keys, *args, **kwargs)
            return output
        others = [collection for collection in self.variables if collection != PARAMS]
        apply = partial(self._module.apply, self.variables, *args, mutable=others, **kwargs)
        try:
            output, changed = apply(rngs=rngs)
        except InvalidRngError:
            if rngs is not None:
                raise
            output, changed = apply(rngs=jax.random.key(0))
        self.variables = {**self.variables, **changed}
        return output


class LinenFunctional:
    """Pure side of a linen module: its parameters and buffers by name, and its loss.

    Collections other than "params" (such as batch_stats) are buffers. The loss function selects training mode
    itself: `loss_fn(model, batch)` calls `model(batch["x"], train=True)`, or with whatever arguments the module takes.

    Args:
        module: linen module.
        loss_fn: (model, batch) -> one loss per element, or `losses.Losses`.
        batch: any batch; the loss is computed on it once to initialize the variables.

    Attributes:
        params, buffers: its values by name.
        param_tree, buffer_tree: maps to the module's trees; that of the buffers begins with the collections.

    Raises:
        InputError: the loss never calls the model, or two collections hold a variable of the same name.

    >>> loss_fn = lambda model, batch: (model(batch["x"])[:, 0] - 1.0) ** 2
    >>> functional = LinenFunctional(linen.Dense(1), loss_fn, {"x": jnp.ones((2, 3))})
    >>> {name: value.shape for name, value in functional.params.items()}
    {'kernel': (3, 1), 'bias': (1,)}
    """

    def __init__(self, module: linen.Module, loss_fn: LossFunction, batch: Batch):
        self._module = module
        bound = Bound(module)
        given = {name: jnp.asarray(array) for name, array in batch.items()}
        accept(loss_fn, train=True, key=jax.random.key(0))(bound, given)
        if bound.variables is None:
            raise InputError("jax_loss: never calls the model")
        flat = {name: traverse_util.flatten_dict(tree, sep=".") for name, tree in bound.variables.items()}
        self.params: Params = flat.pop(PARAMS, {})  # in the order of their first use
        collections = {name: collection for collection, arrays in flat.items() for name in arrays}
        self.buffers: Buffers = {name: flat[collections[name]][name] for name in sorted(collections)}
        if sum(map(len, flat.values())) != len(self.buffers) or self.buffers.keys() & self.params.keys():
            raise InputError("jax_model: two collections hold a variable of the same name")
        paths = {name: tuple(name.split(".")) for name in (*self.params, *self.buffers)}
        self.param_tree = ModelTree({name: paths[name] for name in self.params})
        self.buffer_tree = ModelTree({name: (collections[name], *paths[name]) for name in self.buffers})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its arrays by name."""
        return {name: value.shape for name, value in {**self.params, **self.buffers}.items()}

    def gradient_order(self) -> tuple[str, ...]:
        """Return the parameters' names, the last first, as an order of torch's backward pass."""
        return tuple(reversed(self.params))

    def forget_values(self) -> None:
        """Free the parameters' values; keep their names, shapes and dtypes."""
        self.params = abstract(self.params)

    def variables(self, params: Params, buffers: Buffers) -> dict[str, Any]:
        """Return the module's collections with these values."""
        return {PARAMS: self.param_tree.nest(params), **self.buffer_tree.nest(buffers)}

    def bound(self, params: Params, buffers: Buffers) -> Bound:
        """Return the module with these values, as the loss function gets it."""
        return Bound(self._module, self.variables(params, buffers))

    def local_loss(
        self,
        loss_fn: LossFunction,
        train: bool | None = None,
        masks: str = "replica",
        amp: str = "none",
        metrics: Metrics = no_metrics,
        seed: int = 0,
    ) -> LocalLoss:
        """Turn `loss_fn(model, batch)` into a pure function (params, buffers, batch) -> (sums, new buffers).

        Args:
            loss_fn: see the class; it may take `train` and `key`, see `jaxddp.nn.placed`.
            train, masks, amp, metrics: see `Functional.local_loss`.
            seed: seed of the keys.
        """

        def function(loss_fn: LossFunction, params: Params, buffers: Buffers, batch: Batch) -> tuple[Sums, Buffers]:
            bound = self.bound(params, buffers)
            losses = as_losses(loss_fn(bound, batch), "jax_loss")
            assert bound.variables is not None
            new_buffers = self.buffer_tree.flat(bound.variables)
            valid = None if train is None else batch.get("valid")
            return sums_of(losses, valid, train, metrics(bound, batch), batch), new_buffers

        return placed(function, loss_fn, train, masks, amp, seed)

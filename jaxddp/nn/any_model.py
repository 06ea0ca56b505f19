"""Models and optimizers of any kind: flat dictionaries of arrays, a pure loss, and an optax transformation."""

from collections.abc import Callable, Collection
from typing import Any, cast

import jax
import optax
from flax import linen, nnx

from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.nn.linen import LinenFunctional
from jaxddp.nn.losses import Batch
from jaxddp.nn.plain import PlainFunctional
from jaxddp.program import takes

AnyFunctional = Functional | LinenFunctional | PlainFunctional


def functional_of(
    model: Any, loss_fn: Callable[..., Any], batch: Callable[[], Batch], constants: Collection[str] = ()
) -> AnyFunctional:
    """Return the pure side of an nnx or linen module, or of a tree of arrays.

    Args:
        model: nnx or linen module, a dictionary of nnx modules, or a pytree, see `PlainFunctional`.
        loss_fn: see `LinenFunctional` and `PlainFunctional`.
        batch: returns any batch; called for a linen module only.
        constants: names of a tree's arrays that are not parameters.

    Raises:
        InputError: the model is none of these.
    """
    if isinstance(model, dict) and model and all(isinstance(part, nnx.Module) for part in model.values()):
        model = nnx.Dict(model)
    if isinstance(model, nnx.Module):
        return Functional(model)
    if isinstance(model, linen.Module):
        return LinenFunctional(model, loss_fn, batch())
    if any(map(_is_variable, jax.tree.leaves(model, is_leaf=_is_variable))):
        raise InputError(f"jax_model: must return the nnx module itself, not its {type(model).__name__}")
    return PlainFunctional(model, loss_fn, constants)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def transformation_of(optimizer: Any, model: Any) -> optax.GradientTransformation:
    """Return the optax transformation of an optimizer of any kind.

    Args:
        optimizer: a transformation; an `nnx.Optimizer` of all parameters; or a function, model -> one of them.
        model: the model.

    Raises:
        InputError: the optimizer is none of these, or an `nnx.Optimizer` of other variables than `nnx.Param`.

    >>> adam = optax.adam(1e-3)
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> transformation_of(lambda model: nnx.Optimizer(model, adam, wrt=nnx.Param), model) is adam
    True
    """
    made = optimizer if hasattr(optimizer, "update") else optimizer(*[model][: takes(optimizer)])
    if isinstance(made, nnx.Optimizer):
        if made.wrt is not nnx.Param:
            raise InputError(
                f"jax_optimizer: its wrt is {getattr(made.wrt, '__name__', made.wrt)}; must be nnx.Param, with frozen "
                "parameters masked in the optax transformation"
            )
        return made.tx
    if not hasattr(made, "update"):
        kind = type(made).__name__
        raise InputError(f"jax_optimizer: must return an optax transformation or an nnx.Optimizer, and returns {kind}")
    return cast(optax.GradientTransformation, made)

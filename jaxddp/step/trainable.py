"""Parameters that a step trains: those that are not frozen, and that the loss depends on.

A parameter without a gradient is missing from the dictionary of gradients, as `grad` is None in torch. Mean, clipping,
decay and momentum leave it out, and its value does not change.
"""

from collections.abc import Iterable
from typing import Any

import jax
import optax
from jax import numpy as jnp

from jaxddp.config.name_patterns import frozen_names
from jaxddp.errors import InputError, listed
from jaxddp.state import Params


def trained(params: Params, frozen: Iterable[str]) -> Params:
    """Return the parameters that learn.

    Args:
        frozen: patterns of the names of parameters that do not learn, as after `requires_grad_(False)` in torch.

    Raises:
        InputError: a pattern matches no parameter, or no parameter is left.

    >>> sorted(trained({"fc1.bias": 1, "fc1.kernel": 2, "fc2.bias": 3}, frozen=("fc1.*",)))
    ['fc2.bias']
    """
    left_out = frozen_names("frozen", frozen, params)
    return {name: value for name, value in params.items() if name not in left_out}


def noted(params: Params, reached: set[str]) -> Params:
    """Return the parameters unchanged; when they are differentiated, add the names with a gradient to `reached`.

    Names are added while jax traces, and the program does not change: a backward pass computes cotangents
    only of the inputs that the loss depends on.

    >>> reached = set()
    >>> def loss(params):
    ...     params = noted(params, reached)
    ...     return params["a"] * jax.lax.stop_gradient(params["b"])
    >>> gradients = jax.grad(loss)({"a": 1.0, "b": 2.0, "c": 3.0})
    >>> reached
    {'a'}
    """

    def note(name: str, value: jax.Array) -> jax.Array:
        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            reached.add(name)
            return (cotangent,)

        identity = jax.custom_vjp(lambda x: x)
        identity.defvjp(lambda x: (x, None), backward)
        return identity(value)

    return {name: note(name, value) for name, value in params.items()}


def of_used(gradients: Params, reached: set[str], find_unused_parameters: bool | None) -> Params:
    """Return the gradients of the parameters that the loss depends on.

    Args:
        reached: names of these parameters, from `noted`.
        find_unused_parameters: treatment of the other parameters, see `jaxddp.step.options.StepOptions`.

    Raises:
        InputError: there are other parameters, and `find_unused_parameters` is False.
    """
    unused = sorted(gradients.keys() - reached)
    if find_unused_parameters is None or not unused:
        return gradients
    if not find_unused_parameters:
        raise InputError(
            f"jax_loss: does not depend on {listed(unused, joint=', ')}; freeze these parameters, "
            "or set find_unused_parameters=True"
        )
    return {name: gradient for name, gradient in gradients.items() if name in reached}


def with_zeros(gradients: Params, params: Params) -> Params:
    """Return gradients of all of these parameters: zeros for those that have none."""
    return {name: gradients.get(name, jnp.zeros_like(value)) for name, value in params.items()}


def update(
    optimizer: optax.GradientTransformation, gradients: Params, opt_state: Any, params: Params
) -> tuple[Params, Any]:
    """Update the parameters that have a gradient, and the optimizer's state of only these parameters.

    Args:
        opt_state: state for all parameters that learn; per-parameter values are dictionaries by name.
        params: all parameters, also those that do not learn.

    Returns:
        The next parameters and the optimizer's next state.

    >>> optimizer = optax.sgd(1.0, momentum=0.5)
    >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> params, opt_state = update(optimizer, {"a": jnp.ones(1)}, optimizer.init(params), params)
    >>> print(params["a"], params["b"], opt_state[0].trace["a"], opt_state[0].trace["b"])
    [0.] [1.] [1.] [0.]
    """

    def has_more(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() > gradients.keys() and node.keys() <= params.keys()

    def restrict(node: Any) -> Any:
        return {name: node[name] for name in gradients} if has_more(node) else node

    def merge(before: Any, after: Any) -> Any:
        return {**before, **after} if has_more(before) else after

    some = {name: params[name] for name in gradients}
    restricted = jax.tree.map(restrict, opt_state, is_leaf=has_more)
    updates, after = optimizer.update(gradients, restricted, some)
    return {**params, **optax.apply_updates(some, updates)}, jax.tree.map(merge, opt_state, after, is_leaf=has_more)

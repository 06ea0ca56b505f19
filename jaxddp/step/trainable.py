"""Which parameters a step trains: none that is frozen, and none that the loss does not depend on.

A parameter without a gradient is not in the dictionary of gradients, as torch's `grad` is None: nothing
that comes later (mean, clipping, decay, momentum) knows of it, and it stays as it is.
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
    """The parameters that learn.

    Args:
        frozen: patterns of names; torch says `requires_grad_(False)`.

    Raises:
        InputError: a pattern matches no parameter, or nothing is left.

    >>> sorted(trained({"fc1.bias": 1, "fc1.kernel": 2, "fc2.bias": 3}, frozen=("fc1.*",)))
    ['fc2.bias']
    """
    left_out = frozen_names("frozen", frozen, params)
    return {name: value for name, value in params.items() if name not in left_out}


def noted(params: Params, reached: set[str]) -> Params:
    """The parameters as they are; while they are differentiated, the names of those that get a gradient are noted.

    It happens when jax traces, and leaves nothing in the program: a backward pass asks for the cotangent
    of what the loss depends on, and of nothing else.

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


def of_reached(gradients: Params, reached: set[str], find_unused_parameters: bool | None) -> Params:
    """The gradients of the parameters that the loss depends on.

    Args:
        find_unused_parameters: what is done about the others, see `jaxddp.step.options.StepOptions`.

    Raises:
        InputError: there are others, and they were not expected.
    """
    unused = sorted(gradients.keys() - reached)
    if find_unused_parameters is None or not unused:
        return gradients
    if not find_unused_parameters:
        raise InputError(
            f"the loss does not depend on {listed(unused, joint=', ')}; freeze what is not to learn, "
            "or say find_unused_parameters=True"
        )
    return {name: gradient for name, gradient in gradients.items() if name in reached}


def with_zeros(gradients: Params, params: Params) -> Params:
    """Gradients of all of these parameters, zero where there is none."""
    return {name: gradients.get(name, jnp.zeros_like(value)) for name, value in params.items()}


def update(
    optimizer: optax.GradientTransformation, gradients: Params, opt_state: Any, params: Params
) -> tuple[Params, Any]:
    """One step of an optimizer on the parameters that have a gradient; of the others, its state stays.

    Args:
        opt_state: of all parameters that are trained. What it keeps for each is a dictionary of their names.
        params: all, also those that are not trained.

    >>> optimizer = optax.sgd(1.0, momentum=0.5)
    >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> params, opt_state = update(optimizer, {"a": jnp.ones(1)}, optimizer.init(params), params)
    >>> print(params["a"], params["b"], opt_state[0].trace["a"], opt_state[0].trace["b"])
    [0.] [1.] [1.] [0.]
    """

    def holds_them(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() > gradients.keys() and node.keys() <= params.keys()

    def only_theirs(node: Any) -> Any:
        return {name: node[name] for name in gradients} if holds_them(node) else node

    def merged(before: Any, after: Any) -> Any:
        return {**before, **after} if holds_them(before) else after

    some = {name: params[name] for name in gradients}
    restricted = jax.tree.map(only_theirs, opt_state, is_leaf=holds_them)
    updates, after = optimizer.update(gradients, restricted, some)
    return {**params, **optax.apply_updates(some, updates)}, jax.tree.map(merged, opt_state, after, is_leaf=holds_them)

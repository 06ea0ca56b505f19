"""Hooks on the gradients of chosen parameters, before or after their mean over the replicas.

With g_r replica r's gradient of the step, summed over its micro-batches and scaled as DDP's, and h the hook:

    local   g = mean_r h(g_r)       torch: `parameter.register_hook(h)`
    mean    g = h(mean_r g_r)       torch: a loop over `parameter.grad` between backward pass and clipping

With several micro-batches torch calls a registered hook for each of them; here it is called once per step, which is
the same only if h is linear.

A step is compiled: a hook is called when it is traced, and what it does with arrays becomes part of the program. To
see numbers while it runs, it calls `jax.debug.print`, or `jax.debug.callback` with a function of its own.

>>> def clipped(name, gradient):
...     jax.debug.print("{name}: {largest}", name=name, largest=jnp.abs(gradient).max())
...     return jnp.clip(gradient, -1.0, 1.0)
>>> hooks = (GradientHook("fc.*", clipped),)
>>> gradients = {"fc.bias": jnp.array([-3.0, 0.5]), "scale": jnp.array([7.0])}
>>> print({name: x.tolist() for name, x in jax.jit(lambda g: hooked(g, hooks, "mean"))(gradients).items()})
fc.bias: 3.0
{'fc.bias': [-1.0, 0.5], 'scale': [7.0]}

Source: pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
from jax import numpy as jnp

from jaxddp.config.choices import GRADIENT_STAGES
from jaxddp.config.name_patterns import matching
from jaxddp.errors import InputError, check_name
from jaxddp.state import Params


@dataclass(frozen=True)
class GradientHook:
    """A function of the gradients of some parameters.

    Attributes:
        pattern: of the parameters' names (`fnmatch`'s: "encoder.*").
        function: (name, gradient) -> the gradient to go on with, of the same shape and dtype; None: the same, it
            was only looked at.
        when: "local": on each replica, before gradients are sent; "mean": after, before clipping.

    Raises:
        InputError: `when` is something else.
    """

    pattern: str
    function: Callable[[str, jax.Array], jax.Array | None]
    when: str = "mean"

    def __post_init__(self) -> None:
        check_name("GradientHook: when", self.when, GRADIENT_STAGES)


def hooked(gradients: Params, hooks: Sequence[GradientHook], when: str) -> Params:
    """The gradients as the hooks of this stage leave them, one hook after the other.

    Raises:
        InputError: a hook returns a gradient of another shape or dtype.
    """
    for hook in hooks:
        if hook.when == when:
            chosen = {name: x for name, x in gradients.items() if fnmatchcase(name, hook.pattern)}
            gradients = {**gradients, **{name: _called(hook, name, x) for name, x in chosen.items()}}
    return gradients


def check_patterns(hooks: Iterable[GradientHook], params: Iterable[str]) -> None:
    """Raise `InputError` if a hook's pattern matches no parameter that learns."""
    matching("gradient_hooks", [hook.pattern for hook in hooks], params)


def _called(hook: GradientHook, name: str, gradient: jax.Array) -> jax.Array:
    found = hook.function(name, gradient)
    if found is None:
        return gradient
    if jnp.shape(found) != gradient.shape or jnp.result_type(found) != gradient.dtype:
        kind, right = (f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (found, gradient))
        raise InputError(f"gradient_hooks {hook.pattern}: returns {kind} for {name}; must be {right}, or None")
    return jnp.asarray(found)

"""Hooks on the gradients of chosen parameters, before or after their mean over the replicas.

With g_r the gradient of replica r, accumulated over its micro-batches and normalised as in DDP, and h the hook:

    local   g = mean_r h(g_r)       torch: `parameter.register_hook(h)`
    mean    g = h(mean_r g_r)       torch: a loop over `parameter.grad` between backward pass and clipping

With several micro-batches, torch calls a registered hook for each of them. Here a hook is called once per step, which
is the same only if h is linear.

A step is compiled: a hook runs while the step is traced, and its operations on arrays become part of the program. To
see numbers while the program runs, call `jax.debug.print` or `jax.debug.callback` in the hook.

>>> def clip(name, gradient):
...     jax.debug.print("{name}: {largest}", name=name, largest=jnp.abs(gradient).max())
...     return jnp.clip(gradient, -1.0, 1.0)
>>> hooks = (GradientHook("fc.*", clip),)
>>> gradients = {"fc.bias": jnp.array([-3.0, 0.5]), "scale": jnp.array([7.0])}
>>> print({name: x.tolist() for name, x in jax.jit(lambda g: apply_hooks(g, hooks, "mean"))(gradients).items()})
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
    """A function to call with the gradients of some parameters.

    Attributes:
        pattern: pattern of parameter names, as in `fnmatch` ("encoder.*").
        function: (name, gradient) -> new gradient of the same shape and dtype, or None to leave it unchanged.
        when: "local": on each replica, before gradients are sent; "mean": after their mean, before clipping.

    Raises:
        InputError: `when` has another value.
    """

    pattern: str
    function: Callable[[str, jax.Array], jax.Array | None]
    when: str = "mean"

    def __post_init__(self) -> None:
        check_name("GradientHook: when", self.when, GRADIENT_STAGES)


def apply_hooks(gradients: Params, hooks: Sequence[GradientHook], when: str) -> Params:
    """Apply the hooks of one stage, "local" or "mean", one after the other.

    Raises:
        InputError: a hook returns a gradient of another shape or dtype.
    """
    for hook in hooks:
        if hook.when == when:
            chosen = {name: x for name, x in gradients.items() if fnmatchcase(name, hook.pattern)}
            gradients = {**gradients, **{name: _call(hook, name, x) for name, x in chosen.items()}}
    return gradients


def check_patterns(hooks: Iterable[GradientHook], params: Iterable[str]) -> None:
    """Raise `InputError` if the pattern of a hook matches no parameter that learns."""
    matching("gradient_hooks", [hook.pattern for hook in hooks], params)


def _call(hook: GradientHook, name: str, gradient: jax.Array) -> jax.Array:
    result = hook.function(name, gradient)
    if result is None:
        return gradient
    if jnp.shape(result) != gradient.shape or jnp.result_type(result) != gradient.dtype:
        kind, right = (f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (result, gradient))
        raise InputError(f"gradient_hooks {hook.pattern}: returns {kind} for {name}; must be {right}, or None")
    return jnp.asarray(result)

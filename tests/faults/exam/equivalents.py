"""Mutants that are equivalent by hand: both expressions, which a test evaluates on 1,000 random inputs.

At most 20 of the 700; all others are proved in `equivalence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
import torch
from jax import numpy as jnp

MOST = 20


@dataclass(frozen=True)
class Equivalent:
    """A mutant whose edit changes no value.

    Attributes:
        why: why both expressions are equal, for all inputs that can occur.
        before, after: the edited expression and what replaces it, with their gradients where these are taken, as
            functions of the same inputs.
        shapes: shapes of the inputs, which are drawn from a normal distribution.
    """

    why: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def _swapped_huber(delta: float) -> Equivalent:
    """Return the equivalence of Huber losses of (predictions, targets) and of (targets, predictions)."""

    def before(predictions: Any, targets: Any) -> Any:
        return optax.huber_loss(predictions, targets, delta=delta).mean()

    def after(predictions: Any, targets: Any) -> Any:
        return optax.huber_loss(targets, predictions, delta=delta).mean()

    functions = (jax.jit(jax.value_and_grad(function)) for function in (before, after))
    return Equivalent("the loss depends on the absolute error alone", *functions, ((8, 3), (8, 3)))


def _rates(**dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a number times the rates of positions; integers become float64, PyTorch's default type in the check."""
    return lambda x: torch.as_tensor(x) * 100.0 ** (-torch.arange(0, 8, 2, **dtype).double() / 8)


# Name of a mutant, as `Mutant.name` -> why it is equivalent.
EQUIVALENTS = {
    "mlp/jax/arguments_swapped/37:29/0": _swapped_huber(0.5),
    "actor_critic/jax/arguments_swapped/62:35/0": _swapped_huber(0.2),
    "critics/jax/slice/17:34/0": Equivalent(
        "jax clamps the index to the only column",
        jax.jit(jax.value_and_grad(lambda x: jnp.square(x[:, 0]).sum())),
        jax.jit(jax.value_and_grad(lambda x: jnp.square(x[:, 1]).sum())),
        ((4, 1),),
    ),
    "encoder/torch/keyword_left_out/14:48/0": Equivalent(
        "small integers are exact in each type, and division gives the default type",
        _rates(dtype=torch.float64),
        _rates(),
        ((),),
    ),
}

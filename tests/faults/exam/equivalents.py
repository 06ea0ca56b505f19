"""Mutants that are equivalent by hand: both expressions, which a test evaluates on 1,000 random inputs.

At most 20 of the 700; all others are proved in `equivalence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax import numpy as jnp
from torch.nn import functional as F

from jaxddp.nn.losses import as_losses, sums_of

MOST = 20


@dataclass(frozen=True)
class Equivalent:
    """A mutant whose edit changes no value.

    Attributes:
        why: why both expressions are equal, for all inputs that can occur.
        before, after: the edited expression and what replaces it, with their gradients where these are taken, as
            functions of the same inputs.
        shapes: shapes of the inputs, which are drawn from a normal distribution.
        draws: both expressions draw a random number, from one distribution.
    """

    why: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    draws: bool = False


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


def _average(learns: bool) -> Callable[[Any, Any], Any]:
    """Return the next average of weights, of a parameter that no optimizer has."""

    def average(before: Any, new: Any) -> Any:
        parameter = torch.nn.Parameter(torch.as_tensor(before), requires_grad=learns)
        with torch.no_grad():
            parameter.mul_(0.99).add_(torch.as_tensor(new), alpha=0.01)
        return parameter.detach().numpy()

    return average


def _noise(own: bool) -> Callable[[Any], Any]:
    """Return the first number of noise, of a stream of its own or of the default one; a number gives the seed."""

    def first(x: Any) -> Any:
        seed = int(abs(x) * 1e6)
        rngs = nnx.Rngs(seed, noise=seed + 1) if own else nnx.Rngs(seed)
        return np.asarray(jax.random.normal(rngs.noise()))

    return first


def _kernels(copies: bool) -> Callable[[Any], Any]:
    """Return the sums of kernels and of biases in the groups that an optimizer makes of a list of parameters."""

    def sums(x: Any) -> Any:
        parameters = [np.full(shape, x) for shape in ((2, 3), (3,), (3, 1), (1,))]
        parameters = list(parameters) if copies else parameters
        return np.stack([sum(p.sum() for p in parameters if (p.ndim > 1) is kernel) for kernel in (True, False)])

    return sums


def _hardest(fill: float) -> Callable[[Any, Any], Any]:
    """Return the mean of the three largest similarities with other examples; the diagonal is filled."""

    def mean(a: Any, b: Any) -> Any:
        a, b = (F.normalize(torch.as_tensor(x), dim=-1) for x in (a, b))
        others = (a @ b.T).masked_fill(torch.eye(len(a), dtype=torch.bool), fill)
        return others.topk(3, dim=-1).values.mean(dim=-1).numpy()

    return mean


def _one_element() -> Equivalent:
    """Return the equivalence of a mean and of an array that has it as its only element, as steps and tests take it."""

    def mean(losses: Any, **axes: bool) -> Any:
        returned = as_losses(jnp.square(losses).mean(**axes))
        sums = [sums_of(returned, None, train, {}, {"x": losses}) for train in (True, False)]
        return sum(of["loss"] / of["count"] + of["count"] for of in sums)

    functions = (jax.jit(jax.value_and_grad(partial(mean, **axes))) for axes in ({}, {"keepdims": True}))
    return Equivalent("a loss of one element for several examples is a mean", *functions, ((8,),))


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
    "encoder/jax/keyword_added/62:62/0": _one_element(),
    "residual_convnet/jax/keyword_added/145:89/0": _one_element(),
    "encoder/torch/keyword_left_out/14:48/0": Equivalent(
        "small integers are exact in each type, and division gives the default type",
        _rates(dtype=torch.float64),
        _rates(),
        ((),),
    ),
    "diffusion/torch/boolean/37:63/0": Equivalent(
        "the average's parameters are in no optimizer, and no loss depends on them",
        _average(learns=False),
        _average(learns=True),
        ((3,), (3,)),
    ),
    "contrastive/torch/number/45:74/0": Equivalent(
        "a similarity is at least -1, so that the three largest of seven others are never the filled one",
        _hardest(-1.0),
        _hardest(-2.0),
        ((8, 5), (8, 5)),
    ),
    "residual_convnet/torch/call_left_out/77:18/0": Equivalent(
        "the trainers and the check give an optimizer a list of parameters, which may be read twice",
        _kernels(copies=True),
        _kernels(copies=False),
        ((),),
    ),
    "vae/jax/keyword_left_out/33:26/0": Equivalent(
        "the default stream, which draws nothing else in a step, gives the noise in place of one of its own",
        _noise(own=True),
        _noise(own=False),
        ((),),
        draws=True,
    ),
}

"""Optimizers in both frameworks from one recipe: torch's, and its optax twin in pieces that can each be wrong."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
import torch
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.optim.transforms import scale_by_adam, scale_by_root_of_sum, trace

from .steps import named_map

WARMUP = 3.0
OTHERS = {"nadam": "NAdam", "radam": "RAdam", "adadelta": "Adadelta"}  # jaxddp's function -> torch's class


def factor(count: Any) -> Any:
    """Return the factor on the rate after `count` steps: linear up to 1, then the inverse root."""
    rise, fall = (count + 1.0) / WARMUP, (WARMUP / (count + 1.0)) ** 0.5
    return jnp.minimum(rise, fall) if isinstance(count, jax.Array) else min(rise, fall)


@dataclass(frozen=True)
class Schedule:
    """A schedule of the rate in both frameworks.

    Attributes:
        torch: torch's optimizer -> its schedule.
        jax: (highest rate, count) -> rate.
    """

    torch: Callable[[torch.optim.Optimizer], Any]
    jax: Callable[[float, Any], Any]


FIRST, RISE, FALL = 0.1, 4, 20  # share of the highest rate at the start, steps of the warm-up, steps of a cosine
LONG = 1000


def warm_cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Build a line up, then a cosine."""
    line = torch.optim.lr_scheduler.LinearLR(optimizer, FIRST, total_iters=RISE)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FALL)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [line, cosine], [RISE])


def warm_cosine_in_jax(lr: float, count: Any) -> Any:
    """Return the rate of `warm_cosine`, which rises again after its end, unlike a cosine of optax."""
    line = FIRST + (1 - FIRST) * count / RISE
    return lr * jnp.where(count < RISE, line, (1 + jnp.cos(jnp.pi * (count - RISE) / FALL)) / 2)


SCHEDULES = {
    "root": Schedule(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor), lambda lr, count: lr * factor(count)
    ),
    "cosine": Schedule(warm_cosine, warm_cosine_in_jax),
    "line": Schedule(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISE)),
        lambda lr, count: optax.linear_schedule(lr / RISE, lr, RISE - 1)(count),
    ),
    "long": Schedule(
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, FIRST, total_iters=LONG),
        # optax.linear_schedule rounds to float32 relative to the highest rate, which is coarse this far below it.
        lambda lr, count: lr * (FIRST + (1 - FIRST) * jnp.minimum(count / LONG, 1)),
    ),
}


def is_matrix(params: Any) -> Any:
    """Return a mask of the matrices, which decay where biases and norms do not."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def is_used(params: Any) -> Any:
    """Label the parameters that the loss depends on "trained", the others "skipped"."""
    return named_map(lambda name, _: "skipped" if name.startswith("unused.") else "trained", params)


@dataclass(frozen=True)
class Recipe:
    """An optimizer in torch's terms.

    Attributes:
        kind: sgd, adam, adamw, rmsprop, adagrad, or a key of `OTHERS`.
        lr: highest rate.
        decay: weight decay.
        matrices_only: decay matrices only, not biases and norms.
        betas, eps: options of Adam and AdamW; eps also of RMSprop and Adagrad.
        momentum, dampening, nesterov: options of SGD.
        alpha, centred: options of RMSprop.
        initial: initial value of the sum or mean of squares.
        options: options of the others.
        rates: key of `SCHEDULES`.
    """

    kind: str
    lr: float
    decay: float = 0.02
    matrices_only: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    alpha: float = 0.99
    centred: bool = False
    initial: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    rates: str = "root"

    def torch_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build torch's optimizer."""
        every = list(parameters)
        groups: list[Any] = [{"params": every}]
        if self.matrices_only:
            free = [p for p in every if p.ndim == 1]
            groups = [{"params": [p for p in every if p.ndim > 1]}, {"params": free, "weight_decay": 0.0}]
        common: dict[str, Any] = {"lr": self.lr, "weight_decay": self.decay}
        if self.kind == "sgd":
            options = {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov}
            return torch.optim.SGD(groups, **common, **options)
        if self.kind in ("adam", "adamw"):
            make = torch.optim.Adam if self.kind == "adam" else torch.optim.AdamW
            return make(groups, **common, betas=self.betas, eps=self.eps)
        if self.kind in OTHERS:
            return getattr(torch.optim, OTHERS[self.kind])(groups, **common, **self.options)
        if self.kind == "rmsprop":
            return torch.optim.RMSprop(groups, **common, alpha=self.alpha, eps=self.eps, centered=self.centred)
        return torch.optim.Adagrad(groups, **common, eps=self.eps, initial_accumulator_value=self.initial)

    def torch_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build torch's schedule of the rate."""
        return SCHEDULES[self.rates].torch(optimizer)

    def schedule(self, count: Any) -> Any:
        """Return the rate after `count` steps."""
        return SCHEDULES[self.rates].jax(self.lr, count)


def direction(recipe: Recipe) -> optax.GradientTransformation:
    """Return the transformation of the gradients before the rate, as in torch."""
    if recipe.kind == "sgd":
        return trace(recipe.momentum, recipe.dampening, recipe.nesterov)
    if recipe.kind in ("adam", "adamw"):
        return scale_by_adam(recipe.betas, recipe.eps)
    if recipe.kind in OTHERS:
        return optax.chain(getattr(optim, recipe.kind)(1.0, **recipe.options), optax.scale(-1.0))
    if recipe.kind == "rmsprop":
        rescale = optax.scale_by_stddev if recipe.centred else optax.scale_by_rms
        return rescale(recipe.alpha, recipe.eps, initial_scale=recipe.initial, eps_in_sqrt=False)
    return scale_by_root_of_sum(recipe.eps, recipe.initial)


def decay_of(recipe: Recipe) -> optax.GradientTransformation:
    """Return the transformation that adds `decay` times the parameters."""
    return optax.add_decayed_weights(recipe.decay, is_matrix if recipe.matrices_only else None)


@dataclass(frozen=True)
class Optimizer:
    """Optax twin of a torch optimizer, in pieces.

    Attributes:
        recipe: numbers of the optimizer.
        direction: recipe -> transformation of gradients into the direction of the step.
        decay: recipe -> transformation that adds the decay.
        coupled: apply the decay before `direction`; None: as torch's optimizer of that kind.
        after_rate: apply the decay after the rate.
        schedule: (recipe, count) -> rate.
        first, last: further transformations at either end.
        skips_unused: leave out unused parameters.
    """

    recipe: Recipe
    direction: Callable[[Recipe], optax.GradientTransformation] = direction
    decay: Callable[[Recipe], optax.GradientTransformation] = decay_of
    coupled: bool | None = None
    after_rate: bool = False
    schedule: Callable[[Recipe, Any], Any] = Recipe.schedule
    first: tuple[optax.GradientTransformation, ...] = ()
    last: tuple[optax.GradientTransformation, ...] = ()
    skips_unused: bool = False

    def build(self) -> optax.GradientTransformation:
        """Build the optax chain."""
        coupled = self.recipe.kind != "adamw" if self.coupled is None else self.coupled
        directed, decay = self.direction(self.recipe), self.decay(self.recipe)
        rate = optax.scale_by_learning_rate(lambda count: self.schedule(self.recipe, count))
        if self.after_rate:
            middle = [directed, rate, self.decay(dataclasses.replace(self.recipe, decay=-self.recipe.decay))]
        else:
            middle = [decay, directed, rate] if coupled else [directed, decay, rate]
        chain = optax.chain(*self.first, *middle, *self.last)
        if not self.skips_unused:
            return chain
        return optax.partition({"trained": chain, "skipped": optax.set_to_zero()}, is_used)


RECIPES: dict[str, Recipe] = {
    "sgd": Recipe("sgd", 0.05, momentum=0.9),
    "sgd_plain": Recipe("sgd", 0.1),
    "sgd_nesterov": Recipe("sgd", 0.05, momentum=0.9, nesterov=True),
    "sgd_dampening": Recipe("sgd", 0.05, momentum=0.9, dampening=0.3),
    "adam": Recipe("adam", 0.01),
    "adamw": Recipe("adamw", 0.01),
    "adamw_tiny_decay": Recipe("adamw", 0.01, decay=1e-6),
    "rmsprop": Recipe("rmsprop", 0.003),
    "rmsprop_centred": Recipe("rmsprop", 0.003, centred=True),
    "adagrad": Recipe("adagrad", 0.05, eps=1e-10),
    "nadam": Recipe("nadam", 0.01, options={"momentum_decay": 4e-3}),
    "radam": Recipe("radam", 0.01, options={"betas": (0.9, 0.99)}),
    "adadelta": Recipe("adadelta", 0.5, options={"rho": 0.9}),
}

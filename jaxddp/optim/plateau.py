"""Learning rate that falls when a metric stops improving: torch's ReduceLROnPlateau.

A schedule knows the number of steps and nothing else, so the rate is part of the optimizer's state here: it is saved
and restored with it, and `observed` changes it between two epochs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.config.ranges import check_range
from jaxddp.errors import InputError, check_name
from jaxddp.optim.groups import Grouped

Rates = float | Sequence[float]


@partial(
    jax.tree_util.register_dataclass, data_fields=["rates", "best", "bad_epochs", "cooldown"], meta_fields=["rule"]
)
@dataclass(frozen=True)
class Plateau:
    """Rates and counts, scalars, and the rule by which a metric changes them.

    Attributes:
        rates: learning rate of each group.
        best: best metric so far; infinite before the first.
        bad_epochs: epochs since the metric improved, or since the rates fell.
        cooldown: epochs left in which none counts as bad.
        rule: options of `reduce_on_plateau`.
    """

    rates: tuple[jax.Array, ...]
    best: jax.Array
    bad_epochs: jax.Array
    cooldown: jax.Array
    rule: "PlateauRule"


class PlateauState(NamedTuple):
    """Plateau, and state of the optimizer that uses its rates."""

    plateau: Plateau
    inner: Any


@dataclass(frozen=True)
class PlateauRule:
    """Options of `reduce_on_plateau`, with the least rate of each group."""

    mode: str
    factor: float
    patience: int
    threshold: float
    threshold_mode: str
    cooldown: int
    min_lrs: tuple[float, ...]
    eps: float

    def __post_init__(self) -> None:
        check_name("mode", self.mode, ("min", "max"))
        check_name("threshold_mode", self.threshold_mode, ("rel", "abs"))
        check_range("min_lr", self.min_lrs)
        if not 0 <= self.factor < 1:
            raise InputError(f"factor {self.factor}: must be at least 0 and below 1")

    def start(self, lrs: Sequence[float]) -> Plateau:
        """Return the plateau before the first epoch."""
        worst = jnp.inf if self.mode == "min" else -jnp.inf
        rates = tuple(jnp.asarray(lr, float) for lr in lrs)
        return Plateau(rates, jnp.asarray(worst, float), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32), self)

    def after(self, plateau: Plateau, metric: jax.typing.ArrayLike) -> Plateau:
        """Return the plateau after an epoch; NaN is no improvement."""
        metric = jnp.asarray(metric, plateau.best.dtype)
        better = self._improves(metric, plateau.best)
        resting = plateau.cooldown > 0
        bad = jnp.where(better | resting, 0, plateau.bad_epochs + 1)
        falls = bad > self.patience
        return Plateau(
            tuple(
                jnp.where(falls, self._lower(*pair), pair[0]) for pair in zip(plateau.rates, self.min_lrs, strict=True)
            ),
            jnp.where(better, metric, plateau.best),
            jnp.where(falls, 0, bad),
            jnp.where(falls, self.cooldown, plateau.cooldown - resting),
            self,
        )

    def _improves(self, metric: jax.Array, best: jax.Array) -> jax.Array:
        sign = -1 if self.mode == "min" else 1
        bound = best * (1 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return metric < bound if self.mode == "min" else metric > bound

    def _lower(self, rate: jax.Array, least: float) -> jax.Array:
        lower = jnp.maximum(rate * self.factor, least)
        return jnp.where(rate - lower > self.eps, lower, rate)


def reduce_on_plateau(
    make: Callable[..., optax.GradientTransformation],
    lr: Rates = 1e-3,
    mode: str = "min",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: Rates = 0.0,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Multiply an optimizer's rate by `factor` once a metric has not improved for more than `patience` epochs.

    The rate changes only when `observed` or `DistributedDataParallel.observed` is called with the metric of an epoch.

    Args:
        make: function from the rate, a schedule, to the optimizer; from several rates if `lr` is a sequence.
        lr: first rate, or the first rate of each group.
        mode: "min" if the metric is to fall, "max" if it is to rise.
        threshold, threshold_mode: least improvement that counts: "rel": a share of the best metric; "abs": a
            difference.
        cooldown: epochs after a reduction in which none counts as bad.
        min_lr: least rate, or that of each group.
        eps: least change of a rate; a smaller one is not made.

    Source: torch.optim.lr_scheduler.ReduceLROnPlateau.

    Raises:
        InputError: an unknown mode, a number out of its range, or not one `min_lr` for each of several rates.

    >>> from jaxddp import optim
    >>> optimizer = optim.reduce_on_plateau(lambda rate: optim.sgd(rate, momentum=0.9), lr=0.5, patience=1)
    >>> state = optimizer.init(jnp.zeros(2))
    >>> for loss in (3.0, 2.0, 2.5, float("nan")):
    ...     state = optim.observed(state, loss)
    ...     print(f"{state.plateau.rates[0]:.2f}")
    0.50
    0.50
    0.50
    0.05
    """
    lrs = tuple(lr) if isinstance(lr, Sequence) else (lr,)
    min_lrs = tuple(min_lr) if isinstance(min_lr, Sequence) else (min_lr,) * len(lrs)
    check_range("lr", lrs)
    if len(min_lrs) != len(lrs):
        raise InputError(f"min_lr {min_lr}: must be one number, or one for each of {len(lrs)} rates")
    rule = PlateauRule(mode, factor, patience, threshold, threshold_mode, cooldown, min_lrs, eps)

    def at_rates(rates: Sequence[jax.Array]) -> optax.GradientTransformation:
        # As schedules, so that the optimizer casts them to the dtype of each parameter.
        return make(*(lambda _, rate=rate: rate for rate in rates))

    def init(params: optax.Params) -> PlateauState:
        plateau = rule.start(lrs)
        return PlateauState(plateau, at_rates(plateau.rates).init(params))

    def update(grads: optax.Updates, state: PlateauState, params: Any = None) -> tuple[optax.Updates, PlateauState]:
        updates, inner = at_rates(state.plateau.rates).update(grads, state.inner, params)
        return updates, state._replace(inner=inner)

    optimizer = optax.GradientTransformation(init, update)
    if not isinstance(first := at_rates(rule.start(lrs).rates), Grouped):
        return optimizer
    options = mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
    of_learning = reduce_on_plateau(lambda *rates: make(*rates).of_learning, lr, *options)
    return Grouped(*optimizer).having(frozen=first.frozen, of_learning=of_learning, group_of=first.group_of)


def plateaus(opt_state: Any) -> list[Plateau]:
    """Return the plateaus anywhere in an optimizer's state."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_plateau) if _is_plateau(node)]


def with_plateaus(opt_state: Any, after: Sequence[Plateau]) -> Any:
    """Return an optimizer's state with other plateaus, in the order of `plateaus`."""
    rest = iter(after)
    return jax.tree.map(lambda node: next(rest) if _is_plateau(node) else node, opt_state, is_leaf=_is_plateau)


def observed(opt_state: Any, metric: jax.typing.ArrayLike) -> Any:
    """Return an optimizer's state after an epoch that ended with this metric; pure, for any state.

    Without a plateau in the state, it is returned unchanged.
    """
    return with_plateaus(opt_state, [plateau.rule.after(plateau, metric) for plateau in plateaus(opt_state)])


def _is_plateau(node: Any) -> bool:
    return isinstance(node, Plateau)

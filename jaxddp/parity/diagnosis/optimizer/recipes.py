"""Optimizer steps in NumPy and float64: torch's, optax's, and those with a mistake.

All computations are elementwise, so a sample of elements can be replayed as well as full tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxddp.parity.compare.clipping import TORCH_CLIP_EPSILON, clip_factor

# Parts of each optimizer's state; a restore may lose any of them.
STATE = {
    "sgd": ("buffer",),
    "adam": ("mean", "square", "largest"),
    "rmsprop": ("mean", "square", "buffer"),
    "adagrad": ("square",),
}
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer over S steps and T tensors, with g the gradient, p the parameter, t the count.

        g <- scale g;  g <- g min(1, max_norm / (norm_scale |g| + clip_epsilon));  coupled: g <- g + decay p
        sgd:      b <- first b + (1 - dampening) g, at first b <- g;  u = b;  nesterov: u = g + first b
        adam:     m <- first m + (1 - first) g;  v <- second v + (1 - second) g^2
                  u = m / (1 - first^t) / root(v / (1 - second^t))
                  amsgrad: root of the largest v so far, or of the largest v / (1 - second^t)
        rmsprop:  v <- second v + (1 - second) g^2;  centred: m <- second m + (1 - second) g, else m = 0
                  b <- first b + g / root(v - m^2);  u = b
        adagrad:  v <- v + g^2;  u = g / root(v)
        update = -lr u;  not coupled: - lr decay p;  rate_inside: g <- lr g, and update = -u

    where root(v) = sqrt(v) + eps.

    Attributes:
        family: a key of `STATE`.
        names: names of the T tensors.
        shapes: shapes of the T tensors.
        rates: learning rates, (R, T), R >= S: as far as the scheduler goes.
        index: row of `rates` at each step, (S,); rows beyond the last are the last.
        factor: factor of every learning rate.
        rate_decay: the learning rate is divided by 1 + (t - 1) rate_decay, (T,).
        first: momentum, or Adam's beta1, (S, T).
        second: RMSprop's alpha, or Adam's beta2, (S, T).
        dampening: torch's dampening, (S, T).
        dampens_first: b starts as (1 - dampening) g.
        eps: epsilon, (S, T).
        eps_place: "outside" the root, "inside": sqrt(v + eps), or "both".
        decay: weight decay, (S, T).
        coupled: weight decay is added to the gradient.
        decay_rate: factor of uncoupled decay in place of the learning rate; None: the learning rate.
        used: whether each tensor is updated, (S, T); the others and their state do not change.
        count: t, (S, T).
        start: initial v, (T,).
        norms: |g| of all tensors together before scaling and clipping, (S,).
        clipped: the reference's clipping, which the given gradients have had, as a factor, (S,).
        scale: factor of the gradients.
        max_norm: largest norm of the gradients; None: they are not clipped by their norm.
        norm_scale: factor of the norm that is compared to `max_norm`.
        clip_epsilon: added to the norm.
        largest: elements of the gradients are clipped to -largest .. largest; None: they are not.
        corrects: divide by 1 - first^t and 1 - second^t.
        nesterov, centred: torch's flags.
        amsgrad: "": no; "torch": the largest v; "corrected": the largest v / (1 - second^t).
        rate_inside: the buffer sums gradients times the learning rate.
        restored_at: number of steps after which the state is saved and restored; None: never.
        lost: parts of the state that the restore loses.
    """

    family: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rates: np.ndarray
    index: np.ndarray
    rate_decay: np.ndarray
    first: np.ndarray
    second: np.ndarray
    dampening: np.ndarray
    eps: np.ndarray
    decay: np.ndarray
    used: np.ndarray
    count: np.ndarray
    start: np.ndarray
    norms: np.ndarray
    clipped: np.ndarray
    coupled: bool
    nesterov: bool = False
    centred: bool = False
    amsgrad: str = ""
    rate_inside: bool = False
    dampens_first: bool = False
    corrects: bool = True
    eps_place: str = "outside"
    decay_rate: float | None = None
    factor: float = 1.0
    scale: float = 1.0
    max_norm: float | None = None
    norm_scale: float = 1.0
    clip_epsilon: float = TORCH_CLIP_EPSILON
    largest: float | None = None
    restored_at: int | None = None
    lost: frozenset[str] = frozenset()

    @property
    def scheduled(self) -> bool:
        """Return whether the learning rate changes."""
        return bool((self.rates != self.rates[0]).any())

    @cached_property
    def lr(self) -> np.ndarray:
        """Learning rate of each step and tensor, (S, T)."""
        rates = self.rates[np.clip(self.index, 0, len(self.rates) - 1)]
        return self.factor * rates / (1 + (self.count - 1) * self.rate_decay)

    @cached_property
    def shares(self) -> np.ndarray:
        """Factor of the given gradients at each step, from scaling and clipping, (S,)."""
        scaled = self.scale / self.clipped
        if self.max_norm is None:
            return scaled
        return scaled * clip_factor(self.norm_scale * np.abs(self.scale) * self.norms, self.max_norm, self.clip_epsilon)

    @cached_property
    def fresh(self) -> np.ndarray:
        """Return whether each tensor has no momentum buffer yet, (S, T)."""
        fresh = self.count == 1
        if self.restored_at is not None and "buffer" in self.lost:
            fresh[self.restored_at] = True
        return fresh

    @cached_property
    def numbers(self) -> "list[Numbers]":
        """Numbers of every step, each (T,), or () if all tensors share one."""
        ones = np.ones(self.count.shape)
        rest, rest_ahead, rest_square = ones, ones, ones
        if self.family == "adam" and self.corrects:
            count = np.maximum(self.count, 1)
            rest, rest_ahead = 1 - self.first**count, 1 - self.first ** (count + 1)
            rest_square = 1 - self.second**count
        columns = (self.lr, self.first, self.second, self.dampening, self.eps, self.decay, self.used, self.fresh)
        return [Numbers(*row) for row in zip(*map(_shared, (*columns, rest, rest_ahead, rest_square)), strict=True)]

    def begin(self, block: "ElementBlock", step: int, state: State | None) -> State:
        """Return the state before a step: the initial one at the first step and for parts that a restore lost."""
        lost = self.lost if step == self.restored_at else frozenset()
        new = {part: np.asarray(0.0) for part in STATE[self.family]}
        [start] = _shared(self.start[None])
        new["square"] = np.asarray(block.spread(start))
        return new if state is None else {part: new[part] if part in lost else state[part] for part in state}

    def advance(
        self, block: "ElementBlock", step: int, state: State | None, params: np.ndarray, gradients: np.ndarray
    ) -> tuple[np.ndarray, State]:
        """Take one step on a block of elements.

        Args:
            block: the tensor of each element.
            step: counted from 0.
            state: after the step before; None before the first.
            params, gradients: (E,) or any shape.

        Returns:
            The update, to be added to the parameters, and the new state.
        """
        n = Numbers(*(block.spread(row) for row in self.numbers[step]))
        old = self.begin(block, step, state)
        gradients = self.shares[step] * gradients
        if self.largest is not None:
            gradients = np.clip(gradients, -self.largest, self.largest)
        if self.coupled:
            gradients = gradients + n.decay * params
        if self.rate_inside:
            gradients = n.lr * gradients
        direction, new = DIRECTIONS[self.family](self, n, old, gradients)
        update = -direction if self.rate_inside else -n.lr * direction
        if not self.coupled:
            update = update - (n.lr if self.decay_rate is None else self.decay_rate) * n.decay * params
        if np.all(n.used):
            return update, old | new
        kept = {part: np.where(n.used, value, old[part]) for part, value in new.items()}
        return np.where(n.used, update, 0.0), old | kept


class Numbers(NamedTuple):
    """Numbers of one step, per tensor or per element of a block."""

    lr: np.ndarray
    first: np.ndarray
    second: np.ndarray
    dampening: np.ndarray
    eps: np.ndarray
    decay: np.ndarray
    used: np.ndarray
    fresh: np.ndarray
    rest: np.ndarray  # 1 - first^t
    rest_ahead: np.ndarray  # 1 - first^(t + 1)
    rest_square: np.ndarray  # 1 - second^t


class ElementBlock(NamedTuple):
    """Elements that are replayed together.

    Attributes:
        tensor_of: number of each element's tensor, (E,); one number if all belong to the same tensor.
    """

    tensor_of: np.ndarray | int

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return numbers per tensor, (T,), as numbers per element; a shared number, (), stays one number.

        >>> ElementBlock(np.array([0, 0, 1])).spread(np.array([0.5, 2.0])).tolist()
        [0.5, 0.5, 2.0]
        """
        return values[self.tensor_of] if values.ndim else values


def _shared(table: np.ndarray) -> list[np.ndarray]:
    """Return the rows, (T,); a row whose numbers are equal becomes that number, ().

    >>> _shared(np.array([[1.0, 1.0], [1.0, 2.0]]))
    [np.float64(1.0), array([1., 2.])]
    """
    same = (table == table[:, :1]).all(axis=1)
    if same.all():
        return list(table[:, 0])
    return [row[0] if alike else row for row, alike in zip(table, same, strict=True)]


Direction = Callable[[OptimizerRecipe, Numbers, Mapping[str, np.ndarray], np.ndarray], tuple[np.ndarray, State]]


def _sgd(recipe: OptimizerRecipe, n: Numbers, old: Mapping[str, np.ndarray], g: np.ndarray) -> tuple[np.ndarray, State]:
    kept = (1 - n.dampening) * g
    buffer = np.where(n.fresh, kept if recipe.dampens_first else g, n.first * old["buffer"] + kept)
    return (g + n.first * buffer if recipe.nesterov else buffer), {"buffer": buffer}


def _adam(
    recipe: OptimizerRecipe, n: Numbers, old: Mapping[str, np.ndarray], g: np.ndarray
) -> tuple[np.ndarray, State]:
    mean = n.first * old["mean"] + (1 - n.first) * g
    square = n.second * old["square"] + (1 - n.second) * g**2
    new = {"mean": mean, "square": square}
    if recipe.amsgrad == "torch":
        new["largest"] = square = np.maximum(old["largest"], square)
    square = square / n.rest_square
    if recipe.amsgrad == "corrected":
        new["largest"] = square = np.maximum(old["largest"], square)
    corrected = mean / n.rest
    if recipe.nesterov:
        corrected = n.first * mean / n.rest_ahead + (1 - n.first) * g / n.rest
    return corrected / _root(recipe, square, n.eps), new


def _rmsprop(
    recipe: OptimizerRecipe, n: Numbers, old: Mapping[str, np.ndarray], g: np.ndarray
) -> tuple[np.ndarray, State]:
    square = n.second * old["square"] + (1 - n.second) * g**2
    mean = n.second * old["mean"] + (1 - n.second) * g
    scaled = g / _root(recipe, square - mean**2 if recipe.centred else square, n.eps)
    buffer = n.first * old["buffer"] + scaled
    ahead = scaled + n.first * buffer if recipe.nesterov else buffer
    return ahead, {"mean": mean, "square": square, "buffer": buffer}


def _adagrad(
    recipe: OptimizerRecipe, n: Numbers, old: Mapping[str, np.ndarray], g: np.ndarray
) -> tuple[np.ndarray, State]:
    square = old["square"] + g**2
    return g / _root(recipe, square, n.eps), {"square": square}


def _root(recipe: OptimizerRecipe, square: np.ndarray, eps: np.ndarray) -> np.ndarray:
    if recipe.eps_place == "outside":
        return np.sqrt(square) + eps
    inside = np.sqrt(square + eps)
    return inside + eps if recipe.eps_place == "both" else inside


DIRECTIONS: dict[str, Direction] = {"sgd": _sgd, "adam": _adam, "rmsprop": _rmsprop, "adagrad": _adagrad}

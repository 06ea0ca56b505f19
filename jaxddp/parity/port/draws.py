"""Random numbers of a port's losses: the k-th draw of torch's loss gets the same numbers as the k-th of JAX's.

NumPy draws the numbers, and they travel in the batch as entries that the port's losses do not see.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from types import FrameType
from typing import Any

import numpy as np

from jaxddp.errors import InputError
from jaxddp.parity.port.loading import PortSource
from jaxddp.parity.port.port import Port, Side

SERVED = ("normal", "uniform", "bernoulli")  # kinds of draws that both sides can replace
CONSTANTS = {"bernoulli": 0.0, "normal": 0.5, "uniform": 0.5}  # numbers in a trial; 0 makes dropout keep all elements
CERTAIN = (0, 1)  # probabilities at which a bernoulli draw is constant and does not count as a draw
ENTRY = "jaxddp draw "  # prefix of the batch's hidden entries
GRID = 2**16  # uniform numbers are odd multiples of 1 / (2 GRID), which float32 holds


@dataclass(frozen=True)
class Draw:
    """A draw of random numbers in a loss.

    Attributes:
        kind: "normal", "uniform" or "bernoulli"; for any other draw, the name of its function.
        shape: shape of the numbers.
        where: dotted name of the innermost layer that draws; "" for the root or the loss.
        rate: probability of a 1 in a bernoulli draw, if it is the same for all elements.
        refused: why this draw cannot have the same numbers on both sides; "": it can.

    >>> print(Draw("normal", (32, 8), "encoder"), Draw("bernoulli", (4,), rate=0.9), sep="; ")
    a normal (32, 8) in encoder; a bernoulli (4,)
    """

    kind: str
    shape: tuple[int, ...]
    where: str = ""
    rate: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        """Describe the draw."""
        layer = f"layer {self.where}" if self.where.isdigit() else self.where  # of a Sequential
        return f"a {self.kind} {self.shape}{f' in {layer}' if layer else ''}"


@dataclass(frozen=True)
class Pair:
    """A draw of torch's loss, and the draw of JAX's loss that gets the same numbers."""

    torch: Draw
    jax: Draw


def paired(torch: Sequence[Draw], jax: Sequence[Draw]) -> tuple[Pair, ...]:
    """Pair the draws of both sides in order.

    Raises:
        InputError: a draw cannot have the same numbers on both sides, or has no partner of its kind and size.

    >>> paired([Draw("normal", (32, 8), "encoder")], [])
    Traceback (most recent call last):
    jaxddp.errors.InputError: torch draws a normal (32, 8) in encoder, jax none
    """
    for name, draws in (("torch", torch), ("jax", jax)):
        if refused := next((draw for draw in draws if draw.refused), None):
            raise InputError(f"{name} draws {refused}: {refused.refused}")
    for number, (of_torch, of_jax) in enumerate(zip_longest(torch, jax), start=1):
        none = "none" if number == 1 else f"none after draw {number - 1}"
        if of_jax is None:
            raise InputError(f"torch draws {of_torch}, jax {none}")
        if of_torch is None:
            raise InputError(f"jax draws {of_jax}, torch {none}")
        if of_torch.kind != of_jax.kind or not (
            _moved(of_torch.shape, of_jax.shape) or _reshaped(of_torch.shape, of_jax.shape)
        ):
            says = f"torch draws {of_torch}, jax {of_jax}"
            raise InputError(f"{says} as draw {number}; must be of one kind and size, in the same order")
    return tuple(map(Pair, torch, jax))


def rates_of(pairs: Sequence[Pair]) -> tuple[tuple[float, float], ...]:
    """Return both sides' dropout rates, 1 - P(1), for each pair of masks that have one."""
    both = ((pair.torch.rate, pair.jax.rate) for pair in pairs)
    return tuple((1 - of_torch, 1 - of_jax) for of_torch, of_jax in both if of_torch is not None and of_jax is not None)


def numbers(pair: Pair, rng: np.random.Generator) -> dict[Side, np.ndarray]:
    """Draw the numbers of a pair, in each side's shape: normal ones, or uniform ones in (0, 1), also for masks.

    float32 holds them exactly. If the shape fits two layouts, as of images with as many channels as rows and columns,
    the numbers are equal in both.

    >>> both = numbers(Pair(Draw("normal", (2, 3, 4)), Draw("normal", (2, 4, 3))), np.random.default_rng(0))
    >>> bool((both["torch"] == both["jax"].transpose(0, 2, 1)).all())
    True
    """
    of_torch, of_jax = pair.torch.shape, pair.jax.shape
    size = math.prod(of_torch)
    if pair.torch.kind == "normal":
        flat = rng.standard_normal(size).astype(np.float32).astype(np.float64)
    else:
        flat = (rng.integers(0, GRID, size) + 0.5) / GRID
    layouts = _moved(of_torch, of_jax)
    if not layouts:
        return {"torch": flat.reshape(of_torch), "jax": flat.reshape(of_jax)}
    index = _symmetric(np.arange(size).reshape(of_torch), layouts)
    return {"torch": flat[index], "jax": flat[index.transpose(layouts[0])]}


def _moved(torch: tuple[int, ...], jax: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of torch's axes that give jax's shape: unchanged, channels last, first two axes swapped."""
    axes = tuple(range(len(torch)))
    orders = [axes, (*axes[:1], *axes[2:], *axes[1:2]), (*axes[1::-1], *axes[2:])]
    return [order for order in dict.fromkeys(orders) if tuple(torch[axis] for axis in order) == jax]


def _reshaped(torch: tuple[int, ...], jax: tuple[int, ...]) -> bool:
    """Return whether one shape merges neighbouring axes of the other, such as heads and the batch."""
    ends = [{math.prod(shape[:count]) for count in range(1, len(shape) + 1)} | {1} for shape in (torch, jax)]
    return math.prod(torch) == math.prod(jax) and (ends[0] <= ends[1] or ends[1] <= ends[0])


def _symmetric(index: np.ndarray, orders: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Set some elements equal to others, so that each of these permutations of its axes leaves the array unchanged."""
    while True:
        before = index
        for order in orders:
            index = np.minimum(index, index.transpose(order).transpose(np.argsort(orders[0])))
        if np.array_equal(index, before):
            return index


@dataclass(frozen=True, kw_only=True)
class DrawnPort(Port):
    """A port whose batches contain the numbers that its losses draw.

    Attributes:
        draws: the draws of one micro-batch.
        seed: seed of the numbers.
    """

    draws: tuple[Pair, ...]
    seed: int

    def micro_batches(self, step: int, rank: int, side: Side = "torch") -> list[dict[str, np.ndarray]]:
        """Return the port's micro-batches, with an entry for each draw; see `Port.micro_batches`."""
        pieces = super().micro_batches(step, rank, side)
        for number, piece in enumerate(pieces):
            for k, pair in enumerate(self.draws):
                rng = np.random.default_rng((self.seed, step, rank, number, k))
                piece[f"{ENTRY}{k}"] = numbers(pair, rng)[side]
        return pieces


@dataclass(frozen=True)
class DrawnSource:
    """A source of a `DrawnPort`.

    Attributes:
        source: makes the port.
        draws, seed: see `DrawnPort`.
    """

    source: PortSource
    draws: tuple[Pair, ...]
    seed: int

    @property
    def name(self) -> str:
        """Name of the port."""
        return self.source.name

    def port(self) -> DrawnPort:
        """Make the port."""
        port = self.source.port()
        given = {field.name: getattr(port, field.name) for field in fields(Port)}
        return DrawnPort(**given, draws=self.draws, seed=self.seed)


def examples_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without the entries that the check adds to it."""
    return {name: array for name, array in batch.items() if not name.startswith(ENTRY)}


def shown_entry(name: str) -> str:
    """Return the name of a batch's entry, of the numbers of a draw as messages count these.

    >>> shown_entry("jaxddp draw 0"), shown_entry("x")
    ('draw 1', 'x')
    """
    number = name.removeprefix(ENTRY)
    return f"draw {int(number) + 1}" if number != name and number.isdigit() else name


class Served:
    """Give a loss the random numbers that its batch contains, one draw after the other.

    Args:
        batch: a batch of a `DrawnPort`, of either framework's arrays.
        draws: the draws for which it contains numbers.
        side: name of the side, for messages.
    """

    def __init__(self, batch: Mapping[str, Any], draws: Sequence[Draw], side: str):
        self._side, self._draws, self._taken = side, draws, 0
        self._batch = batch

    @property
    def rest(self) -> dict[str, Any]:
        """Return the batch without the numbers; the factor of a loss (see `jaxddp.parity.port.variants`) stays."""
        names = {f"{ENTRY}{k}" for k in range(len(self._draws))}
        return {name: array for name, array in self._batch.items() if name not in names}

    def take(self, kind: str, shape: Sequence[int]) -> Any:
        """Return the numbers of the next draw.

        Raises:
            InputError: the draw differs from that of the first batch, or the batch has no numbers for it.
        """
        draw = Draw(kind, tuple(shape))
        if self._taken == len(self._draws):
            raise InputError(f"{self._side} draws {draw}, and did not for the first batch; must depend only on shapes")
        expected, name = self._draws[self._taken], f"{ENTRY}{self._taken}"
        if (kind, draw.shape) != (expected.kind, expected.shape):
            raise InputError(f"{self._side} draws {draw}, and {expected} for the first batch; must be the same")
        if name not in self._batch or tuple(self._batch[name].shape) != expected.shape:
            raise InputError("jax_step: must give the loss all entries of the batch, with their shapes")
        self._taken += 1
        return self._batch[name]

    def check(self) -> None:
        """Raise `InputError` unless all numbers were taken."""
        if self._taken < len(self._draws):
            raise InputError(
                f"{self._side} draws {self._draws[self._taken]} for the first batch, and not for another; "
                "must depend only on shapes"
            )


def calling() -> Iterator[FrameType]:
    """Yield the frames on the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def enclosing_layer(name_of: Callable[[Any], str | None]) -> str:
    """Return the name of the innermost layer on the call stack.

    Args:
        name_of: object -> its name; None: not a layer.
    """
    names = (name_of(frame.f_locals.get("self")) for frame in calling())
    return next((name for name in names if name is not None), "")

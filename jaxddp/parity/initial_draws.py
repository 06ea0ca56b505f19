"""Draws of a model's initial weights under other seeds than those that its program sets."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.excerpts import excerpt
from jaxddp.parity.port import Port, PortSource
from jaxddp.parity.records import Tensors
from jaxddp.parity.replaced_functions import replaced

SMALL = 2**22  # elements of a model that is drawn `DRAWS` times; a larger one, whose tensors say more, `FEW` times
DRAWS, FEW = 8, 4
LARGEST = 2**14  # elements of a tensor that is compared in full
MOST_ROWS = 64  # whose products show whether a matrix is orthogonal
FEWEST_ROWS = 3  # two of random numbers may be orthogonal by chance
NAMES = {"seed", "a"}  # of the argument that is a seed
SALT, BITS = 0x5DEECE66D, 2**31 - 1  # of the seeds of a draw


@dataclass(frozen=True)
class DrawnTensor:
    """Values of a tensor in several draws.

    Attributes:
        shape: its shape in torch.
        values: (draws, elements) in torch's order; an excerpt of a large tensor.
        overlap: (draws,) the largest product of two of its rows, or columns where these are fewer, over their mean
            square length: 0 for an orthogonal matrix, NaN where there are less than `FEWEST_ROWS`.
        own: shape of the array that is this tensor, on jax's side; (): there is none, as for a stack of layers.
    """

    shape: tuple[int, ...]
    values: np.ndarray
    overlap: np.ndarray
    own: tuple[int, ...] = ()


def draws_for(elements: int) -> int:
    """Return the number of draws of a model with so many elements."""
    return DRAWS if elements <= SMALL else FEW


class Seeds:
    """Other seeds for a program's random numbers: those that it sets itself, exclusive or a number of the draw.

    Seeds that are equal stay equal, and others stay different. Draw 0 has the seeds of the program.

    Args:
        seed: seed of the generators that the program uses without setting their seed.

    Attributes:
        salt: number of the draw that seeds are changed by.

    >>> seeds = Seeds(0)
    >>> with seeds.replacing():
    ...     seeds.begin(1)
    ...     np.random.default_rng(3).random() == np.random.default_rng(3 ^ seeds.salt).random()
    False
    """

    def __init__(self, seed: int = 0):
        self._seed, self.salt = seed, 0

    def begin(self, draw: int) -> None:
        """Begin a draw, counted from 0."""
        self.salt = draw * SALT & BITS
        for seed in _seeders():
            seed(self._seed)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace NumPy's, torch's and Python's functions that take a seed while the `with` statement's body runs."""
        states = np.random.get_state(), random.getstate()  # noqa: NPY002
        torch = sys.modules.get("torch")
        of_torch = None if torch is None else torch.get_rng_state()
        try:
            with replaced([*((seed, self._salted(seed)) for seed in _seeders()), *self._generators()]):
                yield
        finally:
            self.salt = 0  # modules that were imported meanwhile keep the replacements
            np.random.set_state(states[0])  # noqa: NPY002
            random.setstate(states[1])
            if torch is not None:
                torch.set_rng_state(of_torch)

    def _salted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() & NAMES:
                args = (self._other(args[0] if args else None), *args[1:])
            return function(*args, **{name: self._other(x) if name in NAMES else x for name, x in kwargs.items()})

        return seeded

    def _generators(self) -> list[tuple[Any, Any]]:
        seeds = self

        class RandomState(np.random.RandomState):  # a class, since programs ask whether something is an instance of it
            def __init__(self, seed: Any = None):
                super().__init__(seeds._other(seed))

        return [(np.random.default_rng, self._salted(np.random.default_rng)), (np.random.RandomState, RandomState)]

    def _other(self, seed: Any) -> Any:
        """Return the seed in its place; for a generator that draws one itself, that is the salt."""
        if seed is None or isinstance(seed, int | np.integer):
            return int(seed or 0) ^ self.salt
        if isinstance(seed, list | tuple | np.ndarray):
            return [self._other(part) for part in seed]
        return seed


def _seeders() -> list[Callable[..., Any]]:
    """Return the functions that set the seed of a generator of the whole process."""
    torch = sys.modules.get("torch")
    # torch.compile makes the first one another function.
    of_torch = [] if torch is None else dict.fromkeys([torch.manual_seed, torch.random.manual_seed])
    return [np.random.seed, random.seed, *of_torch]


def drawn(
    source: PortSource, tensors_of: Callable[[Port], Mapping[str, np.ndarray]], seeds: Seeds, count: int
) -> dict[str, DrawnTensor]:
    """Draw the initial weights several times, within `Seeds.replacing`.

    The port is built again for each of the first two draws, and for all draws if it draws weights when it is built.

    Args:
        source: makes the port.
        tensors_of: draws the weights of a port, under torch's names.
        seeds: seeds of the draws.
        count: number of draws, 3 or more.
    """
    excerpts: list[Tensors] = []
    shapes: dict[str, tuple[int, ...]] = {}
    overlaps: list[dict[str, float]] = []
    port, anew = None, True
    while len(excerpts) < count:
        seeds.begin(len(excerpts))
        port = source.port() if anew or port is None else port
        tensors = {name: np.asarray(x, np.float32) for name, x in tensors_of(port).items() if _is_real(x)}
        shapes = {name: x.shape for name, x in tensors.items()}
        excerpts.append({name: excerpt(x, LARGEST).reshape(-1) for name, x in tensors.items()})
        overlaps.append({name: _overlap(x) for name, x in tensors.items()})
        if len(excerpts) == 3 and not anew and _stays(*excerpts):
            anew = True
            del excerpts[2], overlaps[2]
        elif len(excerpts) == 2:
            anew = False
    return {
        name: DrawnTensor(
            shape, np.stack([draw[name] for draw in excerpts]), np.array([draw[name] for draw in overlaps])
        )
        for name, shape in shapes.items()
    }


def _stays(first: Tensors, second: Tensors, third: Tensors) -> bool:
    """Return whether a tensor that differs between two ports is the same in two draws of one port."""
    return any(
        np.array_equal(third[name], x) and not np.array_equal(first[name], x, equal_nan=True)
        for name, x in second.items()
    )


def _is_real(x: np.ndarray) -> bool:
    return x.dtype.kind not in "biuc"  # bfloat16 has its own kind


def _overlap(x: np.ndarray) -> float:
    matrix = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1)
    matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    if len(matrix) < FEWEST_ROWS:
        return np.nan
    some = matrix[:MOST_ROWS].astype(np.float64)
    products = some @ some.T
    lengths = np.diag(products).mean()
    return float(np.abs(products - np.diag(np.diag(products))).max() / lengths) if lengths else np.nan

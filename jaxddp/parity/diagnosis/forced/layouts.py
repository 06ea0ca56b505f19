"""Layouts: in which order an array holds the values of another one."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from math import prod

import numpy as np

from jaxddp.parity.operations import LARGE

Order = np.ndarray  # (n,): for each value of an array, its place in the other one, both flat
Shape = tuple[int, ...]
MOST_AXES = 5  # of which every order is tried
NEAR = 1e-12  # relative to the largest value; measured: calls of both frameworks on equal inputs differ by up to 2e-14


def contains(x: np.ndarray | None, part: np.ndarray) -> bool:
    """Return whether an array of floats has the elements of another one, of which some differ, as one step of a loop.

    >>> contains(np.array([[0.1, 0.2], [0.3, 0.4]]), np.array([0.4, 0.2]))
    True
    """
    if x is None or x.dtype.kind != "f" or part.dtype.kind != "f" or part.size < 2 or not np.ptp(part):
        return False
    known = np.sort(x.ravel())
    places = np.clip(np.searchsorted(known, part.ravel()), 1, len(known) - 1) if len(known) > 1 else [0]
    off = np.minimum(np.abs(known[places] - part.ravel()), np.abs(known[np.subtract(places, 1)] - part.ravel()))
    return bool((off <= NEAR * np.abs(part).max()).all())


def equal(x: np.ndarray, y: np.ndarray, near: float = NEAR) -> bool:
    """Return whether two arrays of one shape are equal up to rounding; numbers from 1e8 on count as infinity.

    >>> equal(np.array([1.0, -1e9]), np.array([1.0 + 1e-15, -np.inf]))
    True
    """
    if x.dtype.kind not in "fc":
        return x.dtype.kind not in "fc" if np.array_equal(x, y) else False
    with np.errstate(invalid="ignore"):
        if x.dtype.kind == "c" or y.dtype.kind == "c":
            return bool(np.abs(x - y).max(initial=0.0) <= near * np.abs(x).max(initial=0.0))
        x, y = (np.clip(np.asarray(value, np.float64), -LARGE, LARGE) for value in (x, y))
        finite = np.abs(x) < LARGE
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return False
        scale = max(np.abs(x[finite]).max(initial=0.0), np.abs(y[finite]).max(initial=0.0))
        return bool(np.abs(x[finite] - y[finite]).max(initial=0.0) <= near * scale)


class Layouts:
    """Orders in which torch's arrays hold the values of the port's.

    Orders that were seen before for the same shapes come first.

    >>> layouts, x = Layouts(), np.arange(6.0).reshape(2, 3)
    >>> layouts.matching(x.T + 1, x + 1)
    array([0, 3, 1, 4, 2, 5])
    >>> layouts.matching(x[:, ::-1], x) is None
    True
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Shape, Shape], list[Order]] = defaultdict(list)
        self._rows: dict[int, list[tuple[int, Order]]] = defaultdict(list)

    @property
    def has_rows(self) -> bool:
        """Return whether arrays of torch have some rows of the port's: of another batch, they have others."""
        return bool(self._rows)

    def note_rows(self, count: int, rows: Order) -> None:
        """Remember that arrays of torch may have only some rows of the port's, which keeps a place for each.

        Args:
            count: number of rows of the port's arrays.
            rows: which of them torch's have.

        >>> layouts, x = Layouts(), np.array([[0.5, 0.0, 1.5], [2.5, 3.5, 0.0]])
        >>> layouts.note_rows(6, np.array([0, 2, 3, 4]))
        >>> [*layouts.sizes_of_padded((4,))], layouts.matching(x[x > 0], x)
        ([6], array([0, 2, 3, 4]))
        """
        if not any(n == count and np.array_equal(known, rows) for n, known in self._rows[len(rows)]):
            self._rows[len(rows)].append((count, rows))

    def sizes_of_padded(self, torch: Shape) -> Iterator[int]:
        """Yield the sizes of arrays of which an array of torch may have some rows."""
        for count in {count for count, _ in self._rows.get(torch[0] if torch else 0, ())}:
            yield count * prod(torch[1:])

    def possible(self, torch: Shape, jax: Shape, seen: bool = False) -> Iterator[Order]:
        """Yield the orders in which an array of torch may hold the values of one of the port.

        Args:
            torch, jax: the shapes.
            seen: only those that were seen before, if there are any.
        """
        known = self._seen[torch, jax]
        yield from known
        if known and seen:
            return
        of_axes = (
            _of_axes(torch, jax) if prod(torch) == prod(jax) else (*self._of_rows(torch, jax), *repeated(torch, jax))
        )
        for order in of_axes:
            if not any(np.array_equal(order, other) for other in known):
                yield order

    def _of_rows(self, torch: Shape, jax: Shape) -> Iterator[Order]:
        for count, rows in self._rows.get(torch[0], ()):
            if count * prod(torch[1:]) == prod(jax):
                yield from (order.reshape(count, -1)[rows].ravel() for order in _of_axes((count, *torch[1:]), jax))

    def matching(self, torch: np.ndarray, jax: np.ndarray, near: float = NEAR) -> Order | None:
        """Return the order in which an array of torch holds the port's values; None: it has others."""
        flat_torch, flat_jax = torch.ravel(), jax.ravel()
        key = torch.shape, jax.shape
        for order in self.possible(*key):
            if equal(flat_torch, flat_jax[order], near):
                self.note(*key, order)
                return order
        strided = _of_strides(flat_torch, flat_jax, near) if torch.size == jax.size else None
        if strided is not None:
            self.note(*key, strided)
        return strided

    def note(self, torch: Shape, jax: Shape, order: Order) -> None:
        """Remember an order as the likeliest of these shapes."""
        seen = self._seen[torch, jax]
        self._seen[torch, jax] = [order, *(known for known in seen if known is not order)]


def repeated(torch: Shape, jax: Shape) -> Iterator[Order]:
    """Yield the orders in which an array of torch repeats one of the port along axes, as operations do that broadcast.

    >>> [*repeated((2, 3), (3,))], [*repeated((2, 3), (2, 1, 1))]
    ([array([0, 1, 2, 0, 1, 2])], [array([0, 0, 0, 1, 1, 1])])
    """
    places, alone = np.arange(prod(jax)), [n for n in jax if n != 1]
    if len(jax) <= len(torch) and all(n in (1, m) for n, m in zip(jax[::-1], torch[::-1], strict=False)):
        yield np.broadcast_to(places.reshape(jax), torch).ravel()
        return
    for axes in itertools.combinations(range(len(torch)), len(alone)) if len(jax) > len(torch) else ():
        if [torch[k] for k in axes] == alone:  # the port has further axes of length 1
            shape = tuple(n if k in axes else 1 for k, n in enumerate(torch))
            yield np.broadcast_to(places.reshape(shape), torch).ravel()


@cache
def _of_axes(torch: Shape, jax: Shape) -> list[Order]:
    """Return the orders that come from an order of the axes, those first after which the axes are torch's."""
    alone, wanted = [n for n in jax if n != 1], [n for n in torch if n != 1]
    places = np.arange(prod(jax)).reshape(alone)
    ways = itertools.permutations(range(len(alone))) if len(alone) <= MOST_AXES else [tuple(range(len(alone)))]
    moved = [places.transpose(way) for way in ways]
    moved.sort(key=lambda x: [*x.shape] != wanted)
    fitting = [x for x in moved if [*x.shape] == wanted] or moved
    return [*{x.tobytes(): x for x in (np.ascontiguousarray(y).ravel() for y in fitting)}.values()]


def _of_strides(torch: np.ndarray, jax: np.ndarray, near: float) -> Order | None:
    """Return the order that equal values show, if it is one of axes of any lengths."""
    if torch.dtype.kind != "f" or jax.dtype.kind != "f" or torch.size < 2:
        return None
    first, second = np.argsort(torch, kind="stable"), np.argsort(jax, kind="stable")
    if not equal(torch[first], jax[second], near) or (np.diff(torch[first]) == 0).any():
        return None
    order = np.empty(torch.size, np.intp)
    order[first] = second
    return order if _is_strided(order) else None


def _is_strided(order: Order) -> bool:
    """Return whether places grow by equal steps along axes.

    >>> [_is_strided(np.array(order)) for order in ([0, 2, 4, 1, 3, 5], [3, 4, 5, 0, 1, 2])]
    [True, False]
    """
    while order.size > 1:
        step = order[1] - order[0]
        if order[0] != 0 or step <= 0:
            return False
        breaks = np.flatnonzero(np.diff(order) != step)
        length = order.size if not breaks.size else int(breaks[0]) + 1
        if order.size % length:
            return False
        rows = order.reshape(-1, length)
        if not (np.diff(rows, axis=1) == step).all():
            return False
        order = rows[:, 0]
    return True

"""Compare how two models draw their initial weights, tensor by tensor, from a few draws of each.

Every allowance is a probability: where both sides draw from one distribution, a comparison errs once in 4e11 times.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.excerpts import distance
from jaxddp.parity.initial_draws import LARGEST, DrawnTensor

# Standard errors between two means, or two log deviations; measured in 340 runs of correct pairs: up to 4.8.
MOST_ERRORS = 7.0
MOST_DISTANCE = 4.0  # of Kolmogorov and Smirnov, times the root of the number of elements; measured: up to 2.0
LONGEST_TAIL = 40 * math.log(2)  # -log of the chance that all of the largest numbers are of one side; measured: 8.3
CONSTANT = 1e-3  # relative difference of constants; measured for a table of 5,000 positions in float32: 3e-4
DISTINCT = 0.5  # share of distinct numbers above which equal ones are no chance
ORTHOGONAL = 0.01  # largest overlap of an orthogonal matrix; measured in bfloat16: 3e-3
UNLIKE = 4.0  # times as much overlap has a matrix that is not
DEPENDENT = 2.0  # ratio of the error between draws to that of independent elements, above which they are not
# Errors of so few draws (degrees of freedom) that have the chance of one error of many, from Student's distribution.
STUDENT = {3: 1360.0, 6: 25.0, 7: 14.0, 14: 3.2}
FIRST = 16  # numbers of a draw that show whether two tensors have one key
RELATED = 0.9  # correlation of the first numbers in all draws; measured of independent ones: up to 0.5
FEWEST = 64  # numbers of a row that is compared by itself
OF_MASK = 2  # values of a mask or of an identity matrix
SIDES = ("torch", "jax")
TINY = 1e-300  # in place of 0, to divide by


@dataclass(frozen=True)
class InitialDifference:
    """A tensor that the two sides draw from different distributions.

    Attributes:
        tensor: its name in torch.
        kind: "constant" for values that are not drawn, "elements" where some of them are, "overlap" for an orthogonal
            matrix, "alike" for tensors that are equal in each draw, "one_key" for those that are so but for a factor;
            "mean", "deviation", "shape", or "row".
        errors: the difference in standard errors; NaN where none measures it.
        others: tensors that are equal to this one only on `side`; for "alike" and "one_key".
        side: see `others`; for "elements", the only side that has a constant, "" if both have.
        row: number of the row that differs; for "row" and "elements".
    """

    tensor: str
    kind: str
    errors: float = math.nan
    others: tuple[str, ...] = ()
    side: str = ""
    row: int = -1


def differences(
    torch: Mapping[str, DrawnTensor], jax: Mapping[str, DrawnTensor], parameters: Collection[str]
) -> Iterator[InitialDifference]:
    """Yield the tensors that are drawn differently, and groups of tensors that are equal on only one side.

    Args:
        torch, jax: draws of both sides' tensors; those that one side lacks, or that have none or not finite
            values, are not compared.
        parameters: names of torch's parameters; other tensors are tables, which must be equal.

    >>> rng = np.random.default_rng(0)
    >>> def of(deviation): return DrawnTensor((1000,), rng.normal(0, deviation, (8, 1000)), np.full(8, np.nan))
    >>> [x.kind for x in differences({"w": of(1.0)}, {"w": of(1.0)}, ["w"])]
    []
    >>> [x.kind for x in differences({"w": of(1.0)}, {"w": of(1.2)}, ["w"])]
    ['deviation']
    """
    both = {name: (torch[name], jax[name]) for name in jax if name in torch}
    both = {
        name: pair for name, pair in both.items() if all(x.values.size and np.isfinite(x.values).all() for x in pair)
    }
    for name, pair in both.items():
        if (difference := _difference(name, *pair, name in parameters)) is not None:
            yield difference
    drawn = {name: pair for name, pair in both.items() if all(map(varies, pair))}
    of_sides = [{name: pair[place] for name, pair in drawn.items()} for place in range(len(SIDES))]
    told = set[tuple[str, str]]()
    for kind, groups in (("alike", [*map(_alike, of_sides)]), ("one_key", [*map(_of_one_key, of_sides)])):
        for side, mine, opposite in zip(SIDES, groups, groups[::-1], strict=True):
            for name, others in mine.items():
                unlike = tuple(x for x in others if x not in opposite.get(name, ()))
                if unlike and (name, side) not in told:
                    told.update((x, side) for x in (name, *unlike))
                    yield InitialDifference(name, kind, others=unlike, side=side)


def varies(tensor: DrawnTensor) -> bool:
    """Return whether a tensor differs between draws."""
    return bool((tensor.values != tensor.values[0]).any())


def is_one_sample(tensor: DrawnTensor) -> bool:
    """Return whether a tensor is the same in each draw, and no constant or mask: no seed of a draw has reached it."""
    return not varies(tensor) and len(np.unique(tensor.values[0])) > OF_MASK


def are_constants(torch: DrawnTensor, jax: DrawnTensor) -> bool:
    """Return whether both sides have the same constants."""
    return not (varies(torch) or varies(jax)) and bool(_near(torch.values[0], jax.values[0]).all())


def _difference(name: str, torch: DrawnTensor, jax: DrawnTensor, trained: bool) -> InitialDifference | None:
    """Return how a tensor is drawn otherwise; None: it is not."""
    draw_both = [varies(torch), varies(jax)]
    if not any(draw_both):
        if are_constants(torch, jax):
            return None
        if not trained or not (is_one_sample(torch) and is_one_sample(jax)):
            return InitialDifference(name, "constant")
    elif any(not (drawn or is_one_sample(x)) for drawn, x in zip(draw_both, (torch, jax), strict=True)):
        return InitialDifference(name, "constant")
    values = [x.values if drawn else x.values[:1] for drawn, x in zip(draw_both, (torch, jax), strict=True)]
    if all(draw_both) and all(map(_is_distinct, values)):
        fixed = [(x == x[0]).all(axis=0) for x in values]
        unequal = (fixed[0] != fixed[1]) | (fixed[0] & fixed[1] & ~_near(values[0][0], values[1][0]))
        if unequal.any():
            place = int(np.argmax(unequal))
            side = "" if fixed[0][place] and fixed[1][place] else SIDES[int(fixed[1][place])]
            row = place * distance(torch.shape, LARGEST) // _width(torch.shape)
            return InitialDifference(name, "elements", side=side, row=row)
        values = [x[:, ~fixed[0]] for x in values]
    return _statistics(name, (values[0], values[1]), torch, jax)


def _statistics(
    name: str, values: tuple[np.ndarray, np.ndarray], of_torch: DrawnTensor, of_jax: DrawnTensor
) -> InitialDifference | None:
    """Compare both sides' numbers, (draws, elements), that all vary."""
    torch, jax = values
    overlaps = of_torch.overlap, of_jax.overlap
    if any(max(a) < ORTHOGONAL and min(b) > UNLIKE * max(a) for a, b in (overlaps, overlaps[::-1])):
        return InitialDifference(name, "overlap")
    wholes = Moments.of(torch[:, None]), Moments.of(jax[:, None])
    (mean,), (deviation,) = wholes[0].errors(wholes[1])
    if max(mean, deviation) > MOST_ERRORS:
        return InitialDifference(name, "deviation" if deviation >= mean else "mean", max(mean, deviation))
    if wholes[0].dependent or wholes[1].dependent:
        return None
    if _differ_in_shape(torch, jax):
        return InitialDifference(name, "shape")
    width = _width(of_torch.shape)
    if min(len(torch), len(jax)) * width >= FEWEST and torch.shape[1] == jax.shape[1] == math.prod(of_torch.shape):
        rows = [Moments.of(x.reshape(len(x), -1, width)) for x in (torch, jax)]
        errors = np.maximum(*rows[0].errors(rows[1]))
        if (most := float(errors.max())) > MOST_ERRORS:
            return InitialDifference(name, "row", most, row=int(errors.argmax()))
    return None


def _width(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])


def _near(torch: np.ndarray, jax: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(torch - jax) <= CONSTANT * max(np.abs(torch).max(), np.abs(jax).max()))


def _is_distinct(values: np.ndarray) -> bool:
    """Return whether numbers are so many that two draws do not have the same by chance."""
    drawn = values[:, (values != values[0]).any(axis=0)]
    return len(np.unique(drawn)) > DISTINCT * drawn.size


@dataclass(frozen=True)
class Moments:
    """Mean and logarithm of the deviation of rows of numbers, each with its squared error.

    Attributes:
        mean, log: (rows,).
        mean_error, log_error: (rows,) of independent elements.
        mean_between, log_between: (rows,) from leaving out a draw at a time; NaN for one draw.
        draws: number of draws.
    """

    mean: np.ndarray
    log: np.ndarray
    mean_error: np.ndarray
    log_error: np.ndarray
    mean_between: np.ndarray
    log_between: np.ndarray
    draws: int

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Return the moments of numbers, (draws, rows, elements)."""
        x = values.astype(np.float64)
        x -= (shift := x.mean(axis=(0, 2), keepdims=True))
        size, of_draw = x.shape[0] * x.shape[2], x.shape[2]
        squares = (x**2).mean(axis=(0, 2))
        kurtosis = (x**4).mean(axis=(0, 2)) / np.maximum(squares**2, TINY)
        # Few numbers show it badly: not below that of uniform numbers, and of a normal one's for a handful.
        kurtosis = np.maximum(kurtosis, 1.8 + 10 / size)
        sums, of_squares = x.sum(axis=2), (x**2).sum(axis=2)
        between = np.full((2, x.shape[1]), np.nan)
        if len(x) > 1:
            means = -sums / (size - of_draw)
            logs = np.log(np.maximum((of_squares.sum(axis=0) - of_squares) / (size - of_draw) - means**2, TINY)) / 2
            between = np.stack([(len(x) - 1) * left.var(axis=0) for left in (means, logs)])
        log = np.log(np.maximum(squares, TINY)) / 2
        return cls(shift[0, :, 0], log, squares / size, (kurtosis - 1) / (4 * size), between[0], between[1], len(x))

    @property
    def dependent(self) -> bool:
        """Return whether the elements of a draw depend on each other, as far as the draws show it."""
        pairs = (self.mean_between, self.mean_error), (self.log_between, self.log_error)
        return any(bool((between > DEPENDENT**2 * error).any()) for between, error in pairs)

    def errors(self, other: "Moments") -> tuple[np.ndarray, np.ndarray]:
        """Return the differences of means and of log deviations to another side, in standard errors."""
        draws = self.draws + other.draws - 2

        def in_errors(name: str) -> np.ndarray:
            independent = np.sum([getattr(moments, f"{name}_error") for moments in (self, other)], axis=0)
            between = [getattr(moments, f"{name}_between") for moments in (self, other)]
            of_single = [np.nan_to_num(between[1]) * other.draws, np.nan_to_num(between[0]) * self.draws]
            shown = np.sum(np.where(np.isnan(between), of_single, between), axis=0)
            of_few = shown * STUDENT.get(draws, 1.0) ** 2
            error = np.where(shown > DEPENDENT**2 * independent, of_few, np.maximum(independent, shown))
            return np.abs(getattr(self, name) - getattr(other, name)) / np.sqrt(np.maximum(error, TINY))

        return in_errors("mean"), in_errors("log")


def _differ_in_shape(torch: np.ndarray, jax: np.ndarray) -> bool:
    """Return whether numbers of equal mean and deviation are distributed otherwise.

    They are not standardised, so that any distribution that both sides share has the same chance of an error.
    """
    centre = (float(torch.mean()) + float(jax.mean())) / 2
    sides = [np.sort(x, axis=None) for x in (torch, jax)]
    for x, y in (sides, sides[::-1]):
        in_tail = np.sum(np.abs(x - centre) > np.abs(y[[0, -1]] - centre).max())
        if -in_tail * math.log(len(x) / (len(x) + len(y))) > LONGEST_TAIL:
            return True
    both = np.concatenate(sides)
    shares = [np.searchsorted(x, both, side="right") / len(x) for x in sides]
    scale = math.sqrt(torch.size * jax.size / both.size)
    return bool(np.abs(shares[0] - shares[1]).max() * scale > MOST_DISTANCE)


def _alike(tensors: Mapping[str, DrawnTensor]) -> dict[str, tuple[str, ...]]:
    """Return for each tensor those that are equal to it in each draw."""
    groups: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.shape, tensor.values.tobytes()), []).append(name)
    return {name: tuple(x for x in group if x != name) for group in groups.values() for name in group}


def _of_one_key(tensors: Mapping[str, DrawnTensor]) -> dict[str, tuple[str, ...]]:
    """Return for each tensor those whose first numbers are its own but for a factor, as one key gives to any shape.

    >>> u = np.random.default_rng(0).uniform(-1, 1, (8, 40))
    >>> drawn = {"a": DrawnTensor((5, 4), u[:, :20], np.full(8, np.nan)), "b": DrawnTensor((40,), 2 * u, np.zeros(8))}
    >>> _of_one_key(drawn)
    {'a': ('b',), 'b': ('a',)}
    """
    whole = {name: x for name, x in tensors.items() if FIRST <= x.values.shape[1] == math.prod(x.shape)}
    names, related = [*whole], np.eye(len(whole), dtype=bool)
    for order in (lambda x: x, _in_layout_of_flax):
        rows = [order(x.values.reshape(-1, *x.shape)).reshape(len(x.values), -1)[:, :FIRST] for x in whole.values()]
        flat = (
            np.stack([(x - x.mean(axis=0, dtype=np.float64)).reshape(-1) for x in rows]) if rows else np.zeros((0, 1))
        )
        flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), TINY)
        related |= flat @ flat.T > RELATED
    return {
        name: tuple(x for x, is_one in zip(names, row, strict=True) if is_one and x != name)
        for name, row in zip(names, related, strict=True)
    }


def _in_layout_of_flax(draws: np.ndarray) -> np.ndarray:
    """Return torch's kernels, (draws, out, in, ...), as Flax has them: (draws, ..., in, out)."""
    return draws.transpose(0, *range(3, draws.ndim), 2, 1) if draws.ndim > 2 else draws

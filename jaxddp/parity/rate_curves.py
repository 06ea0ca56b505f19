"""Learning rates of torch's optimizer by step, and the comparison of another optimizer's with them.

Steps are counted by the updates made before, from 0, as both sides' schedules count them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxddp.parity.deviation import Statement

# Largest residual that counts as equal, relative to the highest rate so far; measured: up to 5e-13; see
# `jaxddp.parity.jax_side.rates.ROUNDED` for a port's own schedule in float32.
ALLOWED = 1e-6
BEYOND = 10  # rates are compared for so many times a schedule's length ...
MOST = 200_000  # ... but for no more steps than these, unless the length itself is larger
OPEN = 20_000  # steps for schedules that show no length
CHOSEN = 200  # steps at which whole updates are compared
SAMPLES = 64  # elements of the model whose updates are looked at
UPDATE = "update"
UPDATES = 3  # made updates, the last of which is looked at
OTHERS = ("momentum", "betas", "weight_decay")  # what else a scheduler may change in a group


@dataclass(frozen=True)
class TorchRates:
    """Hyperparameters of torch's groups at each step.

    Attributes:
        groups: names of the parameters of each group.
        lr: rates of each group: (steps,), or (1,) where it is constant.
        others: for each group, numbers of `OTHERS` ("betas" as "beta1" and "beta2") -> their values, likewise.
        last: the last step that a run takes, or that the schedule shows; None: unknown.
        length: what `last` is called in words.
        steps: number of steps to compare.
        why_not: why the rates are not known; "": they are.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    lr: tuple[np.ndarray, ...] = ()
    others: tuple[Mapping[str, np.ndarray], ...] = ()
    last: int | None = None
    length: int = 0
    steps: int = 0
    why_not: str = ""

    def at(self, group: int, steps: np.ndarray) -> np.ndarray:
        """Return a group's rates at some steps."""
        return at(self.lr[group], steps)

    @property
    def is_constant(self) -> bool:
        """Return whether nothing of any group changes."""
        return all(len(lr) == 1 for lr in self.lr) and not any(map(self.changing, range(len(self.lr))))

    def changing(self, group: int) -> list[str]:
        """Return the numbers of a group that change, other than its rate."""
        return [name for name, values in self.others[group].items() if len(values) > 1]

    def changes_from(self, group: int, reference: int) -> int:
        """Return the first step at which a number other than the rate is not what it is at another; `steps`: none."""
        curves = [self.others[group][name] for name in self.changing(group)]
        changed = [np.flatnonzero(values != values[reference]) for values in curves]
        return min((int(places[0]) for places in changed if len(places)), default=self.steps)


@dataclass(frozen=True)
class RateDifference:
    """The first step at which a number of the optimizers differs.

    Attributes:
        step: number of updates made before.
        tensor: the parameter that shows it most.
        quantity: "learning rate", "momentum", ...; `UPDATE`: no single number.
        torch, jax: its values.
        residual: their distance relative to the largest value so far.
    """

    step: int
    tensor: str
    quantity: str
    torch: float
    jax: float
    residual: float

    def statement(self, several: bool = False) -> Statement:
        """Return the difference as a statement, with the tensor if there are several groups."""
        tensor = self.tensor if several else ""
        if self.quantity == UPDATE:
            return Statement("update_differs_at", tensor=tensor, step=self.step)
        values = {"torch": self.torch, "jax": self.jax}
        return Statement("rate_differs_at", of=self.quantity, tensor=tensor, step=self.step, **values)


@dataclass
class RatesComparison:
    """Result of a comparison over all steps.

    Attributes:
        last: see `TorchRates`; None: every step is beyond.
        within, after: the first difference up to `last`, and after it.
        worst: the largest residual up to `last` of what does not differ, its step and its tensor.
        why_not: what was not compared, and why, each in a sentence.
        constant: neither side changes its rate.
        alone: each optimizer's update is a function of its state and of gradients, for `UpdatesAt`.
    """

    last: int | None
    within: RateDifference | None = None
    after: RateDifference | None = None
    worst: tuple[float, int, str] = (0.0, 0, "")
    why_not: list[str] = field(default_factory=list)
    constant: bool = False
    alone: bool = True

    def note(self, steps: np.ndarray, residuals: np.ndarray, difference: Callable[[int], RateDifference]) -> None:
        """Note residuals.

        Args:
            steps: (n,), ascending.
            residuals: (n,), relative to the largest value so far.
            difference: place in these arrays -> what differs there.
        """
        inside = steps <= (-1 if self.last is None else self.last)
        if inside.any():
            place = int(np.argmax(residuals[inside]))
            if residuals[place] > self.worst[0]:
                self.worst = float(residuals[place]), int(steps[place]), difference(place).tensor
        differs = ~(residuals <= ALLOWED)
        self.within = _first(self.within, differs & inside, difference)
        self.after = _first(self.after, differs & ~inside, difference)

    def leave_out(self, why: str) -> None:
        """Note once what was not compared, and why."""
        if why not in self.why_not:
            self.why_not.append(why)


def _first(
    kept: RateDifference | None, differs: np.ndarray, difference: Callable[[int], RateDifference]
) -> RateDifference | None:
    if not differs.any():
        return kept
    new = difference(int(np.argmax(differs)))
    return new if kept is None or (new.step, -new.residual) < (kept.step, -kept.residual) else kept


def at(curve: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return a curve's values at some steps; a curve of one value is constant.

    >>> at(np.array([0.1]), np.array([0, 7])), at(np.array([1.0, 2.0]), np.array([1]))
    (array([0.1, 0.1]), array([2.]))
    """
    return np.full(len(steps), curve[0]) if len(curve) == 1 else curve[steps]


def compare_numbers(
    result: RatesComparison, quantity: str, tensor: str, steps: np.ndarray, torch: np.ndarray, jax: np.ndarray
) -> None:
    """Compare the values (n,) of a number of both sides at some steps (n,), ascending."""
    residuals = apart(torch, jax)
    result.note(
        steps,
        residuals,
        lambda at: RateDifference(int(steps[at]), tensor, quantity, torch[at], jax[at], float(residuals[at])),
    )


def apart(torch: np.ndarray, jax: np.ndarray) -> np.ndarray:
    """Return |jax - torch| over the largest |torch| so far, or over 1 where that is 0.

    >>> apart(np.array([2.0, 1.0]), np.array([2.0, 1.1])).round(3)
    array([0.  , 0.05])
    """
    peak = np.maximum.accumulate(np.abs(torch))
    return np.nan_to_num(np.abs(jax - torch) / np.where(peak > 0, peak, 1.0), nan=np.inf)


def made_gradients(shapes: Mapping[str, Sequence[int]], number: int) -> dict[str, np.ndarray]:
    """Return the gradients of an update, by name, of the given shapes: noise, the same on both sides.

    >>> made_gradients({"w": (2,)}, 0)["w"].round(3)
    array([ 0.126, -0.132])
    """
    return {
        name: np.random.default_rng((number, place)).normal(size=tuple(shape))
        for place, (name, shape) in enumerate(sorted(shapes.items()))
    }


def places_of(size: int, tensors: int) -> np.ndarray:
    """Return the flat places of a tensor's elements whose updates are looked at.

    Args:
        size: number of its elements.
        tensors: number of tensors of the model.

    >>> places_of(1000, 100)
    array([  0, 999])
    """
    return np.unique(np.linspace(0, size - 1, min(size, max(2, SAMPLES // tensors))).astype(int))


def chosen_steps(torch: TorchRates, run: int) -> tuple[int, ...]:
    """Return steps at which whole updates are compared: those of the run, at torch's jumps, and on a grid.

    Args:
        torch: torch's rates.
        run: number of steps of the check's run.

    >>> jump = np.where(np.arange(2000) < 700, 0.1, 0.01)
    >>> {699, 700, 701} <= {*chosen_steps(TorchRates(lr=(jump,), others=({},), last=1999, steps=2000), 10)}
    True
    """
    curves = [*torch.lr, *(curve for others in torch.others for curve in others.values())]
    grid: list[np.ndarray] = [np.geomspace(1, torch.steps, CHOSEN // 2), np.linspace(0, torch.steps - 1, CHOSEN // 4)]
    for curve in (curve for curve in curves if len(curve) > 2):
        largest = np.argsort(-np.abs(np.diff(curve, 2)), kind="stable")[: CHOSEN // 8]
        grid += [largest + shift for shift in (0, 1, 2)]
    ends = [] if torch.last is None else [[torch.last, torch.last + 1]]
    steps = np.concatenate([np.arange(run), *grid, *ends]).astype(int)
    return tuple(int(step) for step in np.unique(steps[steps < torch.steps]))


def steps_between(steps: Sequence[int], first: int, run: int) -> tuple[int, ...]:
    """Return the run's steps, and `CHOSEN` steps from the one before the first that differs to this one.

    >>> steps_between((0, 1, 2, 10, 20), 20, 2)[:5]
    (0, 1, 10, 11, 12)
    """
    before = steps[steps.index(first) - 1]
    between = np.linspace(before, first, min(CHOSEN, first - before + 1)).astype(int)
    return tuple(int(step) for step in np.unique([*range(run), *between]))


def chunks(count: int, size: int) -> Iterator[np.ndarray]:
    """Yield the numbers 0 .. count - 1 in arrays of at most `size`."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))

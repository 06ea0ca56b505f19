"""Mistakes in the warm-up of a learning rate: its start, its end, or its absence.

The reference's rates r_0, r_1, ... rise linearly up to r_w. With p = r_w, a port's warm-up of m steps from b is

    rate_t = b + (p - b) t / m  for t < m;  r_max(t - s, w)  from there on, s = 0 or s = m - w

Rates that rise in half a wave of a cosine, as OneCycleLR's do, are stretched to m steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxddp.parity.deviation import Statement, Value, rounded
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.schedules import STRAIGHT, column_of, curve_of, last_peak
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values

FAULT = "warmup_start"
# With a factor, a line up to the peak could be any line. Other schedule faults do not combine with these.
OTHERS = frozenset({"lr_scaled", "loss_scale", "dampening", "lr_off_by_one", "scheduler_too_fast"})
LONGEST = 3  # a warm-up takes less than so many times the steps of the run, or a few steps more than the reference's
FEWEST = 3  # steps that show that rates are a line


def warmup_edits(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield edits of the reference's warm-up, if it has one: another start, another length, and no warm-up."""
    column = column_of(program)
    end = _end(column)
    if end == len(column) - 1 > 0:
        yield from (_of_unknown_length(column),) if len(program.index) >= FEWEST else ()
    elif not end:
        yield from _of_other_lengths(column, int(np.argmax(column)), len(program.index))
    else:
        for later in (0, 1, -1):
            for shift in {0, later} if end + later else ():
                yield _from_another_rate(column, end, later, shift)
        yield discrete(
            FAULT,
            Statement("no_warmup", torch=float(column[0])),
            lambda r: replace(r, rates=r.rates[np.minimum(np.arange(len(column)) + end, len(column) - 1)]),
        )
        yield from _of_other_lengths(column, end, len(program.index))


def _end(rates: np.ndarray) -> int:
    """Return the step at which a linear rise of the rates ends; 0: they do not start with one.

    >>> _end(np.array([0.1, 0.2, 0.3, 0.2])), _end(np.array([0.1, 0.2, 0.4, 0.4])), _end(np.array([0.3, 0.2]))
    (2, 0, 0)
    """
    rises = np.diff(rates)
    falls = np.flatnonzero(rises <= 0)
    end = int(falls[0]) if len(falls) else len(rises)
    return end if np.allclose(rises[:end], rises[:1], rtol=STRAIGHT, atol=0) else 0


def _from_another_rate(column: np.ndarray, end: int, later: int, shift: int) -> OptimizerEdit:
    """Return a warm-up that ends `later` steps later; the rest of the schedule is `shift` steps later."""
    peak, steps = column[end], end + later
    after = np.arange(steps, len(column))
    rest = np.clip(after - shift, end, len(column) - 1)

    def start(values: Values) -> float:
        """Return the fitted start, or 0 if it is within the float32 rounding of the other rates."""
        return values[0] if values[0] > STRAIGHT * peak else 0.0

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        line = start(values) + (peak - start(values)) * np.arange(steps) / steps
        of_peak = program.rates[end] / peak
        return replace(program, rates=np.concatenate([line[:, None] * of_peak, program.rates[rest]])[: len(column)])

    def what(values: Values) -> Statement:
        same = later and np.isclose(values[0], column[0], rtol=STRAIGHT, atol=0)
        starts = () if same else (start(values), float(column[0]))
        return Statement("warmup", starts=starts, later=later, shifts_rest=bool(shift))

    likely = (column[0], peak / steps, peak / (steps + 1), peak)
    unknown = Unknown((column[0],), unit=peak, low=-STRAIGHT * peak, likely=likely, rounded=True)
    return OptimizerEdit(FAULT, change, what, (unknown,), OTHERS)


def _of_other_lengths(column: np.ndarray, end: int, steps: int) -> Iterator[OptimizerEdit]:
    """Yield warm-ups of other lengths; the rest of the schedule moves with their end, or ends at the same step.

    A warm-up of n steps from b is b + (p - b) t / n, or p (t + 1) / n if the reference's has this form. Nothing is
    yielded for rates that rise along no known curve. `_from_another_rate` yields lines that are one step longer or
    shorter.
    """
    peak, first, top, last = column[end], column[0], last_peak(column), int(np.argmin(column[end:])) + end
    ahead = int(np.isclose(first * (end + 1), peak, rtol=STRAIGHT, atol=0))
    length, is_line = end + ahead, _end(column) == end
    down = curve_of(column[end::-1])  # the way back
    rest = curve_of(column[top : last + 1]) if last > top else None
    t = np.arange(len(column))
    longest = max(LONGEST * steps, length + FEWEST)
    for other in range(1, longest) if is_line or (end and down) else ():
        begin = top + other - length
        if other == length or (is_line and abs(other - length) == 1) or begin < 0:
            continue
        share = np.minimum((t + ahead) / other, 1.0)
        line = peak * share if ahead else first + (peak - first) * share
        line = line if is_line or down is None else down(end * (1 - share))
        what = Statement("warmup_length", jax=other, torch=length)
        later = np.where(t < begin, line, column[np.clip(t - other + length, top, len(column) - 1)])
        rests = {"later": later}
        if rest is not None and begin < last:
            places = np.clip((t - begin) * (last - top) / (last - begin), 0, last - top)
            rests["ends_alike"] = np.where(t < begin, line, rest(places))
        alike = all(np.array_equal(rates[:steps], later[:steps]) for rates in rests.values()) or begin >= steps
        for of_rest, rates in [*rests.items()][: 1 if alike else None]:
            change = _with_rates(column, end, rates)
            yield discrete(FAULT, what.but(rest="" if alike else of_rest), change, Value(f"{other}", f"{length}"))


def _with_rates(column: np.ndarray, end: int, rates: np.ndarray) -> Callable[[OptimizerProgram], OptimizerProgram]:
    """Return a function that gives a program these rates; other groups get them in proportion."""
    return lambda program: replace(program, rates=rates[:, None] * (program.rates[end] / column[end]))


def _of_unknown_length(column: np.ndarray) -> OptimizerEdit:
    """Return an edit to another line, for a warm-up that is longer than the known rates."""
    first, rise = column[0], column[1] - column[0]

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        line = values[0] + values[1] * np.arange(len(column))
        return replace(program, rates=line[:, None] * (program.rates[-1] / column[-1]))

    def what(values: Values) -> Statement:
        jax, torch = (tuple(_plain(value, column[-1]) for value in of_side) for of_side in (values, (first, rise)))
        return Statement("warmup_line", jax=jax, torch=torch)

    unknowns = (Unknown((first,), unit=column[-1], rounded=True), Unknown((rise,), unit=rise, rounded=True))
    return OptimizerEdit(FAULT, change, what, unknowns, OTHERS)


def _plain(rate: float, scale: float) -> float:
    """Return a fitted rate without its float32 rounding error.

    >>> _plain(4.2e-21, 1e-5), _plain(9.99999e-6, 1e-5), _plain(9.90099e-6, 1e-5)
    (0.0, 1e-05, 9.901e-06)
    """
    return rounded(rate, 5) if abs(rate) > STRAIGHT * scale else 0.0

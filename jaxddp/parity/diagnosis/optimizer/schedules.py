"""Mistakes in a learning rate's schedule: its clock runs too fast, stops or starts again; its lowest rate."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.parity.deviation import Statement, Value
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, both, discrete
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown, Values

FAULT = "schedule"
FEWEST = 3  # rates that show a curve
STRAIGHT = 1e-6  # relative difference of the steps of a line, whose rates a framework may compute in float32
NEAR = 1e-9  # relative difference of rates from a curve; measured: 2e-16 for torch's schedules
OTHERS = frozenset({"lr_scaled", "loss_scale", "lr_off_by_one", "scheduler_too_fast", "warmup_start"})
Curve = Callable[[np.ndarray], np.ndarray]


def schedule_edits(program: OptimizerProgram, counts: dict[int, str]) -> Iterator[OptimizerEdit]:
    """Yield mistakes in the schedule; nothing if the learning rate is constant.

    Args:
        program: the reference's optimizer.
        counts: numbers of steps that a step may count for, each with what is counted.
    """
    if not program.scheduled:
        return
    for shift in (1, -1):
        yield discrete("lr_off_by_one", Statement("schedule_shifted", by=shift), _at(partial(np.add, shift)))
    for speed, of in counts.items():
        what = Statement("schedule_too_fast", times=speed, of=of)
        yield discrete("scheduler_too_fast", what, _at(partial(np.multiply, speed)))
    steps = len(program.index)
    yield from _constant(program)
    yield from _staircase(program, counts)
    for n in range(2, steps):
        yield discrete(FAULT, Statement("rate_held", steps=n), _at(partial(_held, n)))
        yield discrete(FAULT, Statement("schedule_slowed", steps=n), _at(partial(_slowed, n)))
        if n != program.restored_at or steps > 2 * n:  # one restart, where the run restores, is a lost position
            yield discrete(FAULT, Statement("schedule_repeated", steps=n), _at(partial(_repeated, n)))
    yield from _floor(program)
    yield from _power(program)
    yield from _stretched(program)


def _held(n: int, t: np.ndarray) -> np.ndarray:
    return t // n * n


def _slowed(n: int, t: np.ndarray) -> np.ndarray:
    return t // n


def _repeated(n: int, t: np.ndarray) -> np.ndarray:
    return t % n


def _at(clock: Callable[[np.ndarray], np.ndarray]) -> Callable[[OptimizerProgram], OptimizerProgram]:
    """Return a change to the rates of other steps: step t takes that of `clock(t)`."""
    return lambda program: replace(program, index=clock(program.index))


def _constant(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield one rate for all steps, where the reference's falls from the first on."""
    column = column_of(program)
    if column[0] == column.max():
        yield OptimizerEdit(
            FAULT,
            lambda program, values: replace(program, index=np.zeros_like(program.index), factor=values[0] / column[0]),
            lambda values: Statement("rate_stays", jax=values[0]),
            (Unknown((float(column[0]),), unit=float(column[0]), low=1e-12),),
            OTHERS,
        )


def _staircase(program: OptimizerProgram, counts: dict[int, str]) -> Iterator[OptimizerEdit]:
    """Yield another length of the steps of a rate that falls by the same factor every p steps, and another factor."""
    column = column_of(program)
    falls = np.flatnonzero(column[1:] != column[:-1]) + 1
    if len(falls) < 2 or (falls != falls[0] * np.arange(1, len(falls) + 1)).any():
        return
    every = int(falls[0])
    factors = column[falls] / column[falls - 1] if column[falls - 1].all() else np.zeros(1)
    if not 0 < factors[0] < 1 or not np.allclose(factors, factors[0], rtol=NEAR):
        return
    for n in range(1, len(program.index)) if every > 1 else ():
        if n % every and every / n not in counts:  # the others are a clock that is slow, or runs ahead
            what = Statement("rate_changes_every", jax=n, torch=every)
            yield discrete(FAULT, what, _at(partial(_paced, every, n)), Value(f"{n}", f"{every}"))

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        return _falling(program, 0, lambda rates: rates[0] * values[0] ** np.round(np.log(rates / rates[0]) / fall))

    fall = math.log(factors[0])
    yield OptimizerEdit(
        FAULT,
        change,
        lambda values: Statement("falls_by", jax=values[0], torch=float(factors[0]), steps=every),
        (Unknown((float(factors[0]), 0.5, 0.95), low=1e-6, high=1.0),),
        OTHERS,
        values=lambda values: both(values[0], factors[0]),
    )


def _paced(every: int, n: int, t: np.ndarray) -> np.ndarray:
    return t // n * every


def _floor(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield another lowest rate f': with the peak p, p + (r_t - p) (p - f') / (p - f) from the peak on.

    The reference's lowest rate f is known if the schedule reaches it, or is a cosine; else the share is said.
    """
    column = column_of(program)
    top, peak = last_peak(column), float(column.max())
    if not (column[top : len(program.index)] < peak).any():
        return
    least = _lowest(column[top:])

    if least is None:
        yield OptimizerEdit(
            FAULT,
            lambda program, values: _falling(program, top, lambda rates: peak + (rates - peak) * values[0]),
            lambda values: Statement("falls_as_far", times=values[0]),
            (Unknown((0.5,), low=1e-3),),
            OTHERS,
        )
        return

    def lowest_of(values: Values) -> float:
        """Return 0 for a fitted value that is a float32's rounding of the other rates away from 0."""
        return values[0] if values[0] > STRAIGHT * peak else 0.0

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        share = (peak - lowest_of(values)) / (peak - least)
        return _falling(program, top, lambda rates: peak + (rates - peak) * share)

    def what(values: Values) -> Statement:
        return Statement("falls_to", jax=lowest_of(values), torch=least)

    unknown = Unknown((0.1 * peak,), unit=peak, low=-STRAIGHT * peak, high=peak, likely=(0.0,), rounded=True)
    yield OptimizerEdit(
        FAULT, change, what, (unknown,), OTHERS, values=lambda values: both(lowest_of(values), least, key="lr")
    )


def _lowest(falling: np.ndarray) -> float | None:
    """Return the lowest rate of a schedule from its peak on, also of a cosine that ends above it; None: unknown.

    >>> rates = 0.2 + 0.3 * (1 + np.cos(np.pi * np.arange(4) / 20))
    >>> round(_lowest(rates), 12)
    0.2
    """
    if np.argmin(falling) < len(falling) - 1:
        return float(falling.min())
    curve = curve_of(falling)
    if not (isinstance(curve, partial) and curve.func is _wave):
        return None
    middle, amplitude, _ = curve.args
    return max(float(middle - amplitude), 0.0)


def _power(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield a power of the reference's share of the peak, as of a line that falls to 0."""
    column = column_of(program)
    top, peak = last_peak(column), float(column.max())
    falling = column[top : len(program.index)]
    steps = falling[1:] / falling[:-1]
    if len(falling) < FEWEST or falling.min() <= 0 or np.allclose(steps, steps[0], rtol=NEAR):  # a power is a stretch
        return

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        return _falling(program, top, lambda rates: peak * (rates / peak) ** values[0])

    def what(values: Values) -> Statement:
        return Statement("rate_to_power", power=values[0])

    yield OptimizerEdit(FAULT, change, what, (Unknown((2.0, 0.5), low=1e-3, likely=(2.0, 3.0, 0.5)),), OTHERS)


def column_of(program: OptimizerProgram) -> np.ndarray:
    """Return the rates of the tensor whose rate is the highest."""
    return program.rates[:, np.argmax(program.rates.max(axis=0))]


def last_peak(rates: np.ndarray) -> int:
    """Return the step from which the rates fall, the first one if they rise as high again, like a cosine.

    >>> last_peak(np.array([0.5, 1.0, 1.0, 0.7, 1.0 + 1e-16]))
    2
    """
    lower = rates < rates.max() * (1 - NEAR)
    top = int(np.argmin(lower))
    return top + int(np.argmax(lower[top:])) - 1 if lower[top:].any() else len(rates) - 1


def _falling(program: OptimizerProgram, top: int, change: Callable[[np.ndarray], np.ndarray]) -> OptimizerProgram:
    """Return the program with other rates from the peak on."""
    column = column_of(program)
    after = np.concatenate([column[:top], change(column[top:])])
    return replace(program, rates=after[:, None] * (program.rates[top] / column[top]))


def _stretched(program: OptimizerProgram) -> Iterator[OptimizerEdit]:
    """Yield the reference's curve, run through more slowly; a faster clock advances several times per step."""
    column = column_of(program)
    curve = curve_of(column) or curve_of(column[: len(program.index)])
    if curve is None:
        return
    shares = program.rates[:1] / column[0]

    def change(program: OptimizerProgram, values: Values) -> OptimizerProgram:
        rates = curve(np.arange(len(column)) * values[0])
        return replace(program, rates=rates[:, None] * shares)

    def what(values: Values) -> Statement:
        return Statement("schedule_stretched", steps=1 / values[0])

    likely = tuple(1 / steps for steps in range(2, 101))
    yield OptimizerEdit(FAULT, change, what, (Unknown((0.5, 0.1), "log", low=1e-4, high=0.999, likely=likely),), OTHERS)


def curve_of(rates: np.ndarray) -> Curve | None:
    """Return the curve on which rates lie, a line, an exponential or a cosine, also between the steps; None: none.

    >>> rates = 0.05 * (1 + np.cos(np.pi * np.arange(6) / 20))
    >>> curve = curve_of(rates)
    >>> bool(np.isclose(curve(np.array([0.5]))[0], 0.05 * (1 + math.cos(math.pi / 40)), rtol=1e-12))
    True
    >>> curve_of(np.array([0.1, 0.1, 0.05, 0.05])) is None
    True
    """
    if len(rates) < 4:
        return None
    distant = partial(_cosine, apart=(len(rates) - 1) // 2)  # more exact, where the curve falls all along
    for made in (_line, _exponential, distant, _cosine):
        curve = made(rates)
        if curve is not None and np.allclose(curve(np.arange(len(rates))), rates, rtol=0, atol=NEAR * rates.max()):
            return curve
    return None


def _line(rates: np.ndarray) -> Curve | None:
    return lambda t: rates[0] + (rates[1] - rates[0]) * t


def _exponential(rates: np.ndarray) -> Curve | None:
    return (lambda t: rates[0] * (rates[1] / rates[0]) ** t) if min(rates[:2]) > 0 else None


def _cosine(rates: np.ndarray, apart: int = 1) -> Curve | None:
    """Return m + a cos(w t), the highest rate first, from r_0, r_k, r_2k: 1 - cos 2x = 2 (1 - cos x)(1 + cos x).

    Args:
        rates: rates of the steps from 0.
        apart: k; x is w k.
    """
    falls = rates[0] - rates[apart], rates[0] - rates[2 * apart]
    if min(falls) <= 0:
        return None
    cosine = falls[1] / (2 * falls[0]) - 1
    if not -1 < cosine < 1:
        return None
    amplitude, angle = falls[0] / (1 - cosine), math.acos(cosine) / apart
    return partial(_wave, rates[0] - amplitude, amplitude, angle)


def _wave(middle: float, amplitude: float, angle: float, t: np.ndarray) -> np.ndarray:
    return middle + amplitude * np.cos(angle * t)

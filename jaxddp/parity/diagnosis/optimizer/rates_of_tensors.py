"""Mistakes in the learning rates of some tensors: another one, none, or another one for each group."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from jaxddp.parity.deviation import Statement, Value, number
from jaxddp.parity.diagnosis.optimizer.decay import names_of
from jaxddp.parity.diagnosis.optimizer.edit import OptimizerEdit, discrete
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.sample import Sample
from jaxddp.parity.diagnosis.optimizer.schedules import column_of
from jaxddp.parity.diagnosis.search.nonlinear_fit import Unknown

EQUAL = 1e-9  # misfit of a step or tensor that is equal
DISTINCT = 4  # digits in which the rates of two groups differ
LARGEST, NEAR = 100, 1e-6  # denominator of a simple fraction, and how near it a factor is


def rates_of_tensors(program: OptimizerProgram, sample: Sample, floor: float) -> Iterator[OptimizerEdit]:
    """Yield other learning rates of some tensors; a misfit up to `floor` counts as rounding."""
    yield from _of_some(program, sample, floor)
    yield from _of_groups(program, sample)


def _of_some(program: OptimizerProgram, sample: Sample, floor: float) -> Iterator[OptimizerEdit]:
    """Yield another learning rate of those tensors that differ, or none, where others are equal."""
    # Each relative to its own update: a tensor that hardly moves is not an equal one.
    own = sample.of_tensors(sample.update / sample.scale[:, None])
    off = np.any(sample.of_tensors(sample.misfit(program)) > max(EQUAL, floor) * own, axis=0)
    if not off.any() or off.all():
        return
    which = names_of(program, np.asarray(off))
    yield OptimizerEdit(
        "rate_of_some",
        lambda p, v: replace(p, factor=np.where(off, v[0], 1.0)),
        lambda v: (
            Statement("rates_of_tensors", each=((which, v[0]),), alone=())
            if v[0]
            else Statement("not_updated", names=which)
        ),
        (Unknown((0.5,), low=-1.0),),
        frozenset({"lr_scaled", "warmup_start", "lr_off_by_one", "scheduler_too_fast"}),
        values=lambda v: (Value(number(v[0]), "1", key="lr", is_factor=True),) if v[0] else (),
    )


def _of_groups(program: OptimizerProgram, sample: Sample) -> Iterator[OptimizerEdit]:
    """Yield another learning rate of each of several groups, if a multiple of a tensor's prediction is its update.

    A tensor whose rate is 0 in the reference is predicted with the highest rate.
    """
    still = ~program.rates.any(axis=0)
    moving = replace(program, rates=np.where(still, column_of(program)[:, None], program.rates))
    predicted = sample.predict(moving)
    tensors = range(len(program.names))
    products = ((predicted[:, at] * sample.update[:, at], predicted[:, at] ** 2) for at in map(sample.at, tensors))
    with np.errstate(all="ignore"):
        factors = np.array([_plain(both.sum() / squares.sum()) for both, squares in products])
    alone = still & (factors != 0)
    groups = [factor for factor in np.unique(factors[~still]) if factor != 1]
    distinct = {f"{factor:.{DISTINCT}g}" for factor in groups}  # a single rate, rounded in float32, is not several
    if not np.isfinite(factors).all() or not len(distinct) == len(groups) <= len(program.names) // 2:
        return
    if len(groups) < 2 and not alone.any():
        return
    each = tuple((names_of(program, ~still & (factors == factor)), float(factor)) for factor in groups)
    what = Statement("rates_of_tensors", each=each, alone=names_of(program, alone) if alone.any() else ())
    yield discrete("rate_of_some", what, lambda p: replace(p, rates=moving.rates, factor=factors))


def _plain(factor: float) -> float:
    """Return the quotient of two rates that a factor is, up to rounding: a simple fraction, or one of six digits.

    >>> [_plain(x) for x in (3.3333332, 0.2999999, 1.0000001, 0.123456)]
    [3.3333333333333335, 0.3, 1.0, 0.123456]
    """
    if not math.isfinite(factor):
        return factor
    fraction = float(Fraction(factor).limit_denominator(LARGEST))
    return fraction if math.isclose(fraction, factor, rel_tol=NEAR) else float(f"{factor:.6g}")

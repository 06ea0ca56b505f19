"""Updates that no edit of the reference's step makes: another tensor's, or its own at rounded or other rates."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxddp.parity.compare.clipping import NOT_CLIPPED
from jaxddp.parity.compare.rates import is_float32, share_of
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.optimizer.edit import both, number
from jaxddp.parity.diagnosis.optimizer.program import OptimizerProgram
from jaxddp.parity.diagnosis.optimizer.schedules import FAULT, STRAIGHT, column_of
from jaxddp.parity.diagnosis.optimizer.update_evidence import (
    OptimizerEvidence,
    OptimizerStep,
    Tensors,
    replay,
    residuals,
)
from jaxddp.parity.diagnosis.search.decide import Hypothesis, is_plain
from jaxddp.parity.records import relative, stage_norm


def aliased(
    evidence: OptimizerEvidence, program: OptimizerProgram, residuals: list[dict[str, float]], floor: float
) -> Hypothesis | None:
    """Return the hypothesis that each wrong update has another source: another tensor, or the step before.

    Args:
        evidence: the run.
        program: the reference's program.
        residuals: residuals of that program, per step and tensor.
        floor: the largest residual that counts as rounding.

    Returns:
        The hypothesis; None if no tensor is wrong, or half of them or more are.
    """
    off = {name for of_step in residuals for name, value in of_step.items() if value > floor}
    if not off or 2 * len(off) >= len(program.names):
        return None
    worst = 0.0
    says: dict[str, str] = {}
    before: Tensors = {}
    for of_step, (step, predicted, _) in zip(residuals, replay(program, evidence), strict=True):
        norm = stage_norm(step.update)
        for name, value in of_step.items():
            if value > floor:
                value, source = _nearest(name, step, predicted, before, norm)
                says[name] = source
            worst = max(worst, value)
        before = predicted
    all_says = "; ".join(f"the update of {n} {what}" for n, what in says.items())
    return Hypothesis((Deviation("aliased_buffers", all_says),), worst)


def _nearest(name: str, step: OptimizerStep, predicted: Tensors, before: Tensors, norm: float) -> tuple[float, str]:
    """Return the residual of the nearest source of a tensor's update, and a description of the source."""
    observed, own = step.update[name], step.params[name].ravel()
    others = {other: value for other, value in predicted.items() if other != name and value.size == observed.size}
    candidates: Mapping[str, np.ndarray] = {
        **{f"is that of {other}": value for other, value in others.items()},
        **{f"makes it {other}": step.params[other].ravel() + value.ravel() - own for other, value in others.items()},
        **({"is that of the step before": before[name]} if before else {}),
    }
    distances = {
        says: relative(float(np.linalg.norm(value.ravel() - observed.ravel())), norm)
        for says, value in candidates.items()
    }
    says = min(distances, key=distances.__getitem__, default="")
    return distances.get(says, np.inf), says


def of_gradients(evidence: OptimizerEvidence, program: OptimizerProgram) -> Hypothesis | None:
    """Return the nearest hypothesis that the parameters move by their gradients, and by no optimizer's updates.

    They may move by a number times the gradients, or times the learning rate and the gradients, as SGD's do.

    Args:
        evidence: the run.
        program: the reference's program.
    """
    if program.kind == "SGD":
        return None
    found, scheduled = [], column_of(program)[np.clip(program.index, 0, len(program.rates) - 1)]
    for rates, times in ((np.ones_like(scheduled), ""), (scheduled, " and the rate")):
        factor, worst = 0.0, 0.0
        for index in range(len(evidence.steps)):
            step = evidence.steps[index]
            gradients = {name: rates[index] * step.gradient(name) for name in step.update}
            factor = factor or share_of(step.update, gradients, [*gradients])
            worst = max(worst, *residuals(step.update, {name: factor * x for name, x in gradients.items()}).values())
        says = f"the parameters move by their gradients times {number(factor)}{times}, in {program.kind} by its updates"
        found.append(Hypothesis((Deviation("gradients_applied", says),), worst, 1, is_plain(factor)))
    return min(found, key=lambda one: one.residual)


ALLOWED = 5e-7  # of the largest rate; measured: 3e-8 (optax's cosine_onecycle_schedule), 2e-8 (torch's ASGD)


def rounded_rate(evidence: OptimizerEvidence, program: OptimizerProgram, floor: float) -> Hypothesis | None:
    """Return the hypothesis that a part of the learning rate is in float32; None: it is not, or is allowed for.

    Args:
        evidence: the run.
        program: the reference's program.
        floor: the largest residual that counts as rounding.
    """
    worst, furthest, peak = 0.0, 0.0, max(evidence.highest, float(np.max(program.lr))) or 1.0
    is_allowed = True
    for index, (step, predicted, _) in enumerate(replay(program, evidence)):
        scaled, rates = dict(predicted), dict(zip(program.names, program.lr[index].tolist(), strict=True))
        for group in step.groups:
            names = [name for name in group["names"] if name in predicted]
            share, rate = share_of(step.update, predicted, names), rates[names[0]] if names else 0.0
            off = abs(share - 1) * rate / peak
            furthest = max(furthest, off)
            is_allowed &= off <= floor or is_float32(share * rate)
            scaled |= {name: share * predicted[name] for name in names}
        worst = max(worst, *residuals(step.update, scaled).values())
        if not (worst <= floor and furthest <= ALLOWED):
            return None
    if is_allowed:
        return None
    says = f"the learning rate is off by {furthest:.0e} of the largest, as where a part of it is computed in float32"
    measured = "each update is a multiple of the reference's"
    return Hypothesis((Deviation("rate_rounded", says),), worst, measured=measured)


def free_rates(evidence: OptimizerEvidence, program: OptimizerProgram) -> Hypothesis | None:
    """Return the hypothesis that the port's updates are the reference's at other learning rates.

    An update is u_t = r_t d_t, whose direction d_t does not depend on the rates; so r_t = <u_t, d_t> / <d_t, d_t>.

    Returns:
        The hypothesis, with the first rate that differs; None if no rate differs, or all by the same factor, or the
        reference clips, which is a factor of each step too, or if updates are skipped.
    """
    column = column_of(program)
    peak = float(column.max())
    if evidence.clipping != NOT_CLIPPED or len(evidence.steps) < 2 or peak <= 0:
        return None
    of_groups = program.rates[int(column.argmax())]
    highest = replace(program, rates=np.broadcast_to(of_groups, (len(column), len(of_groups))))
    found, worst = [], 0.0
    for step, predicted, _ in replay(highest, evidence):
        factor = share_of(step.update, predicted, [*predicted])
        found.append(peak * factor)
        worst = max(worst, *residuals(step.update, {name: factor * x for name, x in predicted.items()}).values())
    rates, expected = np.array(found), column[np.clip(program.index, 0, len(column) - 1)]
    differs = ~np.isclose(rates, expected, rtol=STRAIGHT, atol=STRAIGHT * peak)
    if not differs.any() or rates.min() < -STRAIGHT * peak or _are_scaled(rates, expected, peak):
        return None
    if _are_skipped(differs & (rates <= STRAIGHT * peak)):
        return None
    first = int(differs.argmax())
    values = both(rates[first], expected[first], key="lr")
    return Hypothesis((Deviation(FAULT, _in_words(rates, expected, differs), values),), worst, len(rates))


def _are_scaled(rates: np.ndarray, expected: np.ndarray, peak: float) -> bool:
    """Return whether all rates are the expected ones times one factor."""
    squares = float(expected @ expected)
    return bool(squares and np.allclose(rates, expected * (rates @ expected) / squares, atol=STRAIGHT * peak))


def _are_skipped(zero: np.ndarray) -> bool:
    """Return whether steps without an update lie between others: a schedule is 0 at its beginning or its end.

    >>> [_are_skipped(np.array(zero, bool)) for zero in ([1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0])]
    [False, False, True, True]
    """
    begins, ends = np.flatnonzero(~zero)[[0, -1]] if not zero.all() else (0, -1)
    return bool(zero[begins : ends + 1].any())


def _in_words(rates: np.ndarray, expected: np.ndarray, differs: np.ndarray) -> str:
    """Describe rates by the first one that differs.

    >>> rates, expected = np.array([0.1, 0.1, 0.01]), np.array([0.1, 0.01, 0.01])
    >>> _in_words(rates, expected, rates != expected)
    "the learning rate is 0.1 at step 2, the reference's 0.01; it differs at 1 of 3 steps"
    """
    first = int(differs.argmax())
    often = f"it differs at {int(differs.sum())} of {len(rates)} steps"
    one, other = number(rates[first]), number(expected[first])
    return f"the learning rate is {one} at step {first + 1}, the reference's {other}; {often}"

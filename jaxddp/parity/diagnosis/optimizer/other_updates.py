"""Updates that no edit of the reference's step makes: another tensor's, or its own at rounded or other rates."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxddp.parity.compare.clipping import NOT_CLIPPED
from jaxddp.parity.compare.rates import is_float32, share_of
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.optimizer.edit import both
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
    sources: dict[str, tuple[str, str]] = {}
    before: Tensors = {}
    for of_step, (step, predicted, _) in zip(residuals, replay(program, evidence), strict=True):
        norm = stage_norm(step.update)
        for name, value in of_step.items():
            if value > floor:
                value, source = _nearest(name, step, predicted, before, norm)
                sources[name] = source
            worst = max(worst, value)
        before = predicted
    each = tuple((name, *source) for name, source in sources.items())
    return Hypothesis((Deviation("aliased_buffers", Statement("updates_of_others", each=each)),), worst)


def _nearest(
    name: str, step: OptimizerStep, predicted: Tensors, before: Tensors, norm: float
) -> tuple[float, tuple[str, str]]:
    """Return the residual of the nearest source of a tensor's update, and the source: its kind, and a tensor or ""."""
    observed, own = step.update[name], step.params[name].ravel()
    others = {other: value for other, value in predicted.items() if other != name and value.size == observed.size}
    candidates: Mapping[tuple[str, str], np.ndarray] = {
        **{("update", other): value for other, value in others.items()},
        **{("result", other): step.params[other].ravel() + value.ravel() - own for other, value in others.items()},
        **({("before", ""): before[name]} if before else {}),
    }
    distances = {
        source: relative(float(np.linalg.norm(value.ravel() - observed.ravel())), norm)
        for source, value in candidates.items()
    }
    nearest = min(distances, key=distances.__getitem__, default=("", ""))
    return distances.get(nearest, np.inf), nearest


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
    for rates, by_rate in ((np.ones_like(scheduled), False), (scheduled, True)):
        factor, worst = 0.0, 0.0
        for index in range(len(evidence.steps)):
            step = evidence.steps[index]
            gradients = {name: rates[index] * step.gradient(name) for name in step.update}
            factor = factor or share_of(step.update, gradients, [*gradients])
            worst = max(worst, *residuals(step.update, {name: factor * x for name, x in gradients.items()}).values())
        what = Statement("gradients_applied", factor=factor, by_rate=by_rate, optimizer=program.kind)
        found.append(Hypothesis((Deviation("gradients_applied", what),), worst, 1, is_plain(factor)))
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
    measured = "each update is a multiple of the reference's"
    return Hypothesis((Deviation("rate_rounded", Statement("rate_rounded", by=furthest)),), worst, measured=measured)


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
    if not differs.any() or _are_scaled(rates, expected, peak):
        return None
    if _are_skipped(differs & (np.abs(rates) <= STRAIGHT * peak)):
        return None
    first, count = int(differs.argmax()), int(differs.sum())
    jax, torch = float(rates[first]), float(expected[first])
    what = Statement("other_rate_at", step=first + 1, jax=jax, torch=torch, differing=count, steps=len(rates))
    return Hypothesis((Deviation(FAULT, what, both(jax, torch, key="lr")),), worst, len(rates))


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

"""Words for what a check looked at in addition to the steps of its run."""

import itertools
import math
from collections.abc import Iterator

from jaxddp.errors import count, listed
from jaxddp.parity.coverage import ASPECTS, TRIALS, Aspect, Beyond, Trial, WithoutEffect
from jaxddp.parity.findings import ORDER, STAGE_NAMES, Findings
from jaxddp.parity.report.numbers import number
from jaxddp.parity.report.sentences import alternatives
from jaxddp.parity.report.words import said

MOST_SAYS = 3  # sentences on an aspect
MOST_REASONS = 3  # of trials that were left out, in a sentence


def aspects(findings: Findings) -> list[tuple[str, Aspect]]:
    """Return the aspects that were looked at, in the order of the report."""
    return [(name, findings.aspects[name]) for name in ASPECTS if name in findings.aspects]


def cells(aspect: Aspect) -> tuple[str, str, str]:
    """Return residual, step and allowed residual of an aspect, "-" for what it does not have.

    >>> cells(Aspect("differs", residual=0.9, step=500, allowed=1e-9)), cells(Aspect("equal"))
    (('0.9', '500', '1e-9'), ('-', '-', '-'))
    """
    return number(aspect.residual), f"{aspect.step}" if aspect.step else "-", number(aspect.allowed)


def sentences(findings: Findings) -> Iterator[str]:
    """Yield what the verdict covers in addition to the run's steps, and what it does not, each in a sentence."""
    for name, aspect in aspects(findings):
        intended = f" (intended: {findings.intended[name]})" if name in findings.intended else ""
        yield from (f"{says}{intended}" for says in aspect.says[:1] if says not in findings.idle)
    compared = [trial for trial in findings.trials if not trial.left_out]
    differing = {trial.what for beyond in findings.beyond for trial in (beyond.trial, *beyond.others)}
    if equal := [trial for trial in compared if trial.what not in differing]:
        kinds = listed([*dict.fromkeys(trial.kind.replace("_", " ") for trial in equal)], len(TRIALS), ", ")
        yield f"Equal beyond the run too, in {count(len(equal), 'trial')} ({kinds})."
    if left_out := [trial for trial in findings.trials if trial.left_out]:
        yield f"Not tried beyond the run: {listed([*map(_left_out, left_out)], MOST_REASONS, '; ')}."


def _left_out(trial: Trial) -> str:
    return f"{trial.what.removeprefix('with ')}, since {trial.left_out}"


def beyond_line(beyond: Beyond, intended: str = "") -> str:
    """Describe in a line what differs in a trial.

    Args:
        intended: why the port means to differ in it; "": it does not.

    >>> from jaxddp.parity.quote import Quote
    >>> from jaxddp.parity.deviation import Statement
    >>> trial = Trial("gradients", "with gradients 1000 times as large")
    >>> clips = Statement("operation_of_one_side", code="clip_by_global_norm(100)", of="jax")
    >>> where = ("update", "0.weight", 0.9, 1e-12)
    >>> print(beyond_line(Beyond(trial, *where)))
    beyond this run, with gradients 1000 times as large: the update differs in 0.weight, residual 0.9
    >>> line = beyond_line(Beyond(trial, *where, (clips,), Quote("port.py", 17)))
    >>> print(line.partition("0.9: ")[2])
    clip_by_global_norm(100) at port.py:17; the reference has none
    """
    name = STAGE_NAMES.get(beyond.stage, beyond.stage)
    tensor = f" in {beyond.tensor}" if beyond.tensor and beyond.tensor != "loss" else ""
    verb = "differ" if name.endswith("s") and not name.endswith("ss") else "differs"
    residual = "" if math.isnan(beyond.residual) else f", residual {number(beyond.residual)}"
    why = f": {said(beyond, alternatives(beyond))}" if beyond.statements else _lines(beyond)
    others = f"; also in {count(len(beyond.others), 'further trial')}" if beyond.others else ""
    why = f"{why}{others}{f' (intended: {intended})' if intended else ''}"
    return f"beyond this run, {beyond.trial.what}: the {name} {verb}{tensor}{residual}{why}"


def _lines(beyond: Beyond) -> str:
    lines = [f"{side}: {quote.place}" for side, quote in (("jax", beyond.jax), ("torch", beyond.torch)) if quote]
    return f" ({', '.join(lines)})" if lines else ""


def without_effect_line(idle: WithoutEffect) -> str:
    """Describe in a line an operation that had no effect.

    >>> from jaxddp.parity.quote import Quote
    >>> without_effect_line(WithoutEffect("jax", "jnp.clip(..., -3, 3)", "never clips", Quote("port.py", 21)))
    'without effect in this run: jnp.clip(..., -3, 3) at port.py:21 (jax) never clips'
    """
    side = f" ({idle.side})" if idle.side else ""
    return f"without effect in this run: {idle.operation} at {idle.line.place}{side} {idle.why}"


def aspect_lines(findings: Findings) -> Iterator[str]:
    """Yield what is said further of each aspect, a line each."""
    for name, aspect in aspects(findings):
        yield from (f"{name}: {says}" for says in aspect.says[1:MOST_SAYS])
        if (rest := len(aspect.says) - MOST_SAYS) > 0:
            yield f"{name}: {count(rest, 'further sentence')} [--report, --json]"


def beyond_lines(findings: Findings) -> Iterator[str]:
    """Yield a line for each difference beyond the run, in the order of the stages."""
    order = {stage: place for place, stage in enumerate(itertools.chain(ORDER, ASPECTS))}
    for beyond in sorted(findings.beyond, key=lambda beyond: order.get(beyond.stage, len(order))):
        yield beyond_line(beyond, findings.intended.get(beyond.trial.kind, ""))

"""The words and numbers that the terminal's report and the page share."""

import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from jaxddp.parity.findings import Cause, Difference, Findings, Layer, Numerics, StageResult

STAGE_NAMES = {
    "samples": "samples",
    "hyperparameters": "hyperparameters",
    "local_loss": "local loss",
    "local_gradients": "local gradients",
    "gradients": "gradients",
    "clipped_gradients": "clipped gradients",
    "update": "update",
    "params": "parameters",
    "buffers": "buffers",
    "optimizer_state": "optimizer state",
}


RATE_TOLD = 1e-12  # a learning rate that is off by less is not worth a sentence


class Status(StrEnum):
    """What is known of one stage."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NUMERIC = "rounds differently"
    FOLLOWS = "differs too"  # beyond what is allowed, because an earlier stage is
    UNSEEN = "not seen"
    ABSENT = "not compared"


class Peak(NamedTuple):
    """Where a stage differs most, and what is allowed there."""

    residual: float
    step: int
    tensor: str
    allowed: float


def number(value: float, digits: int = 1) -> str:
    """A residual or a ratio, as short as it can be read.

    >>> [number(x) for x in (0, 9.4e-16, 6.6e-4, 0.3127, 1.04, 360, math.inf, math.nan)]
    ['0', '9e-16', '7e-4', '0.31', '1', '360', 'inf', '-']
    """
    if math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.{max(2, digits)}g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def apart(a: float, b: float) -> tuple[str, str]:
    """Two values with as many digits as it takes to see the difference, and one more.

    >>> apart(0.12345678, 0.12345987)
    ('0.1234568', '0.1234599')
    """
    digits = next((n for n in range(4, 17) if f"{a:.{n}g}" != f"{b:.{n}g}"), 16) + 1
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "replica"), count(2, "replica")
    ('1 replica', '2 replicas')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def worst(result: StageResult) -> tuple[float, int]:
    """The largest residual and its step (from 1); NaN and 0 if no step was compared.

    >>> worst(StageResult(1e-12, (1e-16, math.nan, 4e-16)))
    (4e-16, 3)
    """
    compared = [(value, -step) for step, value in enumerate(result.residuals, start=1) if not math.isnan(value)]
    value, step = max(compared, default=(math.nan, 0))
    return value, -step


def peak(report: Findings, stage: str) -> Peak | None:
    """The largest residual of a stage; one that was found otherwise (in float32) counts too."""
    result = report.stages.get(stage)
    peaks = [Peak(found.residual, found.step, found.tensor, found.allowed)
             for found in report.differences if found.stage == stage]  # fmt: skip
    if result is not None and steps_compared(result):
        tensors = {name: value for name, (_, value) in result.tensors.items() if value > 0}
        peaks.append(Peak(*worst(result), max(tensors, key=tensors.__getitem__, default=""), result.allowed))
    return max(peaks, key=lambda peak: peak.residual, default=None)


def steps_compared(result: StageResult) -> int:
    """In how many steps both sides showed the stage."""
    return sum(not math.isnan(value) for value in result.residuals)


def steps_of_all(report: Findings, stage: str) -> str:
    """How many steps were compared, to be put behind a verdict; "" for all, or for none."""
    seen = steps_compared(report.stages[stage]) if stage in report.stages else 0
    return f", {seen}/{report.steps} steps" if 0 < seen < report.steps else ""


def status(report: Findings, stage: str) -> Status:
    """What is known of a stage; a difference counts even if no residual of it was kept."""
    kinds = {difference.kind for difference in report.differences if difference.stage == stage}
    if kinds:
        return Status.NUMERIC if kinds == {"numeric"} else Status.DIFFERENT
    result = report.stages.get(stage)
    if result is None or not steps_compared(result):
        return Status.UNSEEN if stage in report.unseen else Status.ABSENT
    return Status.EQUAL if worst(result)[0] <= result.allowed else Status.FOLLOWS


def verdict_word(report: Findings) -> str:
    """The verdict in a word or three: the two kinds of difference are told apart.

    >>> verdict_word(Findings("port.py", 2, 10, "float64"))
    'incomplete'
    """
    if report.verdict == "different" and is_numeric(report):
        return "different in rounding"
    return report.verdict


def is_numeric(report: Findings) -> bool:
    """Whether both sides mean the same and only round differently."""
    return bool(report.differences) and all(found.kind == "numeric" for found in report.differences)


def sentence(report: Findings) -> str:
    """The verdict: what differs, where first, why; or how equal the two are."""
    if not report.differences:
        return _agreement(report)
    found = report.differences[0]
    text = f"{where(found)}{_why(found)}"
    if len(report.differences) > 1:
        text += f" {count(len(report.differences) - 1, 'further difference')} below."
    return text


def where(found: Difference) -> str:
    """Which stage differs, and where it is first seen.

    >>> where(Difference("update", 1, "fc1.weight", 0.1, 1e-12))
    'The update differs, first at step 1 in fc1.weight'
    """
    name = STAGE_NAMES[found.stage]
    plural = name.endswith("s") and not name.endswith("ss")
    verb = "round" if found.kind == "numeric" else "differ"
    manner = " differently" if found.kind == "numeric" else ""
    tensor = f" in {found.tensor}" if found.tensor else ""
    return f"The {name} {verb}{'' if plural else 's'}{manner}, first at step {found.step}{tensor}"


def groups(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Differences that are shown at one place, which has several causes."""
    found = itertools.groupby(differences, lambda d: (d.stage, d.step, d.tensor, d.kind))
    return [list(group) for _, group in found]


def _why(found: Difference) -> str:
    if found.cause is None:
        layer = f" The forward pass parts at {found.layer.torch}." if found.layer else ""
        return f"; no known fault explains it.{layer}"
    if len(found.cause.says) > 1:
        return f". This run cannot tell apart: {'; or '.join(found.cause.says)}."
    return f": {found.cause.says[0]}."


def _agreement(report: Findings) -> str:
    parts = []
    if report.problems:
        parts.append("Not all could be compared." if any(map(steps_compared, report.stages.values())) else "")
    parts.append(_largest(report))
    if report.unseen:
        parts.append(f"The port does not show its {', '.join(STAGE_NAMES[stage] for stage in report.unseen)}.")
    if report.rate_rounding > RATE_TOLD:
        parts.append(f"Its learning rate is computed in float32, {report.rate_rounding:.0e} off, which is allowed for.")
    return " ".join(filter(None, parts))


def _largest(report: Findings) -> str:
    """How equal all stages are."""
    found = {stage: (*worst(result), steps_compared(result)) for stage, result in report.stages.items()}
    found = {stage: values for stage, values in found.items() if values[-1]}
    if not found:
        return "Nothing was compared."
    stage = max(found, key=lambda stage: found[stage][0])
    value, step, _ = found[stage]
    at = f", in the {STAGE_NAMES[stage]} at step {step}" if value > 0 else ""
    return (
        f"In {count(len(found), 'stage')} of {count(max(seen for *_, seen in found.values()), 'step')} on "
        f"{count(report.world_size, 'replica')} nothing differs: the largest residual is {number(value)}{at}, where "
        f"{number(report.stages[stage].allowed)} is allowed."
    )


def evidence(causes: Sequence[Cause]) -> str:
    """What speaks for a cause, or for several that are there at once.

    >>> evidence([Cause(("nesterov",), ("Nesterov momentum",), ("nesterov=False",), 2e-15, ("dampening", 4e-2))])
    'planted in the reference, it leaves 2e-15; the next best, dampening, leaves 0.04'
    """
    cause = causes[0]
    subject = "it leaves" if len(cause.names) == 1 else "each leaves at most"
    if len(causes) > 1:
        subject = "they leave together"
    text = f"planted in the reference, {subject} {number(cause.residual)}"
    if cause.runner_up is None:
        return f"{text}; no other was near"
    return f"{text}; the next best, {cause.runner_up[0]}, leaves {number(cause.runner_up[1])}"


def blame(layer: Layer, allowed: float) -> str:
    """Whether the layer itself differs, or what lies before it."""
    before = f"{layer.before}, the last that is equal" if layer.before else "the model's input"
    if layer.input_residual is None:
        return f"It comes after {before}."
    if layer.input_residual <= allowed:
        return f"Its input is equal ({number(layer.input_residual)}), so the layer itself differs."
    return f"Its input differs already ({number(layer.input_residual)}): look between it and {before}."


def ratio(result: Numerics) -> float:
    """How many times as far from the truth jax is as torch; 1 where both are exact.

    >>> ratio(Numerics(3e-7, 2e-7, 3.0)), ratio(Numerics(0.0, 0.0, 3.0)), ratio(Numerics(1e-9, 0.0, 3.0))
    (1.5, 1.0, inf)
    """
    if result.torch == 0:
        return 1.0 if result.jax == 0 else math.inf
    return result.jax / result.torch

"""Words that the console text and the HTML page share."""

import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from jaxddp.errors import count
from jaxddp.parity.coverage import Beyond
from jaxddp.parity.findings import (
    STAGE_NAMES,
    Cause,
    Difference,
    Findings,
    Layer,
    LeftOut,
    Patch,
    StageResult,
)
from jaxddp.parity.report.numbers import number, runs
from jaxddp.parity.report.sentences import line, sentences

HAS = (", the reference has ", "; the reference has ", " in jax, ")  # what precedes it is jax's
RATE_MENTIONED = 1e-12  # smaller rounding errors of the learning rate are not mentioned


class Status(StrEnum):
    """Result for one stage."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NUMERIC = "rounds differently"
    FOLLOWS = "differs too"  # above the allowed residual because an earlier stage differs
    UNSEEN = "not seen"
    ABSENT = "not compared"


class Peak(NamedTuple):
    """Largest residual of a stage, and the largest that is allowed there."""

    residual: float
    step: int
    tensor: str
    allowed: float


def worst(result: StageResult) -> tuple[float, int]:
    """Return the largest residual and its step (from 1); NaN and 0 if no step was compared.

    >>> worst(StageResult(1e-12, (1e-16, math.nan, 4e-16)))
    (4e-16, 3)
    """
    compared = [(value, -step) for step, value in enumerate(result.residuals, start=1) if not math.isnan(value)]
    value, step = max(compared, default=(math.nan, 0))
    return value, -step


def peak(findings: Findings, stage: str) -> Peak | None:
    """Return the largest residual of a stage, among its results and its differences; None if there is none."""
    result = findings.stages.get(stage)
    peaks = [Peak(d.residual, d.step, d.tensor, d.allowed) for d in findings.differences if d.stage == stage]
    if result is not None and steps_compared(result):
        tensors = {name: value for name, (_, value) in result.tensors.items() if value > 0}
        peaks.append(Peak(*worst(result), max(tensors, key=tensors.__getitem__, default=""), result.allowed))
    return max(peaks, key=lambda peak: peak.residual, default=None)


def steps_compared(result: StageResult) -> int:
    """Count the steps in which both sides show the stage."""
    return sum(not math.isnan(value) for value in result.residuals)


def steps_of_all(findings: Findings, stage: str) -> str:
    """Return the number of compared steps as a suffix of the verdict; "" for all or none."""
    seen = steps_compared(findings.stages[stage]) if stage in findings.stages else 0
    return f", {seen}/{findings.steps} steps" if 0 < seen < findings.steps else ""


def status(findings: Findings, stage: str) -> Status:
    """Return the result for a stage; a difference counts even without a residual in `stages`."""
    kinds = {difference.kind for difference in findings.differences if difference.stage == stage}
    if kinds:
        return Status.NUMERIC if kinds == {"numeric"} else Status.DIFFERENT
    result = findings.stages.get(stage)
    if result is None or not steps_compared(result):
        return Status.UNSEEN if stage in findings.unseen else Status.ABSENT
    return Status.EQUAL if worst(result)[0] <= result.allowed else Status.FOLLOWS


def verdict_word(findings: Findings) -> str:
    """Return the verdict in one to three words; "different in rounding" if every difference is numeric.

    >>> verdict_word(Findings("port.py", 2, 10, "float64"))
    'incomplete'
    """
    if findings.verdict == "different" and is_numeric(findings):
        return "different in rounding"
    return findings.verdict


def is_numeric(findings: Findings) -> bool:
    """Return whether all differences are rounding."""
    return bool(findings.differences) and all(d.kind == "numeric" for d in findings.differences)


def sentence(findings: Findings) -> str:
    """Describe the verdict in a sentence: the first difference and its cause, or the largest residual if equal."""
    if not findings.differences:
        return _agreement(findings) if findings.verdict != "different" else _exceeding(findings)
    first = findings.differences[0]
    text = f"{where(first)}{_why(first)}"
    if len(findings.differences) > 1:
        text += f" {count(len(findings.differences) - 1, 'further difference')} below."
    return text


def where(difference: Difference) -> str:
    """Describe which stage differs, and the first step and tensor.

    >>> where(Difference("update", 1, "fc1.weight", 0.1, 1e-12))
    'The update differs, first at step 1 in fc1.weight'
    >>> where(Difference("local_loss", 2, "loss", math.inf, 1e-12, not_finite="jax"))
    'The local loss is finite in torch and not in jax, first at step 2 in loss'
    """
    name = STAGE_NAMES[difference.stage]
    plural = name.endswith("s") and not name.endswith("ss")
    if difference.not_finite:
        other, be = "torch" if difference.not_finite == "jax" else "jax", "are" if plural else "is"
        sides = f"{be} finite in {other} and not in {difference.not_finite}"
        return f"The {name} {sides}, first at step {difference.step} in {difference.tensor}"
    verb = "round" if difference.kind == "numeric" else "differ"
    manner = " differently" if difference.kind == "numeric" else ""
    tensor = f" in {difference.tensor}" if difference.tensor else ""
    step = f", first at step {difference.step}" if difference.step else ""  # types, and a start, have none
    return f"The {name} {verb}{'' if plural else 's'}{manner}{step}{tensor}"


def _why(difference: Difference) -> str:
    cause, layer = difference.cause, difference.layer
    if difference.not_finite:
        return f"; {difference.detail}." if difference.detail else "."
    if cause is None and difference.needs:
        return f"; its cause needs {difference.needs}."
    if cause is None:
        diverges = f" The forward pass diverges at {layer_name(layer.torch)}." if layer else ""
        return f"; no known fault explains it.{diverges}"
    if len(cause.names) > 1:
        return f". This run cannot tell these causes apart: {'; or '.join(sentences(cause))}."
    return f": {sentences(cause)[0]}."


def _agreement(findings: Findings) -> str:
    parts = []
    if findings.ended:
        parts.append(ended(findings))
    elif findings.problems:
        parts.append("Not everything could be compared." if any(map(steps_compared, findings.stages.values())) else "")
    parts.append(_largest(findings))
    if findings.unseen:
        parts.append(f"The port does not show its {', '.join(STAGE_NAMES[stage] for stage in findings.unseen)}.")
    parts += map(left_out, findings.left_out)
    parts += findings.idle
    if findings.rate_rounding > RATE_MENTIONED:
        off = f"{number(findings.rate_rounding)} of the largest rate so far"
        parts.append(f"The port computes its learning rate in float32, off by {off}, which is allowed for.")
    return " ".join(filter(None, parts))


def _exceeding(findings: Findings) -> str:
    """Describe a residual larger than allowed of which no difference was made."""
    stage = next(stage for stage, result in findings.stages.items() if result.exceeds)
    residual, step = worst(findings.stages[stage])
    sizes = f"residual {number(residual, 2)} at step {step}, allowed {number(findings.stages[stage].allowed)}"
    return f"The {STAGE_NAMES[stage]} of the two sides is not equal: {sizes}; no earlier stage explains it."


def left_out(part: LeftOut) -> str:
    """Describe in a sentence what is not judged.

    >>> left_out(LeftOut(("local_loss", "gradients"), (2, 3, 5), "the parameters have drifted apart"))
    'Left out: local loss, gradients at steps 2 to 3, 5; the parameters have drifted apart.'
    """
    spans = [[*group] for _, group in itertools.groupby(enumerate(part.steps), lambda item: item[1] - item[0])]
    steps = ", ".join(runs([(span[0][1], span[-1][1])]) for span in spans)
    word = "step" if len(part.steps) == 1 else "steps"
    return f"Left out: {', '.join(STAGE_NAMES[stage] for stage in part.stages)} at {word} {steps}; {part.reason}."


def _largest(findings: Findings) -> str:
    """Describe the largest residual of all stages in a sentence."""
    results = findings.stages or findings.free_running
    compared = {stage: result for stage, result in results.items() if steps_compared(result)}
    if not compared:
        return "Nothing was compared."
    stage = max(compared, key=lambda stage: worst(compared[stage])[0])
    value, step = worst(compared[stage])
    steps = max(map(steps_compared, compared.values()))
    at = f", in the {STAGE_NAMES[stage]} at step {step}" if value > 0 else ""
    return (
        f"Nothing differs in {count(len(compared), 'stage')} of {count(steps, 'step')} on "
        f"{count(findings.world_size, 'replica')}: the largest residual is {number(value)}{at}, and "
        f"{number(compared[stage].allowed)} is allowed{', each side running by itself' * (not findings.stages)}."
    )


def ended(findings: Findings) -> str:
    """Describe in a sentence what ended the check early, and what it had not done by then.

    >>> ended(Findings("port.py", 2, 10, "float64", ended="Ctrl-C", untried=("float32",), seconds=14.2))
    'Ended early by Ctrl-C, after 14 s; not done: float32.'
    """
    return f"Ended early by {findings.ended}, after {findings.seconds:.0f} s; not done: {'; '.join(findings.untried)}."


def said(cause: Cause | Beyond, says: str) -> str:
    """Return what the cause says, with the lines of both sides.

    >>> from jaxddp.parity.quote import Quote
    >>> cause = Cause((), 0.0, jax=Quote("model_jax.py", 34), torch=Quote("model.py", 21))
    >>> said(cause, "leaky_relu's negative_slope 0.2, the reference has 0.01")
    "leaky_relu's negative_slope 0.2 at model_jax.py:34, the reference has 0.01 at model.py:21"
    >>> said(cause, "0.weight: bfloat16 in jax, float32 in torch")
    '0.weight: bfloat16 in jax at model_jax.py:34, float32 in torch at model.py:21'
    >>> said(cause, "GELU by tanh")
    'GELU by tanh at model_jax.py:34; the reference: model.py:21'
    >>> said(cause, "Nesterov momentum in the reference only")
    'Nesterov momentum in the reference only (jax: model_jax.py:34, torch: model.py:21)'
    """
    jax, torch = (f" at {quote.place}" if quote else "" for quote in (cause.jax, cause.torch))
    begin, has, end = next(filter(lambda parts: parts[1], map(says.partition, HAS)), (says, "", ""))
    if has:
        begin, has = (f"{begin} in jax", ", ") if has == HAS[-1] else (begin, has)
        return f"{begin}{jax}{has}{end}{torch}"
    if "the reference" in says:
        sides = (f"{side}: {quote.place}" for side, quote in (("jax", cause.jax), ("torch", cause.torch)) if quote)
        return f"{says} ({', '.join(sides)})" if cause.jax or cause.torch else says
    return f"{says}{jax}{f'; the reference: {cause.torch.place}' if cause.torch else ''}"


def patched(patch: Patch) -> str:
    """Describe in words whether a patch was verified, or why there is none.

    >>> patched(Patch("gone", "...", 2)), patched(Patch("equal", "..."))
    ('verified: this difference is gone; 2 others remain', 'verified: equal with this patch')
    >>> patched(Patch("equal", "...", together=2))
    'verified: equal with 2 patches together'
    """
    if patch.verdict == "none":
        return f"none: {patch.why_not}"
    if patch.verdict == "equal":
        return f"verified: equal with {'this patch' if patch.together == 1 else f'{patch.together} patches together'}"
    others = "1 other remains" if patch.others == 1 else f"{patch.others} others remain"
    return f"verified: this difference is gone; {others}"


def evidence(difference: Difference, causes: Sequence[Cause]) -> str:
    """Describe the residual that one cause, or several together, leave, and that of the next best explanation.

    >>> from jaxddp.parity.deviation import Deviation, Statement
    >>> from jaxddp.parity.findings import NextBest
    >>> nesterov, other = (Deviation("", Statement("flag", name=name, of="jax")) for name in ("nesterov", "amsgrad"))
    >>> cause = Cause((nesterov,), 2e-15, NextBest((other,), 4e-2))
    >>> evidence(Difference("update", 1, "fc.weight", 0.5, 1e-12), [cause])
    'planted in the reference: residual 2e-15; next best: AMSGrad in the port only, residual 0.04'
    >>> alone = Cause(cause.deviations, cause.residual)
    >>> evidence(Difference("update", 1, "fc.weight", 0.01, 1e-12), [alone])
    'planted in the reference: residual 2e-15; without a fault: residual 0.01'
    """
    cause = causes[0]
    if cause.measured:
        return f"measured: {cause.measured}"
    planted, at_most = "planted", ""
    if len(causes) > 1:
        planted = "planted together"
    elif len(cause.names) > 1:
        planted, at_most = "each planted", "at most "
    text = f"{planted} in the reference: residual {at_most}{number(cause.residual)}"
    if (other := cause.runner_up) is None:
        residual = "not finite" if math.isinf(difference.residual) else f"residual {number(difference.residual, 2)}"
        return f"{text}; without a fault: {residual}"
    return f"{text}; next best: {line(other)}, residual {number(other.residual)}"


MOST_OPERATIONS = 6  # of one side of a segment that are listed
SEGMENTS = "in one micro-batch, these operations of the loss get equal inputs and give other values"


def operations(names: Sequence[str]) -> str:
    """List the operations of one side of a segment.

    >>> operations(["mul 0.5", "tanh"]), operations([]), operations(["add"] * 8)
    ('mul 0.5, tanh', 'nothing', 'add, add, add, add, add, add and 2 more')
    """
    rest = len(names) - MOST_OPERATIONS
    return ", ".join(names[:MOST_OPERATIONS]) + (f" and {rest} more" if rest > 0 else "") or "nothing"


def layer_name(name: str) -> str:
    """Return a layer's name for a sentence; the model itself, "", has no name.

    >>> layer_name("fc1"), layer_name(""), layer_name(" (2)")
    ('fc1', "the model's output", "the model's output (2)")
    """
    return f"the model's output{name}" if _is_model(name) else name


def _is_model(name: str) -> bool:
    return not name.partition(" ")[0]


def blame(layer: Layer, allowed: float) -> str:
    """Describe in a sentence whether the layer itself differs, or something before it."""
    if layer.before and _is_model(layer.torch):
        return (
            f"All layers in it are equal: look after {layer.before}, the last of them; or in the loss, if the two "
            "models return different things, such as probabilities and logits."
        )
    before = f"{layer.before}, the last equal layer" if layer.before else "the model's input"
    if layer.input_residual is None:
        return f"It comes after {before}."
    if layer.input_residual <= allowed:
        return f"Its input is equal ({number(layer.input_residual)}), so the layer itself differs."
    if layer.columns:
        order = f"torch's channels in another order, {runs(layer.columns)}"
        return f"Its input has {order}: look between this layer and {before}."
    return f"Its input already differs ({number(layer.input_residual)}): look between this layer and {before}."

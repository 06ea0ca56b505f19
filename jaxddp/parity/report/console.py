"""Format reports for a terminal: one check in about twenty lines, or many checks in one line each."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxddp.errors import count, on_one_line
from jaxddp.parity.findings import ORDER, STAGE_NAMES, Cause, Difference, Findings, Patch, Segment, groups
from jaxddp.parity.port.names_block import import_line, names_block, no_twin_line
from jaxddp.parity.report import words
from jaxddp.parity.report.coverage_words import (
    aspect_lines,
    aspects,
    beyond_lines,
    cells,
    sentences,
    without_effect_line,
)
from jaxddp.parity.report.numbers import apart, number, ratio
from jaxddp.parity.report.sentences import sentence
from jaxddp.parity.report.sentences import sentences as sentences_of
from jaxddp.parity.report.words import Status

LINE = 110  # characters
LONGEST = 480  # characters; the middle of a longer text is left out
REST = " [in full: --report, --json]"
TENSOR_WIDTH = 32
MOST_SEGMENTS = 3
LONGEST_CODE = 100  # characters of what one side computes
MOST_EDITED = 8  # lines of a patch that are shown
MOST_DIFFERENCES, MOST_PROBLEMS = 2, 3  # shown in full
MOST_WITHOUT_EFFECT = 10  # lines

# Columns of the table of checks: heading -> stages; a column shows the worst of its stages.
COLUMNS = {
    "inputs": ("samples", "hyperparameters"),
    "loss": ("local_loss",),
    "local": ("local_gradients",),
    "mean": ("gradients",),
    "clip": ("clipped_gradients",),
    "update": ("update",),
    "params": ("params",),
    "buffer": ("buffers",),
    "state": ("optimizer_state",),
}


@dataclass(frozen=True)
class Row:
    """One check in a table of many.

    Attributes:
        model, optimizer: names of the built-in model and optimizer.
        feature: enabled options; "" if none.
        world_size: number of replicas.
        worst: stage -> worst residual over all steps, without the stages that were not compared.
        verdict: "equal", "different" or "incomplete".
        seconds: duration of the check.
    """

    model: str
    optimizer: str
    feature: str
    world_size: int
    worst: Mapping[str, float] = field(default_factory=dict)
    verdict: str = "equal"
    seconds: float = 0.0


def to_text(findings: Findings) -> str:
    """Format findings in lines of at most `LINE` characters: stages, verdict, causes, problems.

    >>> print(to_text(Findings("port.py", 2, 10, "float64")))
    port.py  ·  2 replicas x 10 steps  ·  float64
    <BLANKLINE>
    incomplete: Nothing was compared.
    """
    size = f"{count(findings.world_size, 'replica')} x {count(findings.steps, 'step')}"
    lines = [f"{findings.port}  ·  {size}  ·  {findings.dtype}", ""]
    stages = [name for name in ORDER if words.status(findings, name) is not Status.ABSENT or name in findings.stages]
    if stages:
        lines += [f"{'stage':<17}  {'worst':>6}  {'step':>5}  {'allowed':>7}  {'verdict':<19}  tensor"]
        lines += [_stage_line(findings, stage) for stage in stages]
        lines += [_line(name, *cells(aspect), aspect.verdict, aspect.tensor) for name, aspect in aspects(findings)]
        lines += [""]
    lines += list(_verdict_lines(findings))
    if findings.seconds:
        lines.append(f"{findings.seconds:.1f} s")
    return "\n".join(fitting for line in lines for fitting in _fit(line))


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table of checks as its rows arrive: the heading, the rows, and a summary.

    >>> for line in table([Row("mlp", "adam", "clipping", 2, {"update": 3e-15}, "equal", 1.5)]):
    ...     print(line[:41].rstrip())
    model    optimizer feature            N i
    mlp      adam      clipping           2
    <BLANKLINE>
    1 check, all equal, 1.5 s; the largest re
    """
    stages = " ".join(f"{heading:>6}" for heading in COLUMNS)
    yield f"{'model':<8} {'optimizer':<9} {'feature':<17} {'N':>2} {stages} {'verdict':<10} {'s':>4}"
    shown = []
    for row in rows:
        shown.append(row)
        yield _check_line(row)
    yield ""
    yield _summary(shown)


def cut(text: str, width: int) -> str:
    """Shorten text to `width` characters by cutting out its middle.

    >>> cut("transformer.h.11.attn.weight", 17)
    'transfor...weight'
    """
    if len(text) <= width:
        return text
    head = (width - 2) // 2 + 1 - (width % 2 == 0)
    return f"{text[:head]}...{text[head + 3 - width :]}"


def _stage_line(findings: Findings, stage: str) -> str:
    peak = words.peak(findings, stage)
    verdict = f"{words.status(findings, stage)}{words.steps_of_all(findings, stage)}"
    numbers = ("-", "-", "-", "")
    if peak is not None:
        at = f"{peak.step}" if peak.residual > 0 else "-"
        numbers = (number(peak.residual), at, number(peak.allowed), cut(peak.tensor, TENSOR_WIDTH))
    worst, step, allowed, tensor = numbers
    return _line(stage, worst, step, allowed, verdict, tensor)


def _line(stage: str, worst: str, step: str, allowed: str, verdict: str, tensor: str) -> str:
    return f"{STAGE_NAMES[stage]:<17}  {worst:>6}  {step:>5}  {allowed:>7}  {verdict:<19}  {tensor}"


def _verdict_lines(findings: Findings) -> Iterator[str]:
    leading = [problem for problem in findings.problems if problem.leads]
    others = [problem for problem in findings.problems if not problem.leads]
    yield from (f"problem: {problem}" for problem in leading)
    if not findings.differences:
        yield f"{words.verdict_word(findings)}: {' '.join([words.sentence(findings), *sentences(findings)])}"
        yield from aspect_lines(findings)
        yield from beyond_lines(findings)
        yield from map(without_effect_line, findings.without_effect[:MOST_WITHOUT_EFFECT])
        if (rest := len(findings.without_effect) - MOST_WITHOUT_EFFECT) > 0:
            yield f"without effect in this run: {count(rest, 'further operation')} [--report, --json]"
    grouped = groups(findings.differences)
    for group in grouped[:MOST_DIFFERENCES]:
        yield from _difference_lines(group)
    for difference in itertools.chain(*grouped[MOST_DIFFERENCES:]):
        unexplained = "the cause was not sought" if difference.needs else "unexplained"
        why = "; or ".join(sentences_of(difference.cause)) if difference.cause else unexplained
        yield f"different: {words.where(difference)}: {why}"
    if findings.ended and findings.differences:
        yield f"incomplete: {words.ended(findings)}"
    if findings.numerics:
        yield _numerics_line(findings)
    for problem in others[:MOST_PROBLEMS]:
        yield f"problem: {problem}"
        yield from (f"  {frame}" for frame in problem.frames)
    if len(others) > MOST_PROBLEMS:
        yield f"problem: and {count(len(others) - MOST_PROBLEMS, 'other')}"
    if findings.names or findings.no_twin:
        yield "perhaps, in the program (--write-names writes it there):"
        yield from [line for line in [import_line(findings.names)] if line]
    if findings.no_twin:
        yield f"{no_twin_line(findings.no_twin)}  # constants, or buffers that only one side has"
    if findings.names:
        yield from names_block(findings.names).splitlines()


def _difference_lines(group: list[Difference]) -> Iterator[str]:
    first = group[0]
    kind = "different in rounding" if first.kind == "numeric" else "different"
    residual = f"residual {number(first.residual, 2)}, allowed {number(first.allowed)}"
    measured = not first.not_finite and not math.isnan(first.residual)
    yield f"{kind}: {words.where(first)}{f': {residual}' if measured else ''}"
    if first.detail:
        yield f"  {first.detail}"
    causes = [difference.cause for difference in group if difference.cause]
    for position, difference in enumerate(difference for difference in group if difference.cause):
        yield from _cause_lines(difference, "  and    " if position else "")
    if causes or not first.not_finite:
        located = f"no name; {words.SEGMENTS}:" if first.segments else "unexplained"
        unexplained = f"not sought: it needs {first.needs}" if first.needs else located
        yield f"  proof  {words.evidence(first, causes)}" if causes else f"  cause  {unexplained}"
    if not causes:
        yield from (line for one in first.segments[:MOST_SEGMENTS] for line in _segment_lines(one))
        if (rest := len(first.segments) - MOST_SEGMENTS) > 0:
            yield f"         and {count(rest, 'further place')} [--report, --json]"
        if not first.segments:
            yield from _quotes(first, "  parts  ")
        yield from _patch_lines(first.patch)
    if first.layer is not None and not first.segments:  # which show more
        layer = first.layer
        jax, torch = apart(*layer.values)
        name = words.layer_name(layer.torch) + (f" (jax: {layer.jax})" if layer.jax.strip() else "")
        yield f"  layer  {name}: {jax} in jax, {torch} in torch at {list(layer.element)}"
        yield f"         {words.blame(layer, first.allowed)}"


def _cause_lines(difference: Difference, label: str) -> Iterator[str]:
    cause = difference.cause
    assert cause is not None, "the caller has seen it"
    label = label or ("  either " if len(cause.names) > 1 else "  cause  ")
    for index, one in enumerate(cause.deviations):
        yield f"{'  or     ' if index else label}{words.said(cause, sentence(one))}  [{one.kind}]"
        yield f"  fix    {one.fix}"
    yield from _quotes(cause, "  lines  ")
    said = " ".join(sentences_of(cause))
    yield from (line for one in difference.segments for line in _code_lines(one, said))
    yield from _patch_lines(difference.patch)


def _patch_lines(patch: Patch | None) -> Iterator[str]:
    if patch is not None:
        yield f"  patch  {words.patched(patch)}"
        edited = [line for line in patch.diff.splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++")]
        yield from (f"         {line[:1]} {line[1:].strip()}" for line in edited[:MOST_EDITED])


def _segment_lines(segment: Segment) -> Iterator[str]:
    """Yield the operations of both sides, with their lines and the value that differs most."""
    both = apart(*segment.values) if segment.element else ("", "")
    sides = (
        ("jax", segment.jax, segment.jax_code, segment.jax_line, both[0]),
        ("torch", segment.torch, segment.torch_code, segment.torch_line, both[1]),
    )
    for label, (side, operations, code, quote, value) in zip(("  differ ", "         "), sides, strict=True):
        at = f", {quote.place}" if quote else ""
        yield f"{label}{side}{at}: {code or words.operations(operations)}{f' gives {value}' if value else ''}"
    if segment.places > 1:
        yield f"         in {segment.places} places"


def _code_lines(segment: Segment, said: str) -> Iterator[str]:
    """Yield what both sides compute in the reference's names, if it is short, with the value that differs most."""
    values = apart(*segment.values) if segment.element else ("", "")
    sides = ("jax", segment.jax_code, values[0]), ("torch", segment.torch_code, values[1])
    is_short = segment.jax_code != segment.torch_code and max(len(code) for _, code, _ in sides) <= LONGEST_CODE
    if is_short and segment.torch_code not in said:
        for label, (side, code, value) in zip(("  code   ", "         "), sides, strict=True):
            yield f"{label}{side}: {code}{f' gives {value}' if value else ''}"
    elif segment.element:
        yield f"  values {values[0]} in jax, {values[1]} in torch at {list(segment.element)}"


def _quotes(found: Cause | Difference, label: str) -> Iterator[str]:
    """Yield the lines of both sides, as they are written in the user's files."""
    quotes = [(side, quote) for side, quote in (("jax", found.jax), ("torch", found.torch)) if quote is not None]
    for index, (side, quote) in enumerate(quotes):
        yield f"{' ' * len(label) if index else label}{side}, {quote.place}: {quote.statement}"


def _numerics_line(findings: Findings) -> str:
    ratios = {stage: ratio(result) for stage, result in findings.numerics.items()}
    stage = max(ratios, key=ratios.__getitem__)
    return (
        f"float32: jax's distance from its float64 run is at most {number(ratios[stage])} times torch's "
        f"({STAGE_NAMES[stage]}), allowed {number(findings.numerics[stage].allowed)}"
    )


def _fit(line: str) -> list[str]:
    """Leave out the words in the middle of a line beyond `LONGEST` characters, and wrap it."""
    text = on_one_line(" ".join(line.splitlines())).rstrip()
    if len(text) > LONGEST:
        begin, end = text[: LONGEST // 2].rpartition(" ")[0], text[-LONGEST // 2 :].partition(" ")[2]
        text = f"{begin} ... {end}{REST}"
    return textwrap.wrap(text, LINE, subsequent_indent=" " * 9) or [""]


def _check_line(row: Row) -> str:
    stages = " ".join(f"{_worst_of(row, names):>6}" for names in COLUMNS.values())
    feature = cut(row.feature, 17)
    start = f"{row.model:<8} {row.optimizer:<9} {feature:<17} {row.world_size:>2}"
    return f"{start} {stages} {row.verdict:<10} {row.seconds:>4.1f}"


def _worst_of(row: Row, stages: Iterable[str]) -> str:
    """Format the largest residual of these stages; NaN counts as the largest."""
    residuals = [row.worst[stage] for stage in stages if stage in row.worst]
    return number(max(residuals, key=lambda value: (math.isnan(value), value))) if residuals else "-"


def _summary(rows: list[Row]) -> str:
    seconds = f"{sum(row.seconds for row in rows):.1f} s"
    others = [row for row in rows if row.verdict != "equal"]
    if not rows:
        return "nothing was checked"
    if others:
        names = ", ".join(
            f"{row.model} {row.optimizer} {row.feature} x{row.world_size}".replace("  ", " ") for row in others
        )
        return f"{count(len(rows), 'check')}, {len(others)} not equal, {seconds}: {names}"
    largest = max((value for row in rows for value in row.worst.values()), default=0.0)
    return f"{count(len(rows), 'check')}, all equal, {seconds}; the largest residual is {number(largest)}"

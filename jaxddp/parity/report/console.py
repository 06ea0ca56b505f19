"""A report in a terminal: one check in some twenty lines, and many checks in a line each."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxddp.parity.findings import ORDER, Cause, Difference, Findings
from jaxddp.parity.report import words
from jaxddp.parity.report.words import STAGE_NAMES, Status, count, number

LINE = 110  # characters
LONGEST = 480  # of which what is longer keeps its beginning and its end
TENSOR_WIDTH = 32
MOST_DIFFERENCES, MOST_PROBLEMS = 2, 3  # that are told in full

# Columns of the table of checks: heading -> stages, of which the worst is shown.
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
    """One of many checks.

    Attributes:
        model, optimizer: of the built-in ones.
        feature: what else is on; "" for nothing.
        world_size: number of replicas.
        worst: stage -> worst residual over all steps; stages that were not compared are left out.
        verdict: "equal", "different" or "incomplete".
        seconds: that the check took.
    """

    model: str
    optimizer: str
    feature: str
    world_size: int
    worst: Mapping[str, float] = field(default_factory=dict)
    verdict: str = "equal"
    seconds: float = 0.0


def to_text(report: Findings) -> str:
    """A report in lines of at most `LINE` characters: stages, verdict, causes, problems.

    >>> print(to_text(Findings("port.py", 2, 10, "float64")))
    port.py  ·  2 replicas x 10 steps  ·  float64
    <BLANKLINE>
    incomplete: Nothing was compared.
    """
    title = [report.port, f"{count(report.world_size, 'replica')} x {count(report.steps, 'step')}", report.dtype]
    lines = ["  ·  ".join(title), ""]
    stages = [stage for stage in ORDER if words.status(report, stage) is not Status.ABSENT or stage in report.stages]
    if stages:
        lines += [f"{'stage':<17}  {'worst':>6}  {'step':>5}  {'allowed':>7}  {'verdict':<19}  tensor"]
        lines += [_stage_line(report, stage) for stage in stages] + [""]
    lines += list(_verdict_lines(report))
    if report.seconds:
        lines.append(f"{report.seconds:.1f} s")
    return "\n".join(fitting for line in lines for fitting in _fit(line))


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table of checks, each as soon as its row is known: heading, rows, verdict of all.

    >>> for line in table([Row("mlp", "adam", "clipping", 2, {"update": 3e-15}, "equal", 1.5)]):
    ...     print(line[:41].rstrip())
    model    optimizer feature            N i
    mlp      adam      clipping           2
    <BLANKLINE>
    1 check, all equal, 1.5 s; the largest re
    """
    stages = " ".join(f"{heading:>6}" for heading in COLUMNS)
    yield f"{'model':<8} {'optimizer':<9} {'feature':<17} {'N':>2} {stages} {'verdict':<10} {'s':>4}"
    seen = []
    for row in rows:
        seen.append(row)
        yield _check_line(row)
    yield ""
    yield _verdict_of_all(seen)


def printable(text: str) -> str:
    r"""Text on one line that cannot steer the terminal.

    >>> printable("a\nb\x1b[2J")
    'a b\\x1b[2J'
    """
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def cut(text: str, width: int) -> str:
    """Text of at most `width` characters, its middle left out if it is longer.

    >>> cut("transformer.h.11.attn.weight", 17)
    'transfor...weight'
    """
    if len(text) <= width:
        return text
    head = (width - 2) // 2 + 1 - (width % 2 == 0)
    return f"{text[:head]}...{text[head + 3 - width :]}"


def _stage_line(report: Findings, stage: str) -> str:
    peak = words.peak(report, stage)
    verdict = f"{words.status(report, stage)}{words.steps_of_all(report, stage)}"
    cells = ("-", "-", "-", "")
    if peak is not None:
        at = f"{peak.step}" if peak.residual > 0 else "-"
        cells = (number(peak.residual), at, number(peak.allowed), cut(peak.tensor, TENSOR_WIDTH))
    worst, step, allowed, tensor = cells
    return f"{STAGE_NAMES[stage]:<17}  {worst:>6}  {step:>5}  {allowed:>7}  {verdict:<19}  {tensor}"


def _verdict_lines(report: Findings) -> Iterator[str]:
    if not report.differences:
        yield f"{words.verdict_word(report)}: {words.sentence(report)}"
    groups = words.groups(report.differences)
    for group in groups[:MOST_DIFFERENCES]:
        yield from _difference_lines(group)
    for found in itertools.chain(*groups[MOST_DIFFERENCES:]):
        yield f"different: {words.where(found)}: {'; or '.join(found.cause.says) if found.cause else 'unexplained'}"
    if report.numerics:
        yield _numerics_line(report)
    for problem in report.problems[:MOST_PROBLEMS]:
        yield f"problem: {problem.side}: {problem.where}: {problem.message}"
    if len(report.problems) > MOST_PROBLEMS:
        yield f"problem: and {count(len(report.problems) - MOST_PROBLEMS, 'other')}"


def _difference_lines(group: list[Difference]) -> Iterator[str]:
    found = group[0]
    kind = "different in rounding" if found.kind == "numeric" else "different"
    amount = f"{number(found.residual, 2)}, allowed {number(found.allowed)}"
    yield f"{kind}: {words.where(found)}: {amount}"
    if found.detail:
        yield f"  {found.detail}"
    causes = [one.cause for one in group if one.cause]
    for position, cause in enumerate(causes):
        yield from _cause_lines(cause, "  and    " if position else "  cause  ")
    yield f"  proof  {words.evidence(causes)}" if causes else "  cause  unexplained by any known fault"
    if found.layer is not None:
        layer = found.layer
        flax, torch = words.apart(*layer.values)
        yield f"  layer  {layer.torch} (flax: {layer.flax}): {flax} in flax, {torch} in torch at {list(layer.element)}"
        yield f"         {words.blame(layer, found.allowed)}"


def _cause_lines(cause: Cause, first: str) -> Iterator[str]:
    for index, (name, says, fix) in enumerate(zip(cause.names, cause.says, cause.fixes, strict=True)):
        yield f"{'  or     ' if index else first}{says}  [{name}]"
        yield f"  fix    {fix}"


def _numerics_line(report: Findings) -> str:
    ratios = {stage: words.ratio(result) for stage, result in report.numerics.items()}
    stage = max(ratios, key=ratios.__getitem__)
    return (
        f"float32: jax is at most {number(ratios[stage])} times as far from its float64 run as torch is "
        f"({STAGE_NAMES[stage]}), allowed {number(report.numerics[stage].allowed)}"
    )


def _fit(line: str) -> list[str]:
    """A line, or up to three where it is too long."""
    shortened = cut(printable(line).rstrip(), LONGEST)
    return textwrap.wrap(shortened, LINE, subsequent_indent=" " * 9) or [""]


def _check_line(row: Row) -> str:
    stages = " ".join(f"{_worst_of(row, names):>6}" for names in COLUMNS.values())
    feature = cut(row.feature, 17)
    start = f"{row.model:<8} {row.optimizer:<9} {feature:<17} {row.world_size:>2}"
    return f"{start} {stages} {row.verdict:<10} {row.seconds:>4.1f}"


def _worst_of(row: Row, stages: Iterable[str]) -> str:
    """The largest residual of these stages; NaN counts as larger than any."""
    found = [row.worst[stage] for stage in stages if stage in row.worst]
    return number(max(found, key=lambda value: (math.isnan(value), value))) if found else "-"


def _verdict_of_all(rows: list[Row]) -> str:
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

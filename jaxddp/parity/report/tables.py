"""The page's tables of numbers: tensors, losses, float32."""

import math
from collections.abc import Iterable

from jaxddp.parity.findings import ORDER, Findings
from jaxddp.parity.report import words
from jaxddp.parity.report.markup import Html, breakable, join, tag
from jaxddp.parity.report.pictures import ResidualAxis, draw_losses, draw_residuals
from jaxddp.parity.report.words import STAGE_NAMES, count, number

MOST_ROWS = 12  # that are shown unfolded


def scroll_box(label: str, table: Html) -> Html:
    """A table that scrolls by itself where the window is too narrow; the keyboard reaches it."""
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def rows(items: Iterable[tuple[str, ...]], heading: bool = False) -> list[Html]:
    """Table rows of cells; with `heading`, the first of each names its row."""
    return [
        tag(
            "tr",
            [tag("th", cell, scope="row") if heading and i == 0 else tag("td", cell) for i, cell in enumerate(item)],
        )
        for item in items
    ]


def tensors_section(report: Findings) -> Html:
    """Each tensor's worst residual at each stage, the worst tensor first."""
    stages = [stage for stage in ORDER if stage in report.stages and report.stages[stage].tensors]
    allowed = {stage: report.stages[stage].allowed for stage in stages}
    found: dict[str, dict[str, float]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for tensor, (shape, value) in report.stages[stage].tensors.items():
            found.setdefault(tensor, {})[stage] = value
            shapes.setdefault(tensor, shape)
    if not found:
        return Html()
    worst = {
        tensor: max(values, key=lambda stage: _excess(values[stage], allowed[stage]))
        for tensor, values in found.items()
    }
    ranked = sorted(found, key=lambda tensor: -_excess(found[tensor][worst[tensor]], allowed[worst[tensor]]))
    heading = tag(
        "tr",
        tag("th", "tensor", scope="col"),
        tag("th", "worst", scope="col", class_="number"),
        [tag("th", name, scope="col") for name in ("in", "shape")],
        [tag("th", STAGE_NAMES[stage], scope="col", class_="number") for stage in stages],
    )
    lines = [
        tag(
            "tr",
            tag("th", tag("code", breakable(tensor)), scope="row"),
            _residual_cell(found[tensor][worst[tensor]], allowed[worst[tensor]]),
            tag("td", STAGE_NAMES[worst[tensor]], class_="stage"),
            tag("td", str(shapes[tensor]), class_="shape"),
            [_residual_cell(found[tensor].get(stage), allowed[stage]) for stage in stages],
        )
        for tensor in ranked
    ]
    note = "Worst residual of any step, the worst tensor first; ▲ is beyond what is allowed."
    return tag(
        "section", tag("h2", "Tensors"), tag("p", note, class_="note"), _folded("tensor", heading, lines, "tensors")
    )


def losses_section(report: Findings) -> Html:
    """The losses of both sides, each running by itself: a picture, how far apart they are, and the numbers."""
    if not report.losses:
        return Html()
    apart = [_relative(torch, jax) for torch, jax in report.losses]
    lines = rows(
        (
            (f"{step:,}", f"{torch:.10g}", f"{jax:.10g}", number(distance))
            for step, ((torch, jax), distance) in enumerate(zip(report.losses, apart, strict=True), start=1)
        ),
        heading=True,
    )
    heading = tag("tr", [tag("th", name, scope="col") for name in ("step", "torch", "jax", "apart")])
    distance = draw_residuals(apart, ResidualAxis.over(apart), "losses apart")
    return tag(
        "section",
        tag("h2", "Losses"),
        tag("p", "Each side running by itself, mean over the replicas; apart: |jax - torch| / |torch|.", class_="note"),
        tag(
            "div",
            tag("figure", tag("figcaption", "loss"), draw_losses(report.losses), class_="wide"),
            tag("figure", tag("figcaption", "apart"), distance),
            class_="pictures",
        ),
        tag(
            "details",
            tag("summary", f"Losses of {count(len(lines), 'step')}"),
            scroll_box("losses", tag("table", tag("thead", heading), tag("tbody", lines), class_="numbers")),
        ),
    )


def numerics_section(report: Findings) -> Html:
    """How far float32 carries each side from its own float64 run."""
    if not report.numerics:
        return Html()
    lines = []
    for stage, result in report.numerics.items():
        ratio = words.ratio(result)
        verdict = "· not compared" if math.isnan(ratio) else "✓ equal" if ratio <= result.allowed else "✗ further"
        lines.append(
            tag(
                "tr",
                tag("th", STAGE_NAMES[stage], scope="row"),
                [tag("td", number(value), class_="number") for value in (result.torch, result.jax)],
                _residual_cell(ratio, result.allowed),
                tag("td", number(result.allowed), class_="number"),
                tag("td", verdict, class_="result"),
            )
        )
    names = ("stage", "torch", "jax", "jax / torch", "allowed", "verdict")
    numeric = names[1:5]
    heading = tag("tr", [tag("th", name, scope="col", class_="number" if name in numeric else None) for name in names])
    note = "Each side's distance from its own float64 run, over the norm of that run, at the worst step."
    return tag(
        "section",
        tag("h2", "Rounding in float32"),
        tag("p", note, class_="note"),
        scroll_box("rounding in float32", tag("table", tag("thead", heading), tag("tbody", lines))),
    )


def _folded(noun: str, heading: Html, lines: list[Html], label: str) -> Html:
    """A table whose further rows are folded away."""

    def table(some: list[Html]) -> Html:
        return scroll_box(label, tag("table", tag("thead", heading), tag("tbody", some), class_="tensors"))

    rest = lines[MOST_ROWS:]
    if not rest:
        return table(lines)
    more = tag("details", tag("summary", f"{count(len(rest), 'further ' + noun)}"), table(rest))
    return join(table(lines[:MOST_ROWS]), more)


def _residual_cell(value: float | None, allowed: float) -> Html:
    if value is None:
        return tag("td", class_="number")
    if _excess(value, allowed) > 1:
        return tag(
            "td",
            tag("span", "▲ ", role="img", aria_label="beyond what is allowed"),
            number(value),
            class_="number worst",
        )
    return tag("td", number(value), class_="number")


def _excess(value: float, allowed: float) -> float:
    """A residual in units of what is allowed, infinite if nothing is; 0 for NaN, which was not compared."""
    if value == 0 or math.isnan(value):
        return 0.0
    return value / allowed if allowed else math.inf


def _relative(torch: float, jax: float) -> float:
    """|jax - torch| / |torch|; NaN where one side has no number."""
    if torch == jax:
        return 0.0
    return abs(jax - torch) / abs(torch) if torch else math.inf

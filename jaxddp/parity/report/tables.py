"""Tables of the page: tensors, losses, and rounding in float32."""

import math
from collections.abc import Iterable, Sequence

from jaxddp.errors import count
from jaxddp.parity.coverage import Trial
from jaxddp.parity.findings import ORDER, STAGE_NAMES, Findings
from jaxddp.parity.records import relative
from jaxddp.parity.report.coverage_words import aspects, cells, without_effect_line
from jaxddp.parity.report.markup import Html, breakable, join, tag
from jaxddp.parity.report.numbers import number, ratio
from jaxddp.parity.report.pictures import ResidualAxis, draw_losses, draw_residuals

MOST_ROWS = 12  # rows shown; further ones are folded away


def scroll_box(label: str, table: Html) -> Html:
    """Wrap a table in a box that scrolls in a narrow window, also from the keyboard."""
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def rows(items: Iterable[tuple[str, ...]], heading: bool = False) -> list[Html]:
    """Render table rows; with `heading`, the first cell of each row is its heading."""
    return [
        tag(
            "tr",
            [tag("th", cell, scope="row") if heading and i == 0 else tag("td", cell) for i, cell in enumerate(item)],
        )
        for item in items
    ]


def tensors_section(findings: Findings) -> Html:
    """Render a table of each tensor's worst residual per stage, worst tensor first."""
    stages = [stage for stage in ORDER if stage in findings.stages and findings.stages[stage].tensors]
    allowed = {stage: findings.stages[stage].allowed for stage in stages}
    residuals: dict[str, dict[str, float]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for tensor, (shape, value) in findings.stages[stage].tensors.items():
            residuals.setdefault(tensor, {})[stage] = value
            shapes.setdefault(tensor, shape)
    if not residuals:
        return Html()
    worst = {
        tensor: max(values, key=lambda stage: _excess(values[stage], allowed[stage]))
        for tensor, values in residuals.items()
    }
    ranked = sorted(residuals, key=lambda tensor: -_excess(residuals[tensor][worst[tensor]], allowed[worst[tensor]]))
    heading = tag(
        "tr",
        tag("th", "tensor", scope="col"),
        tag("th", "worst", scope="col", class_="number"),
        [tag("th", name, scope="col") for name in ("stage", "shape")],
        [tag("th", STAGE_NAMES[stage], scope="col", class_="number") for stage in stages],
    )
    lines = [
        tag(
            "tr",
            tag("th", tag("code", breakable(tensor)), scope="row"),
            _residual_cell(residuals[tensor][worst[tensor]], allowed[worst[tensor]]),
            tag("td", STAGE_NAMES[worst[tensor]], class_="stage"),
            tag("td", str(shapes[tensor]), class_="shape"),
            [_residual_cell(residuals[tensor].get(stage), allowed[stage]) for stage in stages],
        )
        for tensor in ranked
    ]
    note = "Worst residual over all steps, worst tensor first; ▲ exceeds the allowed residual."
    return tag(
        "section", tag("h2", "Tensors"), tag("p", note, class_="note"), _folded("tensor", heading, lines, "tensors")
    )


def coverage_section(findings: Findings) -> Html:
    """Render what was compared in addition to the run's steps, the trials beyond it, and what had no effect in it."""
    of_aspects = [
        (STAGE_NAMES[name], aspect.verdict, *cells(aspect), aspect.tensor, " ".join(aspect.says))
        for name, aspect in aspects(findings)
    ]
    differing = {trial.what for beyond in findings.beyond for trial in (beyond.trial, *beyond.others)}

    def verdict(trial: Trial) -> str:
        return "not tried" if trial.left_out else "differs" if trial.what in differing else "equal"

    of_trials = [(trial.what, verdict(trial), trial.left_out) for trial in findings.trials]
    idle = [(without_effect_line(operation),) for operation in findings.without_effect]
    parts = [
        _plain_table(
            "Outside of the steps", ("what", "verdict", "worst", "step", "allowed", "tensor", "says"), of_aspects
        ),
        _plain_table("Beyond the run", ("trial", "verdict", "why not"), of_trials),
        _plain_table("Without effect in the run", ("operation",), idle),
    ]
    return join(*parts)


def _plain_table(title: str, names: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> Html:
    if not lines:
        return Html()
    heading = tag("tr", [tag("th", name, scope="col") for name in names])
    table = tag("table", tag("thead", heading), tag("tbody", rows(lines, heading=True)))
    return tag("section", tag("h2", title), scroll_box(title.lower(), table))


def losses_section(findings: Findings) -> Html:
    """Render the losses of both sides' free runs: plot, relative difference and numbers."""
    if not findings.losses:
        return Html()
    differences = [_relative(torch, jax) for torch, jax in findings.losses]
    lines = rows(
        (
            (f"{step:,}", f"{torch:.10g}", f"{jax:.10g}", number(difference))
            for step, ((torch, jax), difference) in enumerate(zip(findings.losses, differences, strict=True), start=1)
        ),
        heading=True,
    )
    heading = tag("tr", [tag("th", name, scope="col") for name in ("step", "torch", "jax", "difference")])
    plot = draw_residuals(differences, ResidualAxis.over(differences), "relative difference of the losses")
    note = "Mean over the replicas, each side running on its own; difference: |jax - torch| / |torch|."
    return tag(
        "section",
        tag("h2", "Losses"),
        tag("p", note, class_="note"),
        tag(
            "div",
            tag("figure", tag("figcaption", "loss"), draw_losses(findings.losses), class_="wide"),
            tag("figure", tag("figcaption", "difference"), plot),
            class_="pictures",
        ),
        tag(
            "details",
            tag("summary", f"Losses of {count(len(lines), 'step')}"),
            scroll_box("losses", tag("table", tag("thead", heading), tag("tbody", lines), class_="numbers")),
        ),
    )


def numerics_section(findings: Findings) -> Html:
    """Render a table of each side's distance in float32 from the same side's float64 run."""
    if not findings.numerics:
        return Html()
    lines = []
    for stage, result in findings.numerics.items():
        times = ratio(result)
        verdict = "✓ equal" if times <= result.allowed else "✗ rounds differently"
        lines.append(
            tag(
                "tr",
                tag("th", STAGE_NAMES[stage], scope="row"),
                [tag("td", number(value), class_="number") for value in (result.torch, result.jax)],
                _residual_cell(times, result.allowed),
                tag("td", number(result.allowed), class_="number"),
                tag("td", "· not compared" if math.isnan(times) else verdict, class_="result"),
            )
        )
    names = ("stage", "torch", "jax", "jax / torch", "allowed", "verdict")
    numeric = names[1:5]
    heading = tag("tr", [tag("th", name, scope="col", class_="number" if name in numeric else None) for name in names])
    note = "Distance of each side from the same side's float64 run, over the norm of that run, at the worst step."
    return tag(
        "section",
        tag("h2", "Rounding in float32"),
        tag("p", note, class_="note"),
        scroll_box("rounding in float32", tag("table", tag("thead", heading), tag("tbody", lines))),
    )


def _folded(noun: str, heading: Html, lines: list[Html], label: str) -> Html:
    """Render a table, with all but `MOST_ROWS` rows folded away."""

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
            tag("span", "▲ ", role="img", aria_label="exceeds the allowed residual"),
            number(value),
            class_="number worst",
        )
    return tag("td", number(value), class_="number")


def _excess(value: float, allowed: float) -> float:
    """Return residual / allowed, infinite if the allowed one is 0; 0 for NaN, which was not compared."""
    if value == 0 or math.isnan(value):
        return 0.0
    return value / allowed if allowed else math.inf  # used to sort, never printed


def _relative(torch: float, jax: float) -> float:
    """Return |jax - torch| / |torch|; NaN if either is NaN."""
    return math.nan if math.isnan(torch + jax) else relative(abs(jax - torch), abs(torch), abs(jax))

"""HTML page of a report, and a fragment for notebooks; both are self-contained and run no script.

The sections answer in turn: is the port equal? What differs, why, and what fixes it? Which stages were compared? What
are the numbers? How was the check run?
"""

import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files

from jaxddp.errors import count
from jaxddp.parity.findings import ORDER, STAGE_NAMES, Findings, Problem, groups
from jaxddp.parity.report import words
from jaxddp.parity.report.causes import difference_card
from jaxddp.parity.report.coverage_words import beyond_lines, sentences
from jaxddp.parity.report.markup import Html, join, tag, with_code
from jaxddp.parity.report.numbers import number
from jaxddp.parity.report.pictures import ResidualAxis, draw_residuals
from jaxddp.parity.report.tables import (
    coverage_section,
    losses_section,
    numerics_section,
    rows,
    scroll_box,
    tensors_section,
)
from jaxddp.parity.report.words import Status

# Stages in the order of the data flow; the stages of one group are parallel.
FLOW = (
    ("samples", "hyperparameters"),
    ("local_loss",),
    ("local_gradients",),
    ("gradients",),
    ("clipped_gradients",),
    ("update",),
    ("params", "buffers", "optimizer_state"),
)
# Status -> (class in the stylesheet, sign); the sign shows the status without colour.
SIGNS = {
    Status.EQUAL: ("equal", "✓"),
    Status.DIFFERENT: ("different", "✗"),
    Status.NUMERIC: ("numeric", "≈"),
    Status.FOLLOWS: ("follows", "↳"),
    Status.UNSEEN: ("unseen", "○"),
    Status.ABSENT: ("absent", "·"),
}
VERDICT_SIGNS = {
    "equal": "equal",
    "beyond": "numeric",
    "different": "different",
    "different in rounding": "numeric",
    "incomplete": "unseen",
}

BEGIN = "<!doctype html>\n<!-- jaxddp.parity report -->\n"
MARK = BEGIN.encode()


def to_html(findings: Findings, stylesheet: str | None = None) -> str:
    """Render findings as a page.

    Args:
        findings: findings of a check.
        stylesheet: address of `style.css`; None: the styles are embedded, so that the page is self-contained.

    >>> to_html(Findings("port.py", 2, 10, "float64")).splitlines()[0]
    '<!doctype html>'
    """
    incomplete = ", incomplete" if findings.ended and findings.differences else ""
    title = f"{words.verdict_word(findings)}{incomplete}: {findings.port}, parity of torch and jax"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        _style() if stylesheet is None else Html(f'<link rel="stylesheet" href="{stylesheet}">'),
    )
    body = tag("body", tag("main", _content(findings)), class_="jaxddp-report page")
    return f"{BEGIN}{tag('html', head, body, lang='en')}\n"


def notebook(findings: Findings) -> str:
    """Render findings as a fragment for `_repr_html_`; its styles affect nothing outside of it."""
    return tag("div", _style(), _content(findings), class_="jaxddp-report", lang="en")


def _style() -> Html:
    return tag("style", Html(files(__package__).joinpath("style.css").read_text(encoding="utf-8")))


def _content(findings: Findings) -> Html:
    return join(
        _header(findings),
        _problems_section([problem for problem in findings.problems if problem.leads]),
        [difference_card(group) for group in groups(findings.differences)],
        _problems_section([problem for problem in findings.problems if not problem.leads]),
        _stages_section(findings),
        coverage_section(findings),
        tensors_section(findings),
        losses_section(findings),
        numerics_section(findings),
        _run_section(findings),
    )


def _header(findings: Findings) -> Html:
    word = words.verdict_word(findings)
    kind = VERDICT_SIGNS[word]
    sign = next(sign for name, sign in SIGNS.values() if name == kind)
    setting = [count(findings.world_size, "replica"), count(findings.steps, "step"), findings.dtype]
    cause = findings.differences[0].cause if findings.differences else None
    return tag(
        "header",
        tag("p", "Parity of torch and jax: ", tag("b", findings.port), f", {', '.join(setting)}", class_="setting"),
        tag("h1", tag("span", sign, class_="sign", aria_hidden="true"), word.capitalize()),
        tag("p", with_code(" ".join([words.sentence(findings), *_coverage(findings)])), class_="sentence"),
        [tag("p", with_code(line.capitalize()), class_="sentence") for line in beyond_lines(findings)],
        tag("p", tag("b", "Fix: "), with_code("; or ".join(cause.fixes)), class_="sentence") if cause else "",
        tag("p", _meaning(findings), class_="note") if findings.differences else "",
        tag("p", tag("b", "Incomplete: "), words.ended(findings)) if findings.ended and findings.differences else "",
        class_=f"verdict {kind}",
    )


def _coverage(findings: Findings) -> Iterable[str]:
    return () if findings.differences else sentences(findings)


def _meaning(findings: Findings) -> str:
    if words.is_numeric(findings):
        return "Numeric: both sides compute the same thing and round differently."
    return "Semantic: the two sides compute different things; rounding does not explain the difference."


def _problems_section(problems: Sequence[Problem]) -> Html:
    if not problems:
        return Html()
    lines = [
        tag("li", tag("b", f"{p.side}: {p.where}: "), p.message, [join(tag("br"), tag("code", f)) for f in p.frames])
        for p in problems
    ]
    return tag("section", tag("h2", "Problems"), tag("ul", lines, class_="problems"))


def _stages_section(findings: Findings) -> Html:
    """Render the flow of a step, and a plot for each stage that both sides show."""
    axis = ResidualAxis.over(
        value
        for result in (*findings.stages.values(), *findings.free_running.values())
        for value in (*result.residuals, result.allowed)
    )
    plots = [_stage_figure(findings, stage, axis) for stage in ORDER if stage in findings.stages]
    note = (
        "Residual of each stage at each step: the norm of the difference over the norm of the stage. "
        "jax starts every step from torch's weights, and each stage is compared given equal inputs, "
        "so a difference shows where it arises."
    )
    free = [
        _figure(STAGE_NAMES[stage], draw_residuals(result.residuals, axis, STAGE_NAMES[stage], result.allowed))
        for stage, result in findings.free_running.items()
    ]
    return tag(
        "section",
        tag("h2", "Stages of a step"),
        tag("ol", [tag("li", [_node(findings, stage) for stage in group]) for group in FLOW], class_="flow"),
        [tag("p", note, class_="note"), tag("div", plots, class_="pictures")] if plots else "",
        [tag("h3", "jax running on its own, from the same start"), tag("div", free, class_="pictures")] if free else "",
    )


def _node(findings: Findings, stage: str) -> Html:
    """Render the box of a stage in the flow."""
    status = words.status(findings, stage)
    kind, sign = SIGNS[status]
    peak = words.peak(findings, stage)
    amount = [" ", tag("span", number(peak.residual), class_="amount")] if peak else ""
    name = STAGE_NAMES[stage].replace("hyper", "hyper\N{SOFT HYPHEN}")  # the box may be narrower than the word
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", sign, class_="sign", aria_hidden="true"),
        tag("span", status, amount, words.steps_of_all(findings, stage), class_="state"),
        class_=f"node {kind}",
    )


def _stage_figure(findings: Findings, stage: str, axis: ResidualAxis) -> Html:
    result = findings.stages[stage]
    kind, sign = SIGNS[words.status(findings, stage)]
    beyond = {step for step, value in enumerate(result.residuals, start=1) if value > result.allowed}
    first = next((d.step for d in findings.differences if d.stage == stage and d.step in beyond), None)
    plot = draw_residuals(result.residuals, axis, STAGE_NAMES[stage], result.allowed, first)
    sign = tag("span", sign, class_="sign", aria_hidden="true")
    name = join(sign, tag("b", STAGE_NAMES[stage]), words.steps_of_all(findings, stage))
    return _figure(name, plot, kind)


def _figure(name: str, plot: Html, kind: str | None = None) -> Html:
    return tag("figure", tag("figcaption", name), plot, class_=kind)


def _run_section(findings: Findings) -> Html:
    facts = {
        "port": findings.port,
        "replicas": f"{findings.world_size:,}",
        "steps": f"{findings.steps:,}",
        "dtype": findings.dtype,
        **findings.environment,
        "seconds": f"{findings.seconds:.1f}",
    }
    arguments = f"--devices {findings.world_size} --steps {findings.steps} --dtype {findings.dtype}"
    command = f"jaxddp check {shlex.quote(findings.port)} {arguments}"
    return tag(
        "section",
        tag("h2", "Run"),
        scroll_box("command", tag("pre", tag("code", command))) if findings.port.endswith(".py") else "",
        scroll_box("the run", tag("table", tag("tbody", rows(facts.items(), heading=True)), class_="facts")),
    )

"""A report as one HTML file, and as a fragment for notebooks; neither loads anything or runs a script.

In the order in which a reader asks: is it equal; what differs, why, and how is it mended; which
stages were seen; what do the numbers say; how was it run.
"""

import shlex
from importlib.resources import files

from jaxddp.parity.findings import ORDER, Findings
from jaxddp.parity.report import words
from jaxddp.parity.report.causes import difference_card
from jaxddp.parity.report.markup import Html, join, tag, with_code
from jaxddp.parity.report.pictures import ResidualAxis, draw_residuals
from jaxddp.parity.report.tables import losses_section, numerics_section, rows, scroll_box, tensors_section
from jaxddp.parity.report.words import STAGE_NAMES, Status, count, number

# What follows from what: stages of one group stand beside each other.
FLOW = (
    ("samples", "hyperparameters"),
    ("local_loss",),
    ("local_gradients",),
    ("gradients",),
    ("clipped_gradients",),
    ("update",),
    ("params", "buffers", "optimizer_state"),
)
# A mark beside each word, for who sees no colour: name in the stylesheet, sign.
SIGNS = {
    Status.EQUAL: ("equal", "✓"),
    Status.DIFFERENT: ("different", "✗"),
    Status.NUMERIC: ("numeric", "≈"),
    Status.FOLLOWS: ("follows", "↳"),
    Status.UNSEEN: ("unseen", "○"),
    Status.ABSENT: ("absent", "·"),
}
VERDICT_SIGNS = {"equal": "equal", "different": "different", "different in rounding": "numeric", "incomplete": "unseen"}


def to_html(report: Findings) -> str:
    """A report as a page that stands by itself.

    >>> to_html(Findings("port.py", 2, 10, "float64")).splitlines()[0]
    '<!doctype html>'
    """
    title = f"{words.verdict_word(report)}: {report.port}, parity of torch and jax"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        _style(),
    )
    body = tag("body", tag("main", _content(report)), class_="jaxddp-report page")
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def notebook(report: Findings) -> str:
    """The same as a fragment whose styles reach nothing outside, for `_repr_html_`."""
    return tag("div", _style(), _content(report), class_="jaxddp-report", lang="en")


def _style() -> Html:
    return tag("style", Html(files(__package__).joinpath("style.css").read_text(encoding="utf-8")))


def _content(report: Findings) -> Html:
    return join(
        _header(report),
        [difference_card(group) for group in words.groups(report.differences)],
        _problems_section(report),
        _stages_section(report),
        tensors_section(report),
        losses_section(report),
        numerics_section(report),
        _run_section(report),
    )


def _header(report: Findings) -> Html:
    word = words.verdict_word(report)
    kind = VERDICT_SIGNS[word]
    sign = next(sign for name, sign in SIGNS.values() if name == kind)
    setting = [count(report.world_size, "replica"), count(report.steps, "step"), report.dtype]
    cause = report.differences[0].cause if report.differences else None
    return tag(
        "header",
        tag("p", "Parity of torch and jax: ", tag("b", report.port), f", {', '.join(setting)}", class_="setting"),
        tag("h1", tag("span", sign, class_="sign", aria_hidden="true"), word.capitalize()),
        tag("p", with_code(words.sentence(report)), class_="sentence"),
        tag("p", tag("b", "To mend it: "), with_code("; or ".join(cause.fixes)), class_="sentence") if cause else "",
        tag("p", _meaning(report), class_="note") if report.differences else "",
        class_=f"verdict {kind}",
    )


def _meaning(report: Findings) -> str:
    if words.is_numeric(report):
        return "Numeric: both sides mean the same, and round differently."
    return "Semantic: the two sides mean different things; rounding does not explain it."


def _problems_section(report: Findings) -> Html:
    if not report.problems:
        return Html()
    lines = [tag("li", tag("b", f"{problem.side}: {problem.where}: "), problem.message) for problem in report.problems]
    return tag("section", tag("h2", "What could not be done"), tag("ul", lines, class_="problems"))


def _stages_section(report: Findings) -> Html:
    """The flow of a step, and a picture of each stage that both sides have shown."""
    axis = ResidualAxis.over(
        value
        for result in (*report.stages.values(), *report.free_running.values())
        for value in (*result.residuals, result.allowed)
    )
    pictures = [_stage_figure(report, stage, axis) for stage in ORDER if stage in report.stages]
    forced = (
        "The residual of each stage after each step: the norm of the difference over the norm of the stage. "
        "Each stage is judged by what it was given: jax starts each step from torch's weights, "
        "so that a difference shows where it arises."
    )
    free = [
        _figure(STAGE_NAMES[stage], draw_residuals(result.residuals, axis, STAGE_NAMES[stage], result.allowed))
        for stage, result in report.free_running.items()
    ]
    return tag(
        "section",
        tag("h2", "Stages of a step"),
        tag("ol", [tag("li", [_node(report, stage) for stage in group]) for group in FLOW], class_="flow"),
        [tag("p", forced, class_="note"), tag("div", pictures, class_="pictures")] if pictures else "",
        [tag("h3", "jax running by itself, from the same start"), tag("div", free, class_="pictures")] if free else "",
    )


def _node(report: Findings, stage: str) -> Html:
    """A stage in the flow."""
    status = words.status(report, stage)
    kind, sign = SIGNS[status]
    peak = words.peak(report, stage)
    amount = [" ", tag("span", number(peak.residual), class_="amount")] if peak else ""
    return tag(
        "div",
        tag("span", STAGE_NAMES[stage], class_="name"),
        tag("span", sign, class_="sign", aria_hidden="true"),
        tag("span", status, amount, words.steps_of_all(report, stage), class_="state"),
        class_=f"node {kind}",
    )


def _stage_figure(report: Findings, stage: str, axis: ResidualAxis) -> Html:
    result = report.stages[stage]
    kind, sign = SIGNS[words.status(report, stage)]
    beyond = {step for step, value in enumerate(result.residuals, start=1) if value > result.allowed}
    first = next((found.step for found in report.differences if found.stage == stage and found.step in beyond), None)
    picture = draw_residuals(result.residuals, axis, STAGE_NAMES[stage], result.allowed, first)
    sign = tag("span", sign, class_="sign", aria_hidden="true")
    name = join(sign, tag("b", STAGE_NAMES[stage]), words.steps_of_all(report, stage))
    return _figure(name, picture, kind)


def _figure(name: str, picture: Html, kind: str | None = None) -> Html:
    return tag("figure", tag("figcaption", name), picture, class_=kind)


def _run_section(report: Findings) -> Html:
    facts = {
        "port": report.port,
        "replicas": f"{report.world_size:,}",
        "steps": f"{report.steps:,}",
        "dtype": report.dtype,
        **report.environment,
        "seconds": f"{report.seconds:.1f}",
    }
    arguments = f"--world-size {report.world_size} --steps {report.steps} --dtype {report.dtype}"
    command = f"python -m jaxddp.parity {shlex.quote(report.port)} {arguments}"
    return tag(
        "section",
        tag("h2", "How it was run"),
        scroll_box("command", tag("pre", tag("code", command))) if report.port.endswith(".py") else "",
        scroll_box("the run", tag("table", tag("tbody", rows(facts.items(), heading=True)), class_="facts")),
    )

"""HTML of one difference: its causes, the evidence for them, and the first layer that differs."""

import math
from collections.abc import Sequence

from jaxddp.parity.catalogue import EDITS, FAULTS, Fault
from jaxddp.parity.findings import STAGE_NAMES, Cause, Difference, Layer, Patch
from jaxddp.parity.quote import Quote
from jaxddp.parity.report import words
from jaxddp.parity.report.markup import Html, join, tag, with_code
from jaxddp.parity.report.numbers import apart, number
from jaxddp.parity.report.sentences import line, sentence
from jaxddp.parity.report.tables import scroll_box

PAIR = " + "  # joins the names of two faults that explain a difference together
SHORTEST_BAR = -17  # decade of a residual whose bar has length zero


def difference_card(group: Sequence[Difference]) -> Html:
    """Render the differences at one place as a card."""
    first = group[0]
    residual = "" if first.not_finite else f"Residual {number(first.residual, 2)}, allowed {number(first.allowed)}"
    unexplained = "" if first.not_finite else _unexplained(first)
    return tag(
        "section",
        tag("h2", with_code(words.where(first))),
        tag("p", "; ".join(filter(None, [residual, first.detail])), class_="note"),
        _causes(first, [one for one in group if one.cause]) if first.cause else unexplained,
        *(_segments(one) for one in group if one.segments),
        "" if first.cause or first.segments else _quotes(first),
        "" if first.cause else _patch(first.patch),
        _layer(first, first.layer) if first.layer else "",
        class_=f"card {'numeric' if first.kind == 'numeric' else 'different'}",
    )


def _causes(first: Difference, group: Sequence[Difference]) -> Html:
    """Render causes that are present at once, and the residual that they leave together."""
    causes = [one.cause for one in group if one.cause]
    items = [_cause(cause, "And: " if position else "") for position, cause in enumerate(causes)]
    with_patches = [part for item, one in zip(items, group, strict=True) for part in (item, _patch(one.patch))]
    return join(*with_patches, _evidence(first, causes))


def _cause(cause: Cause, lead: str) -> Html:
    several = len(cause.names) > 1
    leads = [lead or ("Either: " if several else "Cause: "), *["Or: "] * (len(cause.names) - 1)]
    items = [
        tag(
            "li",
            tag("p", lead, with_code(words.said(cause, sentence(one))), " ", _name(one.kind), class_="says"),
            [tag("p", with_code(fault.title), class_="known") for fault in _faults(one.kind)],
            tag("p", tag("b", "Fix: "), with_code(one.fix), class_="fix"),
        )
        for lead, one in zip(leads, cause.deviations, strict=True)
    ]
    doubt = tag("p", "This run cannot tell these causes apart; each explains the whole difference.")
    listed = tag("ul", items, class_="causes")
    return join(doubt if several else "", listed, _quotes(cause))


def _patch(patch: Patch | None) -> Html:
    """Render a patch and whether it was verified, or why there is none."""
    if patch is None:
        return Html("")
    verdict = tag("b", "Patch: "), words.patched(patch)
    if not patch.diff:
        return tag("p", *verdict)
    code = scroll_box("patch", tag("pre", patch.diff))
    return tag("figure", tag("figcaption", *verdict), code, class_="quote")


def _quotes(found: Cause | Difference) -> Html:
    """Render the lines of both sides with the lines around them, numbered, the line itself marked."""
    return _both_quotes(found.jax, found.torch)


def _both_quotes(jax: Quote | None, torch: Quote | None) -> Html:
    sides = [(side, quote) for side, quote in (("jax", jax), ("torch", torch)) if quote is not None]
    return join(*(_quote(side, quote) for side, quote in sides))


def _quote(side: str, quote: Quote) -> Html:
    numbered = [
        tag("mark" if number == quote.line else "span", f"{number:>5}  {text}")
        for number, text in enumerate(quote.text, quote.first)
    ]
    lines = [part for line in numbered for part in (line, "\n")]
    code = scroll_box(f"{side}, {quote.place}", tag("pre", *lines))
    return tag("figure", tag("figcaption", f"{side}: ", tag("code", quote.place)), code, class_="quote")


def _name(name: str) -> Html:
    """Return the name in the catalogue, with links to reports of the fault."""
    threads = [fault.thread for fault in _faults(name) if fault.thread]
    links = [tag("a", thread, href=_address(thread), rel="noreferrer") for thread in threads]
    reported = Html(f", reported in {', '.join(links)}" if links else "")
    return tag("span", "(", tag("code", name), reported, ")", class_="name")


def _faults(name: str) -> list[Fault]:
    """Return the entries of the catalogue for a fault, or for each of a pair ("a + b")."""
    rows = FAULTS | EDITS
    return [rows[part] for part in name.split(PAIR) if part in rows]


def _address(thread: str) -> str:
    repository, _, issue = thread.partition("#")
    return f"https://github.com/{repository}/issues/{issue}"


def _evidence(difference: Difference, causes: Sequence[Cause]) -> Html:
    """Render the residual that each explanation leaves, as a number and as a bar on a logarithmic scale."""
    cause, planted = causes[0], " and ".join(" or ".join(cause.names) for cause in causes)
    if cause.measured:
        return join(tag("h3", "Evidence"), tag("p", f"Measured: {cause.measured}."))
    residuals = [("none", difference.residual)]
    if other := cause.runner_up:
        residuals.append((f"next best: {line(other)}", other.residual))
    residuals.append((planted, cause.residual))
    lines = [
        tag(
            "tr",
            tag("th", label, scope="row"),
            tag("td", number(value, 2), class_="number"),
            tag("td", _bar(value, value > difference.allowed), class_="bars", aria_hidden="true"),
        )
        for label, value in residuals
    ]
    heading = tag(
        "tr", tag("th", "explanation", scope="col"), tag("th", "residual", scope="col", class_="number"), tag("td")
    )
    note = (
        "Each explanation was planted in the reference, and the step replayed in float64; "
        "the residual is the difference from jax that remains."
        f"{f' Up to {number(difference.allowed)} is rounding.' if difference.allowed else ''}"
    )
    body = tag("table", tag("thead", heading), tag("tbody", lines), class_="evidence")
    return join(tag("h3", "Evidence"), tag("p", note, class_="note"), scroll_box("evidence", body))


def _bar(value: float, beyond: bool) -> Html:
    decade = SHORTEST_BAR if value == 0 else min(max(math.log10(value), SHORTEST_BAR), 0)
    share = 0.0 if math.isnan(decade) else 100 * (decade - SHORTEST_BAR) / -SHORTEST_BAR
    return tag("span", class_="bar beyond" if beyond else "bar", style=f"width: {share:.0f}%")


def _segments(difference: Difference) -> Html:
    """Render both sides of each segment: operations, lines and the value that differs most."""
    parts, quoted = [], set()
    for segment in difference.segments:
        jax, torch = apart(*segment.values) if segment.element else ("", "")
        quotes = [tag("code", quote.place) if quote else "" for quote in (segment.torch_line, segment.jax_line)]
        codes = segment.torch_code, segment.jax_code
        rows = [
            *([("computes", *(tag("code", code) for code in codes))] if all(codes) else []),
            ("operations", *(tag("code", words.operations(side)) for side in (segment.torch, segment.jax))),
            ("line", *quotes),
            *([(f"output, at {list(segment.element)}", torch, jax)] if segment.element else []),
        ]
        body = [
            tag("tr", tag("th", name, scope="row"), tag("td", left), tag("td", right)) for name, left, right in rows
        ]
        heading = tag("tr", tag("td"), [tag("th", side, scope="col") for side in ("torch", "jax")])
        table = tag("table", tag("thead", heading), tag("tbody", body), class_="layer")
        several = tag("p", f"In {segment.places} places.") if segment.places > 1 else Html("")
        lines = segment.jax_line, segment.torch_line
        parts.append(join(scroll_box("segment", table), several, "" if lines in quoted else _both_quotes(*lines)))
        quoted.add(lines)
    return join(tag("h3", "Operations that differ"), *parts)


def _unexplained(difference: Difference) -> Html:
    if difference.needs:
        return tag("p", f"The cause was not sought: it needs {difference.needs}.")
    if difference.segments:
        return tag("p", f"The cause has no name; {words.SEGMENTS}.")
    text = (
        "Unexplained: no fault that was tried, planted in the reference, reproduces what jax does. "
        f"Look at the {STAGE_NAMES[difference.stage]}"
        f"{f' of step {difference.step}' if difference.step else ''}"
    )
    tensor = [", in ", tag("code", difference.tensor)] if difference.tensor else []
    return tag("p", text, tensor, ".")


def _layer(difference: Difference, layer: Layer) -> Html:
    """Render a table of the first layer whose output differs, with both frameworks' values."""
    jax, torch = apart(*layer.values)
    index = list(layer.element)
    lines = [
        ("layer", *(tag("code", words.layer_name(name)) for name in (layer.torch, layer.jax))),
        ("output shape", str(layer.shapes[1]), str(layer.shapes[0])),
        (f"largest difference, at {index}", torch, jax),
    ]
    body = [
        tag("tr", tag("th", name, scope="row"), tag("td", in_torch), tag("td", in_jax))
        for name, in_torch, in_jax in lines
    ]
    heading = tag("tr", tag("td"), [tag("th", side, scope="col") for side in ("torch", "jax")])
    return join(
        tag("h3", "First layer whose output differs"),
        scroll_box("layer", tag("table", tag("thead", heading), tag("tbody", body), class_="layer")),
        tag("p", f"Residual of the output: {number(layer.residual, 2)}. {words.blame(layer, difference.allowed)}"),
    )

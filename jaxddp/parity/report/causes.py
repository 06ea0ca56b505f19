"""The part of the page that tells one difference: its cause, what speaks for it, and the layer."""

import math
from collections.abc import Sequence

from jaxddp.parity.catalogue import FAULTS, Fault
from jaxddp.parity.findings import Cause, Difference, Layer
from jaxddp.parity.report import words
from jaxddp.parity.report.markup import Html, join, tag, with_code
from jaxddp.parity.report.tables import scroll_box
from jaxddp.parity.report.words import number

PAIR = " + "  # between the names of two faults that explain a difference together
SHORTEST_BAR = -17  # decade of a residual whose bar has no length


def difference_card(group: Sequence[Difference]) -> Html:
    """What differs at one place, and why."""
    found = group[0]
    amount = f"{number(found.residual, 2)}, where {number(found.allowed)} is allowed."
    return tag(
        "section",
        tag("h2", with_code(words.where(found))),
        tag("p", f"Residual {amount} {found.detail}", class_="note"),
        _causes(found, [one.cause for one in group if one.cause]) if found.cause else _unexplained(found),
        _layer(found, found.layer) if found.layer else "",
        class_=f"card {'numeric' if found.kind == 'numeric' else 'different'}",
    )


def _causes(found: Difference, causes: Sequence[Cause]) -> Html:
    """Causes that are there at once, and what they leave together."""
    items = [_cause(cause, "And: " if position else "Cause: ") for position, cause in enumerate(causes)]
    return join(*items, _evidence(found, causes))


def _cause(cause: Cause, lead: str) -> Html:
    leads = [lead, *["Or: "] * (len(cause.names) - 1)]
    items = [
        tag(
            "li",
            tag("p", lead, with_code(says), " ", _name(name), class_="says"),
            [tag("p", with_code(fault.title), class_="known") for fault in _faults(name)],
            tag("p", tag("b", "Fix: "), with_code(fix), class_="fix"),
        )
        for lead, name, says, fix in zip(leads, cause.names, cause.says, cause.fixes, strict=True)
    ]
    several = "This run cannot tell these apart; each explains everything." if len(cause.names) > 1 else ""
    return join(tag("p", several) if several else "", tag("ul", items, class_="causes"))


def _name(name: str) -> Html:
    """The catalogue's name, and where somebody has met it."""
    threads = [fault.thread for fault in _faults(name) if fault.thread]
    links = [tag("a", thread, href=_address(thread), rel="noreferrer") for thread in threads]
    met = Html(f", met in {', '.join(links)}" if links else "")
    return tag("span", "(", tag("code", name), met, ")", class_="name")


def _faults(name: str) -> list[Fault]:
    """What the catalogue knows of a fault, or of each of a pair ("a + b")."""
    return [FAULTS[part] for part in name.split(PAIR) if part in FAULTS]


def _address(thread: str) -> str:
    repository, _, issue = thread.partition("#")
    return f"https://github.com/{repository}/issues/{issue}"


def _evidence(found: Difference, causes: Sequence[Cause]) -> Html:
    """What each explanation leaves unexplained, as numbers and as bars of their logarithms."""
    cause, planted = causes[0], " and ".join(" or ".join(cause.names) for cause in causes)
    left = [("as it is, with no cause", found.residual)]
    if cause.runner_up is not None:
        left.append((f"next best: {cause.runner_up[0]}", cause.runner_up[1]))
    left.append((f"with {planted}", cause.residual))
    lines = [
        tag(
            "tr",
            tag("th", label, scope="row"),
            tag("td", number(value, 2), class_="number"),
            tag("td", _bar(value, value > found.allowed), class_="bars", aria_hidden="true"),
        )
        for label, value in left
    ]
    heading = tag(
        "tr", tag("th", "explanation", scope="col"), tag("th", "leaves", scope="col", class_="number"), tag("td")
    )
    subject = "The cause was" if len(causes) == 1 else "The causes were"
    told = (
        f"{subject} planted in the reference, and the step replayed in float64; "
        "what jax did then differs by the residual that is left."
        f"{f' Up to {number(found.allowed)} is rounding.' if found.allowed else ''}"
    )
    body = tag("table", tag("thead", heading), tag("tbody", lines), class_="evidence")
    return join(tag("h3", "Evidence"), tag("p", told, class_="note"), scroll_box("evidence", body))


def _bar(value: float, beyond: bool) -> Html:
    decade = SHORTEST_BAR if value == 0 else min(max(math.log10(value), SHORTEST_BAR), 0)
    share = 0.0 if math.isnan(decade) else 100 * (decade - SHORTEST_BAR) / -SHORTEST_BAR
    return tag("span", class_="bar beyond" if beyond else "bar", style=f"width: {share:.0f}%")


def _unexplained(found: Difference) -> Html:
    text = (
        "Unexplained: no fault of the catalogue, planted in the reference, reproduces what jax did. "
        f"What to look at: the {words.STAGE_NAMES[found.stage]} of step {found.step}"
    )
    tensor = [", of ", tag("code", found.tensor)] if found.tensor else []
    return tag("p", text, tensor, ".")


def _layer(found: Difference, layer: Layer) -> Html:
    """The first layer whose output differs, in both frameworks."""
    flax, torch = words.apart(*layer.values)
    index = list(layer.element)
    lines = [
        ("layer", tag("code", layer.torch), tag("code", layer.flax)),
        ("shape of its output", str(layer.shapes[1]), str(layer.shapes[0])),
        (f"furthest apart at {index}", torch, flax),
    ]
    body = [
        tag("tr", tag("th", name, scope="row"), tag("td", torch_has), tag("td", flax_has))
        for name, torch_has, flax_has in lines
    ]
    heading = tag("tr", tag("td"), [tag("th", side, scope="col") for side in ("torch", "flax")])
    return join(
        tag("h3", "The first layer whose output differs"),
        scroll_box("layer", tag("table", tag("thead", heading), tag("tbody", body), class_="layer")),
        tag("p", f"Residual of its output: {number(layer.residual, 2)}. {words.blame(layer, found.allowed)}"),
    )

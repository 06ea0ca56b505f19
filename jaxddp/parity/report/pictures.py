"""Small plots as inline SVG: residuals by step, and the losses of both sides.

Colours and fonts come from the stylesheet, so that a plot follows a dark scheme. Colour alone carries no
information: a residual above the allowed one also has a different marker.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxddp.errors import count
from jaxddp.parity.report.markup import Html, tag
from jaxddp.parity.report.numbers import number

WIDTH, LEFT, RIGHT = 200.0, 36.0, 192.0  # a plot of residuals; in CSS pixels at width 200, like all lengths here
TOP, BOTTOM, GAP = 8.0, 92.0, 9.0  # GAP: from the lowest decade to 0, and from the highest to infinity
LOWEST, HIGHEST = -17, 0  # decades that are always shown, so that rounding looks alike in all reports
MOST_MARKERS = 40  # steps; more markers would hide the line
LOSS_WIDTH, LOSS_HEIGHT = 420.0, 210.0
LOSS_LEFT, LOSS_RIGHT, LOSS_TOP, LOSS_BOTTOM = 52.0, 368.0, 10.0, 180.0
MANY_DECADES = 100.0  # ratio of losses above which the axis is logarithmic
SMALLEST, LARGEST = 1e-300, 1e300  # losses shown; at the limits of float64 a sum of two would overflow

Place = tuple[float, float]  # x and y; y is NaN if there is no value


@dataclass(frozen=True)
class ResidualAxis:
    """Vertical, logarithmic axis of residuals, with a line for 0 below and one for infinity above.

    Attributes:
        lowest, highest: decades at the ends of the logarithmic range.
        infinite: whether the axis has a line for infinity.

    >>> axis = ResidualAxis.over([1e-16, 0.5])
    >>> [round(axis.y(value)) for value in (1.0, 1e-17, 0.0)]
    [8, 83, 92]
    """

    lowest: int
    highest: int
    infinite: bool

    @classmethod
    def over(cls, values: Iterable[float]) -> "ResidualAxis":
        """Return the axis that covers all these values."""
        values = list(values)
        decades = [math.log10(value) for value in values if 0 < value < math.inf]
        lowest = min([LOWEST, *(math.floor(decade) for decade in decades)])
        highest = max([HIGHEST, *(math.ceil(decade) for decade in decades)])
        return cls(lowest, highest, math.inf in values)

    def y(self, value: float) -> float:
        """Return the position of a value, downwards from the top of the plot."""
        if value == 0:
            return BOTTOM
        top, bottom = TOP + GAP * self.infinite, BOTTOM - GAP
        if math.isinf(value):
            return TOP
        return top + (self.highest - math.log10(value)) / (self.highest - self.lowest) * (bottom - top)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values with tick marks, and their labels."""
        every = 4 * math.ceil((self.highest - self.lowest) / 20)
        decades = [decade for decade in range(self.lowest, self.highest + 1) if decade % every == 0]
        marked = [(10.0**decade, number(10.0**decade)) for decade in decades]
        return [(0.0, "0"), *marked, *([(math.inf, "∞")] if self.infinite else [])]


def draw_residuals(
    residuals: Sequence[float], axis: ResidualAxis, title: str, allowed: float | None = None, first: int | None = None
) -> Html:
    """Plot the residual of one stage over the steps.

    Args:
        residuals: one per step; NaN leaves a gap.
        axis: vertical axis; plots to be compared should share it.
        title: description of the plot for screen readers.
        allowed: the largest residual that counts as equal; None if there is no limit.
        first: step (from 1) of the first difference, which is marked; its residual must exceed `allowed`.
    """
    places = [(_x(step, len(residuals)), axis.y(value)) for step, value in enumerate(residuals, start=1)]
    beyond = [allowed is not None and value > allowed for value in residuals]
    return tag(
        "svg",
        _frame(axis, len(residuals)),
        _allowed_line(axis, allowed, first is not None) if allowed is not None else "",
        tag("path", class_="line", d=_path(places)),
        _markers(places, beyond) if len(residuals) <= MOST_MARKERS else _stretches(places, beyond),
        _mark(places[first - 1], f"step {first}: {number(residuals[first - 1], 2)}") if first is not None else "",
        class_="residuals",
        viewBox=f"0 0 {WIDTH:g} 110",
        role="img",
        aria_label=f"{title}, residual over {count(len(residuals), 'step')}: {_summary(residuals, allowed)}",
    )


def draw_losses(losses: Sequence[tuple[float, float]]) -> Html:
    """Plot the losses of both sides, (torch's, jax's) per step; a loss that is not finite leaves a gap."""
    finite = [loss for pair in losses for loss in pair if abs(loss) < LARGEST] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    logarithmic = low > 0 and high / low > MANY_DECADES
    ticks = _decades(low, high) if logarithmic else _round_values(low, high)
    bottom, top = min(low, ticks[0]), max(high, ticks[-1])

    def y(loss: float) -> float:
        if not abs(loss) < LARGEST:
            return math.nan
        bend = math.log10 if logarithmic else float
        return LOSS_BOTTOM - (bend(loss) - bend(bottom)) / (bend(top) - bend(bottom)) * (LOSS_BOTTOM - LOSS_TOP)

    xs = [_x(step, len(losses), LOSS_LEFT + 6, LOSS_RIGHT) for step in range(1, len(losses) + 1)]
    sides = {
        side: [(x, y(pair[column])) for x, pair in zip(xs, losses, strict=True)]
        for column, side in enumerate(("torch", "jax"))
    }
    return tag(
        "svg",
        [tag("line", class_="grid", x1=LOSS_LEFT, x2=LOSS_RIGHT, y1=y(tick), y2=y(tick)) for tick in ticks],
        [_text(LOSS_LEFT - 6, y(tick) + 4, f"{tick:.6g}", "end") for tick in ticks],
        _step_labels(len(losses), LOSS_LEFT + 6, LOSS_RIGHT, LOSS_BOTTOM + 17),
        [tag("path", class_=f"loss {side}", d=_path(places)) for side, places in sides.items()],
        _end_labels(sides),
        class_="losses",
        viewBox=f"0 0 {LOSS_WIDTH:g} {LOSS_HEIGHT:g}",
        role="img",
        aria_label=f"loss over {count(len(losses), 'step')}, {'logarithmic' if logarithmic else 'linear'}: "
        f"torch from {losses[0][0]:.6g} to {losses[-1][0]:.6g}, jax from {losses[0][1]:.6g} to {losses[-1][1]:.6g}",
    )


def _frame(axis: ResidualAxis, steps: int) -> list[Html]:
    """Draw the grid, and the labels of both axes."""
    ticks = [(axis.y(value), label) for value, label in axis.ticks()]
    return [
        *(tag("line", class_="grid", x1=LEFT, x2=WIDTH, y1=y, y2=y) for y, _ in ticks),
        *(_text(LEFT - 4, y + 3, label, "end") for y, label in ticks),
        *_step_labels(steps, LEFT + 6, RIGHT, BOTTOM + 13),
    ]


def _allowed_line(axis: ResidualAxis, allowed: float, label_below: bool) -> Html:
    """Draw a line at the largest residual that counts as equal, and shade the area below."""
    y = axis.y(allowed)
    return tag(
        "g",
        tag("rect", class_="allowed", x=LEFT, width=WIDTH - LEFT, y=y, height=BOTTOM + 3 - y),
        tag("line", class_="allowed", x1=LEFT, x2=WIDTH, y1=y, y2=y),
        _text(WIDTH, y + 10 if label_below else y - 3, f"allowed {number(allowed)}", "end")
        if allowed > 0
        else _text(WIDTH, y - 8, "must be 0", "end"),
    )


def _markers(places: Sequence[Place], beyond: Sequence[bool]) -> list[Html]:
    """Draw a ring for each step, or a diamond if its residual exceeds the allowed one."""
    return [
        tag("path", class_="beyond", d=f"M{x - 3.4:.1f} {y:.1f}l3.4-3.4l3.4 3.4l-3.4 3.4z")
        if outside
        else tag("circle", class_="within", cx=x, cy=y, r=2.2)
        for (x, y), outside in zip(places, beyond, strict=True)
        if not math.isnan(y)
    ]


def _stretches(places: Sequence[Place], beyond: Sequence[bool]) -> list[Html]:
    """Draw a thick line through the steps whose residual exceeds the allowed one."""
    kept = [(x, y if outside else math.nan) for (x, y), outside in zip(places, beyond, strict=True)]
    return [tag("path", class_="line beyond", d=_path(kept))] if any(beyond) else []


def _mark(place: Place, label: str) -> Html:
    """Draw a ring around the first difference, labelled with its step and value."""
    x, y = place
    anchor, aside = ("start", -4) if x < (LEFT + RIGHT) / 2 else ("end", 4)
    below = 16 if y < BOTTOM - 24 else -9
    return tag("g", tag("circle", class_="first", cx=x, cy=y, r=6), _text(x + aside, y + below, label, anchor, "first"))


def _step_labels(steps: int, left: float, right: float, y: float) -> list[Html]:
    """Draw the labels of the first and the last step."""
    ends = [_text(left, y, "step 1", "start")]
    return ends + ([_text(right, y, f"{steps:,}", "end")] if steps > 1 else [])


def _end_labels(sides: dict[str, list[Place]]) -> list[Html]:
    """Draw a label at the end of each line; move labels apart if they overlap."""
    ends = {side: [y for _, y in places if not math.isnan(y)][-1:] for side, places in sides.items()}
    heights = {side: end[0] + 4 for side, end in ends.items() if end}
    if len(heights) == 2 and (overlap := 14 - abs(heights["torch"] - heights["jax"])) > 0:
        upper, lower = sorted(heights, key=heights.__getitem__)
        heights[upper] -= overlap / 2
        heights[lower] += overlap / 2
    return [_text(LOSS_RIGHT + 6, heights[side], side, "start", side) for side in heights]


def _x(step: int, steps: int, left: float = LEFT + 6, right: float = RIGHT) -> float:
    return left + (right - left) * (step - 1) / max(steps - 1, 1)


def _path(places: Iterable[Place]) -> str:
    """Draw a path through all places, interrupted where y is NaN."""
    pieces, pen = [], "M"
    for x, y in places:
        if math.isnan(y):
            pen = "M"
            continue
        # A single place becomes a dot: a line of length zero with round ends.
        pieces.append(f"{pen}{x:.1f} {y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(pieces)


def _text(x: float, y: float, text: str, anchor: str, kind: str | None = None) -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=kind)


def _summary(residuals: Sequence[float], allowed: float | None) -> str:
    compared = [value for value in residuals if not math.isnan(value)]
    text = f"from {number(min(compared))} to {number(max(compared))}" if compared else "never compared"
    return text if allowed is None else f"{text}, allowed {number(allowed)}"


def _round_values(low: float, high: float) -> list[float]:
    """Return three to six round numbers whose range contains low and high.

    >>> _round_values(0.13, 2.3)
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    """
    if low == high:
        margin = max(abs(low) / 2, SMALLEST) if low else 0.5
        low, high = low - margin, high + margin
    decade = 10.0 ** math.floor(math.log10((high - low) / 4))
    unit = next(unit for unit in (decade, 2 * decade, 5 * decade, 10 * decade) if (high - low) / unit <= 5)
    return [float(f"{n * unit:.10g}") for n in range(math.floor(low / unit), math.ceil(high / unit) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(max(low, SMALLEST))), math.ceil(math.log10(max(high, SMALLEST)))
    return [10.0**decade for decade in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]

"""Plot of a run: loss and accuracy over its optimizer steps."""

import contextlib
import io
import os
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Record = dict[str, Any]
"""One line of metrics.jsonl: kind ("step" or "epoch"), step, epoch, and metrics by name."""

# Okabe and Ito's blue and vermilion, distinguishable with colour blindness; the markers differ too.
TRAIN_COLOR, TEST_COLOR = "#0072B2", "#D55E00"
INK, GRID = "#333333", "#E3E3E3"
MOST_DECADES = 1e4  # largest ratio of losses with tick marks at 1, 2 and 5
MOST_MARKERS = 40  # epochs; with more, markers would hide the line
LABEL_HEIGHT = 13  # points between the labels at the ends of two lines


def draw_curves(history: Sequence[Record], title: str) -> bytes:
    """Draw loss (logarithmic) and accuracy as a PNG: faint per step, train and test per epoch.

    Args:
        history: "step" and "epoch" records in order; None as a metric leaves a gap.
        title: heading of the plot.

    >>> draw_curves([{"kind": "step", "step": 1, "loss": 2.3}], "one step")[:4]
    b'\\x89PNG'
    """
    with _no_window_system():
        from matplotlib.figure import Figure  # the import takes half a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches
    figure = Figure(figsize=(11, 4.8), dpi=150, layout=margins)
    figure.suptitle(textwrap.fill(title, 100), x=0.012, ha="left", fontsize=12, color=INK, parse_math=False)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    loss_lines = _draw_metric(loss_axes, history, "loss")
    accuracy_lines = _draw_metric(accuracy_axes, history, "accuracy")
    _scale_loss(loss_axes)
    accuracy_axes.set_ylim(top=min(accuracy_axes.get_ylim()[1], 1.01))
    figure.legend(handles=loss_lines, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters of the title that the font lacks
        margins.execute(figure)  # determines where the lines end
        for axes, lines in ((loss_axes, loss_lines), (accuracy_axes, accuracy_lines)):
            _label_ends(axes, lines[1:])
        figure.savefig(png, format="png")
    return png.getvalue()


@contextlib.contextmanager
def _no_window_system() -> Iterator[None]:
    """Hide MPLBACKEND, with whose value the import of matplotlib may fail; a PNG needs none."""
    before = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["MPLBACKEND"] = before


def _draw_metric(axes: "Axes", history: Sequence[Record], name: str) -> "list[Line2D]":
    """Draw the lines of one metric: train per step, train per epoch, test per epoch."""
    steps, values = _series(history, ("step",), name)
    lines = axes.plot(steps, values, color=TRAIN_COLOR, alpha=0.25, linewidth=0.8, label="train, single steps")
    for split, color, marker in (("train", TRAIN_COLOR, "o"), ("test", TEST_COLOR, "D")):
        plain = f"{split}_{name}"  # of several test sets the first one is drawn
        keys = [key for r in history for key in r if key.startswith(f"{split}_") and key.endswith(f"_{name}")]
        drawn = min(keys, key=lambda key: key != plain, default=plain)
        steps, values = _series(history, ("test", "epoch"), drawn)
        size = 3.5 if len(values) <= MOST_MARKERS else 0
        label = f"{drawn.removesuffix(f'_{name}')}, each epoch"
        lines += axes.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=size, label=label)
    _style(axes, name)
    return lines


def _series(
    history: Sequence[Record], kinds: Sequence[str], name: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps and values of one metric; None becomes NaN."""
    points = [(record["step"], record[name]) for record in history if record["kind"] in kinds and name in record]
    steps = np.array([step for step, _ in points], dtype=np.int64)
    return steps, np.array([np.nan if value is None else value for _, value in points], dtype=np.float64)


def _style(axes: "Axes", name: str) -> None:
    """Set title, ticks and grid."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_title(name, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def _scale_loss(axes: "Axes") -> None:
    """Make the axis logarithmic, with plain numbers, if any loss is positive."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    if any(np.any(np.asarray(line.get_ydata()) > 0) for line in axes.lines):
        axes.set_yscale("log", nonpositive="mask")
        lowest, highest = axes.get_ylim()
        within_decades = (1, 2, 5) if highest < MOST_DECADES * lowest else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=within_decades, numticks=10))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        axes.set_title("loss (log scale)", loc="left", fontsize=11, color=INK)


def _label_ends(axes: "Axes", lines: "Sequence[Line2D]") -> None:
    """Label each line with its last value; shift two labels that would overlap."""
    ends = [(line, np.asarray(line.get_xydata())[-1]) for line in lines if np.size(line.get_xydata())]
    heights = [axes.transData.transform(end)[1] * 72 / axes.figure.dpi for _, end in ends]
    shifts = [0.0 for _ in ends]
    if len(ends) == 2 and np.isfinite(heights).all():
        overlap = max(0, LABEL_HEIGHT - abs(heights[0] - heights[1])) / 2
        shifts = [overlap, -overlap] if heights[0] > heights[1] else [-overlap, overlap]
    for (line, end), height, shift in zip(ends, heights, shifts, strict=True):
        if np.isfinite(height):
            style: dict[str, Any] = {"color": line.get_color(), "fontsize": 9, "va": "center"}
            axes.annotate(f"{end[1]:#.4g}", end, xytext=(6, shift), textcoords="offset points", **style)

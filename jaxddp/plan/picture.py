"""Prediction as a picture: efficiency over the number of GPUs, and the step on its two streams."""

import io
from typing import TYPE_CHECKING

from jaxddp.plan.options import WRITER
from jaxddp.plan.report import NOTE, PlanReport
from jaxddp.tracking.curves import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's blue and vermilion, distinguishable with colour blindness.
AFTER, BEFORE = "#0072B2", "#D55E00"
QUIET = "#BBBBBB"


def draw(report: PlanReport) -> bytes:
    """Draw a report as a PNG."""
    from matplotlib.figure import Figure  # the import takes half a second

    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    figure.suptitle(f"{report.title}  ·  {NOTE}", x=0.012, ha="left", fontsize=11, color=INK, parse_math=False)
    left, right = figure.subplots(1, 2)
    _efficiency(left, report)
    _streams(right, report)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": WRITER})
    return png.getvalue()


def _efficiency(axes: "Axes", report: PlanReport) -> None:
    counts = list(report.after.scaling)
    for prediction, color, marker, name in (
        (report.before, BEFORE, "s", "XLA's defaults"),
        (report.after, AFTER, "o", "the trainer's options"),
    ):
        shares = [100 * timeline.efficiency for timeline in prediction.scaling.values()]
        axes.plot(counts, shares, color=color, marker=marker, markersize=4, label=name)
    axes.axvline(report.after.count, color=QUIET, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
    axes.set_xlabel("GPUs, 8 per node", color=INK)
    axes.set_title("efficiency (%): examples/s per GPU against one GPU", loc="left", fontsize=10, color=INK)
    axes.set_ylim(top=100.5)
    axes.grid(color=GRID)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _streams(axes: "Axes", report: PlanReport) -> None:
    """Draw the end of the step on its two streams: kernels, and the messages that overlap with them or hold them up."""
    timeline = report.after.timeline
    waits = [(1e3 * (one.end - one.exposed), 1e3 * one.exposed) for one in timeline.sent if one.exposed]
    bars = [(1e3 * one.begin, 1e3 * one.seconds) for one in timeline.sent]
    end = 1e3 * timeline.seconds
    axes.broken_barh([(0, end)], (1.1, 0.8), color=QUIET)
    axes.broken_barh(waits, (1.1, 0.8), facecolor="white", edgecolor=BEFORE, hatch="////")
    axes.broken_barh(bars, (0.1, 0.8), color=AFTER, edgecolor="white", linewidth=0.2)
    begin = max(0, min((start for start, _ in bars), default=0) - 0.02 * end)  # before it there are kernels only
    axes.set_xlim(begin, end + 0.05 * (end - begin))
    axes.set_yticks([0.5, 1.5], ["messages", "kernels\n(hatched:\nthey wait)" if waits else "kernels"])
    axes.set_ylim(0, 2)
    axes.set_xlabel("ms from the start of the step", color=INK)
    part = "end of a step" if begin else "one step"
    share = f"{timeline.covered_share:.1%} of the bytes covered"
    axes.set_title(f"{part} on {report.after.count:,} GPUs: {share}", loc="left", fontsize=10, color=INK)

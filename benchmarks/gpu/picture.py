"""Draw the page's picture: speed of each contender beside torch DDP, and the utilisation."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.utilisation import CONTENDERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinguishable with colour blindness.
COLORS = {"jaxddp": "#0072B2", "jaxddp_cudnn": "#56B4E9", "torch": "#D55E00", "torch_compile": "#E69F00"}
INK, GRID = "#333333", "#E3E3E3"
GOAL = 50.0  # % utilisation


def draw(table: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Draw the rows of `benchmarks.gpu.utilisation.table` as a PNG."""
    from matplotlib.figure import Figure  # the import takes half a second

    figure = Figure(figsize=(11, 4), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, color=INK, parse_math=False)
    left, right = figure.subplots(1, 2)
    torch = {row["job"]: row["speed"] for row in table if row["contender"] == "torch"}
    relative = [(row, row["speed"] / torch[row["job"]]) for row in table if row["job"] in torch]
    _bars(left, relative, "examples/s, times torch DDP's", "{:.2f}")
    shares = [(row, 100 * row["utilisation"]) for row in table if row["utilisation"] is not None]
    _bars(right, shares, "utilisation, % of the measured bf16 rate", "{:.0f} %")
    left.axvline(1.0, color=INK, linestyle=":", linewidth=1)
    right.axvline(GOAL, color=INK, linestyle=":", linewidth=1)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _bars(axes: "Axes", values: Sequence[tuple[Mapping[str, Any], float]], title: str, form: str) -> None:
    """Draw a bar for each row, or say that nothing was measured."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    if not values:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", color=INK, transform=axes.transAxes)
        axes.set_xticks([], [])
        axes.set_yticks([], [])
        return
    places = range(len(values))
    bars = axes.barh(places, [value for _, value in values], color=[COLORS[row["contender"]] for row, _ in values])
    axes.bar_label(bars, [form.format(value) for _, value in values], padding=3, fontsize=9, color=INK)
    axes.set_yticks(places, [f"{row['job']}: {CONTENDERS[row['contender']]}" for row, _ in values])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID)

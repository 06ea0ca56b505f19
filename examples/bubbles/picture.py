"""Picture of the steps: a lane per replica, JAX beside torch, all on one time axis."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from examples.bubbles.measured import Cases, Measurement
from examples.bubbles.trace import ALL_REDUCE, BACKWARD, FORWARD, PHASES, WAITING, duration, waiting
from jaxddp.tracking.curves import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Three of Okabe and Ito's colours, which colour-blind readers can distinguish; waiting is a hatched gap.
COLORS = {FORWARD: "#56B4E9", BACKWARD: "#0072B2", WAITING: "#F7F7F7", ALL_REDUCE: "#D55E00"}
HATCH, HATCH_COLOR = "/////", "#9A9A9A"
WRITER = "examples.bubbles"  # noted in the picture, so that it is known again
LANE = 0.8  # height of a bar, relative to the distance between two
ROOM = 1.2  # width of the axis relative to the longest step; the labels stand behind the bars
LEGEND_SIZE, TITLE_SIZE, CASE_SIZE, LABEL_SIZE = 11, 14, 11, 9  # points


def draw(frameworks: Mapping[str, Cases]) -> bytes:
    """Draw a typical step of each case as a PNG.

    Args:
        frameworks: the cases by framework.
    """
    png = io.BytesIO()
    figure_of(frameworks).savefig(png, format="png", metadata={"Software": WRITER})
    return png.getvalue()


def figure_of(frameworks: Mapping[str, Cases]) -> "Figure":
    """Arrange a column per framework and a row per case, with the same limits and scale on every time axis."""
    from matplotlib.figure import Figure  # half a second to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = list(next(iter(frameworks.values())))
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(12, 1.2 * len(names) + 1.3), dpi=150, layout=layout)
    grid = figure.subplots(len(names), len(frameworks), sharex=True, sharey=True, squeeze=False)
    for column, (framework, cases) in enumerate(frameworks.items()):
        for axes, name in zip(grid[:, column], names, strict=True):
            _draw_step(axes, cases[name], name)
        _write_framework(grid[0, column], framework)
        grid[-1, column].set_xlabel("milliseconds", color=INK, fontsize=LABEL_SIZE)
        grid[-1, column].tick_params(axis="x", labelbottom=True)
    longest = max(duration(case.step) for cases in frameworks.values() for case in cases.values())
    grid[0, 0].set_xlim(0, ROOM * longest / 1e6)
    grid[0, 0].invert_yaxis()
    _draw_legend(figure)
    return figure


def _draw_step(axes: "Axes", case: Measurement, name: str) -> None:
    """Draw the lanes of one case, each labelled with the share of the step that its replica waits."""
    step = case.step
    for replica, (spans, share) in enumerate(zip(step, waiting(step), strict=True)):
        for span in spans:
            begin, length = span.begin / 1e6, (span.end - span.begin) / 1e6
            axes.barh(replica, length, LANE, left=begin, zorder=2, **_look(span.phase))
        beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        end = spans[-1].end / 1e6, replica
        axes.annotate(f"waits {share:.0%}", end, fontsize=LABEL_SIZE, color=INK, **beside)
    axes.set_title(name, loc="left", fontsize=CASE_SIZE, color=INK)
    axes.set_yticks(range(len(step)), [f"replica {replica}" for replica in range(len(step))])
    axes.tick_params(colors=INK, length=0, labelsize=LABEL_SIZE)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def _write_framework(axes: "Axes", framework: str) -> None:
    """Write the framework's name above the title of its first case."""
    place: dict[str, Any] = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 27), "va": "bottom"}
    axes.annotate(framework, textcoords="offset points", fontsize=TITLE_SIZE, fontweight="bold", color=INK, **place)


def _draw_legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    keys = [Patch(label=phase, **_look(phase)) for phase in PHASES]
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": len(PHASES), "frameon": False}
    figure.legend(handles=keys, labelcolor=INK, fontsize=LEGEND_SIZE, **where)


def _look(phase: str) -> dict[str, Any]:
    if phase == WAITING:
        return {"facecolor": COLORS[phase], "hatch": HATCH, "edgecolor": HATCH_COLOR, "linewidth": 0.0}
    return {"facecolor": COLORS[phase], "edgecolor": "white", "linewidth": 0.4}

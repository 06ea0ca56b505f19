"""The picture of the steps: a lane for each replica, one below the other, JAX beside torch."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from examples.bubbles.measured import Cases, Found
from examples.bubbles.trace import ALL_REDUCE, BACKWARD, FORWARD, PHASES, WAITING, duration, waiting
from jaxddp.tracking.curves import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Okabe and Ito's, which colour-blind readers tell apart; who waits is hatched too.
COLORS = {FORWARD: "#56B4E9", BACKWARD: "#0072B2", WAITING: "#F0E442", ALL_REDUCE: "#D55E00"}
HATCHES = {WAITING: "////"}
LANE = 0.78  # of the distance between two
ROOM = 1.13  # of the longest step, with what stands beside it


def draw(frameworks: Mapping[str, Cases]) -> bytes:
    """A PNG with a typical step of each case, all of a framework to one scale.

    Args:
        frameworks: by name.
    """
    from matplotlib.figure import Figure  # half a second to import
    from matplotlib.patches import Patch

    names = list(next(iter(frameworks.values())))
    figure = Figure(figsize=(12, 1.1 * len(names) + 1.4), dpi=150, layout="constrained")
    columns = figure.subfigures(1, len(frameworks), squeeze=False)[0]
    for column, (framework, cases) in zip(columns, frameworks.items(), strict=True):
        column.suptitle(framework, x=0.02, ha="left", fontsize=12, color=INK)
        rows = column.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(rows, names, strict=True):
            _draw_step(axes, cases[name], name)
        rows[-1].set_xlabel("milliseconds", color=INK)
        rows[-1].set_xlim(0, ROOM * max(duration(found.step) for found in cases.values()) / 1e6)
    keys = [
        Patch(facecolor=COLORS[phase], hatch=HATCHES.get(phase), edgecolor="white", label=phase) for phase in PHASES
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(PHASES), frameon=False, labelcolor=INK)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _draw_step(axes: "Axes", found: Found, name: str) -> None:
    """The lanes of one case, and how much of this step each replica waits."""
    step = found.step
    for replica, (spans, share) in enumerate(zip(step, waiting(step), strict=True)):
        for span in spans:
            begin, length = span.begin / 1e6, (span.end - span.begin) / 1e6
            axes.barh(replica, length, LANE, left=begin, linewidth=0.4, **_look(span.phase))
        end = spans[-1].end / 1e6, replica
        beside: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"waits {share:.0%}", end, fontsize=8, color=INK, **beside)
    axes.set_title(name, loc="left", fontsize=10, color=INK)
    axes.set_yticks(range(len(step)), [f"replica {replica}" for replica in range(len(step))])
    axes.invert_yaxis()
    axes.tick_params(colors=INK, length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def _look(phase: str) -> dict[str, Any]:
    return {"facecolor": COLORS[phase], "hatch": HATCHES.get(phase), "edgecolor": "white"}

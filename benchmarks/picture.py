"""Picture of a benchmark's record: each contender's time beside jaxddp's, and how a step grows.

python -m benchmarks.picture benchmarks/results/mine.json docs/performance.png

Several records may be given; of a part that more than one has, the first counts.
"""

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import ALL_PEERS_AT
from jaxddp import cli
from jaxddp.errors import InputError
from jaxddp.files import check_files, mark_of_picture, write_atomically
from jaxddp.tracking.curves import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
WRITER = "benchmarks.picture"  # noted in the picture, so that it is known again

# Okabe and Ito's colours, distinguishable with colour blindness; the markers differ too.
PEERS = {
    "torch": ("torch DDP", "#D55E00", "s"),
    "torch_compile": ("torch DDP, compiled", "#E69F00", "D"),
    "pmap": ("pmap by hand", "#0072B2", "o"),
    "shard_map": ("jit + shard_map by hand", "#009E73", "^"),
}
# Workloads by the names that the documents use.
LABELS = {
    "mlp": "the default job",
    "wide_mlp": "MLP 784-512-512-10",
    "two_convs": "two convolutions, pooling",
    "residual": "residual convnet, 32x32",
    "decoder": "decoder, 4 layers of 256",
    "decoder_dropout": "the same with dropout",
    "llama": "fine-tuning of a small Llama",
}
TIMES = (1, 2, 5, 10, 20, 50, 100)
GROWTH = {"parameters": ("#0072B2", "o"), "leaves": ("#D55E00", "s"), "replicas": ("#009E73", "^")}


def draw(record: Record) -> bytes:
    """Draw a record as a PNG: times relative to jaxddp's at two replicas; growth of a step's time, if measured."""
    from matplotlib.figure import Figure  # the import takes half a second

    figure = Figure(figsize=(11 if "growth" in record else 7.5, 4.6), dpi=150, layout="constrained")
    left, *right = figure.subplots(1, 2, width_ratios=[3, 2]) if "growth" in record else [figure.subplots()]
    _relative(left, record)
    for axes in right:
        _growth(axes, record["growth"])
    for axes in (left, *right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
        axes.grid(axis="x" if axes is left else "both", color=GRID)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": WRITER})
    return png.getvalue()


def _relative(axes: "Axes", record: Record) -> None:
    races = [race for race in record["races"] if race["replicas"] == ALL_PEERS_AT][::-1]
    for name, (label, color, marker) in PEERS.items():
        found = [(place, race["ratios"][name]) for place, race in enumerate(races) if name in race["ratios"]]
        if found:
            places, ratios = zip(*found, strict=True)
            medians = [ratio["median"] for ratio in ratios]
            below = [ratio["median"] - ratio["min"] for ratio in ratios]
            above = [ratio["max"] - ratio["median"] for ratio in ratios]
            style: dict[str, Any] = {
                "color": color,
                "marker": marker,
                "markersize": 5,
                "linestyle": "",
                "elinewidth": 1,
            }
            axes.errorbar(medians, places, xerr=[below, above], label=label, **style)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 4, 8)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(races)), [LABELS.get(race["workload"], race["workload"]) for race in races])
    axes.set_title("time of a step over jaxddp's, 2 replicas; right of 1, jaxddp is faster", loc="left", fontsize=10)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _growth(axes: "Axes", growth: Record) -> None:
    for kind, (color, marker) in GROWTH.items():
        if rows := list(_rows(growth.get(kind, []), kind)):
            axes.plot(*zip(*rows, strict=True), color=color, marker=marker, markersize=4, label=f"more {kind}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(TIMES, [f"x{times}" for times in TIMES])
    axes.set_yticks(TIMES, [f"x{times}" for times in TIMES])
    axes.minorticks_off()
    axes.set_xlabel("growth of the model or of the number of replicas", color=INK)
    axes.set_title("growth of a step's time", loc="left", fontsize=10)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _rows(rows: Sequence[Record], kind: str) -> Iterator[tuple[float, float]]:
    for row in rows:
        yield row[kind] / rows[0][kind], row["seconds_per_step"] / rows[0]["seconds_per_step"]


def main(argv: list[str]) -> None:
    """Draw the records of all files but the last into the last."""
    *records, picture = argv or [""]
    if not records or not all(Path(path).is_file() for path in records):
        raise InputError("usage: python -m benchmarks.picture RECORD.json [...] PICTURE.png, with records that exist")
    check_files({"PICTURE": (Path(picture), mark_of_picture(WRITER))})
    parts: dict[str, Any] = {}
    for path in records[::-1]:
        parts |= json.loads(Path(path).read_text())
    write_atomically(Path(picture), draw(parts))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        main(sys.argv[1:])

"""Draw the losses of runs into one picture: `python examples/curves.py curves.png runs/jax runs/torch`.

The lower half shows how far the losses of the other runs are from those of the first.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from jaxddp.files import check_files, mark_of_picture

COLOURS = {"train": "#0072B2", "test": "#D55E00"}
STYLES = ("-", "o", "x", "+")


def losses(folder: str, part: str) -> dict[int, float]:
    """Return epoch -> loss of the training or test data."""
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return {record["epoch"]: record[f"{part}_loss"] for record in records if record["kind"] == "epoch"}


def apart(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """Return epoch -> relative difference of two runs' losses, for the epochs of both."""
    return {epoch: abs(loss / first[epoch] - 1) for epoch, loss in second.items() if epoch in first}


def main(picture: str, *folders: str) -> None:
    """Draw the losses of each epoch, and their differences."""
    check_files({"PICTURE": (Path(picture), mark_of_picture("examples/curves.py"))})
    figure = Figure(figsize=(8.25, 4.6), dpi=200, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for part, colour in COLOURS.items():
        first = losses(folders[0], part)
        for folder, style in zip(folders, STYLES, strict=False):
            curve = losses(folder, part)
            upper.plot(curve.keys(), curve.values(), style, color=colour, label=f"{part}, {folder}")
            if folder != folders[0]:
                differences = apart(first, curve)
                lower.plot(differences.keys(), differences.values(), style, color=colour)
    upper.set(ylabel="loss")
    upper.legend(frameon=False, ncols=2)
    lower.set(xlabel="epoch", ylabel=f"relative difference\nfrom {folders[0]}", yscale="log")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD")
    figure.savefig(picture, format="png", metadata={"Software": "examples/curves.py"})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draw the losses of runs into one picture: `python examples/curves.py curves.png runs/jax runs/torch`."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from jaxddp.files import check_files, mark_of_picture


def main(picture: str, *folders: str) -> None:
    """Draw the losses of each epoch."""
    check_files({"PICTURE": (Path(picture), mark_of_picture("examples/curves.py"))})
    figure = Figure(figsize=(6, 3.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for folder, style in zip(folders, ("-", "o", "x", "+"), strict=False):
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        epochs = [record for record in map(json.loads, lines) if record["kind"] == "epoch"]
        for part, colour in (("train", "#0072B2"), ("test", "#D55E00")):
            losses = [epoch[f"{part}_loss"] for epoch in epochs]
            axes.plot([epoch["epoch"] for epoch in epochs], losses, style, color=colour, label=f"{part}, {folder}")
    axes.set(xlabel="epoch", ylabel="loss")
    axes.legend(frameon=False)
    figure.savefig(picture, format="png", metadata={"Software": "examples/curves.py"})


if __name__ == "__main__":
    main(*sys.argv[1:])

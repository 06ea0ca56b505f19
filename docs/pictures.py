"""Draw docs/first-draft.png, the first picture of the README: `python docs/pictures.py`.

The first draft is checked, patched by its own --patch, and checked again, with 60 steps each.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxddp.files import write_atomically

PORT = Path("examples", "ports", "first_draft.py")
PICTURE = Path(__file__).parent / "first-draft.png"
STEPS = 60
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#333333"
LEAST = 1e-17  # stands for 0 on a logarithmic axis


def findings(folder: Path, port: Path, *flags: str) -> Any:
    """Check a port; return what its JSON file says."""
    command = [
        sys.executable,
        "-m",
        "jaxddp",
        "check",
        str(port),
        "--steps",
        f"{STEPS}",
        "--json",
        "found.json",
        *flags,
    ]
    subprocess.run(command, cwd=folder, check=False)
    return json.loads((folder / "found.json").read_text())


def before_and_after() -> tuple[Any, Any]:
    """Return what is found in the first draft, and after its patch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(PORT, folder)
        before = findings(folder, Path(PORT.name), "--patch", "fixes.diff")
        subprocess.run(["patch", "-p1", "-i", "fixes.diff"], cwd=folder, check=True)
        return before, findings(folder, Path(PORT.name))


def draw(before: Any, after: Any) -> Figure:
    """Draw the losses of the first draft, and the distances of the weights before and after the patch."""
    figure = Figure(figsize=(9, 3.4), dpi=170, layout="constrained")
    losses, weights = figure.subplots(1, 2, width_ratios=[1, 1.15])
    steps = range(1, STEPS + 1)
    of_torch, of_jax = zip(*before["losses"], strict=True)
    losses.plot(steps, of_torch, color=GREY, linewidth=3, alpha=0.35, label="PyTorch DDP")
    losses.plot(steps, of_jax, color=ORANGE, linewidth=1.2, label="JAX port")
    losses.set_title("The loss curves look fine …", loc="left", fontsize=11)
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    first, last = (
        [max(residual, LEAST) for residual in found["free_running"]["params"]["residuals"]] for found in (before, after)
    )
    weights.semilogy(steps, first, color=ORANGE, linewidth=1.6)
    weights.semilogy(steps, last, color=BLUE, linewidth=1.6)
    weights.set(ylim=(LEAST, 3), xlim=(1, STEPS), ylabel="distance of the weights, relative")
    weights.set_title("… the weights are not the same run", loc="left", fontsize=11)
    text = "first draft: GELU by tanh,\nweight decay 1e-4 instead of 1e-2"
    weights.text(STEPS - 1, first[-1] / 50, text, color=ORANGE, ha="right", va="top", fontsize=9)
    weights.text(STEPS - 1, last[-1] * 30, "after the two lines of --patch", color=BLUE, ha="right", fontsize=9)
    for axes in (losses, weights):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        draw(*before_and_after()).savefig(file.name)
        write_atomically(PICTURE, Path(file.name).read_bytes())

"""Speed of a run as one process and as several: `python -m benchmarks.layouts mlp convnet`.

Each layout trains the same job on two CPU replicas, from the command on: one process with two devices, two processes
with one each, and torch_ref, which always has two. The layouts take turns; ratios are taken within a round, whose turns
meet the same load of the machine.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tyro.conf import Positional

from benchmarks.tables import table
from jaxddp import cli
from jaxddp.config.choices import MODELS
from jaxddp.distributed.ports import free_port
from jaxddp.errors import InputError, check_name

PROG = "python -m benchmarks.layouts"
REPLICAS = 2
LAYOUTS = {"1 process": ("jaxddp.train", 1), "2 processes": ("jaxddp.train", 2), "torch_ref": ("torch_ref.train", 1)}
SPEED = re.compile(r"^epoch.* ([\d,]+) examples/s", re.MULTILINE)
DISPATCHES = {"": (), ", a step per dispatch": ("--steps-per-dispatch", "1")}  # of jaxddp


@dataclass(frozen=True)
class LayoutOptions:
    """Train some models in one process and in two."""

    models: Positional[tuple[str, ...]] = ("mlp", "convnet")
    """Names of models of jaxddp.train."""
    epochs: int = 20
    """Epochs of a run, of which the second half counts."""
    rounds: int = 3
    """Turns of each layout."""

    def __post_init__(self) -> None:
        for name in self.models:
            check_name("model", name, MODELS)
        for name in ("epochs", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least 1")


def speed(layout: str, flags: Sequence[str]) -> float:
    """Return the examples per second of a run in a layout: the median of the second half of its epochs.

    Raises:
        RuntimeError: a process has failed.
    """
    module, processes = LAYOUTS[layout]
    command = [sys.executable, "-m", module, "--platform", "cpu", "--devices", str(REPLICAS), *flags]
    if processes > 1:
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes), "--process-id"]
    with contextlib.ExitStack() as running:
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        started = [
            running.enter_context(
                subprocess.Popen([*command, *[str(number)] * (processes > 1)], stdout=pipe, stderr=out, text=True)
            )
            for number in range(processes)
        ]
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{' '.join(command)}: {said[0][-500:]}")
    return second_half(said[0])


def second_half(printed: str) -> float:
    """Return the median speed of the second half of the epochs that were printed.

    >>> second_half("epoch 1/2 accuracy 0.5  10 examples/s\\nepoch 2/2  accuracy 0.6  2,000 examples/s\\n")
    2000.0
    """
    speeds = [float(text.replace(",", "")) for text in SPEED.findall(printed)]
    return statistics.median(speeds[len(speeds) // 2 :])


def race(model: str, options: LayoutOptions) -> dict[str, list[float]]:
    """Return the speeds of a model in each layout, one per round."""
    speeds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for layout, (module, _) in LAYOUTS.items():
            for dispatch, flags in DISPATCHES.items():
                if module == "jaxddp.train" or not flags:
                    arguments = ["--model", model, "--epochs", str(options.epochs), *flags]
                    speeds.setdefault(layout + dispatch, []).append(speed(layout, arguments))
    return speeds


def to_markdown(of_models: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return examples per second, and in brackets the median ratio to the first layout, as a table in Markdown.

    >>> print(to_markdown({"mlp": {"1 process": [100.0, 200.0], "2 processes": [50.0, 80.0]}}))
    | examples/s | 1 process | 2 processes |
    |---|---|---|
    | mlp | 150 (1.00) | 65 (0.45) |
    """

    def cell(speeds: Sequence[float], first: Sequence[float]) -> str:
        ratio = statistics.median(other / one for other, one in zip(speeds, first, strict=True))
        return f"{statistics.median(speeds):,.0f} ({ratio:.2f})"

    layouts = list(next(iter(of_models.values())))
    rows = (
        [model, *(cell(speeds[layout], speeds[layouts[0]]) for layout in layouts)]
        for model, speeds in of_models.items()
    )
    return table(["examples/s", *layouts], rows)


def main(options: LayoutOptions) -> None:
    """Race the layouts and print the table."""
    os.environ.setdefault("MPLBACKEND", "agg")
    print(to_markdown({model: race(model, options) for model in options.models}))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        main(cli.parse_plain(LayoutOptions, sys.argv[1:], PROG))

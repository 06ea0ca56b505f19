"""Measure bubbles, print and draw them, and check the claims."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.bubbles import in_jax
from examples.bubbles.cases import PLAN, REPLICAS
from examples.bubbles.measured import Cases, claims, of_jax, of_torch
from examples.bubbles.picture import WRITER, draw
from examples.bubbles.trace import PHASES, chrome_trace, duration, time_in
from examples.claims import report
from jaxddp.cli import one_line_errors, parse_plain
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.files import check_files, mark_of_picture, write_atomically

TRACE = "bubbles.json"
NAME, NUMBER = 56, 11  # widths of columns


@dataclass(frozen=True)
class Options:
    """Measure how long replicas wait for each other, in JAX and in torch."""

    picture: Path | None = None
    """Draw the timelines into this PNG file."""
    trace: Path | None = None
    """Write the timelines into this folder, as a file for chrome://tracing or ui.perfetto.dev."""

    def __post_init__(self) -> None:
        if self.trace is not None:
            self.trace.mkdir(parents=True, exist_ok=True)
        trace = None if self.trace is None else self.trace / TRACE
        check_files({"--picture": (self.picture, mark_of_picture(WRITER)), "--trace": (trace, rb'\{"traceEvents"')})


def table(cases: Cases) -> str:
    """Format a line per replica of each case: median milliseconds in each phase, and the share of waiting."""
    heads = [*PHASES, "whole step", "waits"]
    lines = [f"{'milliseconds':{NAME}}" + "".join(f"{head:>{NUMBER}}" for head in heads)]
    for name, measured in cases.items():
        whole = np.median([duration(step) for step in measured.steps])
        for replica, share in enumerate(measured.shares):
            times = [np.median([time_in(step[replica], phase) for step in measured.steps]) for phase in PHASES]
            cells = "".join(f"{time / 1e6:{NUMBER}.1f}" for time in [*times, whole])
            lines.append(f"{name if replica == 0 else '':{NAME - 2}}{replica} {cells}{share:{NUMBER}.0%}")
    return "\n".join(lines)


def main(options: Options) -> int:
    """Measure, print and draw; return the number of claims that do not hold."""
    replicas = Replicas(prepare(REPLICAS, "cpu"))
    frameworks = {"JAX": of_jax(PLAN, replicas), "torch": of_torch(PLAN)}
    for name, cases in frameworks.items():
        print(f"{name}\n\n{table(cases)}\n")
    cost = 1e3 * in_jax.cost_of_a_mark(PLAN, replicas)
    print(f"Recording the time costs JAX's program {cost:.1f} milliseconds at the end of each phase.\n")
    if options.picture is not None:
        write_atomically(options.picture, draw(frameworks))
    if options.trace is not None:
        steps = {f"{name}: {case}": of.step for name, cases in frameworks.items() for case, of in cases.items()}
        write_atomically(options.trace / TRACE, chrome_trace(steps).encode())
    all_reduces = [in_jax.all_reduces_of_jaxddp(replicas, kind) for kind in ("ddp", "global")]
    return report(claims(frameworks["JAX"], frameworks["torch"], all_reduces))


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(main(parse_plain(Options, sys.argv[1:], "python -m examples.bubbles")) > 0)

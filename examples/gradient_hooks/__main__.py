"""Print the gradients that hooks see, log and trace, and check the claims about them."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from examples.claims import report
from examples.gradient_hooks.measured import Results, claims, of_jax, of_torch
from examples.gradient_hooks.settings import REPLICAS
from jaxddp.cli import one_line_errors, parse_plain
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.tracking.gradient_metrics import LOG2_BINS, NORM, histograms, norms

BARS = " ▁▂▃▄▅▆▇█"
SHOWN_BINS = range(-16, 1)  # powers of 2


@dataclass(frozen=True)
class Options:
    """Show hooks that inspect, change and log gradients, in JAX and in torch."""


def seen(frameworks: Mapping[str, Results]) -> str:
    """Format a line per parameter: the norm of its gradient on each replica, and of the mean."""
    heads = [f"{name} {of}" for name in frameworks for of in (*(f"replica {r}" for r in range(REPLICAS)), "mean")]
    lines = [_line("", heads)]
    for parameter in sorted(frameworks["JAX"]["seen"]["mean"]):
        norms_of = []
        for results in frameworks.values():
            local, mean = (results["seen"][when][parameter] for when in ("local", "mean"))
            norms_of += [np.linalg.norm(gradient) for gradient in (*local, mean[0])]
        lines.append(_line(parameter, [f"{norm:.6f}" for norm in norms_of]))
    return "\n".join(lines)


def logged(frameworks: Mapping[str, Results]) -> str:
    """Format a line per parameter: the norm, and a histogram of the elements by power of two."""
    lines = [_line("", frameworks, width=31)]
    logs = [results["logged"] for results in frameworks.values()]
    for parameter in histograms(logs[0]):
        cells = [f"{norms(log)[NORM + parameter]:.6f} |{bars(histograms(log)[parameter])}|" for log in logs]
        lines.append(_line(parameter, cells, width=31))
    return "\n".join(lines)


def bars(counts: list[int]) -> str:
    """Draw the counts of the bins in `SHOWN_BINS` as a row of bars.

    >>> bars([0] * 32 + [8] + [0] * 8)
    '                █'
    """
    chosen = [counts[LOG2_BINS.index(k)] for k in SHOWN_BINS]
    return "".join(BARS[-(-(len(BARS) - 1) * count // max(*chosen, 1))] for count in chosen)


def _line(name: str, cells: Iterable[str], width: int = 18) -> str:
    return f"{name:16}" + "".join(f"{cell:>{width}}" for cell in cells)


def show(ours: Results, theirs: Results) -> None:
    """Print the gradients that hooks see in both frameworks."""
    frameworks = {"JAX": ours, "torch": theirs}
    print("Norms of the gradients that hooks see: on each replica before the mean, and of the mean\n")
    print(seen(frameworks))
    print(f"\nLogs of the mean gradient: its norm, and a histogram of its elements' sizes, 2^{SHOWN_BINS[0]} to 1\n")
    print(logged(frameworks))
    print("\nReports of a NaN that a hook plants\n")
    for name, results in frameworks.items():
        print(f"{name:16}{results['nan_report']}")
    print("\nOrder of a backward pass in torch, with small buckets\n")
    print(" ".join(theirs["order"]), end="\n\n")


def main(options: Options) -> int:
    """Run both frameworks and print; return the number of claims that do not hold."""
    ours, theirs = of_jax(Replicas(prepare(REPLICAS, "cpu"))), of_torch()
    show(ours, theirs)
    return report(claims(ours, theirs))


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(main(parse_plain(Options, sys.argv[1:], "python -m examples.gradient_hooks")) > 0)

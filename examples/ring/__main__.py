"""Print the ring and the collectives, and check the claims about them."""

import sys
from dataclasses import dataclass

from examples.claims import report
from examples.ring import tables
from examples.ring.measured import Results, claims, of_jax, of_torch
from jaxddp.cli import one_line_errors, parse_plain
from jaxddp.config.options import Platform
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError


@dataclass(frozen=True)
class Options:
    """Show ring all-reduce step by step, and each collective before and after, in JAX and in torch."""

    devices: int = 4
    """Number of replicas, 2 to 5, one per device."""
    platform: Platform = "cpu"
    """cpu | gpu: where the replicas run; gpu needs a GPU for each."""

    def __post_init__(self) -> None:
        if not 2 <= self.devices <= 5:
            raise InputError(f"--devices {self.devices}: must be 2 to 5")


def show(ours: Results) -> None:
    """Print the tables."""
    even, uneven = (ours["ring"][name]["steps"] for name in ("even", "uneven"))
    n = len(even)
    print(f"Chunks held by {n} replicas. b12: chunk b, summed over replicas 1 and 2; B: summed over all.\n")
    print(tables.travel(even))
    print("\nReplica 0's numbers. Replica r starts with 10^r (1, 2, 3, ...), so each digit stands for a replica.\n")
    print(tables.numbers(even, replica=0))
    print(f"\nWith {2 * n - 1} numbers, not divisible by {n}, the last chunk is padded.\n")
    print(tables.numbers(uneven, replica=0))
    print("\nCollectives, before and after.\n")
    print(tables.before_and_after(ours["collectives"]), end="\n\n")


def main(options: Options) -> int:
    """Run both frameworks and print; return the number of claims that do not hold."""
    ours = of_jax(Replicas(prepare(options.devices, options.platform)))
    theirs = of_torch(options.devices, options.platform)
    show(ours)
    return report(claims(ours, theirs))


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(main(parse_plain(Options, sys.argv[1:], "python -m examples.ring")) > 0)

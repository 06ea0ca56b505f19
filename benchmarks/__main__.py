"""`python -m benchmarks` (`make bench`): the speed of jaxddp beside torch DDP, hand-written pmap and plain jit.

python -m benchmarks
python -m benchmarks --workloads mlp decoder --devices 2 --parts race --output benchmarks/results/mine.json

Contenders take turns, all in one process (torch: in processes that stay up); ratios are taken within each round,
whose turns meet the same load of the machine. The exit code is 0 whatever the speed.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import workloads
from jaxddp import cli
from jaxddp.config.options import Platform
from jaxddp.errors import InputError, check_name

PROG = "python -m benchmarks"
PARTS = ("race", "measures", "growth", "reading")


@dataclass(frozen=True)
class RaceOptions:
    """Race jaxddp against torch DDP, hand-written pmap and jax.jit, and measure what surrounds a step."""

    workloads: tuple[str, ...] = tuple(workloads())
    """Workloads to race."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of replicas; those above the number of GPUs are left out. All peers take part at 2."""
    rounds: int = 5
    """Turns of each contender; at most 3 with more than 2 replicas."""
    seconds: float = 0.2
    """Seconds of a turn; one of complete epochs may take twice as long, a single step as long as it takes."""
    parts: tuple[str, ...] = PARTS
    """race | measures | growth | reading."""
    platform: Platform | None = None
    """cpu | gpu. None: GPUs if there are any."""
    smoke: bool = False
    """Run everything with tiny sizes, one round and few peers, to see that it runs; the numbers mean nothing."""
    output: Path | None = None
    """Write the record to this JSON file too."""

    def __post_init__(self) -> None:
        for option, known in (("workloads", tuple(workloads())), ("parts", PARTS)):
            for name in getattr(self, option):
                check_name(f"--{option}", name, known)
        for option in ("rounds", "seconds"):
            if getattr(self, option) <= 0:
                raise InputError(f"--{option} {getattr(self, option):g}: must be above 0")
        if wrong := [count for count in self.devices if count < 1]:
            raise InputError(f"--devices {wrong[0]}: must be at least 1")
        for name, workload in workloads().items():
            if name in self.workloads and (wrong := [count for count in self.devices if workload.batch_size % count]):
                examples = f"{workload.batch_size} examples of {name}"
                raise InputError(f"--devices {wrong[0]}: {examples} cannot be divided; choose a power of two")


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark that the flags ask for; return its record."""
    with cli.one_line_errors(show_traceback=False):
        options = cli.parse_plain(RaceOptions, argv, PROG)
        # Imported here, since the torch ranks' processes import this module and need no jax.
        return importlib.import_module("benchmarks.run").run(options, shlex.join([*PROG.split(), *argv]))


if __name__ == "__main__":
    main(sys.argv[1:])

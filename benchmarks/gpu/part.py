"""Command line that all parts have: `python -m benchmarks.gpu.PART FOLDER [--smoke]`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from benchmarks.gpu.records import Record
from jaxddp import cli


@dataclass(frozen=True)
class Options:
    """Measure one part of `make gpu`; what the folder's record of it has already is kept."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder of the results."""
    smoke: bool = False
    """Use CPU devices and tiny sizes, to see that it runs; the numbers mean nothing."""


def options_of(name: str) -> Options:
    """Parse the command line of a part, and make its folder."""
    options = cli.parse_plain(Options, sys.argv[1:], f"python -m benchmarks.gpu.{name}")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def run(name: str, measure: Callable[[Record], None]) -> None:
    """Run a part; exit with code 1 if a row of its record failed.

    Args:
        name: name of the part.
        measure: adds all rows to the record.
    """
    with cli.one_line_errors(show_traceback=False):
        options = options_of(name)
        record = Record(options.folder, name, options.smoke)
        measure(record)
        failed = record.close()
        for row, failure in failed.items():
            print(f"failed: {row}: {failure}")
        sys.exit(1 if failed else 0)


def platform(smoke: bool) -> str:
    """Return the platform on which a part measures."""
    return "cpu" if smoke else "gpu"

"""`jaxddp compare`: compare two recordings."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxddp.cli.errors import one_line_errors
from jaxddp.cli.flags import parse_plain
from jaxddp.errors import InputError
from jaxddp.files import check_files, write_atomically
from jaxddp.parity.report.json_form import MARK as JSON
from jaxddp.parity.report.json_form import to_json
from jaxddp.parity.report.page import MARK as PAGE
from jaxddp.parity.report.page import to_html
from jaxddp.parity.report.terminal import show

PROG = "jaxddp compare"


@dataclass(frozen=True)
class CompareOptions:
    """Compare what `jaxddp.parity.Recorder` has written of a torch loop and of a JAX loop.

    Exit code 0: equal, 1: different, 2: could not be compared.
    """

    torch_run: Annotated[Positional[Path], arg(metavar="TORCH_RUN")]
    """Folder of torch's recording."""
    jax_run: Annotated[Positional[Path], arg(metavar="JAX_RUN")]
    """Folder of jax's recording."""
    names: Path | None = None
    """File with a table names = {...} as in a program, or with only the braces; it is not executed. None: names map by
    themselves."""
    json: Path | None = None
    """Write all findings to this JSON file. None: they are not written."""
    report: Path | None = None
    """Write the report to this file, as a self-contained HTML page with plots. None: it is not written."""

    def __post_init__(self) -> None:
        if self.names is not None and not self.names.is_file():
            raise InputError(f"--names {self.names}: no such file")
        check_files({"--json": (self.json, JSON), "--report": (self.report, PAGE)})


def main(argv: Sequence[str]) -> int:
    """Compare, print and write the reports; return the exit code.

    Raises:
        InputError: a flag is wrong, or a folder cannot be read.
    """
    options = parse_plain(CompareOptions, argv, PROG)
    from jaxddp.parity.recordings.compare import compare_runs  # after the flags: it imports torch
    from jaxddp.parity.recordings.names import read_names

    names = None if options.names is None else read_names(options.names)
    report = compare_runs(options.torch_run, options.jax_run, names)
    show(str(report))
    if options.json is not None:
        write_atomically(options.json, to_json(report).encode())
    if options.report is not None:
        write_atomically(options.report, to_html(report).encode())
        print(f"report: {options.report}")
    return report.exit_code()


def run(argv: Sequence[str]) -> None:
    """Run the command line, and exit with its code."""
    with one_line_errors("--traceback" in argv):
        sys.exit(main([word for word in argv if word != "--traceback"]))

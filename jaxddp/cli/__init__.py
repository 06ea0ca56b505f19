"""Command lines: flags parsed by tyro into dataclasses, programs, and errors on one line with an exit code."""

from jaxddp.cli.command import parse, parse_run, program_and_flags, program_of_flags, run
from jaxddp.cli.errors import one_line_errors, open_streams, variables_named
from jaxddp.cli.flags import parse_known, parse_plain, value_of
from jaxddp.cli.help import asks_for_help

__all__ = [
    "asks_for_help",
    "one_line_errors",
    "open_streams",
    "parse",
    "parse_known",
    "parse_plain",
    "parse_run",
    "program_and_flags",
    "program_of_flags",
    "run",
    "value_of",
    "variables_named",
]

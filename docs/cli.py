"""Write docs/cli.md, the help of each command with all its flags: `python docs/cli.py`."""

import contextlib
import io
import os
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

from jaxddp.__main__ import COMMANDS, usage
from jaxddp.files import write_atomically

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

What `--help-all` prints, for each command. `--help` shows the flags that most people use. A flag that another trainer
has under another name leads to ours: see [flags of other trainers](train.md#flags-of-other-trainers). Each command
ends with exit code 2 and one line on stderr if a flag, a file or a value is wrong, and `--traceback` shows where that
was found.

"""


def help_of(command: str) -> str:
    """Return what a command prints with --help-all, in 80 columns."""
    output = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        import_module(COMMANDS[command][0]).run(["--help-all"])
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())


def page() -> str:
    """Return the page."""
    sections = [f"```\n{usage()}\n```"]
    sections += [f"## jaxddp {command}\n\n```\n{help_of(command)}\n```" for command in COMMANDS]
    return HEAD + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("docs/cli.py takes no arguments")
    write_atomically(PAGE, page().encode())

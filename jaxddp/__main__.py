"""The command `jaxddp`, or `python -m jaxddp`: train, check, compare, convert, plan and doctor.

It imports a command's module only when the command is given, since some take seconds.
"""

import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

BEGAN = time.monotonic()  # before the imports, which the time limit of a check includes
# Command -> module with its `run`, and what it does.
COMMANDS = {
    "train": ("jaxddp.train.command", "train a model with one replica per device"),
    "check": ("jaxddp.parity.command", "check that a JAX port trains like its PyTorch original"),
    "compare": ("jaxddp.parity.recordings.command", "compare the recordings of two training programs"),
    "convert": ("jaxddp.parity.convert.command", "convert weights between a port's two models"),
    "plan": ("jaxddp.plan.command", "predict memory and time of a run on GPUs, without GPUs"),
    "doctor": ("jaxddp.doctor", "say what is installed, what is missing, and which devices there are"),
}


def usage() -> str:
    """Return the help of the command."""
    lines = [f"  {name:9}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: jaxddp COMMAND [-h] ...", "", *lines, "", "jaxddp COMMAND --help has its flags."])


def end_by_signal() -> None:
    """Let Ctrl-C end this process in silence while it imports, which takes seconds; a check listens to it later."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command that the first word names, with the words that follow; None: those of the command line."""
    name, *argv = (sys.argv[1:] if words is None else words) or ["--help"]
    if name == "check":
        end_by_signal()
        import_module(COMMANDS[name][0]).run(argv, BEGAN)
        return
    if name in COMMANDS:
        import_module(COMMANDS[name][0]).run(argv)
        return
    if name in ("--help", "-h", "--help-all"):
        print(usage())
        return
    if name == "--version":
        from importlib.metadata import version

        print(f"jaxddp {version('jaxddp')}")
        return
    with import_module("jaxddp.cli").one_line_errors(show_traceback=False):
        import_module("jaxddp.errors").check_name("command", name, COMMANDS)


if __name__ == "__main__":
    main()

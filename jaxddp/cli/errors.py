"""Errors turned into one line and an exit code, and streams that can be printed to."""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator

from jaxddp.config.ulimits import ulimits
from jaxddp.errors import (
    BAD_INPUT,
    INTERRUPTED,
    InputError,
    TrainingError,
    exit_code,
    not_installed,
    reason,
    tell,
    tells_of_memory,
)
from jaxddp.files import reason_of

# Else the last collection looks through all objects of the frameworks: 0.8 of the 7 s of a small check.
atexit.register(gc.freeze)


@contextlib.contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """Print errors that a user can act on as one line on stderr, and exit with code 2; open closed streams first."""
    open_streams()
    try:
        yield
    except (InputError, TrainingError) as error:
        if show_traceback:
            traceback.print_exc()
        for line in (f"error: {error}", *(f"  {frame}" for frame in getattr(error, "frames", ()))):
            tell(line)
        raise SystemExit(exit_code(error)) from error
    except ModuleNotFoundError as error:
        if show_traceback or not not_installed(error):
            raise
        tell(f"error: {not_installed(error)}")
        raise SystemExit(BAD_INPUT) from error
    except (MemoryError, RuntimeError) as error:
        if show_traceback or not tells_of_memory(error):
            raise
        limits = "".join(f"; {name} is {limit // 1024}" for name, limit in ulimits().items())
        tell(f"error: not enough memory: {reason(error)}; choose smaller sizes{limits}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as shells say it
    except OSError as error:
        if show_traceback or error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        tell(f"error: {where}{reason_of(error)}")
        raise SystemExit(BAD_INPUT) from error
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def variables_named(prefix: str) -> Iterator[None]:
    """Turn a `ValueError` of an import into an `InputError` that names the environment variables it may come from.

    Args:
        prefix: start of the variables' names. Those whose value the error cites are named, or else all.
    """
    try:
        yield
    except ValueError as error:
        given = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        cited = {name: value for name, value in given.items() if value and value in str(error)}
        variables = ", ".join(f"{name}={value}" for name, value in (cited or given).items())
        raise InputError(f"{variables}: {reason(error)}") from error


def open_streams() -> None:
    """Make stdin, stdout and stderr usable: a closed one becomes the null device, and any text can be printed.

    Otherwise the next file that opens gets the number of the closed stream, and all that is printed there.
    A character that the encoding of a stream lacks is printed as "?".
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

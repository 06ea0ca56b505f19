"""Child processes of a part: each framework, and each measurement that may run out of memory, has its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT = 420.0  # seconds that a child may take
LAST_LINES = 15

# jax takes three quarters of a GPU's memory when it starts, unless told not to; torch needs some beside it.
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class ChildFailed(Exception):
    """A child process that crashed or hung; the message has its last line."""


def last_lines(text: str, count: int = LAST_LINES) -> list[str]:
    """Return the last lines of a text that are not blank."""
    return [line for line in text.splitlines() if line.strip()][-count:]


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    expected: Sequence[int] = (0,),
) -> str:
    """Run `python COMMAND`; print and return what it prints.

    Args:
        command: arguments of Python.
        env: variables that are set besides this process's.
        timeout: seconds that it may take.
        expected: exit codes that are no failure.

    Raises:
        ChildFailed: it ended with another exit code, or not in time.
    """
    environment = {**os.environ, **(env or {})}
    name = " ".join(command)
    try:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        print(_text(error.stdout), _text(error.stderr), flush=True)
        raise ChildFailed(f"{name}: has not ended after {timeout:.0f} s") from None
    print(done.stdout, done.stderr, flush=True)
    if done.returncode not in expected:
        said = last_lines(done.stderr) or last_lines(done.stdout) or ["(no output)"]
        raise ChildFailed(f"{name}: exit code {done.returncode}: {said[-1].strip()}")
    return done.stdout


def ask(module: str, words: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = TIMEOUT) -> Any:
    """Run `python -m MODULE WORDS`, and return the JSON of the last line that it prints.

    Raises:
        ChildFailed: it failed, or its last line is no JSON.
    """
    printed = last_lines(run(["-m", module, *words], env, timeout), 1)
    try:
        return json.loads(printed[0])
    except (IndexError, ValueError):
        raise ChildFailed(f"{module}: printed no JSON: {printed}") from None


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
